"""The batched program against the slow reference, and what its batches are made of."""

from dataclasses import dataclass
from functools import cache

import numpy as np
import pytest
import torch

from narrowcast.algorithms.federated.colr import CoLR
from narrowcast.algorithms.federated.fedmf import FedMF
from narrowcast.algorithms.federated.rank_policy import BandwidthRank
from narrowcast.algorithms.federated.row_updates import mean_change
from narrowcast.algorithms.federated.scolr import SCoLR, draw_components
from narrowcast.algorithms.local_training.batches import draw_batches
from narrowcast.algorithms.local_training.factorisation import LocalResult, train_low_rank, train_rows
from narrowcast.algorithms.local_training.factorisation_sgd import FactorisationSGD
from narrowcast.algorithms.local_training.subspace import Subspace
from narrowcast.platform.contracts import Algorithm, Task
from narrowcast.platform.data.interactions import Interactions
from narrowcast.platform.data.movielens import MovieLens100K
from narrowcast.platform.models.matrix_factorisation import ITEM_FACTORS, USER_FACTORS
from narrowcast.platform.threads import one_thread
from narrowcast.platform.types import Chunk, ChunkResult
from per_client import (
    Array,
    LowRankPart,
    Trained,
    client_batches,
    make_task,
    relative_error,
    synthetic,
    train_cohort,
)

FLOAT32_BOUND, FLOAT64_BOUND = 1e-6, 1e-12


@cache
def ml_100k() -> Interactions:
    return MovieLens100K().load()


@dataclass(frozen=True)
class Cohort:
    """A chunk of random clients in a random round, ready to be trained."""

    task: Task
    chunk: Chunk
    item_factors: Array


def random_cohort(case: int) -> Cohort:
    """The settings go through all pairs; few clients where batches are small, as the reference takes its time."""
    random = np.random.default_rng(case)
    batch_size = (7, 64, 256)[case % 3]
    data = ml_100k()
    clients = np.sort(random.choice(data.n_users, random.integers(1, 61 if batch_size > 7 else 13), replace=False))
    task = make_task(
        data,
        dimension=64,
        seed=int(random.integers(2**62)),
        # so that `bandwidth` gives ranks from 0 to r_g: a touched row of rank 8 weighs 256 bits
        uplink=random.uniform(0, 300 * 5 * data.examples),
        batch_size=batch_size,
        epochs=1 + case % 7 % 3,
        weight_decay=(5e-4, 0.0)[case % 2],
        train_negatives=("clean", "leaky")[case % 5 % 2],
    )
    users = task.model.init_clients(data, task.seed)[USER_FACTORS][clients]
    item_factors = task.model.init_server(data, task.seed)[ITEM_FACTORS]
    return Cohort(task, Chunk(int(random.integers(1, 1000)), 0, clients, {USER_FACTORS: users}), item_factors)


ALGORITHMS: dict[str, Algorithm] = {
    "fedmf": FedMF(),
    "colr-orthonormal": CoLR(),
    "colr-gaussian": CoLR(basis="gaussian"),
    "scolr": SCoLR(rank_policy=BandwidthRank()),
}


@pytest.mark.parametrize("name", ALGORITHMS)
@pytest.mark.parametrize("case", range(20))
def test_batched_program_equals_the_per_client_reference(case: int, name: str) -> None:
    cohort, algorithm = random_cohort(case), ALGORITHMS[name]
    task, chunk = cohort.task, cohort.chunk
    with one_thread():
        broadcast = algorithm.broadcast(algorithm.init(task), task, chunk.round_index).arrays
        result = algorithm.train(broadcast, chunk, task)
        low_rank = None
        if "basis" in broadcast:
            rank = len(broadcast["basis"])
            components = draw_components(result.ledger.rank, rank, chunk.clients, task.seed, chunk.round_index)
            low_rank = LowRankPart(np.asarray(broadcast["basis"]), components)
        batches = draw_batches(task.data, chunk.clients, task.training, task.seed, chunk.round_index)
        wanted = train_cohort(
            cohort.item_factors, np.asarray(chunk.state[USER_FACTORS]), batches, task.training, low_rank
        )
        in_float64 = batched(cohort, low_rank, wanted.touched)
    compare_float32(result, wanted)
    assert relative_error(in_float64.changes, wanted.changes) <= FLOAT64_BOUND
    assert relative_error(in_float64.user_factors, wanted.user_factors) <= FLOAT64_BOUND
    assert relative_error(in_float64.loss, wanted.loss) <= 1e-10  # torch's softplus is linear above 20


