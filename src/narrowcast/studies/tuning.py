"""Cells of a table, each tuned with as many tries as the others, and the plans of their runs.

A cell's values are chosen from a grid on validation results of seeds that are not test seeds. The rule for a table:
chosen on three seeds or more, and none of them at an edge of its grid. A value at an edge may have a better one beyond
it, and a choice on one seed is partly luck: both make a control weaker than it could be. A study gives its seeds to
`tried`, whose results are means over them, and its table ends with the row of `tuning_verdict`.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile, zip_longest
from statistics import fmean
from typing import Any, Generic, Literal, TypeVar

from narrowcast.runs.significance import COMPARABLE_SEEDS
from narrowcast.studies.execution import Plan, Planned
from narrowcast.studies.results import Lines, Rows, as_text
from narrowcast.studies.spec import RunSpec, best_place
from narrowcast.studies.verdicts import PaperVerdict

TEST_SEEDS = 5
TUNING_SEED = 100
"""The first seed of tuning runs, which is not a test seed."""
TUNING = "-tuning"
Point = tuple[float, ...]
"""Values that are tuned together, such as a learning rate and a decay."""
ValueT = TypeVar("ValueT")
KeyT = TypeVar("KeyT")
PointT = TypeVar("PointT")
CellT = TypeVar("CellT", bound="TunedCell[Any]")


@dataclass(frozen=True)
class Choice:
    """A value that was chosen from a grid on validation results of some seeds.

    `what` names the cell of the table, `name` the value. There is no value below `least` nor above `most`, which are no
    edges.
    """

    what: str
    name: str
    value: float
    grid: tuple[float, ...]
    seeds: int
    least: float = -math.inf
    most: float = math.inf

    @property
    def at_edge(self) -> bool:
        """Return whether a better value may lie beyond the grid."""
        return self.value == max(self.grid) < self.most or self.least < self.value == min(self.grid)

    @property
    def words(self) -> str:
        """The value, the grid and the number of seeds in words."""
        edge = ", an edge" if self.at_edge else ""
        seeds = f"{self.seeds} tuning seed{'s' * (self.seeds > 1)}"
        return f"{self.name} {self.value:g}{edge} of {min(self.grid):g} to {max(self.grid):g}, {seeds}"


def mean_result(by_seed: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """Return the means of the metrics and of the rounds over the results of one or more seeds.

    A metric that a seed lacks, since its run failed, is left out: a setting that fails with one seed is not chosen.
    """
    if len(by_seed) == 1:
        return by_seed[0]
    names = set.intersection(*(set(result["final"]) for result in by_seed))
    means = {name: fmean(result["final"][name] for result in by_seed) for name in sorted(names)}
    return {"final": means, "rounds": fmean(result["rounds"] for result in by_seed)}


def tuning_verdict(choices: Sequence[Choice]) -> PaperVerdict:
    """Return the row at the foot of a table: how many choices keep the rule, and which do not."""
    kept = [choice for choice in choices if choice.seeds >= COMPARABLE_SEEDS and not choice.at_edge]
    words = [f"{COMPARABLE_SEEDS} seeds or more and no value at an edge: {len(kept)} of {len(choices)}"]
    faults: Mapping[str, Callable[[Choice], bool]] = {
        "at an edge": lambda choice: choice.at_edge,
        "on fewer seeds": lambda choice: choice.seeds < COMPARABLE_SEEDS,
    }
    words += [f"{fault}: {_listed(filter(has, choices))}" for fault, has in faults.items()]
    return PaperVerdict("tuned values", "", "", "; ".join(words))


def _listed(choices: Iterable[Choice]) -> str:
    return ", ".join(f"{choice.what} ({choice.name} {choice.value:g})" for choice in choices) or "none"


class TunedCell(ABC, Generic[ValueT]):
    """A cell of a table, whose value is chosen from a grid on validation data; subclasses are frozen dataclasses."""

    @property
    @abstractmethod
    def grid(self) -> Sequence[ValueT]:
        """The values that are tried."""

    @abstractmethod
    def spec(self, value: ValueT, part: str) -> RunSpec:
        """Return the run at a value: on validation data if the part of its label is `TUNING`, else on test data."""

    def tuning(self, value: ValueT) -> RunSpec:
        """Return the run on validation data at a value."""
        return replace(self.spec(value, TUNING), first_seed=TUNING_SEED)

    def best(self, results: Sequence[Mapping[str, Any]]) -> ValueT:
        """Return the best value of the grid, from the results in its order."""
        return self.grid[best_place(results)]

    def test(self, results: Sequence[Mapping[str, Any]]) -> RunSpec:
        """Return the run on test data at the best value."""
        return self.spec(self.best(results), "")


def finished(rows: Rows, spec: RunSpec, seeds: int = 1) -> list[Mapping[str, Any]]:
    """Return the results of a run's seeds, empty unless all of them are finished."""
    results = [rows.get(spec, seed) for seed in spec.seeds(seeds)]
    return [result for result in results if result is not None] if all(results) else []


