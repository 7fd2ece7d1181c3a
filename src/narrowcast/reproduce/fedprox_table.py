"""The table and plot of FedProx's comparison: accuracy of each cell, and the order of the methods."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from narrowcast.platform.tracking.run_plots import BLACK, BLUE, GREEN, ORANGE, VERMILLION, new_figure
from narrowcast.reproduce.against_reference import accuracies
from narrowcast.reproduce.fedprox_synthetic import (
    DATA,
    FEDAVG,
    FEDPROX,
    METHODS,
    PARTIAL,
    STRAGGLERS,
    TEST_SEEDS,
    TRIES,
    TUNED_FEDAVG,
    TUNED_PARTIAL,
    TUNING_SEEDS,
    StragglerCell,
    cells_by_data,
    set_name,
)
from narrowcast.reproduce.long_studies import finished, tried
from narrowcast.reproduce.results_csv import Rows
from narrowcast.reproduce.seed_means import draw_seed_means
from narrowcast.reproduce.tuning_rule import Choice, tuning_verdict
from narrowcast.reproduce.verdict import PaperVerdict, describe_order, mean_and_spread
from narrowcast.runs.significance import MeanTest, compare_paired, holm

ORDER = ((PARTIAL, FEDAVG), (FEDPROX, PARTIAL), (FEDPROX, FEDAVG))
"""Pairs of which the paper has the first above the second."""
CONTROLS = ((TUNED_PARTIAL, TUNED_FEDAVG), (FEDPROX, TUNED_PARTIAL), (FEDPROX, TUNED_FEDAVG))
"""Pairs of equal tries: what keeping partial work adds, what mu adds, and both."""
_COLOURS = dict(zip(METHODS, (BLACK, BLUE, ORANGE, GREEN, VERMILLION), strict=True))
_PUBLISHED_GAIN = "+22, on other sets too"


@dataclass(frozen=True)
class TestedCell:
    """A cell whose runs are all finished: what was chosen, if it has a grid, and the accuracies of each seed."""

    choice: Choice | None
    reached: tuple[float, ...]


def tested(rows: Rows) -> dict[StragglerCell, TestedCell]:
    """Return the finished cells."""
    found = {}
    for cell in (cell for several in cells_by_data().values() for cell in several):
        results = tried(rows, cell, TRIES, TUNING_SEEDS)
        if results and (runs := finished(rows, cell.test(results), TEST_SEEDS)):
            found[cell] = TestedCell(cell.choice(results), accuracies(runs, "accuracy"))
    return found


def judge_fedprox(rows: Rows) -> list[PaperVerdict]:
    """Give the accuracy of each cell and the differences that the paper states and of the controls, seed by seed.

    p values are those of the means over the heterogeneous sets, corrected over all of them. The last row says how the
    values were tuned.
    """
    found = tested(rows)
    verdicts = []
    for data in DATA:
        for stragglers in STRAGGLERS:
            for method in METHODS:
                if (cell := StragglerCell(data, stragglers, method)) in found:
                    choice, reached = found[cell].choice, found[cell].reached
                    said = "" if choice is None else choice.words
                    verdicts.append(PaperVerdict(cell.what, "", mean_and_spread(reached), said, "", reached))
    by_cell = {cell: each.reached for cell, each in found.items()}
    for data in DATA:
        verdicts += [
            PaperVerdict(what, _published(what), f"{test.interval.mean:+.2f}", _bounds(test))
            for what, test in _tests([data], set_name(data), by_cell).items()
        ]
    pooled = _tests(DATA[1:], "mean of the heterogeneous sets", by_cell)
    for (what, test), p in zip(pooled.items(), holm([test.p_zero for test in pooled.values()]), strict=True):
        order = describe_order(test, p, "below", "above")
        paper = _PUBLISHED_GAIN if what.endswith(f"90 %: {FEDPROX} less {FEDAVG}") else _published(what)
        verdicts.append(
            PaperVerdict(what, paper, f"{test.interval.mean:+.2f}", f"{order} {_bounds(test)}, p = {p:.2g}")
        )
    choices = [each.choice for each in found.values() if each.choice is not None]
    return [*verdicts, tuning_verdict(choices)] if choices else verdicts


def _published(what: str) -> str:
    return "above" if any(what.endswith(f": {first} less {second}") for first, second in ORDER) else ""


def _tests(sets: Sequence[str], name: str, by_cell: Mapping[StragglerCell, tuple[float, ...]]) -> dict[str, MeanTest]:
    """Return the paired tests on the mean over some data sets; without stragglers nothing is dropped or kept."""
    tests = {}
    for stragglers in STRAGGLERS:
        for pair in (*ORDER, *CONTROLS):
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
                (place + 0.12 * (shift - 2), found[cell].reached)
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
        axes.set_xticks(range(len(DATA)), [set_name(data) for data in DATA], fontsize=8)
        axes.set(title=f"{stragglers} % stragglers", xlabel="data set", ylim=(40, 100))
    panels[0].set(ylabel="test accuracy (%)")
    handles, labels = panels[1].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(METHODS), fontsize=8, frameon=False)
    figure.savefig(path, dpi=150)
