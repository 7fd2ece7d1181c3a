"""Solves of the Frank-Wolfe study: error, gap and rank by iteration and processor time, as rows of a CSV file.

Test entries of a drawn matrix are without noise, as nobody observes them: noisy ones would hide most of the differences
between solvers. Validation entries have the noise of the observed ones.

Every solver has four values of one field, chosen on validation entries of a seed that is no test seed: the radius of
the nuclear-norm ball, the penalty of Soft-Impute, the weight decay of alternating least squares. Frank-Wolfe solvers
share the radius that in-face steps choose, since they minimise the same function. The semidefinite program of least
nuclear norm has nothing to choose: its solutions have the observed entries exactly, noise included.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from narrowcast.platform.compiled import one_thread
from narrowcast.platform.data.rating_matrix import ExplicitRatings
from narrowcast.platform.seeds import generator
from narrowcast.platform.solving import Solver
from narrowcast.platform.types import Arrays, FloatArray
from narrowcast.solves.alternating import ALS
from narrowcast.solves.burer_monteiro import BurerMonteiro
from narrowcast.solves.completion_problems import Completion, HeldOut, RatingCompletion, SyntheticCompletion
from narrowcast.solves.frank_wolfe import InFaceFrankWolfe
from narrowcast.solves.hazan import Hazan
from narrowcast.solves.nuclear_norm import NEGLIGIBLE
from narrowcast.solves.observed import observe, truncated
from narrowcast.solves.thresholding import SoftImpute
from narrowcast.studies.results import Line, Lines
from narrowcast.studies.tables import Measurements

TUNING_SEED, SEEDS = 100, 3
ITERATIONS = 200
_TUNING_ITERATIONS = 60
_SPACING = 1.3
_VALIDATION = 0.1
EXACT = "exact"
DATA = ("ml-100k", "synthetic", EXACT)
"""Ratings; a matrix of rank 5 with noise, and one without."""


@dataclass(frozen=True)
class Method:
    """A solver of the study by the value of its field, the values tried on each data set, and whose choice it takes."""

    build: Any
    values: Mapping[str, tuple[float, ...]]
    chosen_by: str
    iterations: int = ITERATIONS


_RADII = {
    "ml-100k": (1000.0, 1500.0, 2250.0, 3400.0),
    "synthetic": (8.0, 10.0, 12.0, 14.0),
    EXACT: (9.0, 9.33, 10.0, 11.0),
}
"""The nuclear norm of the matrix without noise is 9.33."""
_PENALTIES = {"ml-100k": (0.2, 0.3, 0.45, 0.65), "synthetic": (0.1, 0.2, 0.3, 0.45), EXACT: (0.01, 0.03, 0.06, 0.1)}
_DECAYS = {"ml-100k": (0.05, 0.1, 0.15, 0.2), "synthetic": (1e-5, 1e-4, 1e-3, 1e-2), EXACT: (1e-9, 1e-7, 1e-5, 1e-3)}
IN_FACE, PLAIN, PROGRAM = "in-face (0, inf)", "hazan line search", "burer_monteiro"
METHODS: Mapping[str, Method] = {
    "soft_impute": Method(lambda value: SoftImpute(rank=40, penalty=value), _PENALTIES, "soft_impute", 100),
    "als": Method(lambda value: ALS(rank=10, weight_decay=value), _DECAYS, "als", 50),
    IN_FACE: Method(lambda value: InFaceFrankWolfe(radius=value), _RADII, IN_FACE),
    "in-face (1, 1)": Method(
        lambda value: InFaceFrankWolfe(radius=value, full_gain=1, partial_gain=1), _RADII, IN_FACE
    ),
    PLAIN: Method(lambda value: Hazan(radius=value), _RADII, IN_FACE),
    "hazan 2/(k+2)": Method(lambda value: Hazan(radius=value, step_rule="two_over_k_plus_two"), _RADII, IN_FACE),
    "hazan 1/k": Method(lambda value: Hazan(radius=value, step_rule="one_over_k"), _RADII, IN_FACE),
    PROGRAM: Method(lambda value: BurerMonteiro(rank=int(value)), {"synthetic": (60,), EXACT: (20,)}, PROGRAM, 40),
}
"""The controls, Soft-Impute and alternating least squares, the Frank-Wolfe solvers, and one of the linear program.

