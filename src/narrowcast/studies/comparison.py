"""The table of a comparison that a YAML file declares: cells, a grid of tries for each, a metric and a reference.

Every cell has the same tries of the grid on validation data, with seeds that are not test seeds. The best one by the
mean of `validation.METRIC` runs on test data, and each cell is compared with the first, seed by seed, unless the paper
has verdicts of its own on the finished cells.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from pathlib import Path
from string import Template
from typing import Any, Literal

import numpy as np
from matplotlib.axes import Axes

from narrowcast.packaged import names_solve
from narrowcast.platform.config.kinds import kind_of
from narrowcast.platform.errors import UserError
from narrowcast.platform.rounds.adversary import Attack
from narrowcast.platform.tracking.figures import BLUE, COLOURS, ORANGE, new_figure
from narrowcast.platform.tracking.metrics import SUCCESS, metric_label
from narrowcast.studies.results import Rows
from narrowcast.studies.spec import ACCURACY, Comparison, Fields, RunSpec, Value, best_place, digest_of, slug
from narrowcast.studies.tables import StudyTable
from narrowcast.studies.tuning import Choice, TunedCell, cells_plan, first_finished, tried, tuning_verdict, untuned_plan
from narrowcast.studies.verdicts import (
    PaperVerdict,
    Runs,
    accuracies,
    compared_with_first,
    megabytes,
    paired_differences,
)


def draw_seed_means(axes: Axes, positions: Sequence[float], by_seed: Sequence[Sequence[float]], **style: Any) -> None:
    """Draw the mean and the standard deviation (n - 1) of the values by seed at each position; `style` as of a line."""
    means, spreads = [np.mean(values) for values in by_seed], [np.std(values, ddof=1) for values in by_seed]
    axes.errorbar(positions, means, spreads, **style)


def draw_groups(axes: Axes, names: Sequence[str], groups: Mapping[str, Mapping[str, Sequence[float]]]) -> None:
    """Draw a line of the plot for each name, the first on top, with the values by seed of up to two groups in it."""
    axes.set_yticks(range(len(names)), names[::-1])
    for shift, colour, (group, by_name) in zip((0.12, -0.12), (BLUE, ORANGE), groups.items(), strict=False):
        for index, (name, values) in enumerate(by_name.items()):
            axes.errorbar(
                np.mean(values),
                len(names) - 1 - names.index(name) + shift,
                xerr=np.std(values, ddof=1),
                fmt="o",
                color=colour,
                capsize=3,
                label=group if index == 0 else None,
            )


@dataclass(frozen=True)
class DeclaredCell(TunedCell[tuple[Value, ...]]):
    """A cell of a comparison, in the study `study`; `key` has its value of each axis, or its name alone."""

    of: Comparison
    study: str
    key: tuple[str, ...]

    def __hash__(self) -> int:
        return hash((self.study, self.key))

    @property
    def name(self) -> str:
        """The cell in words."""
        return self.text(self.of.name, {}) if self.of.name else ", ".join(self.key)

    def text(self, text: str, others: Mapping[str, str]) -> str:
        """Return a text with the names and single values of the cell's fields, and others, in their places."""
        return put(text, {**self._texts, **others})

    @cached_property
    def _fields(self) -> Fields:
        axes = zip(self.of.axes.values(), self.key, strict=True) if self.of.axes else ()
        of_axes = (field for values, name in axes for field in values[name].items())
        return {**self.of.fields, **self.of.grid, **dict(of_axes)}

    @cached_property
    def _texts(self) -> dict[str, str]:
        names = dict(zip(self.of.axes, self.key, strict=True)) if self.of.axes else {"cell": self.key[0]}
        single = {name: _word(value) for name, value in self._fields.items() if not isinstance(value, tuple)}
        return {**names, **{f"{axis}_slug": slug(name) for axis, name in names.items()}, "study": self.study, **single}

    @cached_property
    def tries(self) -> dict[str, tuple[Value, ...]]:
        """The values that are tried of each field of the grid."""
        values = {name: self._fields[name] for name in self.of.grid}
        return {name: tried if isinstance(tried, tuple) else (tried,) for name, tried in values.items()}

    @property
    def grid(self) -> tuple[tuple[Value, ...], ...]:
        """All combinations of the values."""
        return tuple(product(*self.tries.values()))

    def best(self, results: Sequence[Mapping[str, Any]]) -> tuple[Value, ...]:
        """Return the best values of the grid, from the results in its order.

        With `until` it is that of the fewest rounds, of these the most accurate one; one of which a run failed is last.
        """
        if not self.of.grid:
            return ()
        metric = self.of.chosen_by
        if self.of.until is None:
            return self.grid[best_place(results, metric)]

        def order(index: int) -> tuple[float, float]:
            reached = results[index]["final"].get(metric)
            return (math.inf, 0.0) if reached is None else (results[index]["rounds"], -reached)

        return self.grid[min(range(len(self.grid)), key=order)]

    def spec(self, value: tuple[Value, ...], part: str) -> RunSpec:
        """Return the run with these values of the grid."""
        of = self.of
        chosen = dict(zip(self.tries, map(_word, value), strict=True))
        texts = {**self._texts, **chosen, "part": part}
        templates = (*of.overrides, *of.cells.get(self.key[0], ()))
        paths = [f"{name}={text}" for name, text in chosen.items() if name not in of.placeholders]
        default = "-".join([f"{self.study}-{'-'.join(map(slug, self.key))}{part}", *chosen.values()])
        return RunSpec(
            put(of.label, texts) if of.label else default,
            of.experiment,
            (*(put(text, texts) for text in templates), *paths, *(of.tuning_overrides if part else ())),
            measure=self._texts.get("measure", ACCURACY),
            first_seed=of.first_seed,
            data_seed=of.data_seed,
            memory_gib=of.memory_gib,
            together=put(of.lockstep, texts),
            target=None if of.until is None else (of.chosen_by if part else of.compared_by, of.until),
            curve=of.curve,
        )


