"""The rule for tuned values in a table: chosen on three seeds or more, and none of them at an edge of its grid.

A value at an edge may have a better one beyond it, and a choice on one seed is partly luck: both make a control weaker
than it could be. A study gives its seeds to `long_studies.tried`, whose results are means over them, and its table ends
with the row of `tuning_verdict`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from narrowcast.reproduce.verdict import PaperVerdict
from narrowcast.runs.significance import COMPARABLE_SEEDS


@dataclass(frozen=True)
class Choice:
    """A value that was chosen from a grid on validation results of some seeds.

    `what` names the cell of the table, `name` the value. There is no value below `least`, which is no edge.
    """

    what: str
    name: str
    value: float
    grid: tuple[float, ...]
    seeds: int
    least: float = -math.inf

    @property
    def at_edge(self) -> bool:
        """Return whether a better value may lie beyond the grid."""
        return self.value == max(self.grid) or self.least < self.value == min(self.grid)

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
    kept = [each for each in choices if each.seeds >= COMPARABLE_SEEDS and not each.at_edge]
    words = [f"{COMPARABLE_SEEDS} seeds or more and no value at an edge: {len(kept)} of {len(choices)}"]
    faults: Mapping[str, Callable[[Choice], bool]] = {
        "at an edge": lambda choice: choice.at_edge,
        "on fewer seeds": lambda choice: choice.seeds < COMPARABLE_SEEDS,
    }
    words += [f"{fault}: {_listed(filter(has, choices))}" for fault, has in faults.items()]
    return PaperVerdict("tuned values", "", "", "; ".join(words))


def _listed(choices: Iterable[Choice]) -> str:
    return ", ".join(f"{each.what} ({each.name} {each.value:g})" for each in choices) or "none"
