"""What a model, an algorithm and an executor must offer; the round loop knows nothing else of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Literal, Protocol, runtime_checkable

from narrowcast.platform.types import (
    Arrays,
    BoolArray,
    Chunk,
    ChunkResult,
    FloatArray,
    IntArray,
    LocalTerms,
    LocalUpdates,
    Payload,
    Profiles,
)

Split = Literal["validation", "test"]


class Dataset(Protocol):
    """The clients' data, held once and indexed by client."""

    @property
    def name(self) -> str:
        """What the set is called."""
        ...

    @property
    def source(self) -> str:
        """Where it was read."""
        ...

    @property
    def digest(self) -> str:
        """The sha256 of everything a run can see of it."""
        ...

    @property
    def n_clients(self) -> int:
        """The number of clients, U."""
        ...

    @property
    def examples(self) -> IntArray:
        """The number of training examples of every client, [U]."""
        ...

    @property
    def sizes(self) -> Mapping[str, int]:
        """What a reader wants to know of its size."""
        ...


class DataSource(Protocol):
    """A data set as an experiment names it: a frozen model whose `kind` picks it from the catalog."""

    @property
    def kind(self) -> str:
        """Its name in the catalog."""
        ...

    def load(self) -> Any:
        """Read the `Dataset`, or raise a `UserError` that says where it was looked for and how to fetch it."""
        ...


class Fleet(Protocol):
    """The devices and links of the clients: a frozen model whose fields are its settings."""

    @property
    def kind(self) -> str:
        """Its name in the catalog."""
        ...

    def profiles(self, examples: IntArray, seed: int) -> Profiles:
        """Return the profile of each client, in the order of `examples` [U]; depends on the arguments alone."""
        ...


class Model(Protocol):
    """What is trained: a frozen model whose fields are its hyper-parameters."""

    @property
    def kind(self) -> str:
        """Its name in the catalog."""
        ...

    def check(self, data: Any) -> None:
        """Raise a `UserError` where the model cannot be trained on this `Dataset`."""
        ...

    def init_server(self, data: Any, seed: int) -> Arrays:
        """The global parameters before round 1."""
        ...

    def init_clients(self, data: Any, seed: int) -> Arrays:
        """The private parameters of all clients before round 1, [U, ...] each."""
        ...

    def evaluate(self, server: Arrays, clients: Arrays, data: Any, split: Split) -> Mapping[str, float]:
        """Metrics over all clients on one held-out split; empty where the split is."""
        ...


class Training(Protocol):
    """How clients train locally: a frozen model whose fields are its hyper-parameters."""

    @property
    def kind(self) -> str:
        """Its name in the catalog."""
        ...

    @property
    def device(self) -> str:
        """Where tensors live meanwhile, cpu or cuda."""
        ...

    def check(self, task: Task) -> None:
        """Raise a `UserError` where the training does not fit the model."""
        ...

    def mode(self, task: Task) -> Literal["batched", "per_client"]:
        """Whether a chunk's clients train as one program or one after the other; recorded with the run."""
        ...

    def samples(self, task: Task, clients: IntArray) -> IntArray:
        """The samples that each client trains on in an epoch, known before it does, [C]."""
        ...

    def train(self, server: Arrays, chunk: Chunk, task: Task, terms: LocalTerms) -> LocalUpdates:
        """Train every client of a chunk from the global parameters."""
        ...

    def train_together(self, calls: Sequence[LocalCall]) -> list[LocalUpdates]:
        """Train the chunks of several runs, as one program where their shapes allow; the results of one by one."""
        ...


@dataclass(frozen=True)
class Broadcast:
    """What the server sends at the start of a round.

    `arrays` is what the clients compute from. `full` is the download of a client that holds nothing; `update` that of
    a client that followed up to the previous round, None where there is nothing smaller than `full`.
    """

    arrays: Arrays
    full: Payload
    update: Payload | None


@dataclass(frozen=True)
class Task:
    """What every client host holds for the whole run, and what an algorithm may look at.

    `data`, `model` and `training` belong together; their `check` says where they do not.
    """

    data: Any
    profiles: Profiles
    model: Model
    training: Any
    seed: int


@dataclass(frozen=True)
class LocalCall:
    """One call of `Training.train`, decided and not yet made, so that those of several runs can be made together."""

    server: Arrays
    chunk: Chunk
    task: Task
    terms: LocalTerms


@dataclass(frozen=True)
class RateDistortion:
    """What an algorithm can make of bits, before a round. Shapes: least_bits [C], below which a client sends nothing.

    `errors` says how much is lost at so many bits, for the allocations that weigh it.
    """

    least_bits: IntArray
    errors: Any


@dataclass(frozen=True)
class LinkAllocation:
    """What a radio gives a cohort in a round, all [C]; None where nothing limits anyone, or no upload is lost."""

    budget_bits: IntArray | None
    lost: BoolArray | None
    uplink_bits_per_second: FloatArray
    downlink_bits_per_second: FloatArray


