"""Rows of a sum that one client sent: which client it was, and what it says of it.

A count of one says that a row of the sum is the row of one client. It can be attributed by the negatives that the seed
gives (if only one client's contain the item), or by the components in which the row is not zero (if only one client
sent these). Its direction is that of the client's private factors; see `direction_attack`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from narrowcast.algorithms.attacks.direction_attack import leading_direction, rows_in_space
from narrowcast.algorithms.attacks.row_list_attack import negatives_of_seed
from narrowcast.algorithms.attacks.transcript import OpenedSum, RoundTranscript, Transcript
from narrowcast.platform.types import BoolArray, FloatArray, IntArray


@dataclass(frozen=True)
class SingleRow:
    """A row of a sum with a count of one: its round, its item, and the clients that may have sent it."""

    round_index: int
    item: int
    candidates: IntArray

    @property
    def client(self) -> int | None:
        """The client to which the row is attributed: the only candidate, or None."""
        return int(self.candidates[0]) if len(self.candidates) == 1 else None


By = Literal["seed", "components", "examples"]
"""The evidence: the negatives of the public seed, the components sent, or, to compare with, the most examples."""


def single_rows(total: OpenedSum) -> IntArray:
    """Return the rows of a sum that one client sent; none if rows are not counted."""
    if len(total.counts) != len(total.values):
        return np.empty(0, dtype=np.int64)
    return np.flatnonzero(total.counts.max(axis=1) == 1)


def attribute_single_rows(transcript: Transcript, by: By) -> list[SingleRow]:
    """Return every single row of the run's sums with the clients that fit; all that arrived if none fits."""
    found = []
    for each in transcript.rounds:
        total = each.total
        if len(items := single_rows(total)):
            fits = {"seed": _by_seed, "components": _by_components, "examples": _by_examples}[by](transcript, each)
            for item in items.tolist():
                candidates = each.cohort[each.arrived & fits(item)]
                found.append(
                    SingleRow(each.round_index, item, candidates if len(candidates) else each.cohort[each.arrived])
                )
    return found


def share_rightly_attributed(rows: list[SingleRow], owners: Mapping[tuple[int, int], Sequence[int]]) -> float:
    """Return the share of rows whose sender is guessed, one candidate at random; `owners` by round and item."""
    hits = [np.isin(row.candidates, owners.get((row.round_index, row.item), ())).mean() for row in rows]
    return float(np.mean(hits)) if hits else 0.0


def factors_from_single_rows(transcript: Transcript, rows: list[SingleRow], clients: IntArray) -> FloatArray:
    """Return the direction of the rows attributed to each client, of either sign, [C, d]; zeros for clients without."""
    rounds = {each.round_index: each for each in transcript.rounds}
    factors = np.zeros((len(clients), transcript.rounds[0].item_factors.shape[1]))
    for place, client in enumerate(clients.tolist()):
        changes = [
            rows_in_space(rounds[row.round_index], rounds[row.round_index].total.values[[row.item]])
            for row in rows
            if row.client == client
        ]
        if changes:
            factors[place] = leading_direction(changes)
    return factors


Fits = Callable[[int], BoolArray]
"""Returns the clients of a cohort [C] that may have sent the row of an item."""


def _by_seed(transcript: Transcript, each: RoundTranscript) -> Fits:
    likely = np.array([negatives_of_seed(transcript, each.round_index, client) for client in each.cohort.tolist()])
    return lambda item: likely[:, item]


def _by_components(transcript: Transcript, each: RoundTranscript) -> Fits:
    del transcript
    values = each.total.values
    opened = (values != 0).any(axis=0)
    return lambda item: np.asarray((each.components == (values[item] != 0))[:, opened].all(axis=1))


def _by_examples(transcript: Transcript, each: RoundTranscript) -> Fits:
    most = np.arange(len(each.cohort)) == transcript.examples[each.cohort].argmax()
    return lambda _: most
