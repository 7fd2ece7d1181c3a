"""The tables and figures of the contests of uploads: accuracy at equal bytes, at equal time and under deadlines."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib import colormaps

from narrowcast.platform.tracking.figures import BLACK, new_figure
from narrowcast.platform.types import FloatArray
from narrowcast.runs.significance import compare_paired
from narrowcast.studies.results import COUNTS, Rows
from narrowcast.studies.tables import StudyTable
from narrowcast.studies.tuning import finished
from narrowcast.studies.verdicts import PaperVerdict, accuracies, corrected, describe, mean_and_spread
from narrowcast_papers.headline.contest import (
    OPEN,
    POPULARITY,
    ROUNDS,
    TEST_SEEDS,
    TUNING_SEEDS,
    Contest,
    ContestCell,
    contest_plan,
    searched,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Point = Mapping[str, Any]
"""The result of a run after some rounds."""
Cost = Callable[[Point], float]
_LINES = {"": "-", "64": "-", "8": "--", "4": ":"}
"""By the dimension in the name of an upload."""


def traffic(point: Point) -> float:
    """Return uplink and downlink together in MB."""
    return sum(point[name] for name in COUNTS) / 8e6


def seconds(point: Point) -> float:
    """Return the simulated seconds."""
    return float(point["simulated_seconds"])


def accuracy_within(curve: Sequence[Point], cost: Cost, budget: float) -> float:
    """Return the test HR@10 in percent for which a budget suffices, linear between evaluations.

    It is that of the last evaluation for a larger budget, and 0 for one that ends before the first.
    """
    return float(np.interp(budget, [cost(each) for each in curve], accuracies(curve, "hr@10"), left=0.0))


def within(curves: Mapping[str, Sequence[Sequence[Point]]], cost: Cost, budget: float) -> dict[str, list[float]]:
    """Return the accuracy of each upload by seed at a budget, of those that are evaluated within it."""
    reached = {
        upload: [accuracy_within(curve, cost, budget) for curve in of_seeds] for upload, of_seeds in curves.items()
    }
    return {upload: values for upload, values in reached.items() if all(values)}


def contest_runs(rows: Rows, contest: Contest) -> dict[str, dict[str, list[Mapping[str, Any]]]]:
    """Return the test results of each upload by condition, of those whose seeds are all finished."""
    found: dict[str, dict[str, list[Mapping[str, Any]]]] = {each: {} for each in contest.conditions}
    for cell in contest.cells:
        rates, _ = searched(rows, cell)
        if rates is None:
            continue
        for condition, runs in found.items():
            if results := finished(rows, cell.test(rates, condition), TEST_SEEDS):
                runs[cell.upload] = results
    return found


def judge_contest(contest: Contest, rows: Rows) -> list[PaperVerdict]:
    """Return the search of each cell, and its accuracy at every budget with the difference from the reference.

    p values are corrected over the cells of a budget.
    """
    verdicts = [_tuned(rows, cell) for cell in contest.cells]
    if baseline := finished(rows, contest.baseline):
        verdicts.append(PaperVerdict(POPULARITY, "", mean_and_spread(accuracies(baseline, "hr@10")), "0 MB"))
    for condition, runs in contest_runs(rows, contest).items():
        budgets: list[tuple[str, Cost, float]] = [(f"{size:g} MB", traffic, size) for size in contest.megabytes]
        budgets += [(f"{time:g} s", seconds, time) for time in contest.seconds]
        for name, cost, budget in [*budgets, (f"{ROUNDS} rounds", seconds, np.inf)]:
            reached = within({upload: [run["curve"] for run in each] for upload, each in runs.items()}, cost, budget)
            spent = {upload: _spent(of_seeds) for upload, of_seeds in runs.items()} if budget == np.inf else {}
            verdicts += compared(f"{condition}, {name}", contest.reference, reached, spent)
    return verdicts


def _tuned(rows: Rows, cell: ContestCell) -> PaperVerdict:
    """Return the rates that the search of a cell chose, with their validation HR@10."""
    best, tried = searched(rows, cell)
    if best is None:
        return PaperVerdict(f"rates of {cell.upload}", "", "", f"{len(tried)} pairs so far")
    runs = finished(rows, cell.tuning(best), TUNING_SEEDS)
    reached = [100 * run["final"].get("validation.hr@10", 0.0) for run in runs]
    said = f"client {best[0]:g}, server {best[1]:g}, the best of {len(tried)} pairs"
    return PaperVerdict(f"rates of {cell.upload}", "", mean_and_spread(reached), said, "", tuple(reached))


def _spent(runs: Sequence[Mapping[str, Any]]) -> str:
    up, down, time = (np.mean([run[name] for run in runs]) for name in (*COUNTS, "simulated_seconds"))
    return f"{up / 8e6:.3g} MB up, {down / 8e6:.3g} MB down, {time:.3g} s"


def compared(
    place: str, reference: str, reached: Mapping[str, list[float]], spent: Mapping[str, str]
) -> list[PaperVerdict]:
    """Return a verdict for each upload, with its difference from the reference if that has finished."""
    others = [upload for upload in reached if upload != reference] if reference in reached else []
    tests = [compare_paired(reached[upload], reached[reference]) for upload in others]
    said, differences = dict(spent), dict[str, str]()
    for upload, (test, p_level, p_zero) in zip(others, corrected(tests), strict=True):
        verdict, interval = describe(test, p_level, p_zero, TEST_SEEDS), test.interval
        bounds = f"{interval.low:+.2f} to {interval.high:+.2f}, p = {p_zero:.2g}"
        said[upload] = "; ".join([verdict, bounds, *([spent[upload]] if upload in spent else [])])
        differences[upload] = f"{interval.mean:+.2f}"
    return [
        PaperVerdict(
            f"{place}: {upload}",
            "",
            mean_and_spread(each),
            said.get(upload, ""),
            differences.get(upload, ""),
            tuple(each),
        )
        for upload, each in reached.items()
    ]


def plot_contest(contest: Contest, rows: Rows, path: Path) -> None:
    """Plot the mean test HR@10 against traffic and time without a deadline, with the seeds' standard deviation."""
    figure, panels = new_figure(f"Test HR@10, {contest.title}", panels=2)
    (_, runs), *_ = contest_runs(rows, contest).items()
    for axes, cost, label in zip(
        panels, (traffic, seconds), ("uplink and downlink (MB)", "simulated time (s)"), strict=True
    ):
        for upload, of_seeds in runs.items():
            costs = np.mean([[cost(each) for each in run["curve"]] for run in of_seeds], axis=0)
            values = np.array([accuracies(run["curve"], "hr@10") for run in of_seeds])
            draw_curve(axes, costs, values, upload, contest.uploads)
        if baseline := finished(rows, contest.baseline):
            axes.axhline(*accuracies(baseline, "hr@10"), color=BLACK, linestyle=":", label="popularity, no update sent")
        axes.set_xlabel(label)
    save_contest(figure, path, columns=4)