The last has the observed entries exactly, noise included, which is no aim for ratings.
"""


def methods_of(data: str) -> dict[str, Method]:
    """Return the methods by name that a data set is completed by."""
    return {name: method for name, method in METHODS.items() if data in method.values}


@lru_cache(maxsize=1)
def problem_of(data: str, seed: int) -> Completion:
    """Return a problem with validation and test entries.

    Those of the synthetic matrix are drawn from the observed ones, and test entries have their true values.
    """
    if data == "ml-100k":
        return RatingCompletion(
            ratings=ExplicitRatings(set="ml-100k", validation_share=_VALIDATION), bias_decay=5.0, seed=seed
        ).load()
    noise = 0.0 if data == EXACT else 0.5
    source = SyntheticCompletion(rows=300, columns=200, rank=5, fraction=0.25, condition=3, noise=noise, seed=seed)
    whole = source.load()
    observed = whole.observed
    row = observed.row_of_entries().astype(np.int64)
    order = generator(seed, "frank-wolfe held out").permutation(observed.count)
    size = round(_VALIDATION * observed.count)
    assert isinstance(whole.truth, tuple)
    parts = []
    for begin, values in ((0, observed.values), (size, observed.sampled(*whole.truth))):
        at = order[begin : begin + size]
        parts.append(HeldOut(row[at], observed.indices[at].astype(np.int64), values[at]))
    left = np.sort(order[2 * size :])
    seen = observe(300, 200, row[left], observed.indices[left], observed.values[left])
    return Completion(whole.name, whole.source, seen, validation=parts[0], held_out=parts[1], rank=whole.rank)


def solve_rows(problem: Completion, solver: Solver, seed: int, iterations: int) -> Iterator[dict[str, Any]]:
    """Yield rows at iterations 1, 2, ... of a constant ratio; the clock is processor time of the solver alone."""
    with one_thread():
        began = time.process_time()
        state = solver.init(problem, seed)
        spent, due = time.process_time() - began, 1
        for iteration in range(1, iterations + 1):
            began = time.process_time()
            state, report = solver.step(problem, state)
            spent += time.process_time() - began
            ended = report.status != "running"
            if iteration >= due or iteration == iterations or ended:
                due = max(iteration + 1, round(iteration * _SPACING))
                answer = {name: each for name, each in solver.answer(state).items() if name != "radius"}
                metrics = problem.measure(answer)
                left, right = _factors(problem, answer)
                spread = truncated(left, right, left.shape[1])[1]
                yield {
                    "iteration": iteration,
                    "cpu_seconds": spent,
                    "residual": report.residual,
                    "objective": metrics["observed_error"] ** 2 * problem.observed.norm**2 / 2,
                    "rank": int(np.count_nonzero(spread > NEGLIGIBLE * spread[0])),
                    "validation_rmse": metrics["validation.rmse"],
                    "test_rmse": metrics["test.rmse"],
                }
            if ended:
                return


def _factors(problem: Completion, answer: Arrays) -> tuple[FloatArray, FloatArray]:
    """Return the factors [m, k] and [n, k] of a solver of completion or of its program."""
    if "vectors" in answer:
        return answer["vectors"][: problem.observed.rows], answer["vectors"][problem.observed.rows :]
    return answer["left"], answer["right"]


def chosen(rows: Lines, data: str, method: str) -> float | None:
    """Return the value of least validation error at the end of the tuning solves, None if one is missing.

    A single value is not tuned.
    """
    least: dict[float, float] = {}
    name = METHODS[method].chosen_by
    if len(METHODS[method].values[data]) == 1:
        return METHODS[method].values[data][0]
    for row in rows:
        if (row["data"], row["solver"], int(row["seed"])) == (data, name, TUNING_SEED):
            least[float(row["value"])] = float(row["validation_rmse"])
    values = METHODS[method].values[data]
    return min(values, key=lambda value: least[value]) if least.keys() >= set(values) else None


def measured(data: str, solver: str, value: float, seed: int) -> list[Line]:
    """Return the lines of a solve; of one for tuning the last alone."""
    method, tuning = METHODS[solver], seed == TUNING_SEED
    iterations = min(method.iterations, _TUNING_ITERATIONS) if tuning else method.iterations
    lines = list[Line](solve_rows(problem_of(data, seed), method.build(value), seed, iterations))
    return lines[-1:] if tuning else lines


def planned(lines: Lines) -> Iterator[tuple[str, str, float, int]]:
    """Yield the solves of each data set, those for tuning first."""
    for data in DATA:
        methods = methods_of(data)
        for name, method in methods.items():
            if method.chosen_by == name and len(method.values[data]) > 1:
                yield from ((data, name, value, TUNING_SEED) for value in method.values[data])
        for seed in range(SEEDS):
            for name in methods:
                best = chosen(lines, data, name)
                assert best is not None, "the solves for tuning came first"
                yield data, name, best, seed


MEASUREMENTS = Measurements(
    "sdp-completion.csv",
    ("data", "solver", "value", "seed"),
    ("iteration", "cpu_seconds", "residual", "objective", "rank", "validation_rmse", "test_rmse"),
    planned,
    measured,
)
