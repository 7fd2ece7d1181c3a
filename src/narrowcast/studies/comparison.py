"""The table of a comparison that a YAML file declares: cells, a grid of tries for each, a metric and a reference.

Every cell has the same tries of the grid on validation data, with seeds that are not test seeds. The best one by the
mean of `validation.METRIC` runs on test data, and each cell is compared with the first, seed by seed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes

from narrowcast.platform.tracking.figures import BLUE, COLOURS, ORANGE, new_figure
from narrowcast.platform.tracking.metrics import metric_label
from narrowcast.studies.results import Rows
from narrowcast.studies.spec import Comparison, RunSpec, best_place, digest_of, slug
from narrowcast.studies.tables import StudyTable
from narrowcast.studies.tuning import Choice, TunedCell, cells_plan, finished, tried, tuning_verdict, untuned_plan
from narrowcast.studies.verdicts import PaperVerdict, accuracies, compared_with_first, megabytes


def draw_seed_means(axes: Axes, places: Sequence[float], by_seed: Sequence[Sequence[float]], **style: Any) -> None:
    """Draw the mean and the standard deviation (n - 1) of the values by seed at each place; `style` as of a line."""
    means, spreads = [np.mean(each) for each in by_seed], [np.std(each, ddof=1) for each in by_seed]
    axes.errorbar(places, means, spreads, **style)


def draw_groups(axes: Axes, names: Sequence[str], groups: Mapping[str, Mapping[str, Sequence[float]]]) -> None:
    """Draw a line of the plot for each name, the first on top, with the values by seed of up to two groups in it."""
    axes.set_yticks(range(len(names)), names[::-1])
    for shift, colour, (group, by_name) in zip((0.12, -0.12), (BLUE, ORANGE), groups.items(), strict=False):
        for place, (name, values) in enumerate(by_name.items()):
            axes.errorbar(
                np.mean(values),
                len(names) - 1 - names.index(name) + shift,
                xerr=np.std(values, ddof=1),
                fmt="o",
                color=colour,
                capsize=3,
                label=group if place == 0 else None,
            )


def table_of(comparison: Comparison, name: str) -> StudyTable:
    """Return the table, whose runs are rows of NAME.csv; raise `UserError` if a cell is not a valid experiment."""
    cells = [DeclaredCell(comparison, name, each) for each in comparison.cells]
    for cell in cells:
        digest_of(comparison.experiment, cell.tuning(cell.grid[0]).overrides)

    def results(rows: Rows) -> dict[DeclaredCell, tuple[list[Mapping[str, Any]], list[Mapping[str, Any]]]]:
        found = {}
        for cell in cells:
            tuned = tried(rows, cell, comparison.tuning_seeds) if comparison.grid else []
            if (tuned or not comparison.grid) and (runs := finished(rows, cell.test(tuned), comparison.seeds)):
                found[cell] = tuned, runs
        return found

    def judge(rows: Rows) -> list[PaperVerdict]:
        found = results(rows)
        if cells[0] not in found:
            return []
        verdicts = compared_with_first({cell.name: runs for cell, (_, runs) in found.items()}, comparison.metric)
        choices = [choice for cell, (tuned, _) in found.items() for choice in cell.choices(tuned)]
        return [*verdicts, tuning_verdict(choices)] if choices else verdicts

    def plot(rows: Rows, path: Path) -> None:
        figure, (axes,) = new_figure(name, panels=1)
        for place, (cell, (_, runs)) in enumerate(results(rows).items()):
            reached, colour = accuracies(runs, comparison.metric), COLOURS[place % len(COLOURS)]
            draw_seed_means(axes, [megabytes(runs)], [reached], color=colour, marker="o", capsize=3, label=cell.name)
        axes.set(xlabel="uplink and downlink (MB)", ylabel=f"{metric_label(f'test.{comparison.metric}')} (%)")
        axes.legend(fontsize=8, frameon=False)
        figure.savefig(path, dpi=100)

    if comparison.grid:
        plan = cells_plan(name, cells, comparison.seeds, comparison.tuning_seeds)
    else:
        plan = untuned_plan(name, [cell.test([]) for cell in cells], comparison.seeds)
    return StudyTable({name: plan}, judge, plot)


@dataclass(frozen=True)
class DeclaredCell(TunedCell[tuple[float, ...]]):
    """A cell of a comparison, in the study `study`."""

    of: Comparison
    study: str
    name: str

    def __hash__(self) -> int:
        return hash((self.study, self.name))

    @property
    def grid(self) -> tuple[tuple[float, ...], ...]:
        """All combinations of the values."""
        return tuple(product(*self.of.grid.values()))

    def best(self, results: Sequence[Mapping[str, Any]]) -> tuple[float, ...]:
        """Return the best values of the grid, from the results in its order."""
        return self.grid[best_place(results, f"validation.{self.of.metric}")] if self.of.grid else ()

    def choices(self, results: Sequence[Mapping[str, Any]]) -> list[Choice]:
        """Return what was chosen for each field of the grid."""
        fields = zip(self.of.grid.items(), self.best(results), strict=True)
        return [Choice(self.name, path, value, grid, self.of.tuning_seeds) for (path, grid), value in fields]

    def spec(self, value: tuple[float, ...], part: str) -> RunSpec:
        """Return the run with these values of the grid."""
        own = tuple(f"{path}={each:g}" for path, each in zip(self.of.grid, value, strict=True))
        return RunSpec(
            "-".join([f"{self.study}-{slug(self.name)}{part}", *(f"{each:g}" for each in value)]),
            self.of.experiment,
            (*self.of.overrides, *self.of.cells[self.name], *own, *(self.of.tuning_overrides if part else ())),
            data_seed=self.of.data_seed,
            memory_gib=self.of.memory_gib,
        )
