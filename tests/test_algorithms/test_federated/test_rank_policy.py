"""Which rank a SCoLR client takes, and what becomes of a client that affords none."""

import numpy as np
import pytest

from narrowcast.algorithms.client.sums import ROWS, TensorSum
from narrowcast.algorithms.federated.low_rank import SCoLR
from narrowcast.algorithms.federated.rank_policy import BandwidthRank, UniformRank
from narrowcast.platform.models.model import ITEM_FACTORS, USER_FACTORS
from narrowcast.platform.rounds.ledger import ChunkResult
from narrowcast.platform.rounds.loop import rounds
from narrowcast.platform.rounds.plan import Plan
from narrowcast.platform.rounds.state import Run
from narrowcast.platform.types import Chunk, Profiles
from per_client import Array, make_task, relative_error, synthetic
from running import begin, local

RANK = 8


def profiles(clients: Array, uplink: Array | None = None) -> Profiles:
    ones = np.ones(len(clients))
    return Profiles(clients, ones.astype(np.int64), ones if uplink is None else uplink, ones, ones)


def bits(n_clients: int, rank: int = RANK) -> Array:
    """100 bits, and 10 more for each component."""
    return np.broadcast_to(100 + 10 * np.arange(rank + 1), (n_clients, rank + 1))


@pytest.mark.parametrize("rank", [1, 2, 8, 64])
def test_uniform_ranks_are_uniform_over_one_to_r_g(rank: int) -> None:
    ranks = UniformRank().draw(np.arange(20_000), rank, seed=1, round_index=2)
    counts = np.bincount(ranks, minlength=rank + 1)
    assert counts[0] == 0
    assert len(counts) == rank + 1
    expected = 20_000 / rank
    assert ((counts[1:] - expected) ** 2).sum() / expected <= (rank - 1) + 5 * (2 * (rank - 1)) ** 0.5


def test_a_uniform_rank_follows_client_round_and_seed_alone() -> None:
    clients = np.array([5, 900, 17, 3])
    together = UniformRank().ranks(profiles(clients), RANK, bits(4), 1, 2)
    alone = [UniformRank().ranks(profiles(np.array([client])), RANK, bits(1), 1, 2)[0] for client in clients]
    assert together.tolist() == alone
    many = np.arange(100)
    drawn = [UniformRank().draw(many, RANK, *key).tolist() for key in ((1, 2), (1, 3), (2, 2), (1, 2))]
    assert drawn[0] == drawn[3]
    assert drawn[0] not in drawn[1:3]


@pytest.mark.parametrize("upload_seconds", [0.5, 1.0, 3.0])
def test_bandwidth_takes_the_highest_rank_within_the_budget(upload_seconds: float) -> None:
    uplink = np.random.default_rng(0).uniform(0, 250, 500) / upload_seconds
    weights = bits(500)
    policy = BandwidthRank(upload_seconds=upload_seconds)
    ranks = policy.ranks(profiles(np.arange(500), uplink), RANK, weights, seed=0, round_index=1)
    assert set(ranks) == set(range(RANK + 1))
    for client, rank in enumerate(ranks):
        budget = uplink[client] * upload_seconds
        assert rank == 0 or weights[client, rank] <= budget
        assert rank == RANK or weights[client, rank + 1] > budget


@pytest.mark.parametrize(("uplink", "rank"), [(109.99, 0), (110.0, 1), (119.99, 1), (120.0, 2), (180.0, 8), (1e9, 8)])
def test_bandwidth_at_the_edges(uplink: float, rank: int) -> None:
    assert BandwidthRank().ranks(profiles(np.arange(1), np.array([uplink])), RANK, bits(1), 0, 1).tolist() == [rank]


def train(algorithm: SCoLR, uplink: list[float], budget: Array | None = None) -> tuple[ChunkResult, Array]:
    data = synthetic([10, 20, 6, 14])
    task = make_task(data, uplink=np.array(uplink))
    users = task.model.init_clients(data, 0)
    broadcast = algorithm.broadcast(algorithm.init(task), task, 1).arrays
    return algorithm.train(broadcast, Chunk(1, 0, np.arange(4), users, budget), task), np.asarray(users[USER_FACTORS])