@runtime_checkable
class Radio(Protocol):
    """The links between clients and server, from round to round; a frozen model."""

    def share(
        self, profiles: Profiles, rate_distortion: RateDistortion | None, seed: int, round_index: int
    ) -> LinkAllocation:
        """What this cohort has in this round: pure, and keyed by seed, round and client."""
        ...

    def download_seconds(self, bits: IntArray, rates: FloatArray) -> FloatArray:
        """Seconds until each client has what the server sends it, [C]."""
        ...


@runtime_checkable
class BitBudgeted(Protocol):
    """An algorithm that fits what its clients send to what their links carry."""

    def rate_distortion(self, task: Task, cohort: IntArray) -> RateDistortion | None:
        """What its clients can make of bits; None where it has nothing to say."""
        ...


@runtime_checkable
class KnowsUploads(Protocol):
    """An algorithm whose uploads can be weighed before a training of as many epochs as the task says."""

    def upload_bits(self, broadcast: Arrays, task: Task, clients: IntArray) -> IntArray | None:
        """What each client sends where nothing limits it, [C]; None where that, or its epochs, are not known."""
        ...


@runtime_checkable
class StalenessWeighted(Protocol):
    """An algorithm that can let a part of the updates count less."""

    def weighted_by_staleness(self, partial: Arrays, factor: float) -> Arrays:
        """A chunk's partial sum with its updates times `factor`, and what they are divided by as it is."""
        ...


class Algorithm(Protocol):
    """A federated algorithm: both halves, and no state of its own."""

    @property
    def kind(self) -> str:
        """Its name in the catalog."""
        ...

    def check(self, task: Task) -> None:
        """Raise a `UserError` where algorithm, model and data do not fit together."""
        ...

    def init(self, task: Task) -> Arrays:
        """The server state before round 1."""
        ...

    def init_clients(self, task: Task) -> Arrays:
        """What every client keeps between rounds, [U, ...] each; zeros may be given as a broadcast zero."""
        ...

    def broadcast(self, server: Arrays, task: Task, round_index: int) -> Broadcast:
        """What the server sends in this round."""
        ...

    def train(self, broadcast: Arrays, chunk: Chunk, task: Task) -> ChunkResult:
        """The client half: train a chunk of clients and put together what they send."""
        ...

    def fold(self, partials: Sequence[Arrays]) -> Arrays:
        """Put the chunks' parts together, in the order of the chunks."""
        ...

    def step(self, server: Arrays, broadcast: Arrays, total: Arrays) -> Arrays:
        """The server half: the next state, from what `fold` made of all chunks."""
        ...

    def final(self, server: Arrays) -> Arrays:
        """The global parameters that a server state stands for."""
        ...


@runtime_checkable
class TrainsThenUploads(Protocol):
    """An algorithm whose `train` can be cut in two, so that the local training of several runs can be one program."""

    def local_call(self, broadcast: Arrays, chunk: Chunk, task: Task) -> LocalCall | None:
        """The local training that `train` begins with; None where this model is trained by a program of its own."""
        ...

    def upload(self, broadcast: Arrays, chunk: Chunk, task: Task, updates: LocalUpdates) -> ChunkResult:
        """The rest of `train`: what the clients send and keep."""
        ...


SECRET = "secret/"
"""Before the names of what a key_store gives the host of a chunk's clients, among what it trains from."""


class ClientKeyStore(Protocol):
    """What the clients hold and the server does not, in another process; it answers by name."""

    def call(self, method: str, round_index: int, arrays: Arrays) -> Arrays:
        """What the clients of a round give out when they are asked."""
        ...


class Executor(Protocol):
    """Where chunks are trained; results must not depend on it. Decides nothing about the experiment."""

    def train(self, broadcast: Arrays, chunks: Sequence[Chunk]) -> list[ChunkResult]:
        """Train all chunks of a round and return their results in the order of the chunks."""
        ...


@runtime_checkable
class Gathers(Protocol):
    """An executor whose chunks' sums are closed, and opened once a round."""

    def gather(self, results: list[ChunkResult]) -> list[ChunkResult]:
        """The results of a round with the opened sum in each place; may find that nobody delivered."""
        ...


@runtime_checkable
class KeepsSecrets(Protocol):
    """An algorithm whose clients hold what the server must not see."""

    def check(self, task: Task) -> None:
        """Raise a `UserError` where algorithm, model and data do not fit together."""
        ...

    def relayed_bits(self, task: Task, cohort: IntArray, round_index: int, budget_bits: IntArray | None) -> IntArray:
        """What the server sends each client of a cohort beside the broadcast, [C]; `budget_bits` as `Chunk` has it."""
        ...

    def public_key_bits(self, task: Task) -> int:
        """What the public key weighs that every client is sent once."""
        ...

    @property
    def keys_last(self) -> bool:
        """Whether a resumed run has the keys that it began with."""
        ...

    def key_store(self) -> ClientKeyStore:
        """What the clients hold, made new; for a process that is not the server's."""
        ...

    def key_store_process(self) -> AbstractContextManager[ClientKeyStore]:
        """The same in a process of its own on this machine."""
        ...

    def over(self, executor: Executor, key_store: ClientKeyStore, task: Task) -> Executor:
        """An executor that opens the sum of each round."""
        ...
