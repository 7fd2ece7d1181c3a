"""Compilation of the fused kernels and their distribution over threads, and libraries held to one thread.

With more than one, torch and BLAS round sums by the number of threads; kernels give each thread clients of its own.
"""

from __future__ import annotations

import hashlib
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache, lru_cache, update_wrapper
from pathlib import Path
from threading import Lock
from typing import Any, TypeVar, cast

import numpy as np
from numpy.typing import DTypeLike, NDArray
from threadpoolctl import LibController, ThreadpoolController

from narrowcast.platform.config.trust import ScopedSettings
from narrowcast.platform.types import IntArray

Function = TypeVar("Function", bound=Callable[..., Any])

# Allow reordered sums and fused multiply-adds, so that loops become vector code, but not `nnan` or `ninf`: NaN and
# infinity must survive, since they mark a diverged client.
_REORDER = {"reassoc", "contract", "nsz"}

_making = Lock()


@cache
def _cache_folder(chosen: str) -> str | None:
    """Return the folder that keeps machine code between processes, or None if no folder is writable.

    `chosen` is numba's own setting, empty if the user has set none. The folder name contains a hash of all modules with
    compiled functions, since numba does not notice a change in a function's callee in another module.
    """
    package = Path(__file__).parent
    modules = (path.read_bytes() for path in sorted(package.parent.rglob("*.py")))
    sources = b"".join(module for module in modules if b"@compiled(" in module)
    # expanduser, unlike Path.home, does not raise for a user without a home folder
    caches = [package / "__pycache__", Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"))]  # noqa: PTH111
    if chosen:
        caches = [Path(chosen)]
    for parent in caches:
        folder = parent / f"narrowcast-{hashlib.sha256(sources).hexdigest()[:16]}"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=folder).close()
        except OSError:
            continue
        return str(folder)
    return None


def compiled(*, reorder: bool = False, inline: bool = False) -> Callable[[Function], Function]:
    """Compile a function at its first call to machine code without the interpreter lock, cached on disk if possible.

    Functions called by compiled ones must be `inline`. Otherwise a process that compiles and one that reads the cache
    may run different machine code for them, which rounds differently if sums are reordered.
    """
    options: dict[str, Any] = {"nogil": True, "error_model": "numpy", "fastmath": reorder and _REORDER}

    def compile_function(function: Function) -> Function:
        return cast("Function", _Compiled(function, inline, options))

    return compile_function


class _Compiled:
    """A function that numba is given at its first use, since importing numba takes a third of a second."""

    def __init__(self, function: Callable[..., Any], inline: bool, options: dict[str, Any]) -> None:
        update_wrapper(self, function)
        self._function, self._inline, self._options = function, inline, options
        self._dispatcher: Any = None

    def __call__(self, *arguments: Any) -> Any:
        return (self._dispatcher or self._made())(*arguments)

    @property
    def _numba_type_(self) -> Any:
        """The type that numba asks for where a compiled function calls this one."""
        return self._made()._numba_type_

    @property
    def signatures(self) -> Any:
        """The types of arguments that it was compiled for."""
        return self._made().signatures

    def _made(self) -> Any:
        import numba

        settings: Any = numba.config
        with _making:
            if self._dispatcher is None:
                chosen = settings.CACHE_DIR
                folder = _cache_folder(chosen)
                settings.CACHE_DIR = folder or ""
                try:
                    cached = folder is not None and not self._inline
                    made = numba.njit(cache=cached, forceinline=self._inline, **self._options)
                    self._dispatcher = made(self._function)
                finally:
                    settings.CACHE_DIR = chosen
        return self._dispatcher


def read_only(array: NDArray[Any], dtype: DTypeLike) -> NDArray[Any]:
    """Return a read-only, contiguous view or copy, so that kernels see one type and are compiled once."""
    view = np.ascontiguousarray(array, dtype=dtype).view()
    view.flags.writeable = False
    return view


def over_clients(work: Callable[[IntArray], None], load: IntArray, threads: int) -> None:
    """Call `work` on the places of all clients, dealt to the threads by load, heaviest first.

    With one thread clients keep their order. Clients must be independent of each other. Shapes: load [C].
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
    """Return a pool of long-lived threads, which keep their memory; `process` gives a forked process its own pool."""
    del process
    return ThreadPoolExecutor(threads)


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