@pytest.mark.parametrize("rows", ["touched", "all"])
@pytest.mark.parametrize("aggregation", ["per_item_mean", "weighted"])
def test_what_is_sent_is_within_the_budget(aggregation: str, rows: str) -> None:
    algorithm = SCoLR(aggregation=aggregation, rows=rows, rank_policy=BandwidthRank())
    uplink = [3e3, 1.2e4, 50.0, 1e6]
    result, _ = train(algorithm, uplink)
    assert (result.ledger.uplink_bits <= uplink).all()
    assert result.ledger.rank[2:].tolist() == [0, 8]
    assert (result.ledger.uplink_bits == 0).tolist() == (result.ledger.rank == 0).tolist()


@pytest.mark.parametrize("budget", [None, np.full(4, 10**6)], ids=["no budget", "a budget"])
@pytest.mark.parametrize("aggregation", ["per_item_mean", "weighted"])
def test_a_client_that_affords_nothing_learns_but_is_not_counted(aggregation: str, budget: Array | None) -> None:
    algorithm = SCoLR(aggregation=aggregation, rank_policy=BandwidthRank())
    result, before = train(algorithm, [1e9, 50.0, 1e9, 1e9], budget)
    everyone, _ = train(algorithm, [1e9, 1e9, 1e9, 1e9])
    assert result.ledger.rank.tolist() == [8, 0, 8, 8]
    assert result.ledger.uplink_bits[1] == 0
    assert result.ledger.delivered.tolist() == [True, False, True, True]
    assert (result.state[USER_FACTORS] != before).any(axis=1).all()
    # Neither in the sum nor in the divisor: the total is that of the other three.
    task = make_task(synthetic([10, 20, 6, 14]), uplink=np.full(4, 1e9))
    users = {USER_FACTORS: before[[0, 2, 3]]}
    broadcast = algorithm.broadcast(algorithm.init(task), task, 1).arrays
    three = algorithm.train(broadcast, Chunk(1, 0, np.array([0, 2, 3]), users), task)
    assert relative_error(result.partial[ROWS], three.partial[ROWS]) <= 1e-6
    assert np.array_equal(result.partial["weight"], three.partial["weight"])
    assert not np.array_equal(everyone.partial["weight"], three.partial["weight"])


def test_such_a_client_trains_its_user_factors_with_items_held_still() -> None:
    result, before = train(SCoLR(rank_policy=BandwidthRank()), [1e9, 50.0, 1e9, 1e9])
    other, _ = train(SCoLR(rank_policy=BandwidthRank(), basis="gaussian"), [1e9, 50.0, 1e9, 1e9])
    assert not np.array_equal(result.state[USER_FACTORS][1], before[1])
    assert np.allclose(result.state[USER_FACTORS][1], other.state[USER_FACTORS][1], atol=1e-6)
    assert not np.allclose(result.state[USER_FACTORS][0], other.state[USER_FACTORS][0], atol=1e-6)


def test_a_round_in_which_nobody_affords_anything_leaves_the_model_alone() -> None:
    data = synthetic([10, 20, 6, 14])
    task = make_task(data, uplink=np.full(4, 50.0))
    algorithm = SCoLR(rank_policy=BandwidthRank())
    before = begin(algorithm, task)
    (outcome,) = rounds(Run(Plan(rounds=1, chunk_size=2), algorithm, task), local(algorithm, task), before)
    after, record, ledger = outcome.state, outcome.record, outcome.ledger
    assert after is not None
    assert (record.delivered, record.uplink_bits, record.mean_rank) == (0, 0, 0.0)
    assert not ledger.delivered.any()
    assert np.array_equal(after.server[ITEM_FACTORS], before.server[ITEM_FACTORS])
    assert (after.clients[USER_FACTORS] != algorithm.init_clients(task)[USER_FACTORS]).any(axis=1).all()
    assert not TensorSum.of({ROWS: np.zeros((3, 2)), "weight": np.zeros((3, 1))}).mean(ITEM_FACTORS).any()
