"""Tables and plots of the semidefinite studies: Frank-Wolfe completion, and sensor localisation."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes

from narrowcast.platform.tracking.figures import new_figure
from narrowcast.runs.significance import compare_paired, holm
from narrowcast.studies.results import Lines
from narrowcast.studies.tables import MeasuredTable
from narrowcast.studies.verdicts import PaperVerdict, describe_order, mean_and_spread
from narrowcast_papers.sdp import frank_wolfe, localisation
from narrowcast_papers.sdp.frank_wolfe import DATA, EXACT, IN_FACE, METHODS, PLAIN, TUNING_SEED, methods_of
from narrowcast_papers.sdp.localisation import NOISES, PROGRAM, RANGES, RELAXED

_FROM = 10
"""First iteration that the slope of a gap is measured from."""


def curves_of(rows: Lines, data: str, method: str) -> dict[int, Lines]:
    """Return the rows of a method's test solves on a data set, by seed."""
    found: dict[int, Lines] = {}
    for row in rows:
        if (row["data"], row["solver"]) == (data, method) and int(row["seed"]) != TUNING_SEED:
            found.setdefault(int(row["seed"]), []).append(row)
    return found


def gap_slope(curve: Lines) -> float:
    """Return the slope of log gap by log iteration, by least squares from iteration 10 on."""
    late = [row for row in curve if int(row["iteration"]) >= _FROM]
    points = np.log([[float(row["iteration"]), float(row["residual"])] for row in late])
    return float(np.polyfit(points[:, 0], points[:, 1], 1)[0])


def judge_completion(rows: Lines) -> list[PaperVerdict]:
    """Compare test errors with Soft-Impute's, seed by seed; add ranks, gaps, times, and the slopes of the gaps.

    Without noise the logarithms of the errors are compared.
    """
    verdicts: list[PaperVerdict] = []
    for data in DATA:
        methods = methods_of(data)
        curves = {method: curves_of(rows, data, method) for method in methods}
        seeds = sorted(set.intersection(*(set(each) for each in curves.values())))
        if not seeds:
            continue
        ends = {method: [each[seed][-1] for seed in seeds] for method, each in curves.items()}
        errors = {method: [float(row["test_rmse"]) for row in each] for method, each in ends.items()}
        label = "test RMSE"
        if data == EXACT:  # errors differ by powers of ten
            label, errors = f"log10 of the {label}", {name: list(np.log10(each)) for name, each in errors.items()}
        control = next(iter(methods))
        verdicts += _compared(f"{data}, {label}, ", errors, control, partial(_end_of, ends))
        largest = {
            method: np.mean([max(int(row["rank"]) for row in curves[method][seed]) for seed in seeds])
            for method in (IN_FACE, PLAIN)
        }
        said = f"{largest[PLAIN]:.0f} of plain Frank-Wolfe with line search"
        verdicts.append(
            PaperVerdict(f"{data}, largest rank on the way, {IN_FACE}", "", f"{largest[IN_FACE]:.0f}", said)
        )
        for method in methods:
            if method.startswith(("hazan", "in-face")):
                slopes = [gap_slope(curves[method][seed]) for seed in seeds]
                near = f"gap times {float(np.mean([10**slope for slope in slopes])):.2g} in ten times the iterations"
                verdicts.append(
                    PaperVerdict(
                        f"{data}, slope of the gap, {method}", "-1", mean_and_spread(slopes), near, "", tuple(slopes)
                    )
                )
    return verdicts


def _end_of(every: Mapping[str, Lines], method: str) -> str:
    ends = every[method]
    ranks = "/".join(str(row["rank"]) for row in ends)
    gap = float(np.mean([float(row["residual"]) for row in ends]))
    cpu = float(np.mean([float(row["cpu_seconds"]) for row in ends]))
    said = f"rank {ranks}, {cpu:.1f} CPU s, {ends[0]['iteration']} iterations"
    return said + (f", gap {gap:.1e}" if method.startswith(("hazan", "in-face")) else "")


def _compared(
    prefix: str, errors: Mapping[str, Sequence[float]], control: str, said: Callable[[str], str]
) -> list[PaperVerdict]:
    """Return a row of each method, with the paired difference from a control and its order by corrected p values."""
    others = [method for method in errors if method != control]
    tests = {m: compare_paired(errors[m], errors[control]) for m in others} if len(errors[control]) > 1 else {}
    corrected = dict(zip(tests, holm([test.p_zero for test in tests.values()]), strict=True))
    verdicts = []
    for method, values in errors.items():
        order, difference = "control" if method == control else "one seed", ""
        if method in tests:
            order = describe_order(tests[method], corrected[method], "lower", "higher")
            difference = f"{tests[method].interval.mean:+.4f}"
        words = ", ".join(filter(None, (order, said(method))))
        verdicts.append(
            PaperVerdict(f"{prefix}{method}", "", mean_and_spread(values, 4), words, difference, tuple(values))
        )
    return verdicts


