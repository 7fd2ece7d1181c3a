"""The batched program of matrix factorisation against the slow per-client reference."""

import numpy as np
import pytest
import torch

from cohorts import Cohort, random_cohort
from narrowcast.algorithms.client.sums import ROWS, TensorSum
from narrowcast.algorithms.federated.fedmf import FedMF
from narrowcast.algorithms.federated.low_rank import CoLR, SCoLR, draw_components
from narrowcast.algorithms.federated.rank_policy import BandwidthRank
from narrowcast.algorithms.local_training.factorisation import LocalResult, train_low_rank, train_rows
from narrowcast.algorithms.local_training.factorisation_kernels import Subspace
from narrowcast.algorithms.local_training.negatives import draw_batches
from narrowcast.platform.compiled import one_thread
from narrowcast.platform.contracts import Algorithm
from narrowcast.platform.models.model import ITEM_FACTORS, USER_FACTORS
from narrowcast.platform.rounds.ledger import ChunkResult
from narrowcast.platform.types import Chunk
from per_client import (
    Array,
    LowRankPart,
    Trained,
    make_task,
    relative_error,
    synthetic,
    train_cohort,
)
from sampling import sampled

FLOAT32_BOUND, FLOAT64_BOUND = 1e-6, 1e-12


ALGORITHMS: dict[str, Algorithm] = {
    "fedmf": FedMF(),
    "colr-orthonormal": CoLR(),
    "colr-gaussian": CoLR(basis="gaussian"),
    "scolr": SCoLR(rank_policy=BandwidthRank()),
}


@pytest.mark.parametrize("name", ALGORITHMS)
@pytest.mark.parametrize("case", sampled(range(20), range(5)))
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
        batches = draw_batches(task, chunk.clients, chunk.round_index)
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
    mean = TensorSum.of(result.partial).mean(ITEM_FACTORS)
    assert relative_error(mean, wanted.per_item_mean(delivered)) <= FLOAT32_BOUND
    assert relative_error(result.state[USER_FACTORS], wanted.user_factors) <= FLOAT32_BOUND
    assert relative_error(result.ledger.loss, wanted.loss) <= FLOAT32_BOUND


def batched(cohort: Cohort, low_rank: LowRankPart | None, touched: Array) -> Trained:
    """The batched program in float64, its rows scattered to each client's own matrix, in the order of the chunk."""
    task, chunk = cohort.task, cohort.chunk
    batches = draw_batches(task, chunk.clients, chunk.round_index)
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
        assert relative_error(other.partial[ROWS], results[0].partial[ROWS]) <= FLOAT32_BOUND
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
