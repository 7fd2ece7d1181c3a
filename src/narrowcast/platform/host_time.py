"""The clocks of this machine, and work that is repeated in the background; a simulation replaces both."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar, copy_context
from typing import Protocol


class Repeated(Protocol):
    """A step that is repeated in the background until it is closed."""

    def wake(self) -> None:
        """Run the step soon, rather than when its interval ends."""
        ...

    def close(self, wait_seconds: float) -> bool:
        """Run the step a last time; return whether it ended within the time."""
        ...


class HostTime(Protocol):
    """The clocks of a machine. Virtual time, of which results are made, is `simulation.clock`."""

    def wall(self) -> float:
        """Return the seconds since 1970, which may jump either way."""
        ...

    def monotonic(self) -> float:
        """Return the seconds since a fixed moment, which never decrease."""
        ...

    def sleep(self, seconds: float) -> None:
        """Wait."""
        ...

    def repeat(self, step: Callable[[], None], seconds: float, name: str) -> Repeated:
        """Start to run a step at once, and again after at most `seconds`."""
        ...


class SystemTime:
    """The clocks of the operating system, and a thread for each repeated step."""

    def wall(self) -> float:
        """Return `time.time`."""
        return time.time()

    def monotonic(self) -> float:
        """Return `time.monotonic`."""
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        """Call `time.sleep`."""
        time.sleep(seconds)

    def repeat(self, step: Callable[[], None], seconds: float, name: str) -> Repeated:
        """Start a thread that repeats the step, in a copy of the context."""
        return _RepeatingThread(step, seconds, name)


class _RepeatingThread:
    def __init__(self, step: Callable[[], None], seconds: float, name: str) -> None:
        self._step, self._seconds = step, seconds
        self._woken, self._closing = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=copy_context().run, args=(self._run,), name=name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while True:
            last = self._closing.is_set()
            self._step()
            if last:
                return
            self._woken.wait(self._seconds)
            self._woken.clear()

    def wake(self) -> None:
        self._woken.set()

    def close(self, wait_seconds: float) -> bool:
        self._closing.set()
        self._woken.set()
        self._thread.join(wait_seconds)
        return not self._thread.is_alive()


_SYSTEM = SystemTime()
_current: ContextVar[HostTime] = ContextVar("host_time", default=_SYSTEM)


def host_time() -> HostTime:
    """Return the clocks in force."""
    return _current.get()


@contextmanager
def time_of(clocks: HostTime) -> Iterator[None]:
    """Replace the clocks within the block."""
    token = _current.set(clocks)
    try:
        yield
    finally:
        _current.reset(token)