def plot_completion(rows: Lines, path: Path) -> None:
    """Plot gap and rank by iteration on ratings, and test errors by processor time on ratings and without noise."""
    figure, panels = new_figure("Completion over a nuclear-norm ball, beside other methods", panels=4)
    wanted = (
        (DATA[0], "iteration", "residual", "gap over f(0)"),
        (DATA[0], "iteration", "rank", "rank of the iterate"),
        (DATA[0], "cpu_seconds", "test_rmse", "test RMSE, ml-100k"),
        (EXACT, "cpu_seconds", "test_rmse", "test RMSE, rank 5, no noise"),
    )
    for axes, (data, across, up, label) in zip(panels, wanted, strict=True):
        for place, method in enumerate(METHODS):
            if up == "residual" and not method.startswith(("hazan", "in-face")):
                continue
            _draw(axes, list(curves_of(rows, data, method).values()), across, up, method, place)
        axes.set(xlabel={"iteration": "iteration", "cpu_seconds": "CPU seconds"}[across], ylabel=label, xscale="log")
        if up == "residual" or data == EXACT:
            axes.set_yscale("log")
    handles, labels = panels[3].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, fontsize=8, frameon=False)
    figure.savefig(path, dpi=100)


def _draw(axes: Axes, curves: Sequence[Lines], across: str, up: str, label: str, place: int) -> None:
    for number, curve in enumerate(curves):
        x, y = ([float(row[name]) for row in curve] for name in (across, up))
        axes.plot(x, y, color=colormaps["tab10"](place), linewidth=1, label=label if number == 0 else None)


def _values(rows: Lines, noise: float, radio_range: float, column: str) -> dict[str, list[float]]:
    """Return a column by method in the order of the seeds, of the methods that have all seeds of the relaxation."""
    found: dict[str, dict[int, float]] = {method: {} for method in localisation.METHODS}
    for row in rows:
        if (float(row["noise"]), float(row["radio_range"])) == (noise, radio_range):
            found[row["method"]][int(row["seed"])] = float(row[column])
    seeds = sorted(found[RELAXED])
    return {method: [each[seed] for seed in seeds] for method, each in found.items() if each.keys() >= {*seeds}}


def judge_localisation(rows: Lines) -> list[PaperVerdict]:
    """Compare position errors with those of the refined relaxation, seed by seed; add its gap."""
    verdicts: list[PaperVerdict] = []
    for noise in NOISES:
        for radio_range in RANGES:
            errors, gaps, cpu = (
                _values(rows, noise, radio_range, name) for name in ("position_rmse", "gap", "cpu_seconds")
            )
            if not errors[RELAXED]:
                continue

            def said(method: str, gaps: Any = gaps, cpu: Any = cpu) -> str:
                seconds = f"{np.mean(cpu[method]):.2f} CPU s"
                if method not in (RELAXED, PROGRAM):
                    return seconds
                return f"largest gap {max(gaps[method]):.0e}, {seconds}"

            verdicts += _compared(f"noise {noise:g}, range {radio_range:g}, ", errors, RELAXED, said)
    return verdicts


def plot_localisation(rows: Lines, path: Path) -> None:
    """Plot the position errors of all seeds by noise, one panel a radio range."""
    figure, panels = new_figure("Position error by noise; sides of the square", panels=len(RANGES))
    for axes, radio_range in zip(panels, RANGES, strict=True):
        for place, method in enumerate(localisation.METHODS):
            for at, noise in enumerate(NOISES):
                errors = _values(rows, noise, radio_range, "position_rmse").get(method, [])
                axes.plot(
                    [at + 0.12 * (place - 3)] * len(errors),
                    np.maximum(errors, 1e-6),
                    "osDP^vx"[place],
                    color=colormaps["tab10"](place),
                    markersize=4,
                    label=method if at == 0 else None,
                )
        axes.set_xticks(range(len(NOISES)), [f"{noise:g}" for noise in NOISES])
        axes.set(yscale="log", xlabel="relative noise", ylabel="position RMSE", title=f"radio range {radio_range:g}")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, fontsize=8, frameon=False)
    figure.savefig(path, dpi=100)


SDP_COMPLETION = MeasuredTable((frank_wolfe.MEASUREMENTS,), judge_completion, plot_completion)
SDP_LOCALISATION = MeasuredTable((localisation.MEASUREMENTS,), judge_localisation, plot_localisation)
