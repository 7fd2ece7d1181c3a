"""Contracts of fleets, trainings, algorithms and executors; the round loop relies on them, on models and on data."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Literal, Protocol

import numpy as np
from typing_extensions import TypeVar

from narrowcast.platform.config.kinds import from_fields
from narrowcast.platform.data.dataset import Dataset
from narrowcast.platform.errors import UserError
from narrowcast.platform.models.model import Model
from narrowcast.platform.rounds.adversary import Adversary
from narrowcast.platform.rounds.client_contracts import ClientKeyStore, ClientSplit, SecureRounds
from narrowcast.platform.rounds.ledger import ChunkResult, ClientMeasures
from narrowcast.platform.seeds import PrivateSeed
from narrowcast.platform.traits import TrainingTraits, Traits
from narrowcast.platform.types import (
    Arrays,
    BoolArray,
    Chunk,
    FloatArray,
    IntArray,
    LocalTerms,
    LocalUpdates,
    Payload,
    Profiles,
)

DataT_co = TypeVar("DataT_co", bound=Dataset, default=Any, covariant=True)
TrainingT_co = TypeVar("TrainingT_co", default=Any, covariant=True)
"""A `Training`, or the part of one that code below its class reads."""


class Fleet(Protocol):
    """The devices and links of the clients: a frozen model whose fields are its settings."""

    @property
    def kind(self) -> str:
        """The fleet's name in the catalog."""
        ...

    def profiles(self, examples: IntArray, seed: int) -> Profiles:
        """Return the profile of each client, in the order of `examples` [U]; depends on the arguments alone."""
        ...


_TRAITS_OF_TRAININGS = {"computes_start_loss", "computes_start_gradient", "descends_gradients"}
"""Attributes of trainings of versions before 0.3, which are traits of the same name."""


class Training(ABC):
    """Local training of clients: a frozen pydantic model whose fields are its hyper-parameters.

    A subclass has a `kind`, `epochs` and `device`, as fields or properties, and overrides what is abstract. `traits`
    stands here with what its fields say of it; a subclass that computes more overrides it.
    """

    def __init_subclass__(cls, **arguments: Any) -> None:
        super().__init_subclass__(**arguments)
        for name in sorted(_TRAITS_OF_TRAININGS & {*vars(cls), *vars(cls).get("__annotations__", {})}):
            raise UserError(f"{cls.__name__}.{name} is now TrainingTraits.{name}; return it from traits")

    if TYPE_CHECKING:

        @property
        def kind(self) -> str:
            """The training's name in the catalog."""

        @property
        def epochs(self) -> int:
            """The local epochs of every client in a round, unless `LocalTerms.epochs` says otherwise."""

        @property
        def device(self) -> str:
            """The device of the tensors during training, cpu or cuda."""

    @property
    def traits(self) -> TrainingTraits:
        """The traits of this training: its fields that have the name of a trait."""
        return from_fields(TrainingTraits, self)

    @abstractmethod
    def check(self, task: Task) -> None:
        """Raise `UserError` if the training does not fit the model."""

    @abstractmethod
    def mode(self, task: Task) -> Literal["batched", "per_client"]:
        """Return whether a chunk's clients train as one program or one after the other; recorded with the run."""

    @abstractmethod
    def samples(self, task: Task, clients: IntArray) -> IntArray:
        """Return the samples that each client trains on in one epoch, [C]; known before the training."""

    @abstractmethod
    def train(self, server: Arrays, chunk: Chunk, task: Task, terms: LocalTerms) -> LocalUpdates:
        """Train every client of a chunk from the global parameters."""

    def train_together(self, calls: Sequence[LocalCall]) -> list[LocalUpdates]:
        """Train the chunks of several runs, as one program if their shapes allow; results are those of `train`.

        By default they are trained one after the other.
        """
        return [call.task.training.train(call.server, call.chunk, call.task, call.terms) for call in calls]


