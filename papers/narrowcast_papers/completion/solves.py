"""The 63 synthetic cases of the completion benchmark, and what was published for each.

Source: Engels and Morse, Benchmarking Low-Rank Matrix Completion Algorithms: table 1, and the 63 plots of its site.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any, Literal

from narrowcast.platform.compiled import one_thread
from narrowcast.platform.solving import Problem, Solver, StepResult
from narrowcast.solves.alternating import LMaFit, PowerFactorisation
from narrowcast.solves.completion_problems import SyntheticCompletion
from narrowcast.solves.descent import ASD, ScaledASD, ScaledGD
from narrowcast.solves.factor_solver import Continuation
from narrowcast.solves.observed import thread_count
from narrowcast.solves.second_order import R3MC, GaussNewton, MatrixIRLS
from narrowcast.solves.thresholding import ALPS, CGIHT, NIHT
from narrowcast.studies.results import Line, Lines
from narrowcast.studies.tables import Measurements

SIZES, RANKS, FRACTIONS, CONDITIONS = (1000, 10_000), (2, 20, 200), (0.05, 0.1, 0.2, 0.4), (2.0, 200.0, 20_000.0)
Class = Literal["S", "M", "F"]

# One letter for each condition number, by size and rank, then by fraction: S below 1e-9, M below 1, F above.
_PUBLISHED = {
    (1000, 2): "SSS SSS SSS SSS",
    (1000, 20): "SSM SSS SSS SSS",
    (1000, 200): "--- --- --- MFF",
    (10_000, 2): "SSS SSS SSM SMF",
    (10_000, 20): "SFF SFF SFF SFF",
    (10_000, 200): "FFF MFF MFF MFF",
}


@dataclass(frozen=True)
class CompletionCase:
    """One synthetic case; `published` is the class of the least distance that any published solver reached in 60 s.

    The distance is the report's, the norm of the errors of column sums, at the best iteration.
    """

    n: int
    rank: int
    fraction: float
    condition: float
    published: Class

    @property
    def name(self) -> str:
        """Return the case as a word, such as n1000-r2-p5-k200."""
        return f"n{self.n}-r{self.rank}-p{round(100 * self.fraction)}-k{self.condition:.0f}"

    @property
    def oversampling(self) -> float:
        """Return the number of observed entries for each degree of freedom of a matrix of this rank."""
        return round(self.fraction * self.n**2) / (self.rank * (2 * self.n - self.rank))

    def source(self, seed: int) -> SyntheticCompletion:
        """Return the problem of this case."""
        return SyntheticCompletion(
            rows=self.n, rank=self.rank, fraction=self.fraction, condition=self.condition, seed=seed
        )


def cases() -> Iterator[CompletionCase]:
    """Yield the 63 cases: all combinations with more entries than degrees of freedom, small ones first."""
    for (n, rank), published in sorted(_PUBLISHED.items()):
        for fraction, classes in zip(FRACTIONS, published.split(), strict=True):
            for condition, each in zip(CONDITIONS, classes, strict=True):
                if fraction * n**2 > (2 * n - rank) * rank:
                    yield CompletionCase(n, rank, fraction, condition, each)  # type: ignore[arg-type]


SOLVERS: dict[str, Any] = {
    "scaled_asd+": ScaledASD(continuation=Continuation()),
    "gauss_newton+": GaussNewton(continuation=Continuation()),
    "r3mc+": R3MC(continuation=Continuation()),
    "lmafit+": LMaFit(continuation=Continuation()),
    "power_factorisation+": PowerFactorisation(continuation=Continuation()),
    "matrix_irls": MatrixIRLS(),
    "scaled_asd": ScaledASD(),
    "asd": ASD(),
    "scaled_gd": ScaledGD(),
    "lmafit": LMaFit(),
    "niht": NIHT(),
    "cgiht": CGIHT(),
    "alps": ALPS(),
    "r3mc": R3MC(),
}
"""The solvers of the benchmark; + is rank continuation."""
TARGET, FLOOR, SECONDS, SEED = 1e-4, 5e-15, 60.0, 1
"""Error on unseen entries that solves a case; residual and seconds at which a solve ends."""
PUBLISHED = ("r3mc", "scaled_asd", "asd", "niht", "cgiht", "scaled_gd", "lmafit", "matrix_irls")
"""The solvers whose results Engels and Morse show."""
_SPACING = 1.25
_NEAR = 10
_EXPONENTS = (-15, 1)
METRICS = ("test.relative_error", "test.unseen_error", "test.column_sum_error")
Solves = dict[tuple[str, str, str], list[Mapping[str, Any]]]
"""The rows of solves by case, solver and seed."""


def timed(solver: Solver, problem: Problem, seed: int, seconds: float) -> Iterator[dict[str, Any]]:
    """Yield rows of a solve: seconds on its clock, the metrics there, and at the last row a status.

    It is measured whenever the clock has gone a quarter further, after every iteration near the target, and at the end:
    a status of the solver, `time`, or `floor`.
    """
    with one_thread():
        began = time.perf_counter()
        state = solver.init(problem, seed)
        spent = start = time.perf_counter() - began
        report, iteration, measured, status, error = StepResult(1.0), 0, 0.0, "", 1.0
        while not status:
            began = time.perf_counter()
            state, report = solver.step(problem, state)
            spent += time.perf_counter() - began
            iteration += 1
            if report.status != "running":
                status = report.status
            elif report.residual <= FLOOR:
                status = "floor"
            elif spent >= seconds:
                status = "time"
            near = error > TARGET and report.residual <= _NEAR * TARGET
            if status or near or spent >= _SPACING * measured:
                measured = spent
                metrics = problem.measure(solver.answer(state))
                found = {name: metrics[name] for name in METRICS}
                error = found["test.unseen_error"]
                row = {"seconds": spent, "start_seconds": start, "iteration": iteration, "residual": report.residual}
                yield {**row, **found, "status": status}


def seconds_to(rows: Sequence[Mapping[str, Any]], error: float, seconds: float) -> float | None:
    """Return the seconds at which unseen entries were first measured below the error, None if not in this time."""
    reached = (float(row["seconds"]) for row in rows if float(row["test.unseen_error"]) <= error)
    first = next(reached, None)
    return first if first is not None and first <= seconds else None


def milestones(rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the rows at which an error is first below a power of ten, those of the least errors, and the last."""
    kept = {len(rows) - 1}
    for metric in METRICS[1:]:
        errors = [float(row[metric]) for row in rows]
        kept.add(min(range(len(rows)), key=errors.__getitem__))
        for exponent in range(*_EXPONENTS):
            kept.update([place for place, error in enumerate(errors) if error <= 10.0**exponent][:1])
    return [rows[place] for place in sorted(kept)]