def compare_float32(result: ChunkResult, wanted: Trained) -> None:
    delivered = result.ledger.delivered
    assert (delivered == (result.ledger.rank > 0)).all()
    assert relative_error(mean_change(result.partial), wanted.per_item_mean(delivered)) <= FLOAT32_BOUND
    assert relative_error(result.state[USER_FACTORS], wanted.user_factors) <= FLOAT32_BOUND
    assert relative_error(result.ledger.loss, wanted.loss) <= FLOAT32_BOUND


def batched(cohort: Cohort, low_rank: LowRankPart | None, touched: Array) -> Trained:
    """The batched program in float64, its rows scattered to each client's own matrix, in the order of the chunk."""
    task, chunk = cohort.task, cohort.chunk
    batches = draw_batches(task.data, chunk.clients, task.training, task.seed, chunk.round_index)
    item_factors = torch.from_numpy(cohort.item_factors).double()
    users = torch.from_numpy(np.asarray(chunk.state[USER_FACTORS])[batches.order]).double()
    result: LocalResult
    if low_rank is None:
        result = train_rows(item_factors, users, batches, task.training)
    else:
        subspace = Subspace(low_rank.basis, low_rank.components[batches.order])
        result = train_low_rank(item_factors, users, subspace, batches, task.training)
    assert {result.row_changes.dtype, result.user_factors.dtype, result.loss.dtype} == {torch.float64}
    changes = np.zeros((*touched.shape, result.row_changes.shape[1]))
    client_of_row = np.repeat(batches.order, np.diff(batches.row_starts))
    changes[client_of_row, batches.row_items] = result.row_changes
    back = np.argsort(batches.order)
    return Trained(result.user_factors.numpy()[back], changes, touched, result.loss.numpy()[back])


def test_the_cohorts_of_the_comparison_are_as_varied_as_they_claim() -> None:
    cohorts = [random_cohort(case) for case in range(20)]
    settings = {(c.task.training.batch_size, c.task.training.epochs) for c in cohorts}
    assert settings == {(size, epochs) for size in (7, 64, 256) for epochs in (1, 2, 3)}
    ranks = [ALGORITHMS["scolr"].train(first_broadcast(c), c.chunk, c.task).ledger.rank for c in cohorts[1:3]]
    assert set(np.concatenate(ranks)) == set(range(9))


def first_broadcast(cohort: Cohort) -> dict[str, Array]:
    scolr = ALGORITHMS["scolr"]
    return dict(scolr.broadcast(scolr.init(cohort.task), cohort.task, 1).arrays)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_padding_changes_nothing(name: str) -> None:
    algorithm, data = ALGORITHMS[name], synthetic([3, 20, 1, 11])
    clients = np.arange(4)
    results = []
    for batch_size in (100, 101, 4096):  # the largest client has 100 samples: one batch each
        task = make_task(data, batch_size=batch_size)
        state = {USER_FACTORS: task.model.init_clients(data, 0)[USER_FACTORS]}
        broadcast = algorithm.broadcast(algorithm.init(task), task, 1)
        results.append(algorithm.train(broadcast.arrays, Chunk(1, 0, clients, state), task))
    for other in results[1:]:
        assert relative_error(other.partial["sum"], results[0].partial["sum"]) <= FLOAT32_BOUND
        assert relative_error(other.state[USER_FACTORS], results[0].state[USER_FACTORS]) <= FLOAT32_BOUND
        assert relative_error(other.ledger.loss, results[0].ledger.loss) <= FLOAT32_BOUND
        assert np.array_equal(other.partial["weight"], results[0].partial["weight"])
        assert np.array_equal(other.ledger.uplink_bits, results[0].ledger.uplink_bits)


