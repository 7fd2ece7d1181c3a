"""The table and plot of FedProx's comparison: accuracy of each cell, and the order of the methods."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from narrowcast.platform.tracking.run_plots import BLACK, BLUE, ORANGE, VERMILLION, new_figure
from narrowcast.reproduce.against_reference import accuracies
from narrowcast.reproduce.fedprox_synthetic import (
    DATA,
    FEDAVG,
    FEDPROX,
    GRIDS,
    METHODS,
    PARTIAL,
    STRAGGLERS,
    TEST_SEEDS,
    TRIES,
    TUNED_FEDAVG,
    StragglerCell,
    cells_by_data,
)
from narrowcast.reproduce.long_studies import finished, tried
from narrowcast.reproduce.results_csv import Rows
from narrowcast.reproduce.seed_means import draw_seed_means
from narrowcast.reproduce.verdict import PaperVerdict, describe_order, mean_and_spread
from narrowcast.runs.significance import MeanTest, compare_paired, holm

ORDER = ((PARTIAL, FEDAVG), (FEDPROX, PARTIAL), (FEDPROX, FEDAVG), (FEDPROX, TUNED_FEDAVG))
"""Pairs of which the paper has the first above the second; the last is the control, of equal tries."""
_COLOURS = dict(zip(METHODS, (BLACK, BLUE, ORANGE, VERMILLION), strict=True))
_PUBLISHED_GAIN = "+22, on other sets too"


def tested(rows: Rows) -> dict[StragglerCell, tuple[float, tuple[float, ...]]]:
    """Return the value of the grid of each cell whose runs are all finished, and the accuracies of each seed."""
    found = {}
    for cell in (cell for several in cells_by_data().values() for cell in several):
        if (results := tried(rows, cell, TRIES)) and (runs := finished(rows, cell.test(results), TEST_SEEDS)):
            found[cell] = cell.best(results), accuracies(runs, "accuracy")
    return found


def judge_fedprox(rows: Rows) -> list[PaperVerdict]:
    """Give the accuracy of each cell, and the differences that the paper states, seed by seed.

    p values are those of the means over the heterogeneous sets, corrected over all of them.
    """
    found = tested(rows)
    verdicts = []
    for data in DATA:
        for stragglers in STRAGGLERS:
            for method in METHODS:
                if (cell := StragglerCell(data, stragglers, method)) in found:
                    value, reached = found[cell]
                    name = "mu" if method == FEDPROX else "rate"
                    said = f"{name} {value:g}" if method in GRIDS else ""
                    what = f"{_name(data)}, {stragglers} % stragglers: {method}"
                    verdicts.append(PaperVerdict(what, "", mean_and_spread(reached), said, "", reached))
    by_cell = {cell: reached for cell, (_, reached) in found.items()}
    for data in DATA:
        verdicts += [
            PaperVerdict(what, "above", f"{test.interval.mean:+.2f}", _bounds(test))
            for what, test in _tests([data], _name(data), by_cell).items()
        ]
    pooled = _tests(DATA[1:], "mean of the heterogeneous sets", by_cell)
    for (what, test), p in zip(pooled.items(), holm([test.p_zero for test in pooled.values()]), strict=True):
        order = describe_order(test, p, "below", "above")
        paper = _PUBLISHED_GAIN if what.endswith(f"90 %: {FEDPROX} less {FEDAVG}") else "above"
        verdicts.append(
            PaperVerdict(what, paper, f"{test.interval.mean:+.2f}", f"{order} {_bounds(test)}, p = {p:.2g}")
        )
    return verdicts


def _tests(sets: Sequence[str], name: str, by_cell: Mapping[StragglerCell, tuple[float, ...]]) -> dict[str, MeanTest]:
    """Return the paired tests of `ORDER` on the mean over some data sets; without stragglers PARTIAL is FEDAVG."""
    tests = {}
    for stragglers in STRAGGLERS:
        for pair in ORDER:
            of_sets = [[by_cell.get(StragglerCell(data, stragglers, method)) for data in sets] for method in pair]
            if all(all(reached) for reached in of_sets):
                first, second = (np.mean(np.array(reached, dtype=np.float64), axis=0) for reached in of_sets)
                tests[f"{name}, {stragglers} %: {pair[0]} less {pair[1]}"] = compare_paired(first, second)
    return tests


def _bounds(test: MeanTest) -> str:
    return f"({test.interval.low:+.2f} to {test.interval.high:+.2f})"


def plot_fedprox(rows: Rows, path: Path) -> None:
    """Plot accuracies by data set, a panel for each share of stragglers."""
    figure, panels = new_figure("Stragglers dropped or kept, synthetic data, 50 rounds", panels=len(STRAGGLERS))
    found = tested(rows)
    for axes, stragglers in zip(panels, STRAGGLERS, strict=True):
        for shift, method in enumerate(METHODS):
            drawn = [
                (place + 0.12 * (shift - 1.5), found[cell][1])
                for place, data in enumerate(DATA)
                if (cell := StragglerCell(data, stragglers, method)) in found
            ]
            draw_seed_means(
                axes,
                [place for place, _ in drawn],
                [reached for _, reached in drawn],
                color=_COLOURS[method],
                linestyle="none",
                marker="o",
                markersize=4,
                capsize=3,
                label=method,
            )
        axes.set_xticks(range(len(DATA)), [_name(data) for data in DATA], fontsize=8)
        axes.set(title=f"{stragglers} % stragglers", xlabel="data set", ylim=(0, 100))
    panels[0].set(ylabel="test accuracy (%)")
    panels[1].legend(fontsize=8, frameon=False, loc="lower left")
    figure.savefig(path, dpi=150)


def _name(data: str) -> str:
    return data if data == "iid" else f"({data}, {data})"
