"""The laws that every algorithm of the catalog must keep, on every model that it trains and through every codec."""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import permutations
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from narrowcast.algorithms.local_training.factorisation_sgd import FactorisationSGD
from narrowcast.algorithms.local_training.sgd import SGD
from narrowcast.catalog import ALGORITHMS
from narrowcast.platform.contracts import Algorithm, AlgorithmDefaults, Task
from narrowcast.platform.data.interactions import Interactions
from narrowcast.platform.data.samples import Labelled, Samples
from narrowcast.platform.errors import UserError
from narrowcast.platform.models.matrix_factorisation import MatrixFactorisation
from narrowcast.platform.models.networks import CNN, MLP
from narrowcast.platform.outcome import Outcome
from narrowcast.platform.plan import Plan
from narrowcast.platform.rounds import lockstep
from narrowcast.platform.run import Run
from narrowcast.platform.simulation.fleet import LogNormalFleet
from narrowcast.platform.types import Arrays, Chunk, ChunkResult
from running import local, play, sha256

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
    "mlp": MLP(hidden=(16,)),
    "cnn": CNN(channels=(4, 6), hidden=16),  # wide enough for the factors of FedPara
}
CODECS: Mapping[str, list[Any]] = {
    "float32": [],
    "quantised": [{"kind": "quantise", "levels": 5, "scale": "max"}, "entropy"],
    "feedback": ["error_feedback", {"kind": "top_k", "fraction": 0.05}],
}


def cases(codecs: Mapping[str, list[Any]] = CODECS) -> Iterator[Any]:
    for kind, algorithm in ALGORITHMS.items():
        for name, model in MODELS.items():
            for codec, stages in codecs.items():
                if name == "cnn" and stages:
                    continue  # what is sent of a network does not depend on how it was trained
                for own in (False, True):
                    basis = {"basis": "own", "rank": 3} if own else {}
                    try:
                        chosen: Any = algorithm.model_validate({"codec": stages, **basis})
                        chosen.check(task_of(model))
                    except (UserError, ValidationError):
                        continue
                    yield pytest.param(chosen, model, id=f"{kind}-{name}-{codec}" + "-own" * own)


every = pytest.mark.parametrize(("algorithm", "model"), list(cases()))
uncoded = pytest.mark.parametrize(("algorithm", "model"), list(cases({"float32": []})))


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


@dataclass(frozen=True)
class Limited:
    """Gives the clients of every chunk budgets from nothing to plenty, and loses the uploads of some."""

    executor: Any
    bits: int

    def train(self, broadcast: Arrays, chunks: list[Chunk]) -> list[ChunkResult]:
        return self.executor.train(broadcast, [self.limit(chunk) for chunk in chunks])

    def limit(self, chunk: Chunk) -> Chunk:
        shares = np.array([0.0, 0.01, 0.2, 0.6, 1.0, 3.0])[(chunk.clients + chunk.round_index) % 6]
        lost = (chunk.clients * 5 + chunk.round_index) % 4 == 0
        return replace(chunk, budget_bits=(shares * self.bits).astype(np.int64), lost=lost)


def largest_upload(algorithm: Algorithm, task: Task) -> int:
    return int(train_everyone(algorithm, task).ledger.uplink_bits.max())


def train_everyone(algorithm: Algorithm, task: Task, clients: Any = range(N_CLIENTS), **limits: Any) -> ChunkResult:
    """What one chunk of these clients gives in round 1; limits [U] are those of all clients."""
    who = np.array(list(clients))
    state = {name: values[who] for name, values in algorithm.init_clients(task).items()}
    chunk = Chunk(1, 0, who, state, **{name: values[who] for name, values in limits.items()})
    return algorithm.train(algorithm.broadcast(algorithm.init(task), task, 1).arrays, chunk, task)


def stepped(algorithm: Algorithm, task: Task, result: ChunkResult) -> Arrays:
    """The global parameters after a round of this chunk alone."""
    server = algorithm.init(task)
    broadcast = algorithm.broadcast(server, task, 1).arrays
    return algorithm.final(algorithm.step(server, broadcast, algorithm.fold([result.partial])))


def close(got: Arrays, wanted: Arrays, start: Arrays, tolerance: float) -> bool:
    """Whether two models differ by less than this share of how far any parameter has moved."""
    moved = max(float(np.abs(wanted[name] - start[name]).max()) for name in wanted)
    return all(float(np.abs(got[name] - wanted[name]).max()) <= tolerance * moved for name in wanted)


