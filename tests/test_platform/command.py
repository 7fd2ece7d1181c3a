"""`narrowcast` as a process of its own: one that can be killed, with whatever it started."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import psutil

SECONDS = 120.0
_MARK = "NARROWCAST_TEST_COMMAND"


class Command:
    """A command line at work, in a session of its own."""

    def __init__(self, *words: object, log: Path, program: tuple[str, ...] = ("-m", "narrowcast")) -> None:
        self._mark = uuid.uuid4().hex
        self._log = log
        self._family: set[psutil.Process] = set()
        with log.with_suffix(".out").open("w") as out, log.with_suffix(".err").open("w") as err:
            self.process = subprocess.Popen(
                [sys.executable, *program, *map(str, words)],
                env={**os.environ, _MARK: self._mark},
                stdout=out,
                stderr=err,
                start_new_session=True,
            )

    @property
    def err(self) -> str:
        """What it printed on stderr."""
        return self._log.with_suffix(".err").read_text()

    def wait(self) -> int:
        """Wait for its end; its exit status."""
        return self.process.wait(SECONDS)

    def wait_for_round(self, folder: Path, round_index: int) -> None:
        """Wait until the journal of its run has the round."""
        journal, deadline = folder / "journal.jsonl", time.monotonic() + SECONDS
        while not journal.exists() or journal.read_bytes().count(b"\n") < round_index:
            assert self.process.poll() is None, self.err
            assert time.monotonic() < deadline
            time.sleep(0.005)

    def send(self, number: signal.Signals) -> None:
        """Send a signal: SIGINT to all in the foreground as a terminal does, another to the command alone."""
        if number == signal.SIGKILL:
            self.process.send_signal(signal.SIGSTOP)  # it gets no further while its children are looked up
        command = psutil.Process(self.process.pid)
        self._family = {command, *command.children(recursive=True), *self._marked()}
        if number == signal.SIGINT:
            os.killpg(self.process.pid, number)
        else:
            self.process.send_signal(number)

    def _marked(self) -> set[psutil.Process]:
        """Those that inherited the command's environment, whoever their parent is by now."""
        found = set()
        for process in psutil.process_iter():
            try:
                if process.environ().get(_MARK) == self._mark:
                    found.add(process)
            except psutil.Error:
                continue
        return found

    def survivors(self, seconds: float, besides: tuple[str, ...] = ()) -> list[str]:
        """Which processes of the command, but for those of these names, are still there after at most so long."""
        deadline = time.monotonic() + seconds
        while True:
            names = [_name(each) for each in self._family | self._marked()]
            alive = [name for name in names if name and name not in besides]
            if not alive or time.monotonic() > deadline:
                return alive
            time.sleep(0.2)

    def clean_up(self) -> None:
        """Kill all that is left of it."""
        for each in self._family | self._marked():
            try:
                each.kill()
            except psutil.NoSuchProcess:
                continue
        self.process.wait()


def _name(process: psutil.Process) -> str:
    """The name of a process, or nothing once it is dead."""
    try:
        # Ray pads the command lines of its workers with blanks.
        return "" if process.status() == psutil.STATUS_ZOMBIE else " ".join(process.cmdline()).strip()
    except psutil.NoSuchProcess:
        return ""
