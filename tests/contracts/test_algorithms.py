"""The laws that every algorithm of the catalog must keep, on every model that it trains."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from itertools import permutations
from typing import Any

import numpy as np
import pytest

from narrowcast.algorithms.local_training.factorisation_sgd import FactorisationSGD
from narrowcast.algorithms.local_training.sgd import SGD
from narrowcast.catalog import ALGORITHMS
from narrowcast.cluster.fleet import LogNormalFleet
from narrowcast.platform.contracts import Algorithm, Task
from narrowcast.platform.data.interactions import Interactions
from narrowcast.platform.data.samples import Labelled, Samples
from narrowcast.platform.errors import UserError
from narrowcast.platform.in_process import InProcess
from narrowcast.platform.models.matrix_factorisation import MatrixFactorisation
from narrowcast.platform.models.networks import CNN, MLP
from narrowcast.platform.rounds import Outcome, Plan, model_sha256, rounds, start
from narrowcast.platform.types import Arrays, Chunk, ChunkResult

N_CLIENTS = 11
PLAN = Plan(rounds=5, clients_per_round=6, chunk_size=2, evaluate_every=2, checkpoint_every=1)


def interactions(counts: np.ndarray) -> Interactions:
    random = np.random.default_rng(0)
    orders = [random.permutation(130) for _ in counts]
    return Interactions(
        name="tiny",
        source="random",
        n_items=130,
        indptr=np.concatenate([[0], np.cumsum(counts)]),
        items=np.concatenate([np.sort(order[:count]) for order, count in zip(orders, counts, strict=True)]),
        validation=np.array([order[-1] for order in orders]),
        test=np.array([order[-2] for order in orders]),
        negatives=np.stack([order[20:119] for order in orders]),
    )


def samples(counts: np.ndarray) -> Samples:
    random = np.random.default_rng(0)
    total = int(counts.sum())
    labels = random.integers(0, 3, total + 20)
    features = (random.random((total + 20, 1, 8, 8)) * 200 + 20 * labels[:, None, None, None]).astype(np.uint8)
    return Samples(
        name="tiny",
        source="random",
        n_classes=3,
        train=Labelled(features[:total], labels[:total]),
        validation=Labelled(features[:0], labels[:0]),
        test=Labelled(features[total:], labels[total:]),
        order=random.permutation(total),
        indptr=np.concatenate([[0], np.cumsum(counts)]),
    )


def task_of(model: Any, seed: int = 0) -> Task:
    counts = np.random.default_rng(1).integers(1, 18, N_CLIENTS)
    factorises = isinstance(model, MatrixFactorisation)
    data = interactions(counts) if factorises else samples(counts)
    training = FactorisationSGD(batch_size=16) if factorises else SGD(batch_size=4, epochs=2)
    return Task(data, LogNormalFleet().profiles(data.examples, seed), model, training, seed)


MODELS = {
    "matrix_factorisation": MatrixFactorisation(embedding_dim=8),
    "mlp": MLP(hidden=(6,)),
    "cnn": CNN(channels=(2, 3), hidden=5),
}


def pairs() -> Iterator[Any]:
    for kind, algorithm in ALGORITHMS.items():
        for name, model in MODELS.items():
            try:
                algorithm().check(task_of(model))
            except UserError:
                continue
            yield pytest.param(algorithm(), model, id=f"{kind}-{name}")


every = pytest.mark.parametrize(("algorithm", "model"), list(pairs()))


def play(algorithm: Algorithm, task: Task, plan: Plan = PLAN, state: Any = None, executor: Any = None) -> list[Outcome]:
    executor = executor or InProcess(algorithm, task)
    return list(rounds(plan, algorithm, task, executor, state or start(algorithm, task)))


def sha256(algorithm: Algorithm, outcomes: list[Outcome]) -> str:
    state = outcomes[-1].state
    assert state is not None
    return model_sha256(algorithm, state)


class Shuffled:
    """Trains the chunks of a round in another order, and in another process's memory: everything is pickled."""

    def __init__(self, algorithm: Algorithm, task: Task) -> None:
        self._algorithm, self._task = pickle.dumps(algorithm), pickle.dumps(task)

    def train(self, broadcast: Arrays, chunks: list[Chunk]) -> list[ChunkResult]:
        algorithm, task = pickle.loads(self._algorithm), pickle.loads(self._task)
        results = {}
        for chunk in reversed(chunks):
            sent = pickle.loads(pickle.dumps((broadcast, chunk)))
            for values in (*sent[0].values(), *sent[1].state.values()):
                values.flags.writeable = False  # as the arrays of an object store are
            results[chunk.index] = pickle.loads(pickle.dumps(algorithm.train(*sent, task)))
        return [results[chunk.index] for chunk in chunks]


