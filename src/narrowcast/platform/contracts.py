"""Contracts of data sets, models, trainings, algorithms and executors; the round loop relies on nothing else."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, Literal, Protocol, runtime_checkable

from typing_extensions import TypeVar

from narrowcast.platform.described import Described
from narrowcast.platform.seeds import PrivateSeed
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

if TYPE_CHECKING:
    from narrowcast.platform.secure_contracts import SecureSums

Split = Literal["validation", "test"]


class Dataset(Described, Protocol):
    """The data of all clients, held once and indexed by client."""

    @property
    def n_clients(self) -> int:
        """The number of clients, U."""
        ...

    @property
    def examples(self) -> IntArray:
        """The number of training examples of every client, [U]."""
        ...


DataT_co = TypeVar("DataT_co", bound=Dataset, default=Any, covariant=True)
TrainingT_co = TypeVar("TrainingT_co", bound="Training", default=Any, covariant=True)


class DataSource(Protocol):
    """A data set as an experiment names it: a frozen model whose fields are its settings.

    A field `seed: int | None = None` follows the seed of the run unless it is set.
    """

    @property
    def kind(self) -> str:
        """The source's name in the catalog."""
        ...

    def load(self) -> Dataset:
        """Read the `Dataset`; raise `UserError` with the folders searched and the command that fetches it."""
        ...


class Fleet(Protocol):
    """The devices and links of the clients: a frozen model whose fields are its settings."""

    @property
    def kind(self) -> str:
        """The fleet's name in the catalog."""
        ...

    def profiles(self, examples: IntArray, seed: int) -> Profiles:
        """Return the profile of each client, in the order of `examples` [U]; depends on the arguments alone."""
        ...


class Model(Protocol):
    """The model to train: a frozen pydantic model whose fields are its hyper-parameters.

    One that has predictions without training to be compared with has `baselines(data)` too, their metrics by name, such
    as `{"popularity": {"test.hr@10": 0.45}}`.
    """

    @property
    def kind(self) -> str:
        """The model's name in the catalog."""
        ...

    def check(self, data: Any) -> None:
        """Raise `UserError` if the model cannot be trained on this `Dataset`."""
        ...

    def init_server(self, data: Any, seed: int) -> Arrays:
        """Return the global parameters before round 1."""
        ...

    def init_clients(self, data: Any, seed: int) -> Arrays:
        """Return the private parameters of all clients before round 1, [U, ...] each, drawn from the private seed."""
        ...

    def evaluate(self, server: Arrays, clients: Arrays, data: Any, split: Split) -> Mapping[str, float]:
        """Return metrics over all clients on one held-out split; empty if the split is."""
        ...


class Training(Protocol):
    """Local training of clients: a frozen pydantic model whose fields are its hyper-parameters."""

    @property
    def kind(self) -> str:
        """The training's name in the catalog."""
        ...

    @property
    def epochs(self) -> int:
        """The local epochs of every client in a round, unless `LocalTerms.epochs` says otherwise."""
        ...

    @property
    def device(self) -> str:
        """The device of the tensors during training, cpu or cuda."""
        ...

    def check(self, task: Task) -> None:
        """Raise `UserError` if the training does not fit the model."""
        ...

    def mode(self, task: Task) -> Literal["batched", "per_client"]:
        """Return whether a chunk's clients train as one program or one after the other; recorded with the run."""
        ...

    def samples(self, task: Task, clients: IntArray) -> IntArray:
        """Return the samples that each client trains on in one epoch, [C]; known before the training."""
        ...

    def train(self, server: Arrays, chunk: Chunk, task: Task, terms: LocalTerms) -> LocalUpdates:
        """Train every client of a chunk from the global parameters."""
        ...

    def train_together(self, calls: Sequence[LocalCall]) -> list[LocalUpdates]:
        """Train the chunks of several runs, as one program if their shapes allow; results are those of `train`."""
        ...


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
    """

    data: DataT_co
    profiles: Profiles
    model: Model
    training: TrainingT_co
    seed: int
    private_seed: PrivateSeed
    start: Arrays | None = None

    def __post_init__(self) -> None:
        if (of_seed := getattr(self.model, "of_seed", None)) is not None:
            object.__setattr__(self, "model", of_seed(self.seed))

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


@runtime_checkable
class Radio(Protocol):
    """The links between clients and server from round to round: a frozen model whose fields are its settings."""

    def share(
        self, profiles: Profiles, rate_distortion: RateDistortion | None, seed: int, round_index: int
    ) -> LinkAllocation:
        """Return the links of a cohort in this round; depends on the seed, the round and the clients alone."""
        ...

    def download_seconds(self, bits: IntArray, rates: FloatArray) -> FloatArray:
        """Return the seconds until each client has received its download, [C]."""
        ...


class Algorithm(Protocol):
    """A federated algorithm: both halves, and no state of its own.

    `rate_distortion`, `download_bits`, `upload_bits`, `relative_work`, `weighted_by_staleness`, `local_calls` with
    `upload_parts`, and `secure_sums` are optional: an algorithm that derives from `AlgorithmDefaults` overrides those
    that it offers. One whose clients all train the same model overrides `local_call` and `upload` instead.
    """

    @property
    def kind(self) -> str:
        """The algorithm's name in the catalog."""
        ...

    def check(self, task: Task) -> None:
        """Raise `UserError` if algorithm, model and data do not fit together."""
        ...

    def init(self, task: Task) -> Arrays:
        """Return the server state before round 1."""
        ...

    def init_clients(self, task: Task) -> Arrays:
        """Return the state that every client keeps between rounds, [U, ...] each; zeros may be a broadcast zero."""
        ...

    def broadcast(self, server: Arrays, task: Task, round_index: int) -> Broadcast:
        """Return what the server sends in this round."""
        ...

    def download_bits(
        self, server: Arrays, broadcast: Broadcast, task: Task, recipients: Recipients
    ) -> IntArray | None:
        """Return the bits that each recipient downloads, [C]; None if `Broadcast.full` and `update` say it."""
        ...

    def train(self, broadcast: Arrays, chunk: Chunk, task: Task) -> ChunkResult:
        """Return the client half: train the clients of a chunk, and encode and sum up their uploads."""
        ...

    def fold(self, partials: Sequence[Arrays]) -> Arrays:
        """Return the sum of the chunks' partial sums, taken in the order of the chunks."""
        ...

    def step(self, server: Arrays, broadcast: Arrays, total: Arrays, task: Task, round_index: int) -> Arrays:
        """Return the server half: the state after this round, from the sum over all chunks."""
        ...

    def final(self, server: Arrays) -> Arrays:
        """Return the global parameters that a server state stands for."""
        ...

    def rate_distortion(self, task: Task, cohort: IntArray) -> RateDistortion | None:
        """Return what the link allocation may know of the cohort's updates; None if uploads do not follow budgets."""
        ...

    def upload_bits(self, broadcast: Arrays, task: Task, clients: IntArray) -> IntArray | None:
        """Return the bits that each client will send if nothing limits it, [C]; None if only the training can tell."""
        ...

    def weighted_by_staleness(self, partial: Arrays, factor: float) -> Arrays | None:
        """Return a partial sum with its updates times `factor` and their weights unchanged; None if that is undefined.

        An empty partial sum asks whether it is defined.
        """
        ...

    def relative_work(self, broadcast: Arrays, task: Task, clients: IntArray) -> FloatArray | None:
        """Return each client's work on one sample, relative to that on the whole model, [C]; None if all do 1."""
        ...

    def local_calls(self, broadcast: Arrays, chunk: Chunk, task: Task) -> Sequence[LocalCall] | None:
        """Return the local training that `train` begins with; None if this model is trained by another program.

        Each client of the chunk is in the chunk of one of the calls, which may differ in model, start and terms.
        """
        ...

    def upload_parts(self, broadcast: Arrays, chunk: Chunk, task: Task, updates: Sequence[LocalUpdates]) -> ChunkResult:
        """Return the rest of `train` after `local_calls`: what the clients send and keep, in the chunk's order."""
        ...

    @property
    def secure_sums(self) -> SecureSums | None:
        """The protection of this algorithm's sums from the server; None without secure aggregation."""
        ...


