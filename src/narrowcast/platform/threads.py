"""Limit of torch and numpy to one thread while results are computed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache

import torch
from threadpoolctl import LibController, ThreadpoolController


@contextmanager
def one_thread() -> Iterator[None]:
    """Run torch and numpy's BLAS with one thread.

    With more, the number of threads would affect the rounding of sums.
    """
    torch_threads = torch.get_num_threads()
    before = [(pool, threads) for pool in _blas() if (threads := pool.get_num_threads()) != 1]
    try:
        if torch_threads != 1:
            torch.set_num_threads(1)
        for pool, _ in before:
            pool.set_num_threads(1)
        yield
    finally:
        for pool, threads in before:
            pool.set_num_threads(threads)
        if torch_threads != 1:
            torch.set_num_threads(torch_threads)


@lru_cache(maxsize=1)
def _blas() -> Sequence[LibController]:
    """Return the thread pools of the BLAS libraries loaded so far; finding them takes milliseconds."""
    return tuple(ThreadpoolController().select(user_api="blas").lib_controllers)