def solves_of(lines: Lines) -> Solves:
    """Return the lines of the finished solves."""
    found: Solves = {}
    for line in lines:
        of_solve = found.setdefault((line["case"], line["solver"], line["seed"]), [])
        if of_solve and int(line["iteration"]) <= int(of_solve[-1]["iteration"]):
            of_solve.clear()  # an earlier solve that was cut
        of_solve.append(line)
    return {key: of_solve for key, of_solve in found.items() if of_solve[-1]["status"]}


def measured(case: str, solver: str, seed: int, seconds: float = SECONDS) -> list[Line]:
    """Return the milestones of a solve."""
    _compile(solver)
    threads = thread_count()
    return [
        {"threads": threads, **row}
        for row in milestones([*timed(SOLVERS[solver], _problem(case, seed), seed, seconds)])
    ]


@cache
def _compile(solver: str) -> None:
    small = SyntheticCompletion(rows=50, rank=2, fraction=0.5).load()
    for _ in zip(range(3), timed(SOLVERS[solver], small, 0, 1.0), strict=False):
        pass


@lru_cache(maxsize=1)
def _problem(name: str, seed: int) -> Problem:
    return next(case for case in cases() if case.name == name).source(seed).load()


MEASUREMENTS = Measurements(
    "completion.csv",
    ("case", "solver", "seed"),
    ("threads", "seconds", "start_seconds", "iteration", "residual", *METRICS, "status"),
    lambda _: ((case.name, solver, SEED) for case in cases() for solver in SOLVERS),
    measured,
)