class AlgorithmDefaults:
    """The optional methods of `Algorithm` for an algorithm that does not offer them."""

    def rate_distortion(self, task: Task, cohort: IntArray) -> RateDistortion | None:
        """Return None: uploads do not follow budgets."""
        del task, cohort
        return None

    def download_bits(
        self, server: Arrays, broadcast: Broadcast, task: Task, recipients: Recipients
    ) -> IntArray | None:
        """Return None: downloads are those of the broadcast."""
        del server, broadcast, task, recipients
        return None

    def upload_bits(self, broadcast: Arrays, task: Task, clients: IntArray) -> IntArray | None:
        """Return None: the size of an upload is known only after the training."""
        del broadcast, task, clients
        return None

    def weighted_by_staleness(self, partial: Arrays, factor: float) -> Arrays | None:
        """Return None: updates cannot be weighted by their staleness."""
        del partial, factor
        return None

    def relative_work(self, broadcast: Arrays, task: Task, clients: IntArray) -> FloatArray | None:
        """Return None: every client trains the whole model."""
        del broadcast, task, clients
        return None

    def local_calls(self, broadcast: Arrays, chunk: Chunk, task: Task) -> Sequence[LocalCall] | None:
        """Return the one call of `local_call`, or None without it."""
        call = self.local_call(broadcast, chunk, task)
        return None if call is None else (call,)

    def upload_parts(self, broadcast: Arrays, chunk: Chunk, task: Task, updates: Sequence[LocalUpdates]) -> ChunkResult:
        """Return the result of `upload` for the one call of `local_call`."""
        return self.upload(broadcast, chunk, task, *updates)

    def local_call(self, broadcast: Arrays, chunk: Chunk, task: Task) -> LocalCall | None:
        """Return None: `train` is one program of its own; else the local training of all clients of the chunk."""
        del broadcast, chunk, task
        return None

    def upload(self, broadcast: Arrays, chunk: Chunk, task: Task, updates: LocalUpdates) -> ChunkResult:
        """Raise: an algorithm that has `local_call` has to have this too."""
        raise NotImplementedError(f"{type(self).__name__} has local_call and lacks upload")

    @property
    def codes_row_lists(self) -> bool:
        """False: no upload has a list of rows that negatives known to the receiver would shorten."""
        return False

    @property
    def widens_model(self) -> bool:
        """False: the global model keeps the shapes that the model draws."""
        return False

    @property
    def averages_clients(self) -> bool:
        """False: the global model is not always a weighted mean of its clients' models, trained by plain steps."""
        return False

    @property
    def counts_draws(self) -> bool:
        """False: a client that is drawn several times with replacement has the weight of one draw."""
        return False

    @property
    def secure_sums(self) -> SecureSums | None:
        """None: the server sees the partial sums of the chunks."""
        return None


class Executor(Protocol):
    """Trains chunks in this process or elsewhere; results must not depend on the executor."""

    def train(self, broadcast: Arrays, chunks: Sequence[Chunk]) -> list[ChunkResult]:
        """Train all chunks of a round and return their results in the order of the chunks."""
        ...