def put(text: str, texts: Mapping[str, str]) -> str:
    """Return a text with those of its fields, which may have fields themselves, in their places."""
    return Template(Template(text).safe_substitute(texts)).safe_substitute(texts)


def _word(value: Value) -> str:
    return value if isinstance(value, str) else f"{value:g}"


@dataclass(frozen=True)
class FinishedCell:
    """A finished cell: the results of its grid, and those of the test runs at the best values, by seed."""

    cell: DeclaredCell
    tried: Sequence[Mapping[str, Any]]
    runs: Runs

    @property
    def values(self) -> dict[str, Value]:
        """The values that were chosen, by field."""
        return dict(zip(self.cell.tries, self.cell.best(self.tried), strict=True))

    @property
    def choices(self) -> list[Choice]:
        """The choice for each field that has several values."""
        of, choices = self.cell.of, list[Choice]()
        for name, value in self.values.items():
            grid = tuple(other for other in self.cell.tries[name] if not isinstance(other, str))
            if len(grid) > 1 and not isinstance(value, str):
                least = of.least.get(name, -math.inf)
                choices.append(Choice(self.cell.name, name.replace("_", " "), value, grid, of.tuning_seeds, least))
        return choices

    def text(self, text: str) -> str:
        """Return a text with the cell's fields and the chosen values in their places."""
        return self.cell.text(text, {name: _word(value) for name, value in self.values.items()})

    def reached(self, metric: str = "") -> tuple[float, ...]:
        """Return a test metric of each run in percent; that of the comparison unless one is named."""
        return accuracies(self.runs, metric or self.cell.of.metric)


Place = Literal["upper left", "lower left"]
"""Of a legend."""
Tested = Mapping[tuple[str, ...], FinishedCell]
"""The cells that are finished, by their keys."""


@dataclass(frozen=True)
class ComparisonVerdicts:
    """A paper's own verdicts and plot of the finished cells of a comparison, in place of those of every comparison."""

    judge: Callable[[Tested], list[PaperVerdict]]
    plot: Callable[[Tested, Path], None] | None = None


def cells_of(comparison: Comparison, study: str) -> list[DeclaredCell]:
    """Return the cells; raise `UserError` if a name of a cell or axis does not give a valid experiment.

    Also if the cells are compared by the success of an attack, and one has no attack that measures it.
    """
    cells, checked = [DeclaredCell(comparison, study, key) for key in comparison.keys], set[tuple[int, str]]()
    for cell in cells:
        if not checked.issuperset(enumerate(cell.key)):
            digest_of(comparison.experiment, cell.tuning(cell.grid[0]).overrides)
            checked |= set(enumerate(cell.key))
        if comparison.metric == SUCCESS:
            _check_attacked(cell)
    return cells


