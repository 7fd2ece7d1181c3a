"""Limit of torch and BLAS libraries to one thread while results are computed."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache

from threadpoolctl import LibController, ThreadpoolController

from narrowcast.platform.config.trust import ScopedSettings

_SETTINGS = ScopedSettings({f"{library}_NUM_THREADS": "1" for library in ("OPENBLAS", "MKL", "BLIS")}, forced=True)
"""Read by a library when it is loaded, which may be within a block: SciPy brings a BLAS of its own."""


@contextmanager
def one_thread() -> Iterator[None]:
    """Run torch and all BLAS libraries with one thread, those too that are loaded within the block.

    With more, the number of threads would affect the rounding of sums.
    """
    import torch  # which takes seconds, and tables of runs do not need

    torch_threads = torch.get_num_threads()
    loaded = _blas()
    before = [(pool, threads) for pool in loaded if (threads := pool.get_num_threads()) != 1]
    try:
        if torch_threads != 1:
            torch.set_num_threads(1)
        for pool, _ in before:
            pool.set_num_threads(1)
        with _SETTINGS.in_force():
            yield
    finally:
        for pool, threads in before:
            pool.set_num_threads(threads)
        if before and (now := _blas()) is not loaded:  # new ones get the threads of the others
            paths = {pool.filepath for pool in loaded}
            for pool in now:
                if pool.filepath not in paths:
                    pool.set_num_threads(before[0][1])
        if torch_threads != 1:
            torch.set_num_threads(torch_threads)


def _blas() -> Sequence[LibController]:
    """Return the thread pools of the BLAS libraries loaded so far."""
    return _blas_of(len(sys.modules))


@lru_cache(maxsize=1)
def _blas_of(n_modules: int) -> Sequence[LibController]:
    """Find the pools again once more modules are imported, any of which may load one: that takes milliseconds."""
    del n_modules
    return tuple(ThreadpoolController().select(user_api="blas").lib_controllers)
