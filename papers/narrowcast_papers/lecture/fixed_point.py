"""The limit of FedAvg's rounds on federated least squares beside equation 6 of the lecture, and SCAFFOLD's limit.

Source and letters: `problem`. With E = 1 the limit is the solution x_LS of all data, and with E without limit
the mean of the clients' own solutions; in between, rounds are fewer and the limit is off by a bias. The bias needs
clients of different solutions and of different A_k'A_k. SCAFFOLD has none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil, log
from pathlib import Path

import numpy as np

from narrowcast.platform.tracking.figures import BLACK, BLUE, GREEN, ORANGE, PURPLE, VERMILLION, new_figure
from narrowcast.platform.types import FloatArray
from narrowcast.studies.tables import RecordedTable
from narrowcast.studies.verdicts import PaperVerdict
from narrowcast_papers.lecture.problem import PRECISION, LeastSquaresProblem, configured, initial_vector, run_platform

STEPS = (1, 2, 5, 20, 100)
"""E."""
SPREADS = (1.0, 0.3, 0.0)
"""Standard deviations of the clients' solutions."""
STRONG = "samples: 100, features: 4, scale_spread: 0.2"
CONVEX = {
    "every client only convex (3 rows, 4 unknowns)": "clients: 20, samples: 3, features: 3, scale_spread: 0.2",
    "all together only convex (6 rows, 20 unknowns)": "clients: 3, samples: 2, features: 19, scale_spread: 0.2",
}
SHORT = (1, 5, 20)
"""E in the cases that are only convex."""
SCAFFOLD_STEPS = 20
_COLOURS = dict(zip(STEPS, (BLACK, BLUE, GREEN, ORANGE, VERMILLION), strict=True))
_SPREAD_COLOURS = dict(zip(SPREADS, (VERMILLION, BLUE, GREEN), strict=True))
_LEFT = 1e-13  # share of the distance to the limit that is left when a run ends
_SCAFFOLD_ROUNDS = 500


@dataclass(frozen=True)
class Limit:
    """A run until its rounds change nothing any more.

    `distances`: |x - x_LS| after `rounds`. `error`: of the last x against the closed form, over |x_LS|. `bias`: the
    closed form's distance from x_LS; 0 for SCAFFOLD, which should end at x_LS.
    """

    rounds: FloatArray
    distances: FloatArray
    error: float
    bias: float


@dataclass(frozen=True)
class Case:
    """A problem, the step size of all its runs, and FedAvg's runs by E."""

    problem: LeastSquaresProblem
    rate: float
    limits: Mapping[int, Limit]


def measure_case(data: str, steps: Sequence[int] = STEPS) -> Case:
    """Run FedAvg on a data set with each number of local steps."""
    problem = _problem(data)
    rate = 1 / problem.smoothness
    return Case(problem, rate, {each: _run(problem, data, rate, each, "fedavg") for each in steps})


def measure_scaffold(data: str) -> Limit:
    """Run SCAFFOLD with `SCAFFOLD_STEPS` local steps on a data set."""
    problem = _problem(data)
    return _run(problem, data, 1 / problem.smoothness, SCAFFOLD_STEPS, "scaffold")


def _problem(data: str) -> LeastSquaresProblem:
    experiment = configured(data)
    return LeastSquaresProblem.of(experiment.task(experiment.data_source.load()).data)


def _run(problem: LeastSquaresProblem, data: str, rate: float, steps: int, algorithm: str) -> Limit:
    corrected = algorithm == "scaffold"
    rounds = _SCAFFOLD_ROUNDS if corrected else 2 + ceil(log(_LEFT) / log(problem.contraction(rate, steps)))
    experiment = configured(
        data,
        f"algorithm={algorithm}",
        f"training={{kind: sgd, learning_rate: {rate!r}, batch_size: all, epochs: {steps}}}",
        f"rounds={rounds}",
        f"evaluate_every={rounds}",
        f"checkpoint_every={max(1, rounds // 100)}",
    )
    first = initial_vector(experiment)
    # Rounds do not move x in directions that no sample has: there it stays as it began.
    unseen = problem.unseen(first)
    solution = problem.solution + unseen
    limit = solution if corrected else problem.fixed_point(rate, steps) + unseen
    seen, distances = [0], [float(np.linalg.norm(first - solution))]

    def watch(round_index: int, x: FloatArray) -> None:
        seen.append(round_index)
        distances.append(float(np.linalg.norm(x - solution)))

    x = run_platform(experiment, watch)
    error = float(np.linalg.norm(x - limit) / np.linalg.norm(problem.solution))
    return Limit(np.array(seen, float), np.array(distances), error, float(np.linalg.norm(limit - solution)))


