"""Methods of learning without a server, and the search that tunes the learning rate and gamma of each alike."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from narrowcast.studies.results import Line, Lines
from narrowcast.studies.tuning import Choice, Point, climbed_on
from narrowcast_papers.gossip.digits import TEST_SEEDS, TUNING_SEEDS

RATES: Point = tuple(0.0125 * 2**step for step in range(14))
GAMMAS: Point = tuple(2.0**step for step in range(-8, 1))
"""A gamma above 1 takes more of the neighbours' models than there is."""


@dataclass(frozen=True)
class Method:
    """The fields of an algorithm but for its topology, and where the search for the least loss begins.

    A method without gamma has a rate alone.
    """

    fields: Mapping[str, Any]
    start: Point
    judged: str = "loss"

    def algorithm(self, point: Point, **others: Any) -> dict[str, Any]:
        """Return all fields of the algorithm at a point."""
        return {**self.fields, **dict(zip(("gamma",), point[1:], strict=False)), **others}

    def searched(self, lines: Lines) -> tuple[Point | None, list[Point]]:
        """Return the point of the least mean loss over the tuning seeds, None before all runs that tell; and all."""
        ladders = dict(zip(("rate", "gamma"), (RATES, GAMMAS)[: len(self.start)], strict=False))
        return climbed_on(lines, self.start, ladders, self.judged, TUNING_SEEDS, better=-1)

    def choices(self, lines: Lines, what: str) -> list[Choice]:
        """Return each value of the best point, among those of all points that were tried."""
        best, tried = self.searched(lines)
        if best is None:
            return []
        grids = [tuple(sorted(set(values))) for values in zip(*tried, strict=True)]
        return [
            Choice(what, name, value, grid, len(TUNING_SEEDS), most=most)
            for name, value, grid, most in zip(("rate", "gamma"), best, grids, (np.inf, GAMMAS[-1]), strict=False)
        ]


def padded(point: Point) -> tuple[float, float]:
    """Return the learning rate and gamma, which is 0 for methods without one."""
    return point[0], point[1] if len(point) > 1 else 0.0


def planned(lines: Lines, methods: Mapping[str, Method]) -> Iterator[tuple[int, str, float, float]]:
    """Yield seed, method, learning rate and gamma of the runs that tune each method, and then of its tests."""
    for name, method in methods.items():
        best: Point | None = None
        while best is None:
            best, tried = method.searched(of_method(lines, name))
            for point in tried:
                yield from ((seed, name, *padded(point)) for seed in TUNING_SEEDS)
        yield from ((seed, name, *padded(best)) for seed in TEST_SEEDS)


def of_method(lines: Lines, name: str) -> Lines:
    """Return the lines of a method."""
    return [line for line in lines if line["method"] == name]


def tests(lines: Lines, name: str) -> dict[int, list[Line]]:
    """Return the lines of a method's test runs by seed; empty unless all are there."""
    by_seed = {seed: [line for line in of_method(lines, name) if int(line["seed"]) == seed] for seed in TEST_SEEDS}
    return by_seed if all(by_seed.values()) else {}


def last(lines: Lines, name: str, column: str) -> tuple[float, ...]:
    """Return a column at the end of each test run."""
    return tuple(float(of_seed[-1][column]) for of_seed in tests(lines, name).values())


def first_at(of_seed: Sequence[Line], column: str, least: float, wanted: str) -> float:
    """Return the wanted column at the first evaluation whose `column` is at least so much; infinite if none is."""
    return next((float(line[wanted]) for line in of_seed if float(line[column]) >= least), float("inf"))
