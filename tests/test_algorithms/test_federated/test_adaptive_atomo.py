"""Adaptive ATOMO: what a client draws, how many bits that takes, and what arrives."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from chains import Array, codec, matrix, quantise, shapes_of
from digits import digits, make_task, run
from narrowcast.algorithms.channel.allocation import MinError
from narrowcast.algorithms.channel.regions import GaussianRegion, Independent
from narrowcast.algorithms.codecs.atomo import Atomo, Directions
from narrowcast.algorithms.codecs.budget import ClientEncoder
from narrowcast.algorithms.codecs.chain import Codec, UnsendableUpdateError
from narrowcast.algorithms.codecs.messages import CodedTensors, TensorUpdate
from narrowcast.algorithms.federated.adaptive_atomo import AdaptiveAtomo, best_draw, encode_drawn
from narrowcast.algorithms.federated.fedavg import FedAvg
from narrowcast.platform.models.networks import CNN
from narrowcast.platform.rounds.chunks import make_chunks
from narrowcast.platform.rounds.state import Population
from running import local

COUNTS = [21, 8, 40, 3, 17, 8, 0, 30]
FINE = codec(quantise(levels=2000, norms="column", rounding="dithered"), "entropy")
COARSE = codec(quantise(levels=8, norms="column", rounding="dithered", norm_type="bfloat16"), "entropy")
UPDATE: dict[str, Array] = {
    "0.kernel": matrix(16, 50, seed=1, decay=0.8).reshape(16, 2, 5, 5),
    "1.bias": np.linspace(-0.1, 0.1, 40, dtype=np.float32),
    "1.weight": matrix(40, 300, decay=0.85),
}
ENERGY = sum(float((values**2).sum()) for values in UPDATE.values())


def send(budget: float, key: int, most: int = 64) -> tuple[CodedTensors, int, dict[str, Array]] | None:
    in_any_order = dict(reversed(UPDATE.items()))
    encoder = ClientEncoder(COARSE, key, budget_bits=budget)
    encoded = encode_drawn(TensorUpdate(in_any_order, 7), encoder, max_rank=most)
    if encoded is None:
        return None
    payload, rank = encoded
    arrived = CodedTensors.from_bytes(payload.to_bytes())
    assert arrived == payload and payload.wire_bits() == 8 * len(payload.to_bytes())
    return payload, rank, dict(Codec((Atomo(rank=most), *COARSE.stages)).decode(arrived.coded, shapes_of(UPDATE), key))


@pytest.mark.parametrize("budget", [5000, 9000, 20000, 60000])
def test_budgets_are_kept_and_the_error_is_what_the_choice_expects(budget: int) -> None:
    directions = Directions.of(UPDATE, 64)
    chosen = best_draw(directions, np.array([40.0]), float(budget))
    assert chosen is not None
    p, levels = chosen
    rounding = directions.lengths.sum(axis=1) / (12 * levels**2)
    model = (directions.strength**2 * ((1 + rounding) / p - 1)).sum() / ENERGY
    errors, weights, ranks = [], [], []
    for key in range(60):
        sent = send(budget, key)
        assert sent is not None
        payload, rank, received = sent
        assert payload.wire_bits() <= budget
        weights.append(payload.wire_bits())
        ranks.append(rank)
        errors.append(sum(float(((received[name] - UPDATE[name]) ** 2).sum()) for name in UPDATE) / ENERGY)
    assert np.mean(weights) > 0.9 * budget
    assert np.mean(errors) == pytest.approx(model, rel=0.35)
    assert max(ranks) <= 40


@pytest.mark.slow
def test_the_draw_is_better_than_at_other_levels() -> None:
    """Each level of a coarse search is sent for real, with the probabilities that fill the budget at it."""
    directions, budget = Directions.of(UPDATE, 64), 12000.0

    def measured(levels: int | None) -> float:
        errors = []
        for key in range(25):
            if levels is None:
                sent = send(budget, key)
                assert sent is not None
                received = sent[2]
            else:
                total = 0.0
                for _ in range(30):  # as many directions as these levels have room for
                    p = directions.probabilities(directions.lengths.sum(axis=1), total + 100)
                    counts, factors = directions.draw(p, key)
                    values = {**factors, "1.bias": UPDATE["1.bias"]}
                    coded = COARSE.with_levels(levels).encode(values, key)
                    if 8 + 8 * len(counts) + coded.wire_bits() > budget:
                        break
                    total, best = total + 100, counts + coded.to_bytes()
                received = Codec((Atomo(), *COARSE.stages)).decode(best, shapes_of(UPDATE), key)
            errors.append(sum(float(((received[name] - UPDATE[name]) ** 2).sum()) for name in UPDATE))
        return float(np.mean(errors))

    assert measured(None) <= 1.1 * min(measured(levels) for levels in (6, 10, 16, 25, 40))


@pytest.mark.slow
def test_what_arrives_is_the_change_on_average() -> None:
    received = [sent[2] for key in range(150) if (sent := send(9000, key))]
    assert len(received) == 150
    flat = np.array([np.concatenate([each[name].ravel() for name in UPDATE]) for each in received], dtype=np.float64)
    wanted = np.concatenate([values.ravel() for values in UPDATE.values()])
    error_of_mean, mean_error = np.square(flat.mean(axis=0) - wanted).sum(), np.square(flat - wanted).sum(axis=1).mean()
    assert 150 * error_of_mean < 2 * mean_error  # a dozen rare directions decide it


def test_without_a_budget_the_strongest_are_sent_and_with_too_little_nothing() -> None:
    sent = send(np.inf, 0, most=3)
    assert sent is not None and sent[1] == 3
    assert all(
        np.linalg.matrix_rank(sent[2][name].reshape(len(sent[2][name]), -1)) == 3
        for name in UPDATE
        if "bias" not in name
    )
    assert send(300, 0) is None
    still = {name: np.zeros_like(values) for name, values in UPDATE.items()}
    encoder = ClientEncoder(COARSE, key=0, budget_bits=1e4)
    assert encode_drawn(TensorUpdate(still, 7), encoder, max_rank=4) is None
    with pytest.raises(UnsendableUpdateError):
        encode_drawn(TensorUpdate({**UPDATE, "1.bias": UPDATE["1.bias"] * np.nan}, 7), encoder, max_rank=4)


def test_with_all_directions_and_fine_levels_it_is_fedavg() -> None:
    task = make_task(digits(COUNTS, images=True), CNN(channels=(4, 8), hidden=16))
    plain = run(FedAvg(), task, n_rounds=2)
    own = AdaptiveAtomo(rank=32, codec=FINE.stages)
    got = own.final(run(own, task, n_rounds=2).server)
    start = FedAvg().init(task)
    for name, values in plain.server.items():
        moved = np.abs(values - start[name]).max()
        assert np.abs(got[name] - values).max() < 0.01 * moved


def test_a_clients_rank_follows_its_budget() -> None:
    task = make_task(digits(COUNTS, images=True), CNN(channels=(4, 8), hidden=16))
    algorithm = AdaptiveAtomo(rank=16, codec=COARSE.stages)
    server = algorithm.init(task)
    broadcast = algorithm.broadcast(server, task, 1)
    population = Population.fresh(algorithm.init_clients(task), 8)
    (chunk,) = make_chunks(np.arange(8), task.data.examples, 100, 1, population)
    budget = np.array([60000, 20000, 9000, 4000, 500, 0, 9000, 9000])[chunk.clients]
    (result,) = local(algorithm, task).train(broadcast.arrays, [replace(chunk, budget_bits=budget)])
    ledger = result.ledger
    assert (ledger.uplink_bits <= budget).all()
    (rich,) = local(algorithm, task).train(broadcast.arrays, [replace(chunk, budget_bits=10 * budget)])
    assert (rich.ledger.rank >= ledger.rank).all() and rich.ledger.rank.sum() > ledger.rank.sum()
    assert sorted(ledger.client[~ledger.delivered]) == [4, 5, 6]
    assert (ledger.rank > 0).tolist() == ledger.delivered.tolist() == (ledger.uplink_bits > 0).tolist()
    again = algorithm.broadcast(algorithm.step(server, broadcast.arrays, result.partial, task, 1), task, 2)
    whole = FedAvg().broadcast(FedAvg().init(task), task, 2)
    assert again.update is not None and again.update.wire_bits() == whole.full.wire_bits()


def test_a_fixed_fraction_is_what_the_codec_sends_or_nothing() -> None:
    task = make_task(digits(COUNTS, images=True), CNN(channels=(4, 8), hidden=16))
    fixed = AdaptiveAtomo(rank=16, fraction=0.1, codec=COARSE.stages, informs_allocation=True)
    rival = FedAvg(codec=(Atomo(rank=16, fraction=0.1), *COARSE.stages))
    broadcast, population = FedAvg().init(task), Population.fresh(fixed.init_clients(task), 8)
    (chunk,) = make_chunks(np.arange(8), task.data.examples, 100, 1, population)
    (free,) = local(fixed, task).train(broadcast, [chunk])
    (same,) = local(rival, task).train(broadcast, [chunk])
    assert np.array_equal(free.ledger.uplink_bits, same.ledger.uplink_bits)
    short = chunk.clients % 2
    (result,) = local(fixed, task).train(broadcast, [replace(chunk, budget_bits=free.ledger.uplink_bits - short)])
    assert np.array_equal(result.ledger.uplink_bits, np.where(short, 0, free.ledger.uplink_bits))
    told = fixed.rate_distortion(task, chunk.clients)
    assert told is not None
    sent = free.ledger.uplink_bits > 0
    assert (free.ledger.uplink_bits <= told.least_bits)[sent].all()
    assert (free.ledger.uplink_bits > 0.5 * told.least_bits)[sent].all()


def test_the_allocation_gives_more_to_clients_with_more_examples() -> None:
    task = make_task(digits(COUNTS, images=True), CNN(channels=(4, 8), hidden=16))
    assert AdaptiveAtomo().rate_distortion(task, np.arange(8)) is None
    told = AdaptiveAtomo(informs_allocation=True).rate_distortion(task, np.arange(8))
    assert told is not None
    region = Independent(np.full(8, 1e9))
    assert (MinError().bits(region, 1.0, told.least_bits, None, told.errors) >= told.errors.max_bits()).all()
    band = GaussianRegion(np.full(8, 3.0), 1.0)
    seconds = 4 * told.least_bits.sum() / band.capacity_of(np.arange(8))
    bits = MinError().bits(band, seconds, told.least_bits, None, told.errors)
    assert (bits >= told.least_bits).all()
    assert (np.diff(bits[np.argsort(COUNTS, kind="stable")]) >= -0.1 * told.least_bits[1:]).all()
