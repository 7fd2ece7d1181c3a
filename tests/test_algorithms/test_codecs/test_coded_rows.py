"""Rows through codecs: what is weighed is what is decoded, within budgets, with and without losses on the way."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coded_round import COARSE, EXAMPLES, FINE, train
from narrowcast.algorithms.client.sums import ROWS, WEIGHT
from narrowcast.algorithms.codecs.budget import ClientEncoder
from narrowcast.algorithms.codecs.chain import Codec
from narrowcast.algorithms.codecs.low_rank import SVD
from narrowcast.algorithms.codecs.messages import RowUpdate, decode_rows, encode_rows
from narrowcast.algorithms.codecs.sparsify import ErrorFeedback, TopK
from narrowcast.algorithms.federated.fedmf import FedMF
from narrowcast.algorithms.federated.low_rank import CoLR, SCoLR
from narrowcast.algorithms.local_training.factorisation import RowCohort
from narrowcast.algorithms.local_training.negatives import SharedNegatives, draw_batches
from narrowcast.platform.errors import UserError
from narrowcast.platform.rounds.state import Population
from narrowcast.platform.types import Chunk, PayloadError
from per_client import make_task, synthetic

ALGORITHMS = [FedMF, CoLR, SCoLR]


@settings(max_examples=200, deadline=None, derandomize=True, database=None)
@given(st.integers(0, 2**32), st.integers(1, 400), st.floats(0, 1), st.floats(0, 1), st.integers(0, 6))
@pytest.mark.parametrize("regenerated", ["none", "of positives"])
def test_rows_come_back_whatever_was_likely(
    regenerated: str, seed: int, n: int, sent: float, known: float, columns: int
) -> None:
    random = np.random.default_rng(seed)
    rows, marked = np.flatnonzero(random.random(n) < sent), random.random(n) < known
    values, positives = random.standard_normal((len(rows), columns)).astype(np.float32), int(random.integers(n + 1))
    likely = {"none": None, "of positives": lambda count: marked & (count == positives)}[regenerated]
    packed = encode_rows(ClientEncoder(Codec(), seed), RowUpdate(rows, values, n, positives, likely))
    assert packed is not None
    got_rows, got = decode_rows(Codec(), packed[0].to_bytes(), n, 6, seed, likely=likely)
    assert np.array_equal(got_rows, rows) and np.array_equal(got, values)
    assert packed[0].wire_bits() == 8 * len(packed[0].to_bytes())
    for cut in (1, len(packed[0].to_bytes()) // 2):
        with pytest.raises(PayloadError):
            decode_rows(Codec(), packed[0].to_bytes()[:-cut], n, 6, seed, likely=likely)


def test_factors_are_of_all_rows_at_once() -> None:
    random = np.random.default_rng(0)
    rows, marked = np.arange(0, 60, 2), random.random(60) < 0.7

    def likely(positives: int) -> Any:
        return marked & (positives == 12)

    values = np.outer(random.standard_normal(30), random.standard_normal(6)).astype(np.float32)
    svd, float32 = ClientEncoder(Codec((SVD(rank=1),)), 0), ClientEncoder(Codec(), 0)
    payload, _ = encode_rows(svd, RowUpdate(rows, values, 60, 12, likely)) or pytest.fail("nothing was sent")
    indices, _ = encode_rows(float32, RowUpdate(rows, values[:, :0], 60, 12, likely)) or pytest.fail("nothing was sent")
    assert payload.wire_bits() == indices.wire_bits() + 32 * (30 + 6)
    _, got = decode_rows(Codec((SVD(rank=1),)), payload.to_bytes(), 60, 6, 0, likely=likely)
    assert np.allclose(got, values, atol=1e-5)


def test_likely_rows_are_nearly_all_that_a_client_draws() -> None:
    task = make_task(synthetic([25] * 40, n_items=400), shared_negatives=True)
    batches = draw_batches(task, np.arange(40), 3)
    drawn, missed = 0, 0
    for place, client in enumerate(batches.order):
        rows = batches.row_items[batches.row_starts[place] : batches.row_starts[place + 1]]
        own = task.data.items[task.data.indptr[client] : task.data.indptr[client + 1]]
        likely = SharedNegatives.of(task, int(client), 3).likely_rows(25)
        assert set(np.flatnonzero(likely)) <= set(rows)  # a likely row that is not drawn is one of the client's own
        others = np.setdiff1d(rows, own)
        drawn, missed = drawn + len(others), missed + int((~likely[others]).sum())
    assert 0 < missed < 0.08 * drawn


@pytest.mark.parametrize("kind", ALGORITHMS, ids=lambda kind: kind.__name__)
def test_a_fine_codec_changes_nothing_but_the_bits(kind: Any) -> None:
    plain, fine = train(kind()), train(kind(codec=FINE))
    scale = np.abs(plain.partial[ROWS]).max()
    assert np.abs(fine.partial[ROWS] - plain.partial[ROWS]).max() < 1e-3 * scale
    assert np.array_equal(fine.partial["weight"], plain.partial["weight"])
    assert np.array_equal(fine.state["user_factors"], plain.state["user_factors"])
    assert (fine.ledger.uplink_bits < plain.ledger.uplink_bits).all()


@pytest.mark.parametrize("kind", ALGORITHMS, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("codec", [(), COARSE], ids=["float32", "coarse"])
def test_nobody_sends_more_than_its_budget(kind: Any, codec: Any) -> None:
    free = train(kind(codec=codec)).ledger.uplink_bits
    budget = (free * np.array([2.0, 1.0, 0.5, 0.3, 0.0, 0.8])).astype(np.int64)
    result = train(kind(codec=codec), budget_bits=budget)
    ledger = result.ledger
    assert (ledger.uplink_bits <= budget).all()
    assert ledger.uplink_bits[0] >= free[0] > 0
    assert (ledger.uplink_bits[4], ledger.rank[4], ledger.delivered[4]) == (0, 0, False)
    assert np.array_equal(ledger.delivered, ledger.uplink_bits > 0)
    assert (result.partial["weight"].max() <= ledger.delivered.sum()).all()


@pytest.mark.parametrize("kind", ALGORITHMS, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("codec", [(), COARSE], ids=["float32", "coarse"])
@pytest.mark.parametrize("aggregation", ["per_item_mean", "per_component_mean", "weighted"])
def test_a_lost_upload_is_paid_for_and_not_summed(kind: Any, codec: Any, aggregation: Any) -> None:
    algorithm = kind(codec=codec, aggregation=aggregation)
    whole = train(algorithm)
    lost = train(algorithm, lost=np.array([False, True, False, False, True, False]))
    assert np.array_equal(lost.ledger.uplink_bits, whole.ledger.uplink_bits)
    assert lost.ledger.delivered.tolist() == [True, False, True, True, False, True]
    assert np.array_equal(lost.state["user_factors"], whole.state["user_factors"])
    only = train(algorithm, lost=np.array([True, False, True, True, False, True]))
    for name in (ROWS, WEIGHT):
        assert np.allclose(lost.partial[name] + only.partial[name], whole.partial[name], atol=1e-5)


def test_each_component_is_divided_by_those_who_sent_it() -> None:
    algorithm = SCoLR(aggregation="per_component_mean")
    result = train(algorithm)
    assert result.partial["weight"].shape == result.partial[ROWS].shape
    assert (result.partial[ROWS][result.partial["weight"] == 0] == 0).all()
    assert len(set(result.ledger.rank.tolist())) > 1
    per_client = [train(algorithm, lost=np.arange(6) != client) for client in range(6)]
    assert np.array_equal(sum(each.partial["weight"] for each in per_client), result.partial["weight"])
    assert all(set(np.unique(each.partial["weight"])) <= {0.0, 1.0} for each in per_client)


def test_a_memory_waits_for_its_rows() -> None:
    """Error feedback owes what Top-K leaves out, in the rows of the round, and sends it when they come again."""
    algorithm = FedMF(codec=(ErrorFeedback(), TopK(fraction=0.25)))
    task = make_task(synthetic(EXAMPLES))
    algorithm.check(task)
    clients = np.arange(6)
    state = Population.fresh(algorithm.init_clients(task), 6).take(clients)
    (memory,) = [name for name in state if name.startswith("codec/memory/")]
    assert state[memory].shape == (6, 150, 8) and not state[memory].any()
    broadcast = algorithm.broadcast(algorithm.init(task), task, 1).arrays
    plain = FedMF().train(broadcast, Chunk(1, 0, clients, {"user_factors": state["user_factors"]}), task)
    first = algorithm.train(broadcast, Chunk(1, 0, clients, state), task)
    owed = first.state[memory].sum(axis=0)
    assert np.allclose(owed + first.partial[ROWS], plain.partial[ROWS], atol=1e-5)
    assert np.abs(owed).max() > 0
    untouched = first.partial["weight"][:, 0] == 0
    assert not owed[untouched].any()
    second = algorithm.train(broadcast, replace(Chunk(2, 0, clients, first.state)), task)
    assert np.abs(second.state[memory]).sum() > 0


@pytest.mark.parametrize("kind", [CoLR, SCoLR])
def test_memories_are_for_bases_that_stay(kind: Any) -> None:
    with pytest.raises(UserError, match="keeps state between rounds"):
        kind(codec=(ErrorFeedback(), TopK(fraction=0.25))).check(make_task(synthetic(EXAMPLES)))
    with pytest.raises(UserError, match=r'leave out algorithm\.rows = "all"'):
        kind(codec=COARSE, rows="all").check(make_task(synthetic(EXAMPLES)))


def test_an_update_that_is_not_finite_is_not_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    inner = RowCohort.train_components

    def broken(*arguments: Any) -> Any:
        result = inner(*arguments)
        assert result.row_changes is not None
        result.row_changes[0, 0] = 2.0**100
        return result

    monkeypatch.setattr(RowCohort, "train_components", broken)
    result = train(CoLR(codec=COARSE))
    assert result.ledger.delivered.sum() == 5
    assert result.ledger.uplink_bits[~result.ledger.delivered].tolist() == [0]
    assert np.isfinite(result.partial[ROWS]).all()
