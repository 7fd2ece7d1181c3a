"""Imports without garbage collection, which would take a fifth of the time that a command needs to start."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def uncollected() -> Iterator[None]:
    """Collect no garbage within the block, and leave what it has made out of later collections.

    The block is for imports: torch and MLflow make half a million objects that stay as long as the process. A second
    command of the process has imported them already, and would only keep the garbage of the first one for ever.
    """
    if gc.get_freeze_count():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
