"""The pool of a reproduction ends with all its processes, whatever ends it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pytest

from narrowcast.studies.recorded import run_all

SECONDS = 120.0


@dataclass(frozen=True)
class _SleepingRun:
    """A run that sleeps, and takes another second to write its checkpoint if it is interrupted."""

    seconds: float

    def run(self) -> Mapping[str, Any]:
        try:
            time.sleep(self.seconds)
        except KeyboardInterrupt:
            time.sleep(1.0)
            raise
        return {}


def fail_with_an_idle_worker() -> None:
    """End the pool by an error while one worker is idle and the other one is at work."""

    def fail(*_: object) -> None:
        time.sleep(1.0)  # the first worker is idle by then
        raise BrokenPipeError

    run_all([_SleepingRun(0.0), _SleepingRun(600.0)], 2, fail)  # type: ignore[list-item]


@pytest.mark.slow
def test_the_pool_ends_if_one_worker_is_idle_and_the_other_at_work() -> None:
    """An idle worker holds the lock of the queue, and keeps it when it is killed."""
    process = subprocess.Popen([sys.executable, __file__], stderr=subprocess.PIPE, text=True, start_new_session=True)
    try:
        _, said = process.communicate(timeout=SECONDS)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        raise
    assert said.splitlines()[-1] == "BrokenPipeError"


if __name__ == "__main__":
    fail_with_an_idle_worker()