def judge_limits(strong: Mapping[float, Case], convex: Mapping[str, Case], scaffold: Limit) -> list[PaperVerdict]:
    """Say how near the last model of each run is to its closed form, and what the bias is."""
    verdicts = []
    for spread, case in strong.items():
        gamma = case.problem.heterogeneity
        for steps, limit in case.limits.items():
            what = f"strongly convex, spread {spread:g} (Gamma {gamma:.2g}), E = {steps}"
            verdicts.append(_verdict(what, limit))
    for name, case in convex.items():
        for steps, limit in case.limits.items():
            verdicts.append(_verdict(f"{name}, Gamma {abs(case.problem.heterogeneity):.2g}, E = {steps}", limit))
    what = f"SCAFFOLD, strongly convex, spread {SPREADS[0]:g}, E = {SCAFFOLD_STEPS}"
    return [*verdicts, _verdict(what, scaffold, "x_LS")]


def _verdict(what: str, limit: Limit, closed: str = "equation 6") -> PaperVerdict:
    bias = "no bias" if limit.bias < _LEFT * 100 else f"bias {limit.bias:.3g}"
    reached = f"equals {closed}" if limit.error <= PRECISION else f"differs from {closed}"
    return PaperVerdict(what, bias, f"{limit.distances[-1]:.3g} from x_LS", f"{reached} to {limit.error:.1g}")


def plot_limits(strong: Mapping[float, Case], scaffold: Limit, path: Path) -> None:
    """Plot the distance to the solution by round, and where rounds end by E, closed forms as lines, runs as dots."""
    title = "Federated least squares: more local steps are faster, and end further from the solution of all data"
    figure, (left, right) = new_figure(title, panels=2)
    for steps, limit in strong[SPREADS[0]].limits.items():
        colour = _COLOURS[steps]
        left.plot(limit.rounds, limit.distances, ".-", color=colour, markersize=3, linewidth=1.2, label=f"E = {steps}")
        if limit.bias:
            left.axhline(limit.bias, color=colour, linestyle=":", linewidth=1)
    label = f"SCAFFOLD, E = {SCAFFOLD_STEPS}"
    left.plot(scaffold.rounds, scaffold.distances, "--", color=PURPLE, linewidth=1.4, label=label)
    left.set(xlabel="round", ylabel="distance to the solution of all data", yscale="log", xlim=(0, 100))
    left.set_title(f"clients' solutions spread by {SPREADS[0]:g}; dotted: the end by equation 6", fontsize=9)
    left.legend(fontsize=8, loc="center right", bbox_to_anchor=(1, 0.42))
    every = np.unique(np.geomspace(1, 300, 60).astype(int))
    for spread, case in strong.items():
        problem, colour = case.problem, _SPREAD_COLOURS[spread]
        curve = [np.linalg.norm(problem.fixed_point(case.rate, int(steps)) - problem.solution) for steps in every]
        right.plot(every[1:], curve[1:], color=colour, linewidth=1.2)
        ran = [steps for steps in case.limits if steps > 1]
        label = f"spread {spread:g}, Γ = {problem.heterogeneity:.2g}"
        right.plot(ran, [case.limits[steps].distances[-1] for steps in ran], "o", color=colour, label=label)
        mean_of_own = float(np.linalg.norm(problem.own_solutions.mean(axis=0) - problem.solution))
        right.axhline(mean_of_own, color=colour, linestyle=":", linewidth=1)
    right.set(xlabel="local steps of a round, E", ylabel="bias: distance of the limit", xscale="log", yscale="log")
    right.set_title("dots: runs; lines: equation 6; dotted: mean of own solutions", fontsize=9)
    right.legend(fontsize=8, frameon=False, title="clients' solutions", title_fontsize=8)
    figure.savefig(path, dpi=150)


def _measured() -> tuple[Mapping[float, Case], Mapping[str, Case], Limit]:
    strong = {spread: f"{STRONG}, heterogeneity: {spread:g}" for spread in SPREADS}
    return (
        {spread: measure_case(data) for spread, data in strong.items()},
        {name: measure_case(data, SHORT) for name, data in CONVEX.items()},
        measure_scaffold(strong[SPREADS[0]]),
    )


LEAST_SQUARES = RecordedTable.computed(
    _measured, judge_limits, lambda strong, _, scaffold, path: plot_limits(strong, scaffold, path)
)
