"""What a server infers from sums: bounded by a guess where nothing but the private stream could tell more."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from attack_cells import cell_experiment, some_users
from narrowcast.algorithms.attacks.inference import (
    attribute_single_rows,
    pooled_recall,
    positives_from_sums,
    positives_of,
    share_rightly_attributed,
)
from narrowcast.algorithms.attacks.transcript import Transcript
from narrowcast.platform.data.interactions import Interactions
from narrowcast.runs.attack_trial import record_transcript


@cache
def recorded(cohort: int, rounds: int) -> tuple[Transcript, Transcript, Interactions]:
    """Return the transcript of masked rounds, that of the same rounds without masks, and the data."""
    data, popularity = some_users(2 * cohort)
    masked, plain = (
        record_transcript(cell_experiment(mode, cohort, rounds), data, popularity)[0] for mode in ("masked", "plain")
    )
    return masked, plain, data


def informed(transcript: Transcript, cohort: int) -> Transcript:
    """Return the transcript in the hands of a server that holds the private seed, as a control."""
    return replace(transcript, public_seed=cell_experiment("masked", cohort, 1).private_seed.value)


def recall_from_sums(transcript: Transcript, data: Interactions, *, with_seed: bool) -> float:
    clients = np.arange(data.n_users)
    wanted = positives_of(data.indptr, data.items, clients, data.n_items)
    return pooled_recall(positives_from_sums(transcript, clients, with_seed=with_seed), wanted)


@pytest.mark.slow
def test_overlapping_cohorts_say_little_without_the_negatives() -> None:
    masked, _, data = recorded(5, 20)
    without = recall_from_sums(masked, data, with_seed=False)
    assert recall_from_sums(masked, data, with_seed=True) <= without
    assert recall_from_sums(informed(masked, 5), data, with_seed=True) > without + 0.15


def owners(plain: Transcript) -> dict[tuple[int, int], list[int]]:
    found: dict[tuple[int, int], list[int]] = {}
    for each in plain.rounds:
        for upload in each.readable:
            for item in upload.rows.tolist():
                found.setdefault((each.round_index, item), []).append(upload.client)
    return found


def test_single_rows_are_not_attributed_by_the_public_seed() -> None:
    masked, plain, _ = recorded(10, 5)
    true = owners(plain)
    right, guess = (share_rightly_attributed(attribute_single_rows(masked, by), true) for by in ("seed", "examples"))
    assert right <= guess
    control = attribute_single_rows(informed(masked, 10), "seed")
    assert share_rightly_attributed(control, true) > 0.8
    named = [row for row in control if row.client is not None]
    assert np.mean([row.client in true[row.round_index, row.item] for row in named]) > 0.97
