"""How the fused kernels are compiled and spread over threads."""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import numba
import numpy as np
from numpy.typing import DTypeLike, NDArray

from narrowcast.platform.types import IntArray

Function = TypeVar("Function", bound=Callable[..., Any])

# Sums may be reordered and multiply-adds fused, so that loops become vector code. Not `nnan` or `ninf`: a client that
# diverged must be seen to have diverged.
_REORDER = {"reassoc", "contract", "nsz"}

_settings: Any = numba.config


def _cache_folder() -> str | None:
    """Where machine code is kept between processes; None where nothing can be written.

    One folder for each state of these sources: numba itself would not see that a function's callee has changed.
    """
    here = Path(__file__).parent
    sources = b"".join(path.read_bytes() for path in sorted(here.glob("*.py")))
    # expanduser, unlike Path.home, does not mind a user without a home
    caches = [here / "__pycache__", Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"))]  # noqa: PTH111
    if _settings.CACHE_DIR:
        caches = [Path(_settings.CACHE_DIR)]
    for parent in caches:
        folder = parent / f"narrowcast-{hashlib.sha256(sources).hexdigest()[:16]}"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=folder).close()
        except OSError:
            continue
        return str(folder)
    return None


_CACHE = _cache_folder()


def compiled(*, reorder: bool = False, inline: bool = False) -> Callable[[Function], Function]:
    """Compile to machine code that holds no lock of the interpreter, kept on disk where that can be written.

    Functions that compiled ones call must be `inline`: else a process that compiles and one that reads what was kept
    may run different machine code for them, which rounds differently where sums are reordered.
    """

    def compile_function(function: Function) -> Function:
        options: dict[str, Any] = {"nogil": True, "error_model": "numpy", "fastmath": reorder and _REORDER}
        chosen, _settings.CACHE_DIR = _settings.CACHE_DIR, _CACHE or ""
        try:
            return numba.njit(cache=_CACHE is not None and not inline, forceinline=inline, **options)(function)
        finally:
            _settings.CACHE_DIR = chosen

    return compile_function


def read_only(array: NDArray[Any], dtype: DTypeLike) -> NDArray[Any]:
    """The array as a read-only, contiguous one: one type, and so one compilation, wherever it comes from."""
    view = np.ascontiguousarray(array, dtype=dtype).view()
    view.flags.writeable = False
    return view


def over_clients(work: Callable[[IntArray], None], load: IntArray, threads: int) -> None:
    """Call `work` on the places of all clients: in their order, or dealt to the threads by load [C], heaviest first.

    Each client must be independent of all others.
    """
    if threads == 1:
        work(np.arange(len(load)))
        return
    hands: list[list[int]] = [[] for _ in range(threads)]
    carried = [0] * threads
    for client in np.argsort(-load, kind="stable").tolist():
        lightest = carried.index(min(carried))
        hands[lightest].append(client)
        carried[lightest] += int(load[client])
    list(_pool(threads, os.getpid()).map(work, [np.array(hand) for hand in hands if hand]))


@cache
def _pool(threads: int, process: int) -> ThreadPoolExecutor:
    """Threads that stay, so that their memory does; a forked process starts its own."""
    del process
    return ThreadPoolExecutor(threads)