@dataclass(frozen=True)
class Recipients:
    """The clients that are sent the broadcast of a round.

    Shapes: clients [C]; last_round [C], the last round whose broadcast each received, 0 for newcomers.
    """

    clients: IntArray
    last_round: IntArray
    round_index: int


@dataclass(frozen=True)
class Broadcast:
    """The message that the server sends at the start of a round.

    `arrays` is the clients' input. `full` is the download of a client that holds nothing; `update` is that of a client
    that followed up to the previous round, None if nothing is smaller than `full`.
    """

    arrays: Arrays
    full: Payload
    update: Payload | None


@dataclass(frozen=True)
class Task(Generic[DataT_co, TrainingT_co]):
    """The data, profiles, model and training of a run, held by every client host and visible to the algorithm.

    `data`, `model` and `training` belong together; their `check` methods raise if they do not. Code for one data set or
    training names them, as in `Task[Interactions, FactorisationSGD]`; `Task` alone is a task of any.

    `seed` is that of the public stream, and the only one from which the server and a decoder may draw. `private_seed`
    is that of the clients' own draws. `start` are the global parameters before round 1 if they are not to be drawn.
    `adversary` are the attackers among the clients; None: all are honest.
    """

    data: DataT_co
    profiles: Profiles
    model: Model
    training: TrainingT_co
    seed: int
    private_seed: PrivateSeed
    start: Arrays | None = None
    adversary: Adversary | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "model", self.model.of_seed(self.seed))

    def of_server(self) -> Task:
        """Return the task of the server as if it were the only client, with samples of its own, which it has to have.

        Its draws are of the public seed; it is honest.
        """
        data: Any = self.data.of_server
        return replace(
            self,
            data=data,
            profiles=self.profiles.take(np.zeros(1, dtype=np.int64)),
            private_seed=PrivateSeed(self.seed),
            adversary=None,
        )

    def initial_parameters(self) -> Arrays:
        """Return the global parameters before round 1: `start`, or those that the model draws from the seed."""
        return self.model.init_server(self.data, self.seed) if self.start is None else self.start


@dataclass(frozen=True)
class LocalCall:
    """The arguments of one call of `Training.train`, so that the calls of several runs can be made together."""

    server: Arrays
    chunk: Chunk
    task: Task
    terms: LocalTerms


@dataclass(frozen=True)
class RateDistortion:
    """The error of each client's update as a function of its bits, before a round.

    Shapes: least_bits [C], below which a client sends nothing. `errors` are the curves that link allocations minimise.
    """

    least_bits: IntArray
    errors: Any


@dataclass(frozen=True)
class LinkAllocation:
    """The links of a cohort in one round, all [C]; None if nothing limits the uploads, or if none is lost."""

    budget_bits: IntArray | None
    lost: BoolArray | None
    uplink_bits_per_second: FloatArray
    downlink_bits_per_second: FloatArray


class Radio(ABC):
    """The links between clients and server from round to round: a frozen model whose fields are its settings."""

    @abstractmethod
    def share(
        self, profiles: Profiles, rate_distortion: RateDistortion | None, seed: int, round_index: int
    ) -> LinkAllocation:
        """Return the links of a cohort in this round; depends on the seed, the round and the clients alone."""

    @abstractmethod
    def download_seconds(self, bits: IntArray, rates: FloatArray) -> FloatArray:
        """Return the seconds until each client has received its download, [C]."""


@dataclass(frozen=True)
class OwnModel:
    """The clients at `places` [k] of a chunk, which use a model other than the run's; parameters are [k, ...]."""

    places: IntArray
    model: Model
    parameters: Arrays


