"""What must hold between the algorithms, inside an aggregate, and at the edges of every size."""

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from narrowcast.algorithms.client.sums import ROWS, TensorSum
from narrowcast.algorithms.codecs.low_rank import draw_basis
from narrowcast.algorithms.codecs.quantise import Quantise
from narrowcast.algorithms.federated.fedmf import FedMF
from narrowcast.algorithms.federated.low_rank import CoLR, SCoLR, basis_seed, draw_components
from narrowcast.algorithms.federated.rank_policy import BandwidthRank
from narrowcast.platform.contracts import Algorithm, Executor, Task
from narrowcast.platform.errors import UserError
from narrowcast.platform.models.model import ITEM_FACTORS, USER_FACTORS
from narrowcast.platform.rounds.chunks import make_chunks
from narrowcast.platform.rounds.evaluation import model_sha256
from narrowcast.platform.rounds.ledger import ChunkResult
from narrowcast.platform.rounds.loop import rounds
from narrowcast.platform.rounds.plan import Plan
from narrowcast.platform.rounds.state import Population, Run, RunState
from narrowcast.platform.types import Arrays, LocalUpdates
from per_client import Array, make_task, relative_error, synthetic
from running import begin, local

EXAMPLES = [3, 20, 1, 11, 8, 30, 2, 15, 15, 6]
EVERYTHING = BandwidthRank(upload_seconds=1e9)


def run(algorithm: Algorithm, task: Task, *, n_rounds: int = 1, clients: int = 10, chunk_size: int = 4) -> RunState:
    plan = Plan(seed=task.seed, rounds=n_rounds, clients_per_round=clients, chunk_size=chunk_size)
    last = list(rounds(Run(plan, algorithm, task), local(algorithm, task)))[-1].state
    assert last is not None
    return last


def train(algorithm: Algorithm, task: Task, cohort: Array, chunk_size: int = 4) -> list[ChunkResult]:
    broadcast = algorithm.broadcast(algorithm.init(task), task, 1).arrays
    population = Population.fresh(algorithm.init_clients(task), task.data.n_clients)
    return local(algorithm, task).train(broadcast, make_chunks(cohort, task.data.examples, chunk_size, 1, population))


def fold(results: list[ChunkResult]) -> Arrays:
    return FedMF().fold([result.partial for result in results])


@pytest.mark.parametrize("weight_decay", [0.0, 5e-4, 0.05])
@pytest.mark.parametrize("aggregation", ["per_item_mean", "weighted"])
def test_full_rank_scolr_is_fedmf(weight_decay: float, aggregation: str) -> None:
    # With r = d the orthonormal basis has B^T B = I, so the change A B takes FedMF's steps, weight decay included.
    task = make_task(synthetic(EXAMPLES), dimension=16, weight_decay=weight_decay)
    fedmf = run(FedMF(aggregation=aggregation), task)
    scolr = run(SCoLR(rank=16, rank_policy=EVERYTHING, aggregation=aggregation), task)
    before = task.model.init_server(task.data, 0)[ITEM_FACTORS]
    assert relative_error(scolr.server[ITEM_FACTORS], fedmf.server[ITEM_FACTORS]) <= 1e-5
    assert relative_error(scolr.server[ITEM_FACTORS] - before, fedmf.server[ITEM_FACTORS] - before) <= 1e-5
    assert relative_error(scolr.clients[USER_FACTORS], fedmf.clients[USER_FACTORS]) <= 1e-5


def test_full_rank_scolr_is_not_fedmf_on_a_gaussian_basis() -> None:
    task = make_task(synthetic(EXAMPLES), dimension=16)
    fedmf, scolr = run(FedMF(), task), run(SCoLR(rank=16, rank_policy=EVERYTHING, basis="gaussian"), task)
    assert relative_error(scolr.server[ITEM_FACTORS], fedmf.server[ITEM_FACTORS]) > 1e-2


