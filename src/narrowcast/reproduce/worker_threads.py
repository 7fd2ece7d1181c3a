"""The number of threads of processes that run several at a time."""

from __future__ import annotations

import os


def one_core_each() -> None:
    """Give the numerical libraries of processes that start from now on one thread, unless the environment says more.

    They read these variables when a process starts.
    """
    for library in ("OMP", "OPENBLAS", "MKL", "NUMBA"):
        os.environ.setdefault(f"{library}_NUM_THREADS", "1")
