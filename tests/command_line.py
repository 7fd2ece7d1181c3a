"""The command line as a user types it, without the seconds that a process of its own takes to start."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from io import StringIO
from pathlib import Path

import pytest

from narrowcast.cli.main import main

TINY = ("scolr-ml100k", "--backend", "local", "rounds=2", "tracking.system_metrics=false")


@dataclass(frozen=True)
class Said:
    """How a command ended and what it printed."""

    status: int
    out: str
    err: str


def narrowcast(*words: object) -> Said:
    """Run a command in this process, and leave the process as it was."""
    root, argv = logging.getLogger(), sys.argv
    handlers, level = root.handlers, root.level
    on_signal = {each: signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)}
    root.handlers = []  # with pytest's there, the command would not set up its own
    sys.argv = ["narrowcast", *map(str, words)]
    out, err = StringIO(), StringIO()
    try:
        with redirect_stdout(out), redirect_stderr(err), pytest.raises(SystemExit) as stopped:
            main()
    finally:
        sys.argv = argv
        root.handlers = handlers
        root.setLevel(level)
        for each, handler in on_signal.items():
            signal.signal(each, handler)
    assert isinstance(stopped.value.code, int)
    return Said(stopped.value.code, out.getvalue(), err.getvalue())


def terminated_after(rounds: int, folder: Path) -> AbstractContextManager[None]:
    """Send this process a SIGTERM once the run in the folder has so many rounds behind it."""
    journal = folder / "journal.jsonl"
    return terminated_when(lambda: journal.exists() and journal.read_bytes().count(b"\n") >= rounds)


@contextmanager
def terminated_when(due: Callable[[], bool]) -> Iterator[None]:
    """Send this process a SIGTERM once it is due."""

    def wait_and_send() -> None:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            if due():
                os.kill(os.getpid(), signal.SIGTERM)
                return
            time.sleep(0.01)

    sender = threading.Thread(target=wait_and_send)
    sender.start()
    yield
    sender.join()


def assert_refused(said: Said, *phrases: str, status: int = 2) -> None:
    """It ended with one clear line and nothing else on stderr, and the line has these phrases in it."""
    lines = said.err.splitlines()
    assert len(lines) == 1, said.err
    assert lines[0].startswith("narrowcast: ")
    assert "Traceback" not in said.out
    assert all(phrase in lines[0] for phrase in phrases), (phrases, lines[0])
    assert said.status == status


def run_folders(output: Path) -> list[str]:
    """What an output folder has of runs, whole or half-written; it need not exist."""
    return sorted(path.name for path in output.glob("*") if path.is_dir() and path.name != "mlartifacts")
