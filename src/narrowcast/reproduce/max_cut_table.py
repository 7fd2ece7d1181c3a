"""The table and the plot of MAXCUT relaxations of Gset: proved optima, sweeps and seconds, cuts by rounding."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median

import numpy as np

from narrowcast.platform.tracking.run_plots import COLOURS, new_figure
from narrowcast.reproduce.max_cut_runs import BASELINE, GRAPHS, MOMENTA, SELECTIONS, Rows, read, solve_missing
from narrowcast.reproduce.measured_target import MeasuredTarget
from narrowcast.reproduce.verdict import PaperVerdict, mean_and_spread

FILE = "sdp-gset.csv"
OPTIMA: Mapping[str, float] = {"G1": 12083.20, "G14": 3191.57, "G22": 14135.95, "G48": 6000.0, "G55": 11039.46}
"""Published optima of the relaxation, to two digits."""
BEST_CUTS: Mapping[str, int] = {"G1": 11624, "G14": 3064, "G22": 13359, "G48": 6000, "G55": 10299}
"""Best known cuts."""
MEAN_CUTS: Mapping[str, int] = {"G1": 11267, "G14": 2930, "G22": 12810, "G48": 6000, "G55": 9815}
"""Mean cuts of 100 hyperplanes, from vectors of the authors' code."""
C_CODE: Mapping[tuple[str, str], str] = {
    ("G1", "Mixing"): "516 sweeps, 0.39 s",
    ("G1", "Mixing++ 0.45"): "97 sweeps, 0.07 s",
    ("G22", "Mixing"): "684 sweeps, 0.94 s",
    ("G22", "Mixing++ 0.45"): "133 sweeps, 0.18 s",
    ("G48", "Mixing"): "1024 sweeps",
    ("G55", "Mixing"): "1151 sweeps, 2.3 s",
    ("G55", "Mixing++ 0.45"): "210 sweeps, 0.41 s",
}
"""The authors' code in C until a sweep gains less than 1e-5 in four times the cut, on a machine without other work."""
_METHODS = (*MOMENTA, *SELECTIONS, *BASELINE)
_COLOURS = (*COLOURS, "grey")


def judge_gset(rows: Rows) -> list[PaperVerdict]:
    """Return a row for the optimum, for every method and for the cuts of each graph that was solved."""
    verdicts = []
    for case in GRAPHS:
        solves = {name: found for name in _METHODS if (found := _of(rows, case, name))}
        if not solves:
            continue
        each = [row for found in solves.values() for row in found]
        verdicts.append(_judge_optimum(case, each))
        verdicts += [_judge_speed(case, name, solves) for name in solves]
        verdicts += _judge_cuts(case, each)
    return verdicts


def _of(rows: Rows, case: str, solver: str) -> list[Mapping[str, str]]:
    return [row for (graph, name, _), row in sorted(rows.items()) if (graph, name) == (case, solver)]


def _judge_optimum(case: str, solves: Sequence[Mapping[str, str]]) -> PaperVerdict:
    values = [float(row["relaxation"]) for row in solves]
    proved = sum(bool(row["sweeps_1e-6"]) for row in solves)
    # the bound is at most the millionth part above; published values are rounded to two digits
    agrees = all(value - 0.005 <= OPTIMA[case] <= value * (1 + 1e-6) + 0.005 for value in values)
    return PaperVerdict(
        f"{case}, relaxation",
        f"{OPTIMA[case]:.2f}",
        f"{max(values):.4f}",
        f"{'agrees' if agrees else 'differs'}; gap of 1e-6 proved in {proved} of {len(solves)} solves",
        f"{max(values) - OPTIMA[case]:+.4f}",
    )