def test_every_algorithm_trains_some_model() -> None:
    assert {parameters.values[0].kind for parameters in cases()} == set(ALGORITHMS)


@uncoded
def test_results_do_not_depend_on_who_trains_which_chunk_and_when(algorithm: Algorithm, model: Any) -> None:
    task = task_of(model)
    straight, shuffled = play(PLAN, algorithm, task), play(PLAN, algorithm, task, executor=Shuffled(algorithm, task))
    assert sha256(algorithm, straight) == sha256(algorithm, shuffled)
    assert [outcome.record for outcome in straight] == [outcome.record for outcome in shuffled]
    assert [outcome.metrics for outcome in straight] == [outcome.metrics for outcome in shuffled]


@uncoded
def test_a_resumed_run_is_the_straight_run(algorithm: Algorithm, model: Any) -> None:
    task = task_of(model)
    straight = play(PLAN, algorithm, task)
    for middle in (1, 3):
        resumed = play(PLAN, algorithm, task, state=straight[middle - 1].state)
        assert sha256(algorithm, resumed) == sha256(algorithm, straight)
        assert [outcome.record for outcome in resumed] == [outcome.record for outcome in straight[middle:]]


@uncoded
def test_another_seed_is_another_run(algorithm: Algorithm, model: Any) -> None:
    first, other = (play(PLAN.model_copy(update={"seed": seed}), algorithm, task_of(model, seed)) for seed in (0, 1))
    assert sha256(algorithm, first) != sha256(algorithm, other)


@every
def test_the_server_learns_and_the_ledger_adds_up(algorithm: Algorithm, model: Any) -> None:
    task = task_of(model)
    before = algorithm.final(algorithm.init(task))
    outcomes = play(PLAN, algorithm, task)
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
    state = play(PLAN, algorithm, task)[-1].state
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
    coded: Any = ALGORITHMS[kind].model_validate({"codec": CODECS["quantised"]})
    assert type(coded).model_validate_json(coded.model_dump_json()) == coded != algorithm
    assert type(algorithm).__doc__


@every
def test_with_limits_results_depend_neither_on_who_trains_nor_on_a_resume(algorithm: Algorithm, model: Any) -> None:
    task = task_of(model)
    bits = largest_upload(algorithm, task)
    plan = PLAN.model_copy(update={"rounds": 3})
    straight = play(plan, algorithm, task, executor=Limited(local(algorithm, task), bits))
    shuffled = play(plan, algorithm, task, executor=Limited(Shuffled(algorithm, task), bits))
    assert sha256(algorithm, straight) == sha256(algorithm, shuffled)
    assert [outcome.record for outcome in straight] == [outcome.record for outcome in shuffled]
    resumed = play(
        plan,
        algorithm,
        task,
        state=straight[1].state,
        executor=Limited(local(algorithm, task), bits),
    )
    assert sha256(algorithm, resumed) == sha256(algorithm, straight)


@every
@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_nobody_sends_more_than_its_budget(algorithm: Algorithm, model: Any, share: float) -> None:
    task = task_of(model)
    free = train_everyone(algorithm, task).ledger
    budgets = (share * free.uplink_bits).astype(np.int64)
    tight = train_everyone(algorithm, task, budget_bits=budgets).ledger
    assert (tight.uplink_bits <= budgets).all()
    assert np.array_equal(tight.delivered, tight.uplink_bits > 0)
    assert (tight.rank[~tight.delivered] <= 0).all()
    if share == 1.0:
        assert tight.delivered.all()
    elif not getattr(algorithm, "codec", ()):
        assert not tight.delivered.any()


@every
def test_who_cannot_send_changes_nothing_and_keeps_what_its_codec_remembered(algorithm: Algorithm, model: Any) -> None:
    task = task_of(model)
    nothing = train_everyone(algorithm, task, budget_bits=np.zeros(N_CLIENTS, dtype=np.int64))
    before, after = algorithm.final(algorithm.init(task)), stepped(algorithm, task, nothing)
    assert all(np.array_equal(after[name], before[name]) for name in before)
    for name, values in nothing.state.items():
        if name.startswith(("codec/", "control/")):
            assert not values.any()