def first_finished(rows: Rows, spec: RunSpec, seeds: int) -> list[Mapping[str, Any]]:
    """Return the results of a run's seeds, in order up to the first that is not finished."""
    return [rows[run] for run in takewhile(rows.__contains__, ((spec, seed) for seed in spec.seeds(seeds)))]


def tried(rows: Rows, cell: TunedCell[Any], tuning_seeds: int = 1) -> list[Mapping[str, Any]]:
    """Return the results of a cell at each value of its grid, means over the seeds; empty unless all are finished."""
    by_value = [finished(rows, cell.tuning(value), tuning_seeds) for value in cell.grid]
    return [mean_result(of_value) for of_value in by_value] if all(by_value) else []


def chosen(rows: Rows, cell: TunedCell[Any], tuning_seeds: int = 1) -> RunSpec | None:
    """Return the test run of a cell at the best of its values; None until all runs of its grid are finished."""
    results = tried(rows, cell, tuning_seeds)
    return cell.test(results) if results else None


def one_step_away(point: Point, ladders: Sequence[Sequence[float]]) -> list[Point]:
    """Return the points with one value one step down or up its ladder."""
    around = list[Point]()
    for place, (value, ladder) in enumerate(zip(point, ladders, strict=True)):
        step = ladder.index(value)
        others = (*ladder[max(0, step - 1) : step], *ladder[step + 1 : step + 2])
        around += [(*point[:place], other, *point[place + 1 :]) for other in others]
    return around


def climbed(
    start: PointT, neighbours: Callable[[PointT], Sequence[PointT]], reached: Callable[[PointT], float | None]
) -> tuple[PointT | None, list[PointT]]:
    """Return the best point, None while the search is not finished; and all that it tried or tries next.

    The search goes to the neighbour that reached most until none is better; a point that has not been tried has None.
    """
    centre, tried = start, list[PointT]()
    while True:
        around = [centre, *neighbours(centre)]
        tried += [point for point in around if point not in tried]
        values = [value for value in map(reached, around) if value is not None]
        if len(values) < len(around):
            return None, tried
        if (best := around[values.index(max(values))]) == centre:
            return centre, tried
        centre = best


def climbed_on(
    lines: Lines,
    start: Point,
    ladders: Mapping[str, Sequence[float]],
    column: str,
    seeds: Collection[int],
    better: Literal[1, -1] = 1,
) -> tuple[Point | None, list[Point]]:
    """Return what `climbed` does for the mean of a column over a line of each seed, from a point to those next to it.

    `ladders` have the columns of a point's values, and the values that each may have. If `better` is -1, a lower mean
    is better; one that is not finite is the worst.
    """

    def reached(point: Point) -> float | None:
        of_point = dict(zip(ladders, map(as_text, point), strict=True))
        values = [
            float(line[column]) for line in lines if int(line["seed"]) in seeds and of_point.items() <= line.items()
        ]
        if len(values) < len(seeds):
            return None
        return better * mean if math.isfinite(mean := fmean(values)) else -math.inf

    return climbed(start, lambda point: one_step_away(point, tuple(ladders.values())), reached)