@pytest.mark.parametrize("basis", ["orthonormal", "gaussian"])
@pytest.mark.parametrize("rank", [1, 3, 8])
def test_colr_is_scolr_where_everyone_trains_every_component(rank: int, basis: str) -> None:
    task = make_task(synthetic(EXAMPLES))
    colr = run(CoLR(rank=rank, basis=basis), task, n_rounds=3)
    scolr = run(SCoLR(rank=rank, basis=basis, rank_policy=EVERYTHING), task, n_rounds=3)
    assert model_sha256(CoLR(), colr) == model_sha256(SCoLR(), scolr)
    assert colr.uplink_bits == scolr.uplink_bits


@pytest.mark.parametrize("algorithm", [FedMF, CoLR, SCoLR])
def test_weighted_with_equal_sizes_is_the_plain_mean(algorithm: type[FedMF | CoLR | SCoLR]) -> None:
    task = make_task(synthetic([12] * 6))
    results = [train(algorithm(aggregation=name), task, np.arange(6)) for name in ("weighted", "per_item_mean")]
    weighted, per_item = (fold(each) for each in results)
    assert weighted["weight"].tolist() == [[6 * 12]]
    assert relative_error(TensorSum.of(weighted).mean(ITEM_FACTORS), per_item[ROWS] / 6) <= 1e-6


def test_weighted_follows_the_clients_examples() -> None:
    task = make_task(synthetic([5, 20]))
    alone = [TensorSum.of(fold(train(FedMF(), task, np.array([client])))).mean(ITEM_FACTORS) for client in (0, 1)]
    together = TensorSum.of(fold(train(FedMF(aggregation="weighted"), task, np.arange(2)))).mean(ITEM_FACTORS)
    assert relative_error(together, (5 * alone[0] + 20 * alone[1]) / 25) <= 1e-6


@pytest.mark.parametrize("algorithm", [FedMF(), CoLR(), SCoLR()], ids=lambda each: each.kind)
def test_per_item_mean_of_one_client_is_its_own_change(algorithm: FedMF | CoLR | SCoLR) -> None:
    task = make_task(synthetic(EXAMPLES))
    for client in (1, 2):
        total = fold(train(algorithm, task, np.array([client])))
        assert set(np.unique(total["weight"])) == {0.0, 1.0}
        assert np.array_equal(TensorSum.of(total).mean(ITEM_FACTORS), total[ROWS])


@pytest.mark.parametrize("codec", [(), (Quantise(levels=15),)])
@pytest.mark.parametrize("method", [FedMF, CoLR, SCoLR])
def test_clients_without_rows_pay_for_an_empty_list_and_change_no_sum(method: Any, codec: Any) -> None:
    task, algorithm = make_task(synthetic([0, 12, 0, 3])), method(codec=codec)
    (together,), apart = train(algorithm, task, np.arange(4)), train(algorithm, task, np.array([1, 3]))
    ledger = together.ledger
    assert ledger.delivered.all()
    assert 0 < ledger.uplink_bits[0] == ledger.uplink_bits[2] < ledger.uplink_bits[3] < ledger.uplink_bits[1]
    assert ledger.uplink_bits[[1, 3]].tolist() == apart[0].ledger.uplink_bits.tolist()
    for name, values in fold(apart).items():
        assert np.array_equal(together.partial[name], values), name


@pytest.mark.parametrize("method", [FedMF, CoLR])
def test_an_upload_of_exactly_its_budget_is_in_the_sum(method: type[FedMF | CoLR]) -> None:
    """The training adds rows up before they are sent, by the sizes that they will have."""
    task, algorithm = make_task(synthetic([12, 9, 20])), method()
    (free,) = train(algorithm, task, np.arange(3))
    population = Population.fresh(algorithm.init_clients(task), task.data.n_clients)
    (chunk,) = make_chunks(np.arange(3), task.data.examples, 4, 1, population)
    limited = replace(chunk, budget_bits=free.ledger.uplink_bits - np.array([0, 1, 0]))
    result = algorithm.train(algorithm.broadcast(algorithm.init(task), task, 1).arrays, limited, task)
    assert result.ledger.delivered.tolist() == [True, False, True]
    (wanted,) = train(algorithm, task, np.array([0, 2]))
    for name, values in wanted.partial.items():
        assert np.array_equal(result.partial[name], values), name


