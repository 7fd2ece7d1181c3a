"""Small tasks and short runs on which laws are tried."""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from narrowcast.algorithms.local_training.factorisation import FactorisationSGD
from narrowcast.algorithms.local_training.graph import GraphTraining
from narrowcast.algorithms.local_training.ratings import AlternatingGradient
from narrowcast.algorithms.local_training.sgd import SGD
from narrowcast.platform.contracts import Algorithm, Executor, LocalCall, Task
from narrowcast.platform.data.graph import NodeGraph
from narrowcast.platform.data.interactions import Interactions
from narrowcast.platform.data.rating_matrix import TRAIN, VALIDATION, RatingMatrix
from narrowcast.platform.data.samples import Labelled, Samples, Unlabelled, one_array
from narrowcast.platform.data.synthetic import BlockModel
from narrowcast.platform.models.factorisation import MaskedFactorisation, MatrixFactorisation
from narrowcast.platform.models.graph import GCN
from narrowcast.platform.rounds.evaluation import model_sha256
from narrowcast.platform.rounds.fleet import LogNormalFleet
from narrowcast.platform.rounds.ledger import ChunkResult
from narrowcast.platform.rounds.loop import LocalExecutor, rounds
from narrowcast.platform.rounds.outcome import Outcome
from narrowcast.platform.rounds.plan import Plan
from narrowcast.platform.rounds.state import Run, RunState
from narrowcast.platform.seeds import PrivateSeed
from narrowcast.platform.types import Arrays, Chunk, LocalTerms, LocalUpdates

N_CLIENTS = 11
_TRAININGS: Mapping[type[Any], Any] = {
    RatingMatrix: AlternatingGradient(weight_decay=0.1),
    NodeGraph: GraphTraining(epochs=2),
    Interactions: FactorisationSGD(batch_size=16),
    Samples: SGD(batch_size=4, epochs=2),
}
PLAN = Plan(rounds=5, clients_per_round=6, chunk_size=2, evaluate_every=2, checkpoint_every=1)


def interactions(counts: np.ndarray) -> Interactions:
    """Return random interactions of one user for each count with 130 items."""
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


