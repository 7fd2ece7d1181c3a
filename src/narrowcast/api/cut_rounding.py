"""Cuts from a finished MAXCUT solve by many random hyperplanes, in this process or on actors of Ray."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Generator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from narrowcast.algorithms.sdp.max_cut_problem import MaxCut, unit_vectors
from narrowcast.algorithms.sdp.rounding import TOGETHER, round_by_hyperplanes
from narrowcast.algorithms.sdp.weighted_graph import WeightedGraph
from narrowcast.cluster.ray_backend import RayBackend
from narrowcast.cluster.worker_pool import LocalPool, WorkerPool, dispatch
from narrowcast.platform.errors import RunFailed, UserError
from narrowcast.platform.threads import one_thread
from narrowcast.platform.types import FloatArray, IntArray
from narrowcast.runs.any_result import load_any
from narrowcast.runs.run_folder import find_run
from narrowcast.runs.solve_result import SolveResult

if TYPE_CHECKING:
    from pandas import DataFrame

_ATTEMPTS = 3
"""Attempts at hyperplanes whose worker dies."""


@dataclass(frozen=True, eq=False)
class CutRoundings:
    """The cuts of hyperplanes `first`, `first` + 1, ... of a seed, and the best of them.

    Shapes: cuts [count] in units of the cut; sides [n], 0 or 1, of the first best one. `bound` is the upper bound on
    all cuts that the solve proved.
    """

    seed: int
    first: int
    cuts: FloatArray
    sides: IntArray
    bound: float

    @property
    def best(self) -> float:
        """The largest cut."""
        return float(self.cuts.max())

    @property
    def mean(self) -> float:
        """The mean cut."""
        return float(self.cuts.mean())

    @property
    def ratio(self) -> float:
        """The largest cut over the bound."""
        return self.best / self.bound

    @cached_property
    def table(self) -> DataFrame:
        """A row for each hyperplane: seed, number and cut."""
        from pandas import DataFrame

        numbers = np.arange(self.first, self.first + len(self.cuts))
        return DataFrame({"seed": self.seed, "hyperplane": numbers, "cut": self.cuts})


def round_cut(
    run: SolveResult | str | Path,
    count: int = 1000,
    *,
    seed: int | None = None,
    first: int = 0,
    workers: int = 1,
    backend: str = "local",
    address: str | None = None,
    output: str | Path = "runs",
) -> CutRoundings:
    """Round the vectors of a finished MAXCUT solve by random hyperplanes, and return the cuts.

    A hyperplane depends on the seed and its number alone: the cuts are the same in process and on any number of
    workers, and another call with `first` continues them.

    Args:
        run: a result, the name of a run in `output`, or its folder.
        count: number of hyperplanes.
        seed: seed of the hyperplanes; by default that of the solve, whose `cut` is the best of its first ones.
        first: number of the first hyperplane.
        workers: actors side by side on Ray; one that dies is replaced, and its hyperplanes are repeated.
        backend: `local` for this process or `ray`.
        address: a running Ray cluster to join; implies Ray.
        output: folder of all runs.

    Raises:
        UserError: bad input, a run that is no MAXCUT solve, or a cluster without room.
        RunFailed: the workers died too often.

    """
    numbers: tuple[tuple[str, object, int], ...] = (("count", count, 1), ("first", first, 0), ("workers", workers, 1))
    for name, value, least in numbers:
        if not isinstance(value, int) or value < least:
            raise UserError(f"{name} is {value!r}; give a whole number of at least {least}")
    on_ray = address is not None or backend == "ray"
    if not on_ray and backend != "local":
        raise UserError(f'backend is "{backend}"; give local or ray')
    if workers > 1 and not on_ray:
        raise UserError(f"{workers} workers side by side need Ray; add backend='ray', or leave out workers")
    problem, vectors, bound = _solved(run, Path(output))
    chosen = problem.seed if seed is None else seed
    ends = range(first, first + count, TOGETHER)
    parts = [range(begin, min(begin + TOGETHER, first + count)) for begin in ends]
    queue, shared = _Parts(parts), (problem.graph, vectors, chosen)
    pool: AbstractContextManager[WorkerPool] = nullcontext(LocalPool(_round_part, shared))
    if on_ray:
        ray = RayBackend(actors=workers, cpus_per_actor=1, address=address)
        ray.check_workers("workers")
        pool = ray.worker_pool(_round_part, shared)
    with pool as opened:
        dispatch(queue, opened, workers)
    cuts = np.concatenate([queue.found[part.start].cuts for part in parts])
    best = parts[int(np.argmax([queue.found[part.start].cuts.max() for part in parts]))]
    return CutRoundings(chosen, first, cuts, queue.found[best.start].sides, bound)


@dataclass(frozen=True)
class _Rounded:
    """The cuts of the hyperplanes from `begin` on, and the sides of the best."""

    begin: int
    cuts: FloatArray
    sides: IntArray


def _round_part(numbers: range, shared: tuple[WeightedGraph, FloatArray, int]) -> Generator[_Rounded, None, None]:
    """Yield the cuts of some hyperplanes."""
    graph, vectors, seed = shared
    with one_thread():
        found = round_by_hyperplanes(graph, vectors, len(numbers), seed, numbers.start)
    yield _Rounded(numbers.start, found.cuts, found.sides)


class _Parts:
    """The hyperplanes that are left, as the queue that `dispatch` gives workers their jobs from."""

    def __init__(self, parts: Sequence[range]) -> None:
        self.found: dict[int, _Rounded] = {}
        self._waiting = deque(parts)
        self._deaths: Counter[range] = Counter()

    def next_job(self) -> range | None:
        """Return the next part."""
        return self._waiting.popleft() if self._waiting else None

    def answer_to(self, message: _Rounded) -> None:
        """Keep the cuts of a part."""
        self.found[message.begin] = message

    def worker_died(self, job: range, reason: str) -> None:
        """Queue the part again unless its cuts came; raise `RunFailed` after some deaths."""
        self._deaths[job] += 1
        if self._deaths[job] == _ATTEMPTS:
            raise RunFailed(f"hyperplanes {job.start} to {job.stop - 1} failed: {reason}, {_ATTEMPTS} times")
        if job.start not in self.found:
            self._waiting.append(job)

    def heartbeat(self) -> None:
        """Do nothing: no other process needs to know of these parts."""

    def is_finished(self) -> bool:
        """Return whether all parts are done."""
        return not self._waiting


def _solved(run: SolveResult | str | Path, output: Path) -> tuple[MaxCut, FloatArray, float]:
    """Return the problem of a run, its unit vectors and its bound; raise `UserError` if it is no MAXCUT solve."""
    result = run if isinstance(run, SolveResult) else load_any(find_run(run, output))
    problem = result.config.problem_source.load() if isinstance(result, SolveResult) else None
    if not isinstance(result, SolveResult) or not isinstance(problem, MaxCut):
        raise UserError(f"{result.name} is not a solve of MAXCUT; give one, such as that of max-cut-g1")
    if problem.digest != result.file.problem_sha256:
        raise UserError(f"{result.name}: its graph has changed since the solve; solve it again")
    return problem, unit_vectors(result.answer()["vectors"]), float(result.final["bound"])