class SecureSums(Protocol):
    """Secure aggregation as the platform sees it: the keys' place, their bits, and the hooks around a round."""

    @property
    def keys_last(self) -> bool:
        """Return whether a resumed run has the keys that it began with."""
        ...

    def relayed_bits(self, task: Task, cohort: IntArray, round_index: int, budget_bits: IntArray | None) -> IntArray:
        """Return each client's download besides the broadcast, [C]; `budget_bits` [C] as in `Chunk`."""
        ...

    def public_key_bits(self, task: Task) -> int:
        """Return the size of the public key, which every client is sent once."""
        ...

    def key_store(self, answered: Path | None = None) -> ClientKeyStore:
        """Return a new key store; for a process that is not the server's.

        It remembers the rounds that it answers in the file `answered`; None: no longer than it lives.
        """
        ...

    def key_store_process(self, answered: Path | None = None) -> AbstractContextManager[ClientKeyStore]:
        """Start a key store in a process of its own on this machine; see `key_store`."""
        ...

    def rounds(self, key_store: ClientKeyStore, task: Task) -> SecureRounds:
        """Return the server's side of one run."""
        ...


_NOW_TRAITS = {
    "has_global_model": "global_model",
    "sends_one_model": "downloads",
    "widens_model": "grows",
    "counts_draws": "counts_draws",
    "averages_clients": "mean_unless",
    "trains_factors": "trains_factors",
    "codes_row_lists": "codes_row_lists",
}
"""Attributes of algorithms of versions before 0.3, and the traits that they have become."""
_NOW_METHODS = {
    "local_call": "local_calls, which returns a sequence of calls",
    "upload": "message and contribution: what clients send, and what they add to the sums",
    "upload_parts": "send",
}
"""Methods of algorithms of versions before 0.3, and what has replaced them."""