@pytest.mark.parametrize("name", ALGORITHMS)
@pytest.mark.parametrize("bad", range(5))
def test_a_diverged_client_leaves_the_others_of_its_chunk_alone(bad: int, name: str) -> None:
    algorithm, data = ALGORITHMS[name], synthetic([20, 3, 11, 20, 7])
    task = make_task(data)
    broadcast = algorithm.broadcast(algorithm.init(task), task, 1)
    results = []
    for value in (0.5, np.nan):
        users = np.array(task.model.init_clients(data, 0)[USER_FACTORS])
        users[bad] = value
        results.append(algorithm.train(broadcast.arrays, Chunk(1, 0, np.arange(5), {USER_FACTORS: users}), task))
    healthy, sick = results
    others = np.arange(5) != bad
    assert np.array_equal(sick.ledger.delivered, others)
    assert np.array_equal(sick.state[USER_FACTORS][others], healthy.state[USER_FACTORS][others])
    assert np.array_equal(sick.ledger.loss[others], healthy.ledger.loss[others])
    assert np.isnan(sick.state[USER_FACTORS][bad]).all()
    assert all(np.isfinite(values).all() for values in sick.partial.values())


@pytest.mark.parametrize("train_negatives", ["clean", "leaky"])
def test_batches_do_not_depend_on_company(train_negatives: str) -> None:
    training = FactorisationSGD(batch_size=32, train_negatives=train_negatives)
    clients = np.sort(np.random.default_rng(1).choice(943, 40, replace=False))
    together = client_batches(draw_batches(ml_100k(), clients, training, seed=5, round_index=9))
    for client, steps in zip(clients, together, strict=True):
        (alone,) = client_batches(draw_batches(ml_100k(), np.array([client]), training, seed=5, round_index=9))
        assert len(alone) == len(steps)
        for mine, theirs in zip(alone, steps, strict=True):
            assert np.array_equal(mine[0], theirs[0])
            assert np.array_equal(mine[1], theirs[1])


@pytest.mark.parametrize(("batch_size", "epochs", "negatives"), [(7, 3, 4), (64, 2, 1), (256, 1, 4), (16, 2, 0)])
def test_each_epoch_visits_each_sample_once(batch_size: int, epochs: int, negatives: int) -> None:
    training = FactorisationSGD(batch_size=batch_size, epochs=epochs, negatives=negatives)
    data, clients = ml_100k(), np.array([3, 12, 500, 942])
    batches = draw_batches(data, clients, training, seed=1, round_index=2)
    for client, steps in zip(clients, client_batches(batches), strict=True):
        own = data.items[data.indptr[client] : data.indptr[client + 1]]
        per_epoch = len(steps) // epochs
        visited = []
        for epoch in range(epochs):
            part = steps[epoch * per_epoch : (epoch + 1) * per_epoch]
            assert [len(items) for items, _ in part[:-1]] == [batch_size] * (per_epoch - 1)
            items, labels = (np.concatenate(column) for column in zip(*part, strict=True))
            assert np.array_equal(np.sort(items[labels]), own)
            assert len(items) == len(own) * (1 + negatives)
            visited.append((np.sort(items).tolist(), items.tolist()))
        assert len({str(same) for same, _ in visited}) == 1
        assert len({str(order) for _, order in visited}) == epochs  # shuffled anew
    assert np.array_equal(batches.samples, data.examples[clients[batches.order]] * (1 + negatives))