def attacked(method: type[FedMF | CoLR | SCoLR], factor: float) -> Any:
    """Return the method with a client 0 that claims so many times what it has learnt."""

    def tamper(*arguments: Any) -> LocalUpdates:
        *_, chunk, _, updates = arguments
        return updates.scaled(np.where(chunk.clients == 0, factor, 1.0))

    return type("Attacked", (method,), {"__module__": __name__, "tamper": tamper})


@pytest.mark.parametrize("method", [FedMF, CoLR, SCoLR])
@pytest.mark.parametrize("aggregation", ["per_item_mean", "per_component_mean", "weighted"])
def test_attackers_of_item_rows_pay_what_all_do(method: type[FedMF | CoLR | SCoLR], aggregation: str) -> None:
    """The sum of two clients is the sum of what each sends alone, of the attacker -2 times that, or nothing if NaN."""
    task, both = make_task(synthetic([20, 5, 30])), np.array([2, 0])
    honest = train(method(aggregation=aggregation), task, both)
    first, other = (fold(train(method(aggregation=aggregation), task, np.array([client]))) for client in (0, 2))
    for factor, counts in ((-2.0, 1.0), (np.nan, 0.0)):
        results = train(attacked(method, factor)(aggregation=aggregation), task, both)
        total = fold(results)
        claimed = factor * first[ROWS] if counts else np.zeros_like(first[ROWS])
        assert relative_error(total[ROWS], claimed + other[ROWS]) <= 1e-6
        assert np.array_equal(total["weight"], other["weight"] + counts * first["weight"])
        for got, wanted in zip(results, honest, strict=True):
            assert np.array_equal(got.ledger.uplink_bits, wanted.ledger.uplink_bits)
            assert np.array_equal(got.ledger.loss, wanted.ledger.loss)


SHAPES = [(1, 1), (1, 8), (4, 8), (8, 8), (1, 64), (4, 64), (64, 64), (7, 65), (128, 128)]


@pytest.mark.parametrize(("rank", "dimension"), SHAPES)
def test_orthonormal_basis_has_orthogonal_rows_of_norm_sqrt_d_over_r(rank: int, dimension: int) -> None:
    basis = draw_basis("orthonormal", rank, dimension, seed=7).astype(np.float64)
    assert basis.shape == (rank, dimension)
    assert np.allclose(basis @ basis.T, np.eye(rank) * dimension / rank, rtol=0, atol=2e-6 * dimension / rank)


