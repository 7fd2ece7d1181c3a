"""One thread for torch and numpy wherever results are computed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache

import torch
from threadpoolctl import ThreadpoolController


@contextmanager
def one_thread() -> Iterator[None]:
    """Run torch, and numpy's BLAS, with one thread: with more, sums would be cut, and so rounded, by their number."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with _pools().limit(limits=1, user_api="blas"):
            yield
    finally:
        torch.set_num_threads(before)


@lru_cache(maxsize=1)
def _pools() -> ThreadpoolController:
    """The libraries that were loaded when results were first computed; finding them takes milliseconds."""
    return ThreadpoolController()
