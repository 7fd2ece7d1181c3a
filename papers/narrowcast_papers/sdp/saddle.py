"""Saddle points of factored semidefinite programs: zero columns hold the plain method, a perturbation leaves them.

Relaxations of MAXCUT on random graphs are solved by `burer_monteiro` from a V of which all columns but the first are
zero. The gradient in these columns is zero, so that the plain method ends at the best point of rank one that it meets.
The control is the plain method from a V without zero columns.

Source: Burer and Monteiro, Mathematical Programming 103, 2005.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from narrowcast.platform.tracking.figures import BLACK, BLUE, GREEN, VERMILLION, new_figure
from narrowcast.platform.types import FloatArray
from narrowcast.solves.burer_monteiro import BurerMonteiro
from narrowcast.solves.certificate import least_eigenvector
from narrowcast.solves.max_cut import RandomMaxCut
from narrowcast.studies.tables import RecordedTable
from narrowcast.studies.verdicts import PaperVerdict


def _solver(**fields: Any) -> BurerMonteiro:
    return BurerMonteiro.model_validate(fields)


SEEDS = range(10)
"""Each has a graph and a first V of its own."""
VERTICES, EDGES, ITERATIONS = 60, 200, 25
PROVED = 1e-6
"""The gap of an answer that counts as optimal."""
SETTINGS: Mapping[str, tuple[BurerMonteiro, str]] = {
    "plain, from zero columns": (_solver(start_rank=1), VERMILLION),
    "noise, from zero columns": (_solver(start_rank=1, perturbation="noise"), BLUE),
    "negative curvature, from zero columns": (_solver(start_rank=1, perturbation="curvature"), GREEN),
    "control: plain, no zero columns": (_solver(), BLACK),
}
PLAIN, CONTROL = next(iter(SETTINGS)), list(SETTINGS)[-1]


@dataclass(frozen=True)
class SaddleRun:
    """A solve of one seed: the gap after each iteration, and of its end the residual, rank and least eigenvalue.

    `relaxation` is the objective in units of the cut, `least_eigenvalue` that of the slack: at an optimum it is zero.
    """

    gaps: FloatArray
    residual: float
    rank: int
    relaxation: float
    least_eigenvalue: float


def run_saddle(solver: BurerMonteiro, seed: int) -> SaddleRun:
    """Solve the relaxation of the seed's graph."""
    graph = {"vertices": VERTICES, "edges": EDGES, "roundings": 0, "seed": seed}
    problem = RandomMaxCut.model_validate(graph).load()
    state, gaps, residual = solver.init(problem, seed), [], np.inf
    for _ in range(ITERATIONS):
        state, report = solver.step(problem, state)
        metrics, residual = problem.measure(solver.answer(state)), report.residual
        gaps.append(metrics["gap"])
    least, _ = least_eigenvector(problem.program.slack(state["dual"]))
    return SaddleRun(np.array(gaps), residual, int(metrics["rank"]), metrics["relaxation"], least)


def run_saddles(seeds: Sequence[int] = SEEDS) -> dict[str, list[SaddleRun]]:
    """Solve every seed's problem in every setting."""
    return {name: [run_saddle(solver, seed) for seed in seeds] for name, (solver, _) in SETTINGS.items()}


def judge_saddles(runs: Mapping[str, Sequence[SaddleRun]]) -> list[PaperVerdict]:
    """Say of each setting how many seeds end at a proved optimum, and of the plain one at what kind of point."""
    verdicts = []
    for name, solves in runs.items():
        gaps = tuple(float(solve.gaps[-1]) for solve in solves)
        proved = sum(gap <= PROVED for gap in gaps)
        ranks = sorted({solve.rank for solve in solves})
        ours = (
            f"{proved} of {len(gaps)} optimal, gaps {min(gaps):.1g} to {max(gaps):.1g}, ranks {ranks[0]} to {ranks[-1]}"
        )
        stays = name == PLAIN
        agrees = proved == (0 if stays else len(gaps))
        said = ("stays", "leaves at times") if stays else ("reaches the optimum", "misses the optimum at times")
        verdicts.append(PaperVerdict(name, "", ours, said[0] if agrees else said[1], by_seed=gaps))
    stuck, free = runs[PLAIN], runs[CONTROL]
    residuals = tuple(solve.residual for solve in stuck)
    least = tuple(solve.least_eigenvalue for solve in stuck)
    kind = "saddle points" if max(residuals) <= 1e-5 and max(least) < -1e-3 else "not all are saddle points"
    ours = f"residual at most {max(residuals):.1g}, least eigenvalue {min(least):.2g} to {max(least):.2g}"
    verdicts.append(PaperVerdict("where the plain method stays", "", ours, kind, by_seed=least))
    lost = tuple(
        1 - stuck_run.relaxation / free_run.relaxation for stuck_run, free_run in zip(stuck, free, strict=True)
    )
    share = f"{100 * min(lost):.1f} to {100 * max(lost):.1f} % of the optimum"
    return [*verdicts, PaperVerdict("what it loses there", "", share, "", by_seed=lost)]


def plot_saddles(runs: Mapping[str, Sequence[SaddleRun]], path: Path) -> None:
    """Plot the proved gap by iteration, a line for each seed, and the last gap beside the last rank."""
    figure, (left, right) = new_figure("A start with zero columns holds the plain method at a saddle point", panels=2)
    for name, solves in runs.items():
        colour = SETTINGS[name][1]
        for index, solve in enumerate(solves):
            label = name if index == 0 else None
            left.plot(
                np.arange(1, len(solve.gaps) + 1), solve.gaps, color=colour, linewidth=0.9, alpha=0.7, label=label
            )
        ranks, gaps = [solve.rank for solve in solves], [solve.gaps[-1] for solve in solves]
        right.plot(ranks, gaps, "o", color=colour, alpha=0.7, markersize=5)
    left.axhline(PROVED, color="0.5", linestyle=":", linewidth=1)
    left.set(xlabel="iteration", ylabel="proved relative gap", yscale="log")
    left.legend(fontsize=8, loc="upper right", bbox_to_anchor=(1, 0.85))
    right.axhline(PROVED, color="0.5", linestyle=":", linewidth=1)
    right.set(xlabel="rank of the answer", ylabel="proved relative gap at the end", yscale="log")
    right.set_xticks(range(1, 1 + max(solve.rank for solves in runs.values() for solve in solves)))
    figure.savefig(path, dpi=150)


SADDLES = RecordedTable.computed(lambda: (run_saddles(),), judge_saddles, plot_saddles)