@pytest.mark.parametrize(("rank", "dimension"), SHAPES)
def test_gaussian_basis_has_entries_of_variance_one_over_r(rank: int, dimension: int) -> None:
    draws = np.stack([draw_basis("gaussian", rank, dimension, seed) for seed in range(2000 // dimension + 2)])
    assert draws.shape[1:] == (rank, dimension)
    scaled = draws.astype(np.float64) * rank**0.5
    assert abs(scaled.mean()) < 5 / scaled.size**0.5
    assert abs(scaled.var() - 1) < 5 * (2 / scaled.size) ** 0.5


@pytest.mark.parametrize("kind", ["orthonormal", "gaussian"])
@pytest.mark.parametrize("rank", [1, 3, 6])
def test_mean_of_basis_squared_is_the_identity(rank: int, kind: str) -> None:
    bases = [draw_basis(kind, rank, 6, seed).astype(np.float64) for seed in range(4000)]
    squared = np.stack([basis.T @ basis for basis in bases])
    standard_error = np.maximum(squared.std(axis=0) / len(bases) ** 0.5, 1e-7)
    assert (np.abs(squared.mean(axis=0) - np.eye(6)) / standard_error).max() < 5


def test_the_basis_follows_seed_and_round() -> None:
    seeds = [basis_seed(seed, round_index) for seed in range(5) for round_index in range(1, 6)]
    assert len(set(seeds)) == 25
    assert basis_seed(3, 4) == basis_seed(3, 4)
    for kind in ("orthonormal", "gaussian"):
        bases = [draw_basis(kind, 2, 8, seed) for seed in seeds]
        assert np.array_equal(bases[0], draw_basis(kind, 2, 8, seeds[0]))
        assert not any(np.allclose(one, other) for one, other in itertools.combinations(bases, 2))


def test_components_are_as_many_as_asked_for_and_uniform() -> None:
    clients, rank = np.arange(30_000), 6
    ranks = clients % (rank + 1)
    components = draw_components(ranks, rank, clients, seed=2, round_index=3)
    assert np.array_equal(components.sum(axis=1), ranks)
    for size in range(1, rank):
        subsets, counts = np.unique(components[ranks == size], axis=0, return_counts=True)
        expected, freedom = counts.mean(), len(subsets) - 1
        assert len(subsets) == len(list(itertools.combinations(range(rank), size)))
        assert ((counts - expected) ** 2).sum() / expected < freedom + 5 * (2 * freedom) ** 0.5


def test_components_do_not_depend_on_company_and_change_with_round_and_seed() -> None:
    clients = np.array([4, 99, 7])
    ranks = np.array([4, 4, 4])
    together = draw_components(ranks, 8, clients, 1, 1)
    for row, client in enumerate(clients):
        assert np.array_equal(draw_components(ranks[:1], 8, np.array([client]), 1, 1)[0], together[row])
    assert not np.array_equal(draw_components(ranks, 8, clients, 1, 2), together)
    assert not np.array_equal(draw_components(ranks, 8, clients, 2, 1), together)


@pytest.mark.parametrize("dimension", [1, 2, 8, 64, 128])
def test_every_dimension_and_its_extreme_ranks_run(dimension: int) -> None:
    task = make_task(synthetic(EXAMPLES), dimension=dimension)
    for algorithm in (FedMF(), *(kind(rank=rank) for kind in (CoLR, SCoLR) for rank in {1, dimension})):
        algorithm.check(task)
        state = run(algorithm, task, n_rounds=2)
        assert np.isfinite(state.server[ITEM_FACTORS]).all()
        assert np.isfinite(state.clients[USER_FACTORS]).all()
        assert not np.array_equal(state.server[ITEM_FACTORS], begin(algorithm, task).server[ITEM_FACTORS])


@pytest.mark.parametrize("kind", [CoLR, SCoLR])
def test_a_rank_above_the_dimension_is_a_user_error(kind: type[CoLR | SCoLR]) -> None:
    with pytest.raises(UserError, match=r"algorithm\.rank = 9 is above model\.embedding_dim = 8") as caught:
        kind(rank=9).check(make_task(synthetic(EXAMPLES)))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("algorithm", [FedMF(), CoLR(), SCoLR()], ids=lambda each: each.kind)
@pytest.mark.parametrize(
    ("n_users", "clients", "n_rounds", "chunk_size"),
    [(10, 1000, 2, 30), (10, 1000, 2, 1), (10, 1, 2, 30), (1, 1, 2, 1), (1, 60, 1, 30), (10, 3, 1, 2)],
    ids=["more-clients-than-users", "chunks-of-one", "one-client", "one-user", "one-user-asked-for-60", "one-round"],
)
def test_extreme_sizes_run(algorithm: Algorithm, n_users: int, clients: int, n_rounds: int, chunk_size: int) -> None:
    task = make_task(synthetic(EXAMPLES[:n_users]))
    state = run(algorithm, task, n_rounds=n_rounds, clients=clients, chunk_size=chunk_size)
    assert state.round_index == n_rounds
    assert len(state.participants) == min(n_users, clients * n_rounds)
    assert np.isfinite(state.server[ITEM_FACTORS]).all()


@pytest.mark.parametrize("algorithm", [FedMF(), CoLR(), SCoLR()], ids=lambda each: each.kind)
def test_the_order_of_a_cohort_changes_nothing(algorithm: Algorithm) -> None:
    task = make_task(synthetic(EXAMPLES))
    wanted = train(algorithm, task, np.arange(10))
    for order in (np.arange(10)[::-1], np.random.default_rng(0).permutation(10)):
        for one, other in zip(train(algorithm, task, order), wanted, strict=True):
            assert_same(one, other)


def assert_same(one: ChunkResult, other: ChunkResult) -> None:
    assert one.index == other.index
    for mine, theirs in (
        (one.partial, other.partial),
        (one.state, other.state),
        (vars(one.ledger), vars(other.ledger)),
    ):
        assert mine.keys() == theirs.keys()
        for name in mine:
            assert np.array_equal(mine[name], theirs[name])


class OutOfOrder(Executor):
    """Trains the chunks last to first, as a cluster may, and hands the results back in the order of the chunks."""

    def __init__(self, algorithm: Algorithm, task: Task) -> None:
        self.inner = local(algorithm, task)

    def train(self, broadcast, chunks):  # type: ignore[no-untyped-def]
        return sorted(self.inner.train(broadcast, chunks[::-1]), key=lambda result: result.index)


@pytest.mark.parametrize("algorithm", [FedMF(), CoLR(), SCoLR()], ids=lambda each: each.kind)
def test_the_order_in_which_chunks_are_trained_changes_nothing(algorithm: Algorithm) -> None:
    task = make_task(synthetic(EXAMPLES))
    plan = Plan(rounds=3, clients_per_round=10, chunk_size=2)
    digests = {
        model_sha256(algorithm, list(rounds(Run(plan, algorithm, task), executor))[-1].state)
        for executor in (local(algorithm, task), OutOfOrder(algorithm, task))
    }
    assert len(digests) == 1


def test_cut_deals_every_client_once_into_chunks_alike_in_work() -> None:
    random = np.random.default_rng(0)
    examples = random.integers(1, 500, 97)
    cohort = random.permutation(97)[:61]
    population = Population.fresh({USER_FACTORS: np.arange(97)[:, None]}, 97)
    chunks = make_chunks(cohort, examples, 20, 5, population)
    assert sorted(np.concatenate([chunk.clients for chunk in chunks])) == sorted(cohort)
    assert [len(chunk.clients) for chunk in chunks] == [16, 15, 15, 15]
    work = [examples[chunk.clients].sum() for chunk in chunks]
    assert max(work) - min(work) <= examples.max()
    for index, chunk in enumerate(chunks):
        assert (chunk.index, chunk.round_index) == (index, 5)
        assert (np.diff(chunk.clients) > 0).all()
        assert np.array_equal(chunk.state[USER_FACTORS][:, 0], chunk.clients)


@pytest.mark.parametrize("algorithm", [FedMF(), CoLR(basis="gaussian"), SCoLR(aggregation="weighted")])
def test_compiled_loops_and_the_tensor_program_play_the_same_rounds(algorithm: FedMF | CoLR | SCoLR) -> None:
    fused, batched = (
        run(algorithm, make_task(synthetic(EXAMPLES), program=program), n_rounds=3) for program in ("fused", "batched")
    )
    assert relative_error(batched.server[ITEM_FACTORS], fused.server[ITEM_FACTORS]) <= 1e-5
    assert relative_error(batched.clients[USER_FACTORS], fused.clients[USER_FACTORS]) <= 1e-5
    assert (batched.uplink_bits, batched.downlink_bits) == (fused.uplink_bits, fused.downlink_bits)
