"""A server's transcript holds what the documentation of its mode lists, and nothing else of its clients' data."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from scipy import stats

from attack_cells import cell_experiment, some_users
from narrowcast.algorithms.attacks.transcript import RoundTranscript, Transcript
from narrowcast.algorithms.client.client_pass import Arrived, Contribution
from narrowcast.algorithms.client.sums import WEIGHT
from narrowcast.algorithms.federated.fedmf import FedMF
from narrowcast.algorithms.secure.aggregation import SecureAggregation
from narrowcast.algorithms.secure.schemes import Masked
from narrowcast.platform.contracts import Task
from narrowcast.platform.errors import UserError
from narrowcast.platform.models.model import ITEM_FACTORS
from narrowcast.platform.rounds.plan import Plan
from narrowcast.platform.rounds.state import Run
from narrowcast.platform.types import Arrays, Chunk, RowChanges
from narrowcast.runs.attack_trial import record_run, record_transcript
from secure_rounds import SMALL_CKKS, experiment, run_rounds
from small_tasks import rows_task

READS, UNREAD, SUMS = "rows and values of a client", "protected uploads", "sums"
SHOWN = {
    "none": {READS},
    "{kind: plain}": {READS, SUMS},
    "{kind: masked}": {UNREAD, SUMS, "keys of the round", "shares"},
    SMALL_CKKS: {UNREAD, SUMS},
}
"""What each mode shows of its clients; the table in docs/secure.md says the same."""


def recorded(mode: str, *settings: str) -> Transcript:
    chosen = cell_experiment("none", 6, 2, *settings, *([] if mode == "none" else [f"secure={mode}"]))
    return record_transcript(chosen, some_users(8)[0])[0]


@pytest.mark.parametrize("mode", SHOWN)
def test_a_mode_shows_what_is_documented(mode: str) -> None:
    transcript = recorded(mode)
    assert transcript.shown == SHOWN[mode]
    for each in transcript.rounds:
        seen = {upload.client for upload in (*each.readable, *each.protected)}
        assert seen == set(each.cohort.tolist())


def test_protected_sums_equal_those_of_readable_uploads() -> None:
    plain = recorded("{kind: plain}")
    for mode in ("{kind: masked}", "{kind: ckks, bits: 16}"):
        for readable, opened in zip(plain.rounds, recorded(mode).rounds, strict=True):
            added = replace(readable, opened=None).total
            assert opened.opened is not None
            np.testing.assert_allclose(opened.opened.values, added.values, atol=1e-6)
            assert (opened.opened.counts == added.counts).all()


def test_a_tapped_run_is_the_run_itself() -> None:
    """The taps change nothing: the recorded sums lead to the model of an unrecorded run."""
    chosen = experiment("{kind: masked}")
    _, state = record_transcript(chosen)
    last = run_rounds(chosen)[-1].state
    assert last is not None
    for name, values in last.server.items():
        assert (np.asarray(values) == np.asarray(state.server[name])).all()


class Prescribed(FedMF):
    """FedMF whose clients contribute what they are told to, instead of what they learnt."""

    values: Any

    def contribution(self, broadcast: Arrays, chunk: Chunk, task: Task, arrived: Arrived) -> Contribution:
        del broadcast, task, arrived
        mine = np.stack([self.values[client] for client in chunk.clients.tolist()]).astype(np.float32)
        counts = mine.any(axis=2, keepdims=True).astype(np.float64)
        rows = {ITEM_FACTORS: RowChanges.whole(mine)}
        return Contribution(rows, np.ones(len(mine), dtype=np.float32), sums={WEIGHT: counts})


def of_split(values: np.ndarray) -> RoundTranscript:
    """Return the transcript of a masked round in which client u contributes values[u]."""
    task = rows_task(len(values))
    prescribed = Prescribed(values=values)
    secure = SecureAggregation(prescribed, Masked(rounding="nearest", clip=32.0), len(values))
    run = Run(Plan(rounds=1, clients_per_round=len(values), evaluate_every=1), secure, task)
    return record_run(run)[0].rounds[0]


def test_masked_rounds_with_equal_sums_look_alike() -> None:
    """Which client contributed what changes nothing in the transcript but numbers that are uniform either way."""
    rng = np.random.default_rng(0)
    one = rng.integers(-3, 4, (8, 130, 8)).astype(np.float64)
    one[:, :, 0] = 4  # every client touches every row, so that counts are equal too
    other = one[rng.permutation(8)]
    for item in range(130):  # other values as well: a part of what a client contributes goes to the next client
        moved = rng.integers(-2, 3, (8, 7))
        other[:, item, 1:] += moved - np.roll(moved, 1, axis=0)
    first, second = of_split(one), of_split(other)
    assert not (one == other).all()
    assert first.opened is not None
    assert second.opened is not None
    assert (first.opened.values == second.opened.values).all()
    assert (first.opened.counts == second.opened.counts).all()
    for name in ("cohort", "uplink_bits", "arrived", "components", "item_factors"):
        assert (getattr(first, name) == getattr(second, name)).all()
    sizes = {step: {name: values.shape for name, values in answer.items()} for step, answer in first.told.items()}
    assert sizes == {
        step: {name: values.shape for name, values in answer.items()} for step, answer in second.told.items()
    }
    for each in (first, second):
        for upload in each.protected:
            low_bits = np.bincount(upload.groups[0][: 130 * 8] & np.uint64(255), minlength=256)
            assert stats.chisquare(low_bits).pvalue > 1e-6


def test_transcripts_are_those_of_rows() -> None:
    with pytest.raises(UserError, match=r"model\.kind = "):
        record_transcript(experiment("none", name="fedavg-digits"))
