"""The choice of the rounds or iterations that a verification repeats: drawn at random, within a budget."""

from __future__ import annotations

import random
import secrets
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from narrowcast.runs.checks import Check

_LEAST = 10
_SEEDS = 10**6


@dataclass(frozen=True)
class Budget:
    """The steps, rounds or iterations, that may be repeated.

    Attributes:
        steps: their number; None for as many as took the run itself `seconds`, and at least ten.
        seconds: the time of the run, as it recorded that.
        seed: the seed of the draw, by default another one each time, so that nobody knows before what is repeated.

    """

    steps: int | None = None
    seconds: float = 20.0
    seed: int = field(default_factory=lambda: secrets.randbelow(_SEEDS))

    def count(self, steps: int, took_seconds: float) -> int:
        """Return how many steps of a run to repeat that has so many and took so long."""
        if self.steps is not None:
            return min(self.steps, steps)
        if not took_seconds > self.seconds:  # NaN too
            return steps
        return min(steps, max(_LEAST, int(steps * self.seconds / took_seconds)))

    def shared_by(self, runs: int) -> Budget:
        """Return the budget of each of several runs, which share the seconds; `steps` are those of each."""
        return Budget(self.steps, self.seconds / max(runs, 1), self.seed)

    def draws(self) -> random.Random:
        """Return the source of the draw."""
        return random.Random(self.seed)


@dataclass(frozen=True)
class Leg:
    """Steps to repeat: those after `origin`, a state that is kept or the start, up to `last`.

    `end` is the origin of the next leg, or the last step of the run: the leg is whole if it reaches that.
    """

    origin: int
    last: int
    end: int


def legs_of(recorded: Sequence[int], origins: Collection[int], count: int, draws: random.Random) -> list[Leg]:
    """Return what to repeat of a run: from each origin as far as the steps drawn lie, `count` steps in all at most.

    The first step and the last one go first if the budget allows that, then steps drawn from all that are recorded:
    each takes the steps since the origin before it. The budget is spent, whatever is drawn.

    Args:
        recorded: the steps of the journal, ascending.
        origins: the steps after which the state is known; 0 is the start.
        count: the most steps.
        draws: the source of the draw.

    """
    if not recorded or not origins:
        return []
    last = recorded[-1]
    bounds = [*sorted(each for each in origins if each < last), last]
    reached = {origin: origin for origin in bounds[:-1]}
    ends = dict(pairwise(bounds))
    drawn = draws.sample(recorded, len(recorded))
    left = count
    for step in (recorded[0], last, *drawn):
        origin = max((each for each in reached if each < step), default=None)
        if origin is not None and 0 < (cost := step - reached[origin]) <= left:
            reached[origin], left = step, left - cost
    return [Leg(origin, step, ends[origin]) for origin, step in reached.items() if step > origin]


def coverage(legs: Sequence[Leg], recorded: Sequence[int], what: str, budget: Budget) -> Check:
    """Return the check that says what was repeated: `9 of 60 rounds (15 %): 1, 51 to 58; drawn with --seed 8231`."""
    total, steps = recorded[-1], sum(leg.last - leg.origin for leg in legs)
    share = f"{steps} of {total} ({100 * steps / total:.0f} %)"
    if steps not in (0, total):
        share += f": {', '.join(_span(leg.origin + 1, leg.last) for leg in legs)}; drawn with --seed {budget.seed}"
    rest = f"the other {total - steps} {what}; --rounds {total} repeats all" if steps < total else ""
    return Check(f"{what} repeated", share, skipped=rest)


def _span(first: int, last: int) -> str:
    return str(first) if first == last else f"{first} to {last}"