def test_every_algorithm_trains_some_model() -> None:
    assert {parameters.values[0].kind for parameters in pairs()} == set(ALGORITHMS)


@every
def test_results_do_not_depend_on_who_trains_which_chunk_and_when(algorithm: Algorithm, model: Any) -> None:
    task = task_of(model)
    straight, shuffled = play(algorithm, task), play(algorithm, task, executor=Shuffled(algorithm, task))
    assert sha256(algorithm, straight) == sha256(algorithm, shuffled)
    assert [outcome.record for outcome in straight] == [outcome.record for outcome in shuffled]
    assert [outcome.metrics for outcome in straight] == [outcome.metrics for outcome in shuffled]


@every
def test_a_resumed_run_is_the_straight_run(algorithm: Algorithm, model: Any) -> None:
    task = task_of(model)
    straight = play(algorithm, task)
    for middle in (1, 3):
        resumed = play(algorithm, task, state=straight[middle - 1].state)
        assert sha256(algorithm, resumed) == sha256(algorithm, straight)
        assert [outcome.record for outcome in resumed] == [outcome.record for outcome in straight[middle:]]


@every
def test_another_seed_is_another_run(algorithm: Algorithm, model: Any) -> None:
    first, other = (play(algorithm, task_of(model, seed), PLAN.model_copy(update={"seed": seed})) for seed in (0, 1))
    assert sha256(algorithm, first) != sha256(algorithm, other)


@every
def test_the_server_learns_and_the_ledger_adds_up(algorithm: Algorithm, model: Any) -> None:
    task = task_of(model)
    before = algorithm.final(algorithm.init(task))
    outcomes = play(algorithm, task)
    state = outcomes[-1].state
    assert state is not None
    after = algorithm.final(state.server)
    assert {name: values.shape for name, values in after.items()} == {
        name: values.shape for name, values in before.items()
    }
    assert all(values.dtype == np.float32 for values in after.values())
    assert any((after[name] != before[name]).any() for name in after)
    assert state.uplink_bits == sum(int(outcome.ledger.uplink_bits.sum()) for outcome in outcomes)
    for outcome in outcomes:
        ledger = outcome.ledger
        assert (ledger.uplink_bits[ledger.delivered] > 0).all()
        assert (ledger.downlink_bits > 0).all()
        assert (ledger.uplink_bits % 8 == 0).all()
        assert (ledger.downlink_bits % 8 == 0).all()


@every
def test_what_clients_keep_has_a_row_for_each(algorithm: Algorithm, model: Any) -> None:
    task = task_of(model)
    initial = algorithm.init_clients(task)
    state = play(algorithm, task)[-1].state
    assert state is not None
    assert set(state.clients) == set(initial)
    for name, values in initial.items():
        assert len(values) == N_CLIENTS
        assert state.clients[name].shape == (len(state.participants), *values.shape[1:])


@every
def test_permuting_the_parts_of_a_chunk_changes_no_ledger_line(algorithm: Algorithm, model: Any) -> None:
    task = task_of(model)
    broadcast = algorithm.broadcast(algorithm.init(task), task, 1).arrays
    initial = algorithm.init_clients(task)
    lines: set[tuple[Any, ...]] = set()
    for order in permutations([1, 4, 6]):
        clients = np.array(order)
        result = algorithm.train(broadcast, Chunk(1, 0, clients, {n: v[clients] for n, v in initial.items()}), task)
        ledger = result.ledger
        assert ledger.client.tolist() == list(order)
        lines |= set(
            zip(ledger.client, ledger.rank, ledger.uplink_bits, ledger.examples, ledger.delivered, strict=True)
        )
    assert len(lines) == 3


@pytest.mark.parametrize("kind", ALGORITHMS)
def test_an_algorithm_is_its_configuration(kind: str) -> None:
    algorithm: Any = ALGORITHMS[kind]()
    assert algorithm.kind == kind
    assert pickle.loads(pickle.dumps(algorithm)) == algorithm
    assert type(algorithm).model_validate_json(algorithm.model_dump_json()) == algorithm
    assert hash(algorithm) == hash(ALGORITHMS[kind]())
    assert type(algorithm).__doc__