def _check_attacked(cell: DeclaredCell) -> None:
    spec = cell.spec(cell.grid[0], "")
    attack = None if names_solve(spec.experiment) else spec.configured(spec.first_seed, spec.label).attack
    if spec.measure == ACCURACY and (attack is None or type(attack).measured is Attack.measured):
        got = "no attack" if attack is None else f"attack.kind = {kind_of(attack)}"
        raise UserError(
            f"comparison.metric = {SUCCESS}: cell {cell.name} has {got}, whose runs do not measure it; give every cell "
            "an attack with a target, such as trigger or edge_case"
        )


def table_of(comparison: Comparison, name: str, verdicts: ComparisonVerdicts | None = None) -> StudyTable:
    """Return the table, whose runs are rows of NAME.csv; raise `UserError` if a cell is not a valid experiment."""
    cells = cells_of(comparison, name)

    def tested(rows: Rows) -> dict[tuple[str, ...], FinishedCell]:
        grids = {cell: tried(rows, cell, comparison.tuning_seeds) if comparison.grid else [] for cell in cells}
        ready = [cell for cell, results in grids.items() if results or not comparison.grid]
        runs = {cell: first_finished(rows, cell.test(grids[cell]), comparison.seeds) for cell in ready}
        least = comparison.seeds
        if comparison.so_far:
            least = min((len(results) for results in runs.values() if len(results) > 1), default=least)
        return {
            cell.key: FinishedCell(cell, grids[cell], results[:least])
            for cell, results in runs.items()
            if len(results) >= least
        }

    own = verdicts or ComparisonVerdicts(judge_comparison, lambda done, path: plot_comparison(name, done, path))
    if comparison.grid:
        plan = cells_plan(name, cells, comparison.seeds, comparison.tuning_seeds)
    else:
        plan = untuned_plan(name, [cell.test([]) for cell in cells], comparison.seeds)
    plot = own.plot
    drawn = None if plot is None else lambda rows, path: plot(tested(rows), path)
    return StudyTable({name: plan}, lambda rows: own.judge(tested(rows)), drawn)


def judge_comparison(tested: Tested) -> list[PaperVerdict]:
    """Compare each cell with the first one, seed by seed, and say how the values were tuned."""
    first = next(iter(tested.values()), None)
    if first is None or first.cell.key != first.cell.of.keys[0]:
        return []
    verdicts = compared_with_first(
        {finished.cell.name: finished.runs for finished in tested.values()}, first.cell.of.metric
    )
    choices = choices_of(tested)
    return [*verdicts, tuning_verdict(choices)] if choices else verdicts


def pair_differences(tested: Tested, pairs: Sequence[tuple[str, str]]) -> list[PaperVerdict]:
    """Return the differences of pairs of methods, the reference last, for each group, whose name is the field `words`.

    Keys are the group and the method.
    """
    groups = dict.fromkeys(group for group, _ in tested)
    return paired_differences(
        [
            (
                tested[group, method].text(f"{method} less {reference}, $words"),
                tested[group, method].reached(),
                tested[group, reference].reached(),
            )
            for group in groups
            for method, reference in pairs
            if {(group, method), (group, reference)} <= tested.keys()
        ]
    )


def plot_groups(title: str, label: str, location: Place, tested: Tested, path: Path) -> None:
    """Plot the metric of each method, in up to two groups, whose names are the field `words`."""
    figure, (axes,) = new_figure(title, panels=1)
    groups: dict[str, dict[str, tuple[float, ...]]] = {}
    for (_, method), finished in tested.items():
        groups.setdefault(finished.text("$words"), {})[method] = finished.reached()
    draw_groups(axes, list(dict.fromkeys(method for _, method in tested)), groups)
    axes.set(xlabel=label)
    axes.legend(frameon=False, loc=location)
    figure.savefig(path, dpi=100)


def choices_of(tested: Tested) -> list[Choice]:
    """Return what was chosen for all cells."""
    return [choice for finished in tested.values() for choice in finished.choices]


def plot_comparison(name: str, tested: Tested, path: Path) -> None:
    """Plot the metric of each cell against its traffic."""
    figure, (axes,) = new_figure(name, panels=1)
    for index, finished in enumerate(tested.values()):
        colour = COLOURS[index % len(COLOURS)]
        label = finished.cell.name
        draw_seed_means(
            axes, [megabytes(finished.runs)], [finished.reached()], color=colour, marker="o", capsize=3, label=label
        )
        axes.set(ylabel=f"{metric_label(finished.cell.of.compared_by)} (%)")
    axes.set(xlabel="uplink and downlink (MB)")
    axes.legend(fontsize=8, frameon=False)
    figure.savefig(path, dpi=100)
