"""Adaptive SVD: what a client chooses, how many bits that takes, and what arrives."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from coded_round import COARSE, FINE, train
from narrowcast.algorithms.channel.allocation import MinError
from narrowcast.algorithms.channel.joint import STEPS, symbol_bits
from narrowcast.algorithms.channel.regions import Independent
from narrowcast.algorithms.client import sums
from narrowcast.algorithms.codecs.budget import ClientEncoder
from narrowcast.algorithms.codecs.chain import Codec
from narrowcast.algorithms.codecs.entropy import Entropy
from narrowcast.algorithms.codecs.messages import RowUpdate, decode_rows
from narrowcast.algorithms.codecs.quantise import Quantise
from narrowcast.algorithms.codecs.sparsify import ErrorFeedback, TopK
from narrowcast.algorithms.federated.adaptive_svd import (
    NORM_BITS,
    AdaptiveSVD,
    best_choice,
    encode_directions,
    select_rows,
)
from narrowcast.algorithms.federated.fedmf import FedMF
from narrowcast.platform.errors import UserError
from narrowcast.platform.rounds.state import Population
from narrowcast.platform.types import Chunk, PayloadError
from per_client import make_task, synthetic

ROWS, DIMENSION, ITEMS = 700, 64, 3000


def change(random: np.random.Generator, *energies: float) -> np.ndarray[Any, np.dtype[np.float32]]:
    """[700, 64] of normal directions with these energies."""
    left = np.linalg.qr(random.standard_normal((ROWS, len(energies))))[0]
    right = np.linalg.qr(random.standard_normal((DIMENSION, len(energies))))[0]
    return (left * np.sqrt(energies) @ right.T).astype(np.float32)


@pytest.mark.parametrize("regenerated", ["none", "half"])
@pytest.mark.parametrize("budget", [3000, 5000, 8000, 20000])
def test_the_choice_is_the_best_that_can_be_sent(budget: int, regenerated: str) -> None:
    """Against all ranks at all levels, each sent and decoded for real, on average over the keys."""
    random = np.random.default_rng(budget)
    marked = np.zeros(ITEMS, dtype=bool)
    rows = np.sort(random.permutation(ITEMS)[:ROWS])
    marked[rows[::2]] = True
    likely = {"none": None, "half": lambda positives: marked & (positives == 1)}[regenerated]
    ours, best = [], []
    for key in range(4):
        changes = change(random, 0.9, 0.08, 0.02)
        errors = {}
        for rank in (0, 1, 2, 3):
            encoder = ClientEncoder(Codec(COARSE), key, budget_bits=float(budget))
            encoded = encode_directions(RowUpdate(rows, changes, ITEMS, 1, likely), encoder, max_rank=rank or 3)
            assert encoded is not None
            payload, chosen = encoded
            assert payload.wire_bits() == 8 * len(payload.to_bytes()) <= budget
            assert chosen == rank or chosen <= (rank or 3)
            _, received = decode_rows(
                *(Codec(COARSE), payload.to_bytes(), ITEMS, 3, key), likely=likely, dimension=DIMENSION
            )
            errors[rank] = float(np.square(received - changes).sum())
        ours.append(errors[0])
        best.append(min(errors.values()))
    assert np.mean(ours) <= 1.1 * np.mean(best)


def test_the_choice_is_that_of_a_search_over_all() -> None:
    missing = np.array([0.1, 0.02, 0.0])
    for bits in (500.0, 1500.0, 2500.0, 6000.0, 30000.0):
        found = (np.inf, 1, 1)
        for rank in (1, 2, 3):
            for step, entropy in zip(STEPS, symbol_bits(), strict=True):
                levels = ROWS**0.5 / step
                weight = rank * ((ROWS + 64) * entropy + 32 * np.log2(ROWS / 64) + NORM_BITS)
                if weight <= bits and levels >= 1:
                    left_out = missing[rank - 1]
                    error = left_out + (1 - left_out) * (ROWS + 64) / (12 * levels**2)
                    found = min(found, (error, rank, round(levels)))
        assert best_choice(missing, ROWS, 64, bits, NORM_BITS) == found[1:]


@pytest.mark.parametrize("aggregation", ["per_item_mean", "weighted"])
def test_with_all_directions_and_fine_levels_it_is_fedmf(aggregation: Any) -> None:
    plain = train(FedMF(aggregation=aggregation))
    own = train(AdaptiveSVD(rank=8, codec=FINE, aggregation=aggregation))
    scale = np.abs(plain.partial[sums.ROWS]).max()
    assert np.abs(own.partial[sums.ROWS] - plain.partial[sums.ROWS]).max() < 1e-3 * scale
    assert np.array_equal(own.partial["weight"], plain.partial["weight"])
    assert own.ledger.rank.max() <= 8


def test_budgets_are_kept_and_the_rank_follows_them() -> None:
    algorithm = AdaptiveSVD(rank=4, codec=COARSE)
    free = train(algorithm, budget_bits=np.full(6, 10**6)).ledger
    budget = (free.uplink_bits * np.array([1.0, 0.6, 0.4, 0.2, 0.0, 0.8])).astype(np.int64)
    ledger = train(algorithm, budget_bits=budget).ledger
    assert (ledger.uplink_bits <= budget).all() and (ledger.rank <= free.rank).all()
    assert ledger.rank[4] == 0 and not ledger.delivered[4]
    assert (ledger.rank[ledger.delivered] >= 1).all() and ledger.rank[3] < free.rank[3]


def test_the_server_adds_whole_rows_and_sends_no_basis() -> None:
    task, algorithm = make_task(synthetic([3, 20, 8])), AdaptiveSVD(rank=2, codec=COARSE)
    server = algorithm.init(task)
    sent = algorithm.broadcast(server, task, 1)
    assert set(sent.arrays) == {"item_factors"}
    total = {sums.ROWS: np.ones((150, 8), dtype=np.float32), "weight": np.full((150, 1), 2.0)}
    after = algorithm.step(server, sent.arrays, total, task, 1)
    assert np.allclose(after["item_factors"] - server["item_factors"], 0.5)
    update = algorithm.broadcast(after, task, 2).update
    whole = FedMF().broadcast({**after, "sent": np.empty(0, np.uint8)}, task, 2).update
    assert update is not None and whole is not None and update.wire_bits() == whole.wire_bits()


def test_cut_payloads_are_refused() -> None:
    random = np.random.default_rng(0)
    rows = np.arange(0, ITEMS, 5)[:ROWS]
    changes = change(random, 1.0)[: len(rows)]
    encoder = ClientEncoder(Codec(COARSE), key=0, budget_bits=1e5)
    encoded = encode_directions(RowUpdate(rows, changes, ITEMS), encoder, max_rank=2)
    assert encoded is not None
    data = encoded[0].to_bytes()
    for end in range(0, len(data), 17):
        with pytest.raises(PayloadError):
            decode_rows(Codec(COARSE), data[:end], ITEMS, 2, 0, dimension=DIMENSION)


def test_what_it_does_not_go_with_is_said() -> None:
    task = make_task(synthetic([3, 20, 8]))
    for algorithm, message in (
        (AdaptiveSVD(codec=()), "put quantise into algorithm.codec"),
        (AdaptiveSVD(codec=(TopK(fraction=0.1),)), "put quantise into algorithm.codec"),
        (AdaptiveSVD(codec=(ErrorFeedback(), *COARSE)), "keeps state between rounds"),
        (AdaptiveSVD(rank=9), "is above model.embedding_dim = 8"),
    ):
        with pytest.raises(UserError, match=message):
            algorithm.check(task)


def test_without_adaptation_an_upload_is_that_without_a_budget_or_none() -> None:
    free = train(AdaptiveSVD(rank=2, codec=COARSE))
    fixed = AdaptiveSVD(rank=2, codec=COARSE, adapted=False)
    whole = train(fixed, budget_bits=free.ledger.uplink_bits)
    assert np.array_equal(whole.partial[sums.ROWS], free.partial[sums.ROWS])
    assert np.array_equal(train(fixed).partial[sums.ROWS], free.partial[sums.ROWS])
    short = np.arange(6) % 2
    ledger = train(fixed, budget_bits=free.ledger.uplink_bits - short).ledger
    assert np.array_equal(ledger.uplink_bits, np.where(short, 0, free.ledger.uplink_bits))
    assert np.array_equal(ledger.delivered, short == 0)


def test_the_size_that_the_allocation_is_told_is_enough() -> None:
    task = make_task(synthetic([20 + 5 * client for client in range(20)], n_items=3000))
    cohort = np.arange(20)
    state = Population.fresh(FedMF().init_clients(task), 20).take(cohort)
    for levels in (2, 8, 64):
        codec = (Quantise(levels=levels, norms="column", rounding="dithered", norm_type="bfloat16"), Entropy())
        fixed = AdaptiveSVD(rank=1, codec=codec, adapted=False)
        told = fixed.rate_distortion(task, cohort)
        assert told is not None
        broadcast = fixed.broadcast(fixed.init(task), task, 1).arrays
        ledger = fixed.train(broadcast, Chunk(1, 0, cohort, state, told.least_bits), task).ledger
        assert (ledger.uplink_bits > 0).mean() >= 0.9
        assert (ledger.uplink_bits > 0.6 * told.least_bits)[ledger.delivered].all()
        shared = MinError().bits(
            Independent(told.least_bits * (1.0 - cohort % 2 / 2)), 1.0, told.least_bits, None, told.errors
        )
        assert np.array_equal(shared > 0, cohort % 2 == 0)


@pytest.mark.parametrize("choice", ["strongest", "random"])
def test_a_client_short_of_bits_sends_some_rows_and_only_these_count(choice: Any) -> None:
    task = make_task(synthetic([20 + 5 * client for client in range(12)], n_items=3000))
    cohort = np.arange(12)
    state = Population.fresh(FedMF().init_clients(task), 12).take(cohort)
    codec = (Quantise(levels=8, norms="column", rounding="dithered", norm_type="bfloat16"), Entropy())
    whole, some = AdaptiveSVD(rank=1, codec=codec), AdaptiveSVD(rank=1, codec=codec, row_choice=choice)
    broadcast = whole.broadcast(whole.init(task), task, 1).arrays
    ample = np.full(12, 10**6)
    first, second = (each.train(broadcast, Chunk(1, 0, cohort, state, ample), task) for each in (whole, some))
    assert np.array_equal(first.partial[sums.ROWS], second.partial[sums.ROWS])
    assert np.array_equal(first.partial["weight"], second.partial["weight"])
    budget = np.array([700, 1000, 100] * 4)
    short = some.train(broadcast, Chunk(1, 0, cohort, state, budget), task)
    assert (short.ledger.uplink_bits <= budget).all()
    assert short.ledger.delivered.tolist() == [True, True, False] * 4
    assert (short.ledger.uplink_bits > 0.6 * budget)[short.ledger.delivered].all()
    assert 0 < short.partial["weight"].sum() < 0.5 * first.partial["weight"].sum()
    assert not short.partial[sums.ROWS][short.partial["weight"][:, 0] == 0].any()
    told, more = whole.rate_distortion(task, cohort), some.rate_distortion(task, cohort)
    assert told is not None and more is not None
    assert (more.least_bits < 0.5 * told.least_bits).all()


def test_the_strongest_rows_are_those_that_changed_most() -> None:
    values = np.random.default_rng(0).standard_normal((50, 4)).astype(np.float32)
    update = RowUpdate(np.arange(0, 100, 2), values, 200)
    kept = select_rows(update, "strongest", 20, key=1)
    assert kept is not None
    energy = np.square(values).sum(axis=1)
    assert set(kept.rows.tolist()) == set((2 * np.argsort(-energy)[:20]).tolist())
    assert select_rows(update, "random", 7, key=1) is None


@pytest.mark.parametrize("fields", [{"adapted": False}, {"aggregation": "weighted"}])
def test_rows_are_not_chosen_where_that_means_nothing(fields: dict[str, Any]) -> None:
    with pytest.raises(UserError, match="row_choice = random"):
        AdaptiveSVD(row_choice="random", **fields).check(make_task(synthetic([3, 4])))
