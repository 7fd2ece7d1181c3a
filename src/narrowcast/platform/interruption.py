"""Deferral of SIGINT, SIGTERM and SIGHUP, so that a run stops only where its state is consistent."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType

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
def uninterrupted() -> Iterator[None]:
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
def interruptible() -> Iterator[None]:
    """Deliver signals within this block of an `uninterrupted` one; deferred ones are delivered at once."""
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
            arrived = [each for each in handler.chain() if each.arrived]
            for each in arrived:
                each.arrived = False
            if arrived:
                signal.raise_signal(number)
        yield
    finally:
        for number, handler in deferred.items():
            signal.signal(number, handler)


def stop_waits() -> bool:
    """Return whether an `interruptible` block may have a signal to deliver, which is quick to ask."""
    return (STOPPING.is_set() or _WAITING.is_set()) and threading.current_thread() is threading.main_thread()
