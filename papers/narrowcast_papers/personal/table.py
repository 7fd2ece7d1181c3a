"""The table of personal models: every method beside fine-tuned FedAvg, with its bits, gradients and tuned values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from textwrap import fill

import numpy as np

from narrowcast.platform.tracking.figures import COLOURS, new_figure
from narrowcast.runs.significance import compare_paired
from narrowcast.studies.results import COUNTS, Rows
from narrowcast.studies.tables import StudyTable
from narrowcast.studies.tuning import Point, finished, in_turn
from narrowcast.studies.verdicts import PaperVerdict, Runs, accuracies, corrected, describe, mean_and_spread, megabytes
from narrowcast_papers.personal.methods import (
    GROUPS,
    METRIC,
    OWN_RATE,
    TEST_SEEDS,
    TUNED,
    USERS_GROUPS,
    WATCH_GROUPS,
    Cell,
    Split,
    cells,
    plan_of,
)

Groups = tuple[tuple[Split, str], ...]
"""Splits and models whose cells are compared with one another."""
WORST = "accuracy.worst_10_percent"


@dataclass(frozen=True)
class Tested:
    """A method at its best point, how many points were tried, and its test results by seed."""

    cell: Cell
    best: Point
    tries: int
    runs: Runs

    @property
    def reached(self) -> tuple[float, ...]:
        """The mean accuracy of the clients by seed, in percent."""
        return accuracies(self.runs, METRIC)

    @property
    def words(self) -> str:
        """Megabytes up and in both directions, thousands of gradients, and the chosen values."""
        up = sum(float(run[COUNTS[0]]) for run in self.runs) / len(self.runs) / 8e6
        values = ", ".join(
            f"{name.replace('_', ' ')} {value:g}"
            for name, value in zip(self.cell.method.ladders, self.best, strict=True)
        )
        traffic = f"{up:.3g} MB up, {megabytes(self.runs):.3g} MB"
        gradients = f"{self.cell.gradients(self.best) / 1000:.4g} thousand gradients"
        return f"{traffic}; {gradients}; {values}, the best of {self.tries}"

    def within(self, megabytes_spent: float) -> tuple[float, ...]:
        """Return the mean accuracy by seed for which so many megabytes suffice, linear between evaluations."""
        return tuple(_within(run["curve"], megabytes_spent) for run in self.runs)


def _within(curve: Runs, budget: float) -> float:
    spent = [sum(float(point[name]) for name in COUNTS) / 8e6 for point in curve]
    return float(np.interp(budget, spent, accuracies(curve, METRIC)))


def finished_methods(rows: Rows, group: list[Cell]) -> dict[str, Tested]:
    """Return the cells of a group whose runs are all finished, by method."""
    found = dict[str, Tested]()
    for cell in group:
        best, tried = cell.searched(rows)
        if best is not None and (runs := finished(rows, cell.test(best), TEST_SEEDS)):
            found[cell.name] = Tested(cell, best, len(tried), runs)
    return found


def judge_group(rows: Rows, split: Split, model: str) -> list[PaperVerdict]:
    """Compare each method with fine-tuned FedAvg, seed by seed: the mean, the worst tenth, and the mean at equal bits.

    Where FedAvg is also fine-tuned at a rate of its own, mean and worst tenth are compared with that control too. p
    values are corrected over the methods of each comparison.
    """
    found = finished_methods(rows, cells(split, model))
    place, words = f"{split.name}, {model}", {name: each.words for name, each in found.items()}
    reached = {name: each.reached for name, each in found.items()}
    worst = {name: accuracies(each.runs, WORST) for name, each in found.items()}
    verdicts = compared(place, reached, words) + compared(f"{place}, worst tenth", worst, {})
    if OWN_RATE in found:
        verdicts += compared(f"{place}, beside its own rate", reached, {}, OWN_RATE)
        verdicts += compared(f"{place}, worst tenth beside its own rate", worst, {}, OWN_RATE)
    if all("curve" in run for each in found.values() for run in each.runs):
        for budget in split.budgets:
            within = {name: each.within(budget) for name, each in found.items()}
            verdicts += compared(f"{place}, {budget:g} MB", within, {})
    return verdicts


def compared(
    place: str, reached: Mapping[str, tuple[float, ...]], words: Mapping[str, str], control: str = TUNED
) -> list[PaperVerdict]:
    """Return the verdict on each method of a group; differences are from the control, if that has finished."""
    others = [name for name in reached if name != control] if control in reached else []
    tests = [compare_paired(reached[name], reached[control]) for name in others]
    said, differences = dict[str, str](), dict[str, str]()
    for name, (test, p_level, p_zero) in zip(others, corrected(tests), strict=True):
        said[name] = f"{describe(test, p_level, p_zero, TEST_SEEDS)}, p = {p_zero:.2g} of no difference"
        differences[name] = f"{test.interval.mean:+.2f}"
    return [
        PaperVerdict(
            f"{place}: {name}",
            "",
            mean_and_spread(values),
            "; ".join(filter(None, [said.get(name, "reference" if name == control else ""), words.get(name, "")])),
            differences.get(name, ""),
            values,
        )
        for name, values in reached.items()
    ]


def plot(rows: Rows, path: Path, groups: Groups, title: str) -> None:
    """Plot the mean accuracy of each method's clients by split, a panel for each model."""
    models = list(dict.fromkeys(model for _, model in groups))
    figure, panels = new_figure(title, panels=len(models))
    for axes, model in zip(panels, models, strict=True):
        of_model = [split for split, other in groups if other == model]
        names = list(dict.fromkeys(cell.name for split in of_model for cell in cells(split, model)))
        axes.set_yticks(range(len(names)), [fill(name, 26) for name in names[::-1]], fontsize=8)
        axes.set_title(model, fontsize=10)
        for colour, shift, split in zip(COLOURS, (0.2, -0.2, 0.0), of_model, strict=False):
            found = finished_methods(rows, cells(split, model))
            for index, (name, each) in enumerate(found.items()):
                axes.errorbar(
                    np.mean(each.reached),
                    len(names) - 1 - names.index(name) + shift,
                    xerr=np.std(each.reached, ddof=1),
                    fmt="o",
                    color=colour,
                    capsize=3,
                    label=split.name if index == 0 else None,
                )
        axes.set(xlabel="mean test accuracy of clients (%)")
    figure.legend(
        *panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=3, frameon=False, fontsize=8
    )
    figure.savefig(path, dpi=100)


def table_of(groups: Groups, title: str) -> StudyTable:
    """Return the table of groups of one study."""
    (study,) = {split.study for split, _ in groups}
    return StudyTable(
        {study: in_turn([plan_of(*group) for group in groups])},
        lambda rows: [verdict for group in groups for verdict in judge_group(rows, *group)],
        lambda rows, path: plot(rows, path, groups, title),
    )


FASHION_TABLE = table_of(GROUPS, "Models of clients' own, Fashion-MNIST over 40 clients")
WATCH_TABLE = table_of(WATCH_GROUPS, "Models of clients' own, exercises by a watch over ten subjects")
USERS_TABLE = table_of(USERS_GROUPS, "Models of clients' own, liked films of 200 users of MovieLens 100K")