@every
def test_a_lost_upload_is_paid_for_and_is_as_if_its_client_had_not_been_there(algorithm: Algorithm, model: Any) -> None:
    task = task_of(model)
    lost = np.arange(N_CLIENTS) % 3 == 1
    free, some = train_everyone(algorithm, task), train_everyone(algorithm, task, lost=lost)
    assert np.array_equal(some.ledger.uplink_bits, free.ledger.uplink_bits)
    assert np.array_equal(some.ledger.delivered, free.ledger.delivered & ~lost)
    without = train_everyone(algorithm, task, np.flatnonzero(~lost))
    start, all_of_them = algorithm.final(algorithm.init(task)), stepped(algorithm, task, free)
    got, wanted = stepped(algorithm, task, some), stepped(algorithm, task, without)
    assert close(got, wanted, start, 1e-5)
    if any((all_of_them[name] != start[name]).any() for name in start):  # a median of sparse updates may stand still
        assert not close(got, all_of_them, start, 1e-3)
    for name, values in some.state.items():
        if name.startswith("codec/"):
            assert np.array_equal(values, free.state[name])


@every
def test_chunk_sizes_change_no_more_than_rounding(algorithm: Algorithm, model: Any) -> None:
    task = task_of(model)
    whole, parts = (play(PLAN.model_copy(update={"rounds": 2, "chunk_size": size}), algorithm, task) for size in (6, 1))
    start = algorithm.final(algorithm.init(task))
    ends = [algorithm.final(outcomes[-1].state.server) for outcomes in (whole, parts) if outcomes[-1].state]
    assert close(ends[0], ends[1], start, 1e-4)
    for one, other in zip(whole, parts, strict=True):
        assert np.array_equal(one.ledger.delivered, other.ledger.delivered)
        assert np.allclose(one.ledger.uplink_bits, other.ledger.uplink_bits, rtol=0.01)


@every
def test_a_replica_gives_what_it_gives_alone(algorithm: Algorithm, model: Any) -> None:
    first = task_of(model)
    tasks = [first, replace(first, seed=1)]
    plans = [PLAN.model_copy(update={"seed": task.seed, "rounds": 3}) for task in tasks]
    replicas = [Run(plan, algorithm, task) for plan, task in zip(plans, tasks, strict=True)]
    played = list(lockstep(replicas))
    for place, (plan, task) in enumerate(zip(plans, tasks, strict=True)):
        got, wanted = played[-1][place], play(plan, algorithm, task)
        assert isinstance(got, Outcome)
        assert sha256(algorithm, [got]) == sha256(algorithm, wanted)
        assert got.record.total_uplink_bits == wanted[-1].record.total_uplink_bits


@uncoded
def test_through_a_fine_quantiser_the_result_is_that_of_float32(algorithm: Algorithm, model: Any) -> None:
    task = task_of(model)
    stages = [{"kind": "quantise", "levels": 2**14, "scale": "max"}]
    fine: Any = type(algorithm).model_validate({"codec": stages})  # type: ignore[attr-defined]
    got, wanted = (stepped(each, task, train_everyone(each, task)) for each in (fine, algorithm))
    assert close(got, wanted, algorithm.final(algorithm.init(task)), 1e-3)


@every
def test_what_is_known_before_the_training_is_what_comes_of_it(algorithm: Algorithm, model: Any) -> None:
    task, everyone = task_of(model), np.arange(N_CLIENTS)
    ledger = train_everyone(algorithm, task).ledger
    assert (task.training.samples(task, everyone) * task.training.epochs == ledger.examples).all()
    predicted = algorithm.upload_bits(algorithm.broadcast(algorithm.init(task), task, 1).arrays, task, everyone)
    if type(algorithm).upload_bits is not AlgorithmDefaults.upload_bits:  # type: ignore[comparison-overlap]
        assert (predicted is None) == bool(getattr(algorithm, "codec", ()))
    assert predicted is None or (predicted == ledger.uplink_bits).all()


@every
def test_updates_that_count_half_move_the_server_half_as_far(algorithm: Algorithm, model: Any) -> None:
    task = task_of(model)
    result = train_everyone(algorithm, task)
    weighted = algorithm.weighted_by_staleness(result.partial, 0.5)
    if weighted is None:
        assert algorithm.kind not in ("fedavg", "fedprox")
        return
    before, whole = algorithm.init(task), stepped_server(algorithm, task, result)
    half = stepped_server(algorithm, task, replace(result, partial=weighted))
    for name, values in before.items():
        np.testing.assert_allclose(half[name] - values, (whole[name] - values) / 2, rtol=1e-4, atol=1e-6)
        assert half[name].dtype == whole[name].dtype


def stepped_server(algorithm: Algorithm, task: Task, result: ChunkResult) -> Arrays:
    """The server's whole state after a round of this chunk alone."""
    server = algorithm.init(task)
    broadcast = algorithm.broadcast(server, task, 1).arrays
    return algorithm.step(server, broadcast, algorithm.fold([result.partial]))