def draw_curve(axes: Axes, costs: Sequence[float], values: FloatArray, upload: str, uploads: Iterable[str]) -> None:
    """Draw the mean over the seeds with their standard deviation; values [S, n].

    An upload of a smaller model has the colour of its method and a broken line.
    """
    methods = list(dict.fromkeys(_method_and_dimension(each)[0] for each in uploads))
    method, dimension = _method_and_dimension(upload)
    colour = colormaps["tab10"](methods.index(method))
    mean, spread = values.mean(axis=0), values.std(axis=0, ddof=1)
    axes.plot(costs, mean, color=colour, linestyle=_LINES[dimension], linewidth=1.6, label=upload)
    axes.fill_between(costs, mean - spread, mean + spread, color=colour, alpha=0.15, linewidth=0)


def _method_and_dimension(upload: str) -> tuple[str, str]:
    method, _, dimension = upload.partition(", d = ")
    return method, dimension


def save_contest(figure: Figure, path: Path, *, columns: int) -> None:
    """Write a figure of curves over logarithmic costs, with one legend of so many columns for all panels."""
    for axes in figure.axes:
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    panel = figure.axes[0]
    panel.set_ylabel("test HR@10 (%)")
    handles, labels = panel.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=columns, fontsize=8, frameon=False)
    figure.savefig(path, dpi=150)


HEADLINE = StudyTable(
    {OPEN.name: contest_plan(OPEN)},
    lambda rows: judge_contest(OPEN, rows),
    lambda rows, path: plot_contest(OPEN, rows, path),
)
