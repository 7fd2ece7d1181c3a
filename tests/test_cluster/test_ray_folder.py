"""What a local cluster leaves behind: nothing, however the run that began it ends, and nothing of others is touched."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from narrowcast.cluster import ray_folder as program
from narrowcast.cluster.ray_folder import ray_folder, remove_abandoned
from scratch import short_folder

# Starts a process as Ray does, which outlives its parent, and waits.
RUN = """
import os, subprocess, sys, time
from narrowcast.cluster.ray_folder import ray_folder
with ray_folder() as folder:
    agent = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    (folder / "session").mkdir()
    print(folder, agent.pid, flush=True)
    time.sleep(600)
"""


def wait_until(done: Callable[[], bool], seconds: float = 60.0) -> bool:
    deadline = time.monotonic() + seconds
    while not done() and time.monotonic() < deadline:
        time.sleep(0.05)
    return done()


def start(temporary: Path) -> tuple[subprocess.Popen[str], Path, int]:
    env = {**os.environ, "TMPDIR": str(temporary)}
    process = subprocess.Popen([sys.executable, "-c", RUN], stdout=subprocess.PIPE, text=True, env=env)
    assert process.stdout is not None
    with process.stdout as said:
        folder, agent = said.readline().split()
    return process, Path(folder), int(agent)


def guards(folder: Path) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or []
        if words[-1:] == [str(folder)] and "-I" in words:
            found.append(process)
    return found


def gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


@pytest.fixture
def temporary() -> Iterator[Path]:
    with short_folder() as folder:
        yield folder


def test_nothing_is_left_at_the_end() -> None:
    with ray_folder() as folder:
        assert folder.stat().st_mode & 0o777 == 0o700
        agent = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
        (folder / "session").mkdir()
    assert agent.wait(10) == -signal.SIGKILL
    assert not folder.exists()
    assert "NARROWCAST_RAY_FOLDER" not in os.environ


def test_the_guard_needs_no_package(temporary: Path) -> None:
    (folder := temporary / "nc-ray-of-a-run").mkdir()
    # -S: without installed packages, as where narrowcast is found by PYTHONPATH alone, which a guard ignores.
    subprocess.run([sys.executable, "-I", "-S", program.__file__, str(folder)], input=b"", timeout=60, check=True)
    assert not folder.exists()


def test_a_killed_run_is_cleaned_up_after(temporary: Path) -> None:
    process, folder, agent = start(temporary)
    other, live, bystander = start(temporary)
    process.kill()
    process.wait()
    assert wait_until(lambda: gone(agent) and not folder.exists())
    assert live.is_dir() and not gone(bystander), "a live run is left alone"
    other.send_signal(signal.SIGINT)
    other.wait(30)
    assert wait_until(lambda: gone(bystander) and not live.exists())


def test_the_next_run_cleans_up_where_the_guard_was_killed_too(temporary: Path) -> None:
    process, folder, agent = start(temporary)
    other, live, bystander = start(temporary)
    try:
        for each in (*guards(folder), process):
            each.kill()
        process.wait()
        foreign = temporary / "nc-ray-of-somebody"
        foreign.mkdir()
        remove_abandoned(temporary)
        assert gone(agent)
        assert not folder.exists()
        assert live.is_dir() and not gone(bystander)
        assert foreign.is_dir(), "a folder without a lock may be about to get one"
    finally:
        other.kill()
        other.wait()
    assert wait_until(lambda: gone(bystander) and not live.exists())
