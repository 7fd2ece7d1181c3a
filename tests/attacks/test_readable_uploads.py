"""What a server infers from uploads that it reads: everything, which is why `none` and `plain` have no lower bound."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from attack_cells import cell_experiment, some_users
from narrowcast.algorithms.attacks.inference import (
    alignment,
    chance_recall,
    factors_from_directions,
    pooled_recall,
    positives_from_row_lists,
    positives_from_signs,
    positives_of,
)
from narrowcast.algorithms.attacks.transcript import Transcript
from narrowcast.platform.models.model import USER_FACTORS
from narrowcast.platform.types import BoolArray, FloatArray
from narrowcast.runs.attack_trial import record_transcript

CLIENTS = np.arange(10)
CODED = "none, coded"


@cache
def recorded(mode: str, *settings: str) -> tuple[Transcript, FloatArray, BoolArray]:
    """Return five rounds of ten clients, their private factors, and their training items."""
    data, popularity = some_users(10)
    transcript, state = record_transcript(cell_experiment(mode, 10, 5, *settings), data, popularity)
    wanted = positives_of(data.indptr, data.items, CLIENTS, data.n_items)
    return transcript, np.asarray(state.clients[USER_FACTORS]), wanted


def recall(transcript: Transcript, wanted: BoolArray, rounds: int, *, with_seed: bool) -> float:
    return pooled_recall(positives_from_row_lists(transcript.first(rounds), CLIENTS, with_seed=with_seed), wanted)


@pytest.mark.parametrize("mode", ["none", "none, rows: all", CODED, "plain"])
def test_row_lists_give_training_items_away_over_rounds(mode: str) -> None:
    transcript, _, wanted = recorded(mode)
    guess = pooled_recall(np.broadcast_to(transcript.popularity, wanted.shape), wanted)
    assert chance_recall(wanted) < guess < recall(transcript, wanted, 1, with_seed=False)
    assert recall(transcript, wanted, 5, with_seed=False) > 0.95


@pytest.mark.parametrize("mode", ["none", CODED])
def test_the_public_seed_says_nothing_of_private_negatives(mode: str) -> None:
    transcript, _, wanted = recorded(mode)
    assert recall(transcript, wanted, 1, with_seed=True) <= recall(transcript, wanted, 1, with_seed=False)


def test_the_seed_of_the_negatives_says_a_lot() -> None:
    """The control of the test above: the same attack by a server that holds the private seed."""
    transcript, _, wanted = recorded("none")
    private = cell_experiment("none", 10, 5).private_seed.value
    informed = replace(transcript, public_seed=private)
    assert recall(informed, wanted, 1, with_seed=True) > recall(transcript, wanted, 1, with_seed=False) + 0.1


def test_shared_negatives_leak_as_documented() -> None:
    transcript, _, wanted = recorded(CODED, "training.shared_negatives=true")
    private, _, _ = recorded(CODED)
    shared, alone = (recall(each, wanted, 1, with_seed=True) for each in (transcript, private))
    assert shared > 0.75
    assert shared > alone + 0.1


@pytest.mark.parametrize("mode", ["none", "none, rows: all", "plain"])
def test_signs_give_all_training_items_away_in_one_round(mode: str) -> None:
    transcript, _, wanted = recorded(mode)
    assert pooled_recall(positives_from_signs(transcript.first(1), CLIENTS), wanted) > 0.99


@pytest.mark.parametrize("mode", ["none", CODED, "plain"])
def test_directions_are_those_of_the_private_factors(mode: str) -> None:
    transcript, factors, _ = recorded(mode)
    found = factors_from_directions(transcript, CLIENTS)
    assert alignment(found, factors) > alignment(found, np.roll(factors, 1, axis=0)) + 0.3