def _judge_speed(case: str, name: str, solves: Mapping[str, Sequence[Mapping[str, str]]]) -> PaperVerdict:
    found = [row for row in solves[name] if row["sweeps_1e-6"]]
    if not found:
        return PaperVerdict(f"{case}, {name}, to 1e-6", C_CODE.get((case, name), ""), "", "not proved")
    sweeps, seconds = ([float(row[f"{each}_1e-6"]) for row in found] for each in ("sweeps", "cpu_seconds"))
    reference = [row for row in solves.get("Mixing", ()) if row["sweeps_1e-6"]]
    faster = ""
    if reference and name != "Mixing":
        fewer, less = (
            median(own) / median(float(row[f"{each}_1e-6"]) for row in reference)
            for each, own in (("sweeps", sweeps), ("cpu_seconds", seconds))
        )
        faster = (
            f"{less:.2g} times the time" if name in BASELINE else f"{fewer:.2g} of the sweeps, {less:.2g} of the time"
        )
    loads, seeds = [float(row["load"]) for row in found], f"{len(found)} seed{'s' * (len(found) > 1)}"
    return PaperVerdict(
        f"{case}, {name}, to 1e-6",
        C_CODE.get((case, name), ""),
        f"{median(sweeps):.0f} {'iterations' if name in BASELINE else 'sweeps'}, {median(seconds):.3g} s",
        f"{min(seconds):.3g} to {max(seconds):.3g} s, {seeds}, load {min(loads):.0f} to {max(loads):.0f}",
        faster,
        tuple(sweeps),
    )


def _judge_cuts(case: str, solves: Sequence[Mapping[str, str]]) -> list[PaperVerdict]:
    means, best = [float(row["mean_cut"]) for row in solves], max(float(row["cut"]) for row in solves)
    bound = max(float(row["relaxation"]) for row in solves) * (1 + 1e-6)
    mean = PaperVerdict(
        f"{case}, mean cut of 100 hyperplanes",
        f"{MEAN_CUTS[case]}",
        mean_and_spread(means, 0),
        f"{np.mean(means) / bound:.4f} of the bound",
        f"{np.mean(means) - MEAN_CUTS[case]:+.0f}",
    )
    known = BEST_CUTS[case]
    return [
        mean,
        PaperVerdict(
            f"{case}, best of {100 * len(solves)} hyperplanes, beside the best known cut",
            f"{known}",
            f"{best:.0f}",
            f"{best / bound:.4f} of the bound, {best / known:.4f} of the best known",
            f"{best - known:+.0f}",
        ),
    ]


def plot_gset(rows: Rows, path: Path) -> None:
    """Plot median sweeps, which `BASELINE` has none of, and processor seconds to a proved gap of 1e-6, by graph."""
    figure, panels = new_figure("Relaxations of MAXCUT on Gset: to a proved gap of 1e-6", panels=2)
    for axes, column, label in zip(panels, ("sweeps", "cpu_seconds"), ("sweeps", "processor seconds"), strict=True):
        for place, name in enumerate(_METHODS):
            for at, case in enumerate(GRAPHS):
                values = [float(row[f"{column}_1e-6"]) for row in _of(rows, case, name) if row["sweeps_1e-6"]]
                if values and (name not in BASELINE or column != "sweeps"):
                    middle = median(values)
                    spread = [[middle - min(values)], [max(values) - middle]]
                    x = at + 0.1 * (place - (len(_METHODS) - 1) / 2)
                    axes.errorbar(
                        x, middle, spread, color=_COLOURS[place], marker="osD^v<P"[place], capsize=2, linestyle=""
                    )
            axes.plot([], [], color=_COLOURS[place], marker="osD^v<P"[place], linestyle="", label=name)
        axes.set_yscale("log")
        axes.set_xticks(range(len(GRAPHS)), GRAPHS)
        axes.set(ylabel=label)
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=7, fontsize=8, frameon=False)
    figure.savefig(path, dpi=100)


GSET = MeasuredTarget(
    "MAXCUT relaxations of five graphs of Gset: sweeps and processor seconds to a proved gap of 1e-6, and cuts",
    "175 solves, 30 min",
    FILE,
    lambda paths: read(*paths),
    lambda path, done: solve_missing(path, done, lambda case, _: case in GRAPHS),
    judge_gset,
    plot_gset,
    (
        "Seconds: processor time of start and sweeps, one thread, median over seeds; proofs are not in it. "
        "An iteration of Burer-Monteiro has up to 300 steps of L-BFGS. "
        "Paper: optima of the literature; the authors' code in C, which ends at another rule, without proof, on a "
        "machine without other work; mean cuts of its vectors.",
    ),
    "Wang, Chang and Kolter, arXiv:1706.00476; Mixing method++: arXiv:2106.08775",
)
