"""Limit of torch and numpy to one thread while results are computed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache

import torch
from threadpoolctl import ThreadpoolController


@contextmanager
def one_thread() -> Iterator[None]:
    """Run torch and numpy's BLAS with one thread.

    With more, the number of threads would affect the rounding of sums.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with _pools().limit(limits=1, user_api="blas"):
            yield
    finally:
        torch.set_num_threads(before)


@lru_cache(maxsize=1)
def _pools() -> ThreadpoolController:
    """Return the thread pools of the libraries loaded so far; finding them takes milliseconds."""
    return ThreadpoolController()