def rating_matrix(counts: np.ndarray) -> RatingMatrix:
    """Return random ratings of 40 items by the users of one client for each count, which has one or two users."""
    random = np.random.default_rng(0)
    owners = np.concatenate([np.arange(len(counts)), np.arange(0, len(counts), 3)])
    item_lists = [np.sort(random.permutation(40)[: 3 + counts[owner]]) for owner in owners]
    users = np.repeat(np.arange(len(owners)), [len(items) for items in item_lists])
    split = np.full(len(users), TRAIN, dtype=np.int8)
    split[random.permutation(len(users))[: len(users) // 4]] = np.arange(len(users) // 4) % 2 + VALIDATION
    split[np.flatnonzero(np.diff(users, prepend=-1))] = TRAIN
    values = random.integers(1, 6, len(users)).astype(np.float64)
    return RatingMatrix("tiny", "random", len(owners), 40, users, np.concatenate(item_lists), values, split, owners)


def graph() -> NodeGraph:
    """Return a small drawn graph, of which all clients train on the same nodes."""
    return BlockModel(clients=N_CLIENTS, nodes=60, blocks=3, degree=4, features=8, separation=1, seed=0).load()


def samples(counts: np.ndarray) -> Samples:
    """Return random images of three classes, dealt to one client for each count."""
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
        public=Labelled(np.random.default_rng(2).integers(0, 256, (9, 1, 8, 8), np.uint8), np.arange(9) % 3),
        server=Labelled(features[:10], labels[:10]),
        unlabelled=Unlabelled(features[::-1].copy(), np.arange(total), np.concatenate([[0], np.cumsum(counts[::-1])])),
    )


def windows(counts: np.ndarray) -> Samples:
    """Return random windows of ten characters of an alphabet of seven, dealt to one client for each count."""
    data, random = replace(samples(counts), public=None, server=None, unlabelled=None), np.random.default_rng(0)

    def read(part: Labelled) -> Labelled:
        return Labelled(random.integers(0, 7, (len(part), 10)), random.integers(0, 7, len(part)))

    return replace(data, n_classes=7, train=read(data.train), validation=read(data.validation), test=read(data.test))


def sequences(counts: np.ndarray) -> Samples:
    """Return random windows of ten characters with the character after each, dealt to one client for each count."""
    data, random = windows(counts), np.random.default_rng(0)

    def read(part: Labelled) -> Labelled:
        return Labelled(part.features, random.integers(0, 7, one_array(part.features).shape))

    return replace(data, train=read(data.train), validation=read(data.validation), test=read(data.test))


def masked_tokens(counts: np.ndarray) -> Samples:
    """Return texts of up to ten tokens out of seven, with masks of what is text, dealt to one client for each count."""
    data, random = windows(counts), np.random.default_rng(0)

    def read(part: Labelled) -> Labelled:
        mask = np.arange(10) < random.integers(1, 11, (len(part), 1))
        tokens = np.where(mask, one_array(part.features), 0)
        return Labelled({"input_ids": tokens, "attention_mask": mask.astype(np.int64)}, part.labels)

    return replace(data, train=read(data.train), validation=read(data.validation), test=read(data.test))


def rated_items(counts: np.ndarray) -> Samples:
    """Return random classes that users give 12 items, one client for each count."""
    data, random = windows(counts), np.random.default_rng(0)

    def read(part: Labelled) -> Labelled:
        return Labelled(random.integers(0, 12, (len(part), 1)), random.integers(0, 3, len(part)))

    parts = [read(part) for part in (data.train, data.validation, data.test)]
    return replace(data, n_classes=3, n_items=12, train=parts[0], validation=parts[1], test=parts[2])


def numbers(counts: np.ndarray) -> Samples:
    """Return samples of five features and two numbers that depend on them, dealt to one client for each count."""
    data, random = replace(samples(counts), public=None, server=None, unlabelled=None), np.random.default_rng(0)
    weights = random.standard_normal((5, 2))

    def read(part: Labelled) -> Labelled:
        features = random.standard_normal((len(part), 5))
        noise = 0.1 * random.standard_normal((len(part), 2))
        return Labelled(features.astype(np.float32), (features @ weights + noise).astype(np.float32))

    return replace(data, n_classes=0, train=read(data.train), validation=read(data.validation), test=read(data.test))


def sample_sets(counts: np.ndarray) -> dict[str, Samples]:
    """Return a small data set for each kind of targets and features that neural networks know."""
    return {
        "labelled images": samples(counts),
        "windows of text": windows(counts),
        "rated items": rated_items(counts),
        "tokens after each position": sequences(counts),
        "tokens with a mask": masked_tokens(counts),
        "numbers": numbers(counts),
    }


def task_of(model: Any, seed: int = 0, training: Any = None) -> Task:
    """Return a task of eleven clients on which the model can be trained."""
    counts = np.random.default_rng(1).integers(1, 18, N_CLIENTS)
    data: Any
    if isinstance(model, MaskedFactorisation):
        data = rating_matrix(counts)
    elif isinstance(model, GCN):
        data = graph()
    elif isinstance(model, MatrixFactorisation):
        data = interactions(counts)
    else:
        data = samples(counts)
    return task_on(data, model, seed, training)


def task_on(data: Any, model: Any, seed: int = 0, training: Any = None) -> Task:
    """Return a task on this data, by default with the training that suits it."""
    training = training or next(candidate for kind, candidate in _TRAININGS.items() if isinstance(data, kind))
    return Task(data, LogNormalFleet().profiles(data.examples, seed), model, training, seed, PrivateSeed.derived(seed))


def local_call(task: Task, server: Arrays, clients: Any) -> LocalCall:
    """Return the training of these clients in round 1, as one chunk and without terms."""
    indices = np.array(list(clients))
    private = {name: values[indices] for name, values in task.model.init_clients(task.data, 0).items()}
    return LocalCall(server, Chunk(1, 0, indices, private), task, LocalTerms())


def trained(call: LocalCall) -> LocalUpdates:
    """Return what the clients of a call learn."""
    updates: LocalUpdates = call.task.training.train(call.server, call.chunk, call.task, call.terms)
    return updates


def digest_of_updates(updates: LocalUpdates) -> str:
    """Return the sha256 of what clients learnt."""
    return digest({**updates.changes, **updates.state, "loss of a client": updates.loss})


def local(algorithm: Algorithm, task: Task) -> LocalExecutor:
    """Return an executor that trains in this process."""
    return LocalExecutor(Run(PLAN, algorithm, task))


def run(
    plan: Plan, algorithm: Algorithm, task: Task, state: RunState | None = None, executor: Executor | None = None
) -> list[Outcome]:
    """Run a plan in this process, from the start or from a state."""
    return list(rounds(Run(plan, algorithm, task), executor or local(algorithm, task), state))


def records(outcomes: Sequence[Outcome]) -> list[str]:
    """Return the records of rounds as text, in which the missing loss of a round without uploads equals itself."""
    return [repr(outcome.record) for outcome in outcomes]


def sha256(algorithm: Algorithm, outcomes: list[Outcome]) -> str:
    """Return the sha256 of the model after the last round."""
    state = outcomes[-1].state
    assert state is not None
    return model_sha256(algorithm, state)


def digest(arrays: Arrays) -> str:
    """Return the sha256 of names, types, shapes and values."""
    digest = hashlib.sha256()
    for name, values in sorted(arrays.items()):
        digest.update(f"{name} {values.dtype} {values.shape}".encode() + np.ascontiguousarray(values).tobytes())
    return digest.hexdigest()


class Shuffled(Executor):
    """Trains the chunks of a round in another order, and in another process's memory: everything is pickled."""

    def __init__(self, algorithm: Algorithm, task: Task) -> None:
        self._algorithm, self._task = pickle.dumps(algorithm), pickle.dumps(task)

    def train(self, broadcast: Arrays, chunks: Sequence[Chunk]) -> list[ChunkResult]:
        """Train all chunks of a round, the last one first."""
        algorithm, task = pickle.loads(self._algorithm), pickle.loads(self._task)
        results = {}
        for chunk in reversed(chunks):
            sent = pickle.loads(pickle.dumps((broadcast, chunk)))
            for values in (*sent[0].values(), *sent[1].state.values()):
                values.flags.writeable = False  # as the arrays of an object store are
            results[chunk.index] = pickle.loads(pickle.dumps(algorithm.train(*sent, task)))
        return [results[chunk.index] for chunk in chunks]


@dataclass(frozen=True)
class Limited(Executor):
    """Gives the clients of every chunk budgets from nothing to plenty, and loses the uploads of some."""

    executor: Any
    bits: int

    def train(self, broadcast: Arrays, chunks: Sequence[Chunk]) -> list[ChunkResult]:
        """Train all chunks under these limits."""
        results: list[ChunkResult] = self.executor.train(broadcast, [self.limit(chunk) for chunk in chunks])
        return results

    def limit(self, chunk: Chunk) -> Chunk:
        """Return the chunk with the budgets and losses of its clients in its round."""
        shares = np.array([0.0, 0.01, 0.2, 0.6, 1.0, 3.0])[(chunk.clients + chunk.round_index) % 6]
        lost = (chunk.clients * 5 + chunk.round_index) % 4 == 0
        return replace(chunk, budget_bits=(shares * self.bits).astype(np.int64), lost=lost)


def train_everyone(algorithm: Algorithm, task: Task, clients: Any = range(N_CLIENTS), **limits: Any) -> ChunkResult:
    """Return what one chunk of these clients gives in round 1; limits [U] are those of all clients."""
    indices = np.array(list(clients))
    state = {name: values[indices] for name, values in algorithm.init_clients(task).items()}
    chunk = Chunk(1, 0, indices, state, **{name: values[indices] for name, values in limits.items()})
    return algorithm.train(algorithm.broadcast(algorithm.init(task), task, 1).arrays, chunk, task)


def stepped_server(algorithm: Algorithm, task: Task, result: ChunkResult) -> Arrays:
    """Return the server's whole state after a round of this chunk alone."""
    server = algorithm.init(task)
    broadcast = algorithm.broadcast(server, task, 1).arrays
    return algorithm.step(server, broadcast, algorithm.fold([result.partial]), task, 1)


def stepped(algorithm: Algorithm, task: Task, result: ChunkResult) -> Arrays:
    """Return the global parameters after a round of this chunk alone."""
    return algorithm.final(stepped_server(algorithm, task, result))


def close(got: Arrays, wanted: Arrays, start: Arrays, tolerance: float) -> bool:
    """Return whether two models differ by less than this share of how far any parameter has moved.

    A parameter of another shape than at the start has moved from 0.
    """
    if any(got[name].shape != values.shape for name, values in wanted.items()):
        return False
    from_ = {name: start[name] if start[name].shape == values.shape else 0.0 for name, values in wanted.items()}
    moved = max(float(np.abs(wanted[name] - from_[name]).max()) for name in wanted)
    return all(float(np.abs(got[name] - wanted[name]).max()) <= tolerance * moved for name in wanted)