class Algorithm(ABC):
    """A federated algorithm: both halves, and no state of its own.

    A subclass is a frozen model with a `kind`, and overrides what is abstract. The other methods are optional: each
    stands here with what it returns for an algorithm that does not offer it. One whose clients train by `task.training`
    overrides `local_calls` and `send`. `traits` is a class variable, or a property where fields decide.
    """

    def __init_subclass__(cls, **arguments: Any) -> None:
        super().__init_subclass__(**arguments)
        for name in _NOW_TRAITS.keys() & {*vars(cls), *vars(cls).get("__annotations__", {})}:
            raise UserError(f"{cls.__name__}.{name} is now Traits.{_NOW_TRAITS[name]}; return it from traits")
        for name in _NOW_METHODS.keys() & vars(cls).keys():
            raise UserError(f"{cls.__name__}.{name} is now {_NOW_METHODS[name]}")
        if not isinstance(own := vars(cls).get("traits", Traits()), Traits | property):
            raise UserError(f"{cls.__name__}.traits is {type(own).__name__}; give Traits of narrowcast.extend")

    if TYPE_CHECKING:

        @property
        def kind(self) -> str:
            """The algorithm's name in the catalog."""

    @property
    def traits(self) -> Traits:
        """The traits of this algorithm, with its fields as they are set; a field `codec` has the stages of uploads."""
        codec = vars(self).get("codec")
        return Traits(codec=codec if isinstance(codec, tuple) else ())

    @property
    def plain(self) -> Algorithm:
        """The algorithm that secure aggregation is around; itself without."""
        return self

    def check(self, task: Task) -> None:
        """Raise `UserError` if algorithm, model and data do not fit together; all do by default."""
        del task

    def check_cohort(self, clients: int) -> None:
        """Raise `UserError` if rounds of so many clients are too small; none are by default."""
        del clients

    @abstractmethod
    def init(self, task: Task) -> Arrays:
        """Return the server state before round 1."""

    @abstractmethod
    def init_clients(self, task: Task) -> Arrays:
        """Return the state that every client keeps between rounds, [U, ...] each; zeros may be a broadcast zero."""

    # Server half

    @abstractmethod
    def broadcast(self, server: Arrays, task: Task, round_index: int) -> Broadcast:
        """Return what the server sends in this round."""

    def download_bits(
        self, server: Arrays, broadcast: Broadcast, task: Task, recipients: Recipients
    ) -> IntArray | None:
        """Return the bits that each recipient downloads, [C]; None, the default, if the broadcast says it."""
        del server, broadcast, task, recipients
        return None

    def exchanged_bits(
        self, broadcast: Arrays, task: Task, round_index: int, uploads: IntArray, downloads: IntArray
    ) -> tuple[IntArray, IntArray] | None:
        """Return the bits that each client of a cohort sends and receives if they exchange messages, [C] each.

        They are all of its bits in the round, and follow from `uploads` and `downloads` [C], the sizes of the messages
        to and from a server, of the whole cohort in ascending order: not from what arrives. It is None, the default,
        if there is a server.
        """
        del broadcast, task, round_index, uploads, downloads
        return None

    def sending_rates(self, task: Task, clients: IntArray, round_index: int) -> FloatArray | None:
        """Return the bits per second at which each client sends, [C], if links between clients have rates of their own.

        What goes over such a link takes its time while it is sent, and none when its receiver downloads it. None, the
        default: the rates of the fleet or the radio.
        """
        del task, clients, round_index
        return None

    def elected_server(self, task: Task, cohort: IntArray, round_index: int) -> int | None:
        """Return the client of a cohort, [C] ascending, that makes the step of this round; None, the default: none."""
        del task, cohort, round_index
        return None

    @abstractmethod
    def fold(self, partials: Sequence[Arrays]) -> Arrays:
        """Return the sum of the chunks' partial sums, taken in the order of the chunks."""

    @abstractmethod
    def step(self, server: Arrays, broadcast: Arrays, total: Arrays, task: Task, round_index: int) -> Arrays:
        """Return the state after this round, from the sum over all chunks."""

    def step_metrics(self, before: Arrays, after: Arrays, total: Arrays, task: Task) -> Mapping[str, float]:
        """Return metrics of a step of the server, from its state before and after it and the sum; none by default.

        Each is a column of the round. What `step` alone knows, it keeps in the state.
        """
        del before, after, total, task
        return {}

    def requested_bits(self, server: Arrays) -> IntArray | None:
        """Return the bits that each client sent besides because the step to this state asked for them, [U].

        They are sent after all uploads of the round, and lengthen it. None, the default: a step asks for nothing.
        """
        del server
        return None

    @abstractmethod
    def final(self, server: Arrays) -> Arrays:
        """Return the global parameters that a server state stands for."""

    def weighted_by_staleness(self, partial: Arrays, factor: float) -> Arrays | None:
        """Return a partial sum with its updates times `factor` and their weights unchanged; None, the default, if not.

        An empty partial sum asks whether it is defined.
        """
        del partial, factor
        return None

    def sum_layout(self, task: Task, cohort: int) -> Any:
        """Return the `SumLayout` of rounds of at most `cohort` clients, for secure aggregation.

        It is None, the default, if the server needs more than a sum.
        """
        del task, cohort
        return None

    @property
    def secure_sums(self) -> SecureSums | None:
        """The protection of this algorithm's sums from the server; None without secure aggregation."""
        return None

    # Client half

    def train(self, broadcast: Arrays, chunk: Chunk, task: Task) -> ChunkResult:
        """Train the clients of a chunk, and send what they learnt."""
        updates = self.local_updates(broadcast, chunk, task)
        began = time.perf_counter()
        return self.send(broadcast, chunk, task, updates).encoded_since(began)

    def local_updates(self, broadcast: Arrays, chunk: Chunk, task: Task) -> Sequence[LocalUpdates]:
        """Return the results of the local training: those of `local_calls`, unless it has a program of its own."""
        calls = self.training_calls(broadcast, chunk, task)
        if calls is None:
            raise NotImplementedError(f"{type(self).__name__} has no local_calls, and no local_updates of its own")
        if len(calls) > 1:
            return calls[0].task.training.train_together(calls)
        return [call.task.training.train(call.server, call.chunk, call.task, call.terms) for call in calls]

    def training_calls(self, broadcast: Arrays, chunk: Chunk, task: Task) -> Sequence[LocalCall] | None:
        """Return `local_calls`, those of attackers on their data and by their terms."""
        calls, adversary = self.local_calls(broadcast, chunk, task), task.adversary
        if calls is None or adversary is None or not adversary.attack.attacks_in(chunk.round_index):
            return calls
        return [
            replace(
                call,
                task=replace(call.task, data=adversary.data),
                terms=adversary.attack.terms(
                    call.terms, adversary.clients[call.chunk.clients], call.task.training.epochs
                ),
            )
            for call in calls
        ]

    def local_calls(self, broadcast: Arrays, chunk: Chunk, task: Task) -> Sequence[LocalCall] | None:
        """Return the local training of a chunk's clients; None, the default, if it is another program.

        Each client of the chunk is in the chunk of one of the calls, which may differ in model, start and terms.
        """
        del broadcast, chunk, task
        return None

    def send(self, broadcast: Arrays, chunk: Chunk, task: Task, updates: Sequence[LocalUpdates]) -> ChunkResult:
        """Return what the clients send and keep of their local training, in the chunk's order."""
        raise NotImplementedError(f"{type(self).__name__} has no send")

    def rate_distortion(self, task: Task, cohort: IntArray) -> RateDistortion | None:
        """Return what the link allocation may know of the cohort's updates.

        It is None, the default, if uploads do not follow budgets.
        """
        del task, cohort
        return None

    def upload_bits(self, broadcast: Arrays, task: Task, clients: IntArray) -> IntArray | None:
        """Return the bits that each client will send if nothing limits it, [C].

        It is None, the default, if only the training can tell.
        """
        del broadcast, task, clients
        return None

    def relative_work(self, broadcast: Arrays, task: Task, clients: IntArray) -> FloatArray | None:
        """Return each client's work on one sample, relative to that on the whole model, [C]; None: all do 1."""
        del broadcast, task, clients
        return None

    # Evaluation of clients

    @property
    def personalises(self) -> bool:
        """Return whether clients use models other than the global one: a subclass has `personal` or `own_models`."""
        cls = type(self)
        return (cls.personal, cls.own_models) != (Algorithm.personal, Algorithm.own_models)

    def joined(self, broadcast: Arrays, chunk: Chunk, task: Task) -> Arrays:
        """Return what clients keep that join now, before they train for the first time, [C, ...] each.

        By default that is `chunk.state`, which they had before round 1. It is asked of new clients, which an evaluation
        lets train as in a round, without sending anything.
        """
        del broadcast, task
        return chunk.state

    def personal(self, broadcast: Arrays, chunk: Chunk, task: Task) -> Arrays:
        """Return the parameters that each client of a chunk would use, [C, ...], or [1, ...] if they are the same.

        They may be adapted on training samples, never on held-out ones. `chunk.state` is all that clients keep. Without
        an override `broadcast` is the global model, which all of them use.
        """
        del chunk, task
        return {name: values[np.newaxis] for name, values in broadcast.items()}

    def own_models(self, broadcast: Arrays, chunk: Chunk, task: Task) -> Sequence[OwnModel]:
        """Return the models that the clients of a chunk would use; each client is in one of them.

        Their metrics are those of the run's model. By default that is the model of all, with `personal` parameters.
        """
        return [OwnModel(np.arange(len(chunk.clients)), task.model, self.personal(broadcast, chunk, task))]


class Executor(ABC):
    """Trains chunks in this process or elsewhere; results must not depend on the executor."""

    @abstractmethod
    def train(self, broadcast: Arrays, chunks: Sequence[Chunk]) -> list[ChunkResult]:
        """Train all chunks of a round and return their results in the order of the chunks."""

    def measure(
        self, broadcast: Arrays, chunks: Sequence[Chunk], splits: Sequence[ClientSplit]
    ) -> list[ClientMeasures] | None:
        """Measure the clients of all chunks, in the order of the chunks, and keep nothing.

        Return None, the default, where the process of the round loop is to do it.
        """
        del broadcast, chunks, splits
        return None
