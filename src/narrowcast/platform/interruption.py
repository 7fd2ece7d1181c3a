"""Signals held back, so that a run is only ever stopped between two things that belong together."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType

_STOPS = (signal.SIGINT, signal.SIGTERM)
_Handler = Callable[[int, FrameType | None], object] | int

STOPPING = threading.Event()
"""Set once the process is asked to stop, for an interrupt that Python lost in a callback."""


@dataclass(eq=False)
class _HeldBack:
    """The handler of a signal that is held back, and the one that will hear of it."""

    heir: _Handler
    came: bool = False

    def __call__(self, *_: object) -> None:
        self.came = True

    def chain(self) -> list[_HeldBack]:
        """It, and those around it, of blocks within blocks."""
        return [self, *(self.heir.chain() if isinstance(self.heir, _HeldBack) else [])]


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Hold SIGINT and SIGTERM back until the block is through; in a thread that gets no signals, nothing happens."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    holding = {
        number: _HeldBack(heir)
        for number in _STOPS
        if (heir := signal.getsignal(number)) is not None  # None was not set by Python, and Python cannot set it back
    }
    for number, handler in holding.items():
        signal.signal(number, handler)
    try:
        yield
    finally:
        for number, handler in holding.items():
            signal.signal(number, handler.heir)
        came = [number for number, handler in holding.items() if handler.came]
        if came:
            signal.raise_signal(came[0])


@contextmanager
def interruptible() -> Iterator[None]:
    """Inside `uninterrupted`: let signals be heard in this block, those that came before it at once."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    if STOPPING.is_set():
        raise KeyboardInterrupt
    holding = {number: handler for number in _STOPS if isinstance(handler := signal.getsignal(number), _HeldBack)}
    try:
        for number, handler in holding.items():
            signal.signal(number, handler.chain()[-1].heir)
        for number, handler in holding.items():
            came = [each for each in handler.chain() if each.came]
            for each in came:
                each.came = False
            if came:
                signal.raise_signal(number)
        yield
    finally:
        for number, handler in holding.items():
            signal.signal(number, handler)
