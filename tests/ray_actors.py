"""The processes of Ray's actors among our descendants, to be killed."""

from __future__ import annotations

import time

import psutil

_SECONDS = 30.0


def actor_processes(actor: str, ancestor: int | None = None) -> list[psutil.Process]:
    """Those of an actor class that this process, or another, has started."""
    return [
        process
        for process in psutil.Process(ancestor).children(recursive=True)
        if f"ray::{actor}" in " ".join(_command_line(process))
    ]


def kill_one(actor: str) -> int:
    """SIGKILL the first of them, once there is one; its process id."""
    deadline = time.monotonic() + _SECONDS
    while time.monotonic() < deadline:
        for process in actor_processes(actor):
            process.kill()
            return process.pid
        time.sleep(0.05)
    raise AssertionError(f"no process of {actor} to kill")


def _command_line(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.NoSuchProcess:  # Ray's workers come and go
        return []