def searched(
    rows: Rows,
    start: PointT,
    neighbours: Callable[[PointT], Sequence[PointT]],
    tuning: Callable[[PointT], RunSpec],
    metric: str,
    seeds: int,
) -> tuple[PointT | None, list[PointT]]:
    """Return what `climbed` does for the sum of the metric over the seeds of each point's run."""

    def reached(point: PointT) -> float | None:
        runs = finished(rows, tuning(point), seeds)
        return sum(run["final"].get(metric, 0.0) for run in runs) if runs else None

    return climbed(start, neighbours, reached)


def finished_cells(
    rows: Rows, cells: Iterable[CellT], seeds: int, tuning_seeds: int = 1
) -> Iterator[tuple[CellT, list[Mapping[str, Any]], list[Mapping[str, Any]]]]:
    """Yield each cell whose runs are all finished, with the results of its grid and those of its best value's test."""
    for cell in cells:
        results = tried(rows, cell, tuning_seeds)
        if results and (runs := finished(rows, cell.test(results), seeds)):
            yield cell, results, runs


def tested(rows: Rows, cells: Mapping[KeyT, TunedCell[Any]], seeds: int) -> dict[KeyT, Sequence[Mapping[str, Any]]]:
    """Return the test results of the cells at their best values, of those whose seeds are all finished."""
    specs = {key: chosen(rows, cell) for key, cell in cells.items()}
    results = {key: finished(rows, spec, seeds) for key, spec in specs.items() if spec is not None}
    return {key: of_seeds for key, of_seeds in results.items() if of_seeds}


def tested_so_far(rows: Rows, cells: Sequence[TunedCell[Any]], seeds: int) -> list[Sequence[Mapping[str, Any]]]:
    """Return the test results of each cell, in order: of the same first seeds for all cells that have two or more."""
    of_cells = list[list[Mapping[str, Any]]]()
    for cell in cells:
        spec = chosen(rows, cell)
        of_cells.append([] if spec is None else first_finished(rows, spec, seeds))
    shared = min((len(of_cell) for of_cell in of_cells if len(of_cell) > 1), default=0)
    return [of_cell[:shared] if len(of_cell) > 1 else [] for of_cell in of_cells]


def cells_plan(name: str, cells: Sequence[TunedCell[Any]], seeds: int, tuning_seeds: int = 1) -> Plan:
    """Return the plan of cells: all tries on validation data, then the seeds of each cell's best one on test data."""

    def plan(rows: Rows) -> Iterator[Planned]:
        for tries in zip_longest(*([cell.tuning(value) for value in cell.grid] for cell in cells)):
            for spec in filter(None, tries):
                for seed in spec.seeds(tuning_seeds):
                    yield Planned(name, spec, seed, test=False)
        best = [chosen(rows, cell, tuning_seeds) for cell in cells]
        for seed in range(seeds):
            for spec in filter(None, best):
                yield Planned(name, spec, seed)

    return plan


def untuned_plan(name: str, runs: Sequence[RunSpec], seeds: int) -> Plan:
    """Return the plan of runs without a choice, seed by seed."""

    def plan(rows: Rows) -> Iterator[Planned]:
        del rows
        for shift in range(seeds):
            for run in runs:
                yield Planned(name, run, run.first_seed + shift)

    return plan


def in_turn(plans: Sequence[Plan]) -> Plan:
    """Return the plan that has all runs of a plan before those of the next one."""
    return lambda rows: (planned for plan in plans for planned in plan(rows))