def negatives_of(data: Interactions, training: FactorisationSGD, round_index: int) -> list[Array]:
    steps = client_batches(draw_batches(data, np.arange(data.n_users), training, seed=3, round_index=round_index))
    return [np.concatenate([items[~labels] for items, labels in each]) for each in steps]


@pytest.mark.parametrize("train_negatives", ["clean", "leaky"])
def test_what_is_never_a_negative(train_negatives: str) -> None:
    data = synthetic([5, 30, 12, 140], n_items=150, n_negatives=20)
    training = FactorisationSGD(epochs=1, negatives=40, train_negatives=train_negatives)
    for user, drawn in enumerate(negatives_of(data, training, 1)):
        own = set(data.items[data.indptr[user] : data.indptr[user + 1]])
        held_out = {data.test[user], data.validation[user], *data.negatives[user]}
        never = own | held_out | (set(range(data.n_items)) - set(data.items)) if train_negatives == "leaky" else own
        allowed = set(range(data.n_items)) - never
        assert set(drawn) <= allowed
        if len(drawn) > 20 * len(allowed):
            assert set(drawn) == allowed  # held-out items too, where they are clean
    assert len(set(data.items)) < data.n_items


def chi_square_deviations(counts: Array) -> float:
    """How many of its standard deviations the statistic of a uniform draw lies above its mean."""
    expected, freedom = counts.sum() / len(counts), len(counts) - 1
    return float((((counts - expected) ** 2).sum() / expected - freedom) / (2 * freedom) ** 0.5)


def test_negatives_are_uniform_over_the_allowed_items() -> None:
    data = synthetic([10, 10, 10], n_items=60)
    training = FactorisationSGD(epochs=1, negatives=2000)
    for user, drawn in enumerate(negatives_of(data, training, 1)):
        counts = np.bincount(drawn, minlength=60)
        allowed = np.setdiff1d(np.arange(60), data.items[10 * user : 10 * user + 10])
        assert len(drawn) == 20_000
        assert abs(chi_square_deviations(counts[allowed])) < 4
    assert chi_square_deviations(np.append(counts[allowed], 0)) > 30  # the statistic does see a missing item


def test_shuffles_are_uniform() -> None:
    data = synthetic([4], n_items=60)
    training = FactorisationSGD(epochs=1, negatives=4, batch_size=256)
    counts = np.zeros(20)
    for round_index in range(1, 1001):
        ((_, labels),) = client_batches(draw_batches(data, np.array([0]), training, 0, round_index))[0]
        counts[np.flatnonzero(labels)] += 1
    assert counts.sum() == 4000
    assert abs(chi_square_deviations(counts)) < 4


def test_negatives_differ_between_rounds_and_stay_over_the_epochs() -> None:
    data, training = synthetic([20, 20]), FactorisationSGD(epochs=2)
    first, again, other = (negatives_of(data, training, round_index) for round_index in (1, 1, 2))
    assert np.array_equal(first[0], again[0])
    assert sorted(first[0]) != sorted(other[0])
    assert sorted(first[0]) != sorted(first[1])
    assert sorted(first[0][:80]) == sorted(first[0][80:])


@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_client_that_knows_every_item_trains_without_negatives(name: str) -> None:
    data, algorithm = synthetic([150, 10]), ALGORITHMS[name]
    task = make_task(data)
    users = task.model.init_clients(data, 0)
    broadcast = algorithm.broadcast(algorithm.init(task), task, 1)
    result = algorithm.train(broadcast.arrays, Chunk(1, 0, np.arange(2), users), task)
    assert result.ledger.examples.tolist() == [2 * 150, 2 * 50]
    assert np.isfinite(result.state[USER_FACTORS]).all()
    assert (result.state[USER_FACTORS] != users[USER_FACTORS]).any(axis=1).all()
    assert 0 < result.ledger.loss[0] < 1
