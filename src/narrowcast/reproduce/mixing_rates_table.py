"""The table and the plot of the Mixing method's convergence with and without momentum."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import NamedTuple

from narrowcast.platform.tracking.run_plots import COLOURS, new_figure
from narrowcast.reproduce.csv_lines import Lines, read_lines
from narrowcast.reproduce.max_cut_runs import GRAPHS, SEEDS, TORUS, TORUS_METHODS, Rows, read, solve_missing
from narrowcast.reproduce.max_cut_table import FILE
from narrowcast.reproduce.measured_target import MeasuredTarget
from narrowcast.reproduce.mixing_rates import (
    CURVES,
    CURVES_FILE,
    RATES_FILE,
    measure_missing,
)
from narrowcast.reproduce.verdict import PaperVerdict

_AGREES = 0.02
"""Relative difference of the sweeps for a digit that counts as the same rate."""
_TORUS_IN_C: Mapping[str, str] = {
    "Mixing": "15463 sweeps",
    "Mixing++ 0.45": "3333 sweeps",
    "Mixing++ 0.495": "724 sweeps",
}
"""The authors' code on G67, another such torus, until a sweep gains less than 1e-5 in four times the cut."""


class Convergence(NamedTuple):
    """Solves, rates and curves."""

    solves: Rows
    rates: Lines
    curves: Lines


def read_convergence(paths: Sequence[Path]) -> Convergence:
    """Return what is in these files of rates, and in those of curves and solves beside them."""
    folders = [path.parent for path in paths]
    curves = read_lines(*(folder / CURVES_FILE for folder in folders))
    return Convergence(read(*(folder / FILE for folder in folders)), read_lines(*paths), curves)


def measure_convergence(path: Path, done: Convergence) -> Iterator[str]:
    """Measure the rates, curves and solves that are missing, and yield a line of each."""
    yield from measure_missing(path.parent, done.rates, done.curves)
    yield from solve_missing(path.parent / FILE, done.solves, lambda _, name: name in TORUS_METHODS)


def judge_convergence(found: Convergence) -> list[PaperVerdict]:
    """Return the rows of sweeps and of rates."""
    return [*judge_sweeps(found.solves), *judge_rates(found.rates)]


def judge_sweeps(solves: Rows) -> list[PaperVerdict]:
    """Return the median sweeps to both gaps of each graph and momentum, beside those without momentum."""
    verdicts = []
    for case in SEEDS:
        for name in TORUS_METHODS:
            rows = [row for (graph, solver, _), row in solves.items() if (graph, solver) == (case, name)]
            plain = [row for (graph, solver, _), row in solves.items() if (graph, solver) == (case, "Mixing")]
            for gap in ("1e-4", "1e-6"):
                own, reference = (
                    [int(row[f"sweeps_{gap}"]) for row in each if row[f"sweeps_{gap}"]] for each in (rows, plain)
                )
                if not own:
                    continue
                fewer = f"1/{median(reference) / median(own):.2g}" if reference and name != "Mixing" else ""
                verdicts.append(
                    PaperVerdict(
                        f"{case}, {name}, sweeps to {gap}",
                        _TORUS_IN_C.get(name, "") if case == TORUS and gap == "1e-6" else "",
                        f"{median(own):.0f}",
                        f"{min(own)} to {max(own)}, {len(own)} seed{'s' * (len(own) > 1)}",
                        fewer,
                        tuple(map(float, own)),
                    )
                )
    return verdicts


def judge_rates(rates: Lines) -> list[PaperVerdict]:
    """Return observed and theoretical factors of the error by a sweep; they agree if the sweeps for a digit do."""
    verdicts = []
    for case in GRAPHS:
        for row in (each for each in rates if each["case"] == case):
            observed, theory = float(row["observed"]), max(float(row["within"]), float(row["across"]))
            off = math.log(theory) / math.log(observed) - 1
            verdicts.append(
                PaperVerdict(
                    f"{case}, momentum {float(row['momentum']):g}, factor of the residual by a sweep",
                    f"{theory:.5f}",
                    f"{observed:.5f}",
                    f"{'agrees' if abs(off) <= _AGREES else 'differs'}: {off:+.1%} sweeps a digit, rank {row['rank']}",
                    f"{observed - theory:+.5f}",
                )
            )
    return verdicts


def plot_curves(curves: Lines, path: Path) -> None:
    """Plot the proved gap by sweep of each graph and solver."""
    drawn = [case for case in CURVES if any(row["case"] == case for row in curves)]
    figure, panels = new_figure("Proved gap by sweep: the Mixing method with and without momentum", max(1, len(drawn)))
    for axes, case in zip(panels, drawn, strict=False):
        for place, name in enumerate(CURVES[case]):
            rows = [row for row in curves if (row["case"], row["solver"]) == (case, name)]
            places, gaps = ([float(row[column]) for row in rows] for column in ("sweep", "gap"))
            axes.plot(places, gaps, color=COLOURS[place], marker="osD^"[place], markersize=4, label=name)
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set(title=case, xlabel="sweeps", ylabel="proved gap")
        axes.legend(fontsize=8, frameon=False)
    figure.savefig(path, dpi=100)


MIXING_RATES = MeasuredTarget(
    "the Mixing method with and without momentum: sweeps to a proved gap, and the linear rate beside theory",
    "45 solves, 15 min",
    RATES_FILE,
    read_convergence,
    measure_convergence,
    judge_convergence,
    lambda found, path: plot_curves(found.curves, path),
    (
        "Paper: of rates, the spectral radius of the derivative of a sweep at the solution, which is Gauss-Seidel or "
        "overrelaxation by 1 / (1 - momentum) on the Hessian; of sweeps, the authors' code in C on G67, which ends at "
        "another rule. Ours: the residual's geometric mean factor over the last digits; medians over seeds. "
        "Differences of sweeps are shares of those without momentum.",
    ),
    "Wang, Chang and Kolter, arXiv:1706.00476; Mixing method++: arXiv:2106.08775",
)
