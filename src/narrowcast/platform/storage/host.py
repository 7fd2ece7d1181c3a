"""The host of a process: its clocks, work that it repeats in the background, and signals that it defers.

A simulation replaces the clocks and the repeated work. SIGINT, SIGTERM and SIGHUP are deferred, so that a run stops
only where its state is consistent.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar, copy_context
from dataclasses import dataclass
from types import FrameType
from typing import Protocol


class PeriodicTask(Protocol):
    """A step that is repeated in the background until it is closed."""

    def wake(self) -> None:
        """Run the step soon, rather than when its interval ends."""
        ...

    def close(self, wait_seconds: float) -> bool:
        """Run the step a last time; return whether it ended within the time."""
        ...


class HostClock(Protocol):
    """The clocks of a machine. Virtual time, of which results are made, is `rounds.fleet`."""

    def wall(self) -> float:
        """Return the seconds since 1970, which may jump either way."""
        ...

    def monotonic(self) -> float:
        """Return the seconds since a fixed moment, which never decrease."""
        ...

    def sleep(self, seconds: float) -> None:
        """Wait."""
        ...

    def run_periodically(self, step: Callable[[], None], seconds: float, name: str) -> PeriodicTask:
        """Start to run a step at once, and again after at most `seconds`."""
        ...


class SystemClock:
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

    def run_periodically(self, step: Callable[[], None], seconds: float, name: str) -> PeriodicTask:
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


_SYSTEM = SystemClock()
_current: ContextVar[HostClock] = ContextVar("host_clock", default=_SYSTEM)


def host_clock() -> HostClock:
    """Return the clocks in force."""
    return _current.get()


@contextmanager
def use_clock(clocks: HostClock) -> Iterator[None]:
    """Replace the clocks within the block."""
    token = _current.set(clocks)
    try:
        yield
    finally:
        _current.reset(token)


_STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_Handler = Callable[[int, FrameType | None], object] | int

STOPPING = threading.Event()
"""Set once the process is asked to stop, because Python discards an interrupt that is raised in a callback."""
_WAITING = threading.Event()
"""Set while a signal may be deferred."""


@dataclass(eq=False)
class _Deferred:
    """A handler that defers a signal, and the handler that it is passed to in the end."""

    successor: _Handler
    arrived: bool = False

    def __call__(self, *_: object) -> None:
        self.arrived = True
        _WAITING.set()

    def chain(self) -> list[_Deferred]:
        """Return this handler and those of the enclosing blocks."""
        return [self, *(self.successor.chain() if isinstance(self.successor, _Deferred) else [])]


@contextmanager
def defer_signals() -> Iterator[None]:
    """Defer signals to stop to the end of the block; a thread other than the main one gets no signals anyway."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    deferred = {
        number: _Deferred(successor)
        for number in _STOPS
        if (successor := signal.getsignal(number))
        is not None  # None was not set by Python, and Python cannot set it back
    }
    for number, handler in deferred.items():
        signal.signal(number, handler)
    try:
        yield
    finally:
        for number, handler in deferred.items():
            signal.signal(number, handler.successor)
        arrived = [number for number, handler in deferred.items() if handler.arrived]
        if arrived:
            _WAITING.clear()
            signal.raise_signal(arrived[0])


@contextmanager
def block_signals(*numbers: signal.Signals) -> Iterator[None]:
    """Block signals in this block, after which they are delivered, and for good in the processes that it starts.

    A terminal sends its signals to those too, which print a traceback if they get one before they handle it.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def allow_signals() -> Iterator[None]:
    """Deliver signals within this block of an `defer_signals` one; deferred ones are delivered at once."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    if STOPPING.is_set():
        raise KeyboardInterrupt
    deferred = {number: handler for number in _STOPS if isinstance(handler := signal.getsignal(number), _Deferred)}
    try:
        for number, handler in deferred.items():
            signal.signal(number, handler.chain()[-1].successor)
        _WAITING.clear()
        for number, handler in deferred.items():
            arrived = [link for link in handler.chain() if link.arrived]
            for waiting in arrived:
                waiting.arrived = False
            if arrived:
                signal.raise_signal(number)
        yield
    finally:
        for number, handler in deferred.items():
            signal.signal(number, handler)


def stop_requested() -> bool:
    """Return whether an `allow_signals` block may have a signal to deliver, which is quick to ask."""
    return (STOPPING.is_set() or _WAITING.is_set()) and threading.current_thread() is threading.main_thread()
