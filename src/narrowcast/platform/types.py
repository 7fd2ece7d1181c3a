"""The types that data flows through, from a client's profile to what it learns.

Every layer speaks in them, and none may import another for a type; `rounds.ledger` has those of a round's end.

Letters: C clients of a chunk or cohort, U clients in all, N items (rows of the item matrix), d embedding dimension,
r rank, R rows that a chunk's clients touch, n examples.
"""

from __future__ import annotations

import hashlib
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, Self

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float64]
BoolArray = NDArray[np.bool_]
Arrays = Mapping[str, NDArray[Any]]
"""Named arrays: a server state, the clients' states, a broadcast, a partial sum."""
Dtype = np.dtype[Any]


@dataclass(frozen=True)
class PrefixedArrays:
    """The arrays whose names begin with `prefix`; checkpoints store them under these names."""

    prefix: str

    def name(self, name: str) -> str:
        """Return the full name of an array of this part."""
        return self.prefix + name

    def add(self, arrays: Arrays) -> dict[str, NDArray[Any]]:
        """Return arrays under their full names."""
        return {self.prefix + name: values for name, values in arrays.items()}

    def of(self, arrays: Arrays) -> dict[str, NDArray[Any]]:
        """Return the arrays of this part under their own names."""
        return {
            name.removeprefix(self.prefix): values for name, values in arrays.items() if name.startswith(self.prefix)
        }

    def without(self, arrays: Arrays) -> dict[str, NDArray[Any]]:
        """Return all other arrays."""
        return {name: values for name, values in arrays.items() if not name.startswith(self.prefix)}


def scaled(tensors: Arrays, factor: FloatArray) -> dict[str, NDArray[Any]]:
    """Return tensors [C, ...] times a factor of each client, [C], in their own types."""
    return {
        name: values * factor.reshape(-1, *[1] * (values.ndim - 1)).astype(values.dtype)
        for name, values in tensors.items()
    }


def all_finite(*arrays: NDArray[Any]) -> bool:
    """Return whether all values of the arrays are finite.

    The sum of squares is, unless it overflows or a value is not: one pass over the values, without a temporary array.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        for values in arrays:
            flat = values.ravel()
            if not (math.isfinite(flat.dot(flat)) or np.isfinite(values).all()):
                return False
    return True


def hash_arrays(hasher: Any, arrays: Arrays, prefix: str = "") -> None:
    """Add the names, each after the prefix, types, shapes and values of arrays to a hash, in the order of names."""
    for name in sorted(arrays):
        values = np.ascontiguousarray(arrays[name])
        hasher.update(f"{prefix}{name}\0{values.dtype.str}\0{values.shape}\0".encode())
        hasher.update(values.reshape(-1).view(np.uint8).data)


def arrays_sha256(arrays: Arrays) -> bytes:
    """Return the hash of arrays by `hash_arrays`, [32]."""
    hasher = hashlib.sha256()
    hash_arrays(hasher, arrays)
    return hasher.digest()


@dataclass(frozen=True)
class ClientProfile:
    """One client's number of examples, link and device.

    Units: bits per second for the links; `compute_speed` is relative to the reference device of the clock.
    """

    client: int
    examples: int
    uplink_bits_per_second: float
    downlink_bits_per_second: float
    compute_speed: float


@dataclass(frozen=True)
class Profiles:
    """The profiles of many clients as columns, so that a million of them cost five arrays."""

    client: IntArray
    examples: IntArray
    uplink_bits_per_second: FloatArray
    downlink_bits_per_second: FloatArray
    compute_speed: FloatArray

    def __len__(self) -> int:
        return len(self.client)

    def __getitem__(self, row: int) -> ClientProfile:
        return ClientProfile(
            int(self.client[row]),
            int(self.examples[row]),
            float(self.uplink_bits_per_second[row]),
            float(self.downlink_bits_per_second[row]),
            float(self.compute_speed[row]),
        )

    def take(self, rows: IntArray) -> Profiles:
        """Return the profiles of the clients at `rows`, in that order."""
        return Profiles(
            self.client[rows],
            self.examples[rows],
            self.uplink_bits_per_second[rows],
            self.downlink_bits_per_second[rows],
            self.compute_speed[rows],
        )


class Payload(ABC):
    """Base of anything that is sent over a link; its size is that of its packed bytes.

    Its class method `from_bytes` unpacks the bytes without running code, with what the receiver knows besides; it
    raises `PayloadError` if they are malformed.
    """

    @abstractmethod
    def wire_bits(self) -> int:
        """Return eight times the length of `to_bytes()`, computed without packing."""

    @abstractmethod
    def to_bytes(self) -> bytes:
        """Return the bytes that a radio would send."""


class PayloadError(ValueError):
    """Bytes that are not a valid payload: truncated, padded, or of another shape than stated."""


@dataclass(frozen=True)
class Chunk:
    """A fixed part of a round's cohort: the work of one call to a client host.

    Shapes: clients [C] ascending by place in the chunk; state holds each of these clients' private arrays, [C, ...];
    budget_bits [C], what each may send in this round, None if nothing limits it; lost [C], whose upload an outage
    takes or comes too late, None if there is none: it is paid for and does not enter the sum; epochs [C], the most
    that each has time for, None if all have time for the training's; draws [C], how often each was drawn with
    replacement and counts, None if once.

    Under secure aggregation, `relayed` is the record of public keys that the server passes on to all clients of the
    round, and `secrets` are the private keys of these clients: their host fills them in, and they never leave it.
    `key_round` is the number of the sum in the run, for which clients make keys once; a round may have several sums.

    `watched` are the other chunks of the round, if attackers of this one know what those learn: their host trains them
    too, so that the result of a chunk follows from the chunk alone.
    """

    round_index: int
    index: int
    clients: IntArray
    state: Arrays
    budget_bits: IntArray | None = None
    lost: BoolArray | None = None
    epochs: IntArray | None = None
    draws: IntArray | None = None
    relayed: Any = None
    secrets: Arrays = field(default_factory=dict, repr=False)
    watched: tuple[Chunk, ...] = ()
    key_round: int = 0

    def take(self, indices: IntArray) -> Chunk:
        """Return the clients at these indices, in that order; `relayed`, `secrets` and `watched` stay behind."""

        def of(values: NDArray[Any] | None) -> Any:
            return None if values is None else values[indices]

        return Chunk(
            self.round_index,
            self.index,
            self.clients[indices],
            {name: values[indices] for name, values in self.state.items()},
            *map(of, (self.budget_bits, self.lost, self.epochs, self.draws)),
        )

    def affords(self, bits: IntArray) -> BoolArray:
        """Return whether each client may send that many bits, [C]."""
        return np.ones(len(self.clients), dtype=bool) if self.budget_bits is None else bits <= self.budget_bits

    def reserve_bits(self, bits: int) -> Chunk:
        """Return the chunk with `bits` subtracted from every budget, 0 at least."""
        if self.budget_bits is None:
            return self
        return replace(self, budget_bits=np.maximum(self.budget_bits - bits, 0))

    def arrives(self) -> BoolArray:
        """Return whether each client's upload arrives and counts, [C]."""
        return np.ones(len(self.clients), dtype=bool) if self.lost is None else ~self.lost


Rebuild = Callable[[Mapping[str, Any], Mapping[str, Any]], Mapping[str, Any]]
"""Function that computes a module's parameters, as torch tensors, from trained and frozen values."""


class UnlabelledStep(Protocol):
    """The samples without labels of a step, m of each of each client, for a rule that moves by other losses of them.

    They are drawn if `LocalTerms.consistency` is given; with its `weight` 0 no gradient has their loss.
    """

    @property
    def valid(self) -> Any:
        """Which samples there are, [a, m]: a client may have fewer than others, or none."""
        ...

    def outputs(self, at: Mapping[str, Any]) -> Any:
        """Return the outputs for the weak views, [a, m, K], without a gradient."""
        ...

    def gradient(self, at: Mapping[str, Any], targets: Any, weights: Any, *, strong: bool) -> dict[str, Any]:
        """Return that of the sum of the views' cross-entropies with shares of classes [a, m, K], by weights [a, m]."""
        ...


class Gradient(Protocol):
    """The gradient of each client's mean loss over a part of a step's batch; a part without samples has no loss."""

    def __call__(self, at: Mapping[str, Any], part: int) -> dict[str, Any]:
        """Return it at parameters [a, ...], of the names and shapes of the trained ones.

        It has the terms of the training and of `LocalTerms`.
        """
        ...

    @property
    def unlabelled(self) -> UnlabelledStep | None:
        """The samples without labels of the step; None if no client has any."""
        ...

    def hessian_product(self, at: Mapping[str, Any], part: int, direction: Mapping[str, Any]) -> dict[str, Any]:
        """Return the product of the Hessian at parameters [a, ...] with a direction [a, ...]; clipping has no part."""
        ...


class LocalRule(Protocol):
    """A local step other than gradient descent, taken by a clients at once; hashable, such as a frozen model.

    All values are torch tensors with a leading client axis: [C, ...] for all clients, [a, ...] in a step, of the
    clients that take it or of one of them.
    """

    @property
    def parts(self) -> int:
        """The number of parts, of equal size to one sample, into which the batch of every step is cut."""
        ...

    def init(self, start: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
        """Return what the rule keeps from step to step, such as moments: new tensors [C, ...].

        `start` has the parameters from which clients start and `own` the tensors of `LocalTerms.own`.
        """
        ...

    def step(
        self,
        values: Mapping[str, Any],
        slots: Mapping[str, Any],
        gradient: Gradient,
        own: Mapping[str, Any],
        rate: float,
        step: int,
    ) -> None:
        """Take step number `step`, from 0, at this learning rate: change `values` and `slots` [a, ...] in place.

        The loss of the step is that at the parameters of the first call of `gradient`, which there has to be.
        """
        ...


class Consistency(Protocol):
    """A loss of samples without labels, of a clients at once; hashable, such as a frozen model. Torch tensors.

    It is `weight` times the mean over a step's samples of the cross-entropy of the outputs for a strong view with
    targets that follow from those for a weak one, which are no function of the parameters that are trained.
    """

    @property
    def weight(self) -> float:
        """The factor of the loss."""
        ...

    @property
    def ratio(self) -> int:
        """The samples without labels in a step for each sample of the training's batch size."""
        ...

    @property
    def views(self) -> Any:
        """The views, by `weak` and `strong`, of images [a, m, ...] from keys [a, 1] at places [1 or a, m]."""
        ...

    def targets(self, outputs: Any) -> tuple[Any, Any]:
        """Return shares of the classes for outputs [a, m, K], and which samples count, [a, m]."""
        ...


@dataclass(frozen=True)
class Phase:
    """Local epochs in which only some of the trained parameters train; the others wait as they are."""

    trained: tuple[str, ...]
    epochs: int


@dataclass(frozen=True)
class LocalTerms:
    """Terms that an algorithm adds to the clients' local steps.

    `proximal` is mu of mu/2 ||y - x||^2. Shapes: correction [C, ...] for each parameter, added to every gradient;
    epochs [C], if clients deviate from the training's; gains [C, ...], factors of the gradients of the tensors they
    name. If values other than the module's own parameters are trained, `rebuild` computes the parameters from these
    values and `frozen`; without it `frozen` are values of tensors that the module does not train, in place of its own.
    `start_loss` and `start_gradient` ask for those of `LocalUpdates`, at the cost of one more pass
    over a client's samples, forward or forward and back.

    `rule` replaces gradient descent; `own` [C, ...] are its clients' tensors. `start` [C, ...] has the parameters from
    which each client starts where these are not the server's; changes are relative to them. `columns` [k] are the
    features that a slice of a network reads, ascending; None if it reads all of them.

    `trained` names the parameters that train, None for all: the others stay bit for bit as the server or `start` has
    them, and have no change. `phases` are a client's first epochs, in turn, in which only some of these train; what is
    left of its epochs trains all of them. Momentum, moments and the slots of a rule begin anew in each phase.

    Of networks alone: pulls [C] are added to `proximal`, one for each client; radii [C] are the largest L2 distances
    from where they start that clients' parameters, all tensors taken together, have after a step: they are moved back
    along the line to their start. inf is no bound. Both are measured from where a phase starts. `consistency` is the
    loss of clients' samples without labels, which is added to that of a step's batch; where no client has labels it is
    the whole loss, over batches of the training's size. `tail_weight` is that of the sum of |B_t| |A_t| over adapters,
    which is added to the loss: of the columns of B and rows of A from tails [C] on.
    """

    proximal: float = 0.0
    correction: Arrays | None = None
    epochs: IntArray | None = None
    gains: Arrays | None = None
    rebuild: Rebuild | None = None
    frozen: Arrays = field(default_factory=dict)
    start_loss: bool = False
    rule: LocalRule | None = None
    start: Arrays | None = None
    own: Arrays = field(default_factory=dict)
    start_gradient: bool = False
    columns: IntArray | None = None
    trained: tuple[str, ...] | None = None
    phases: tuple[Phase, ...] = ()
    pulls: FloatArray | None = None
    radii: FloatArray | None = None
    consistency: Consistency | None = None
    tails: IntArray | None = None
    tail_weight: float = 0.0

    @property
    def holds_clients(self) -> bool:
        """Return whether clients have distances of their own from where they start."""
        return self.pulls is not None or self.radii is not None


@dataclass(frozen=True)
class RowChanges:
    """Each client's changes of some rows of a tensor [n_rows, k], in place of all of them.

    Shapes: rows [R], ascending in each client; values [R, k]; row_starts [C + 1], where each client's rows begin.
    `order` [C] are the places in the chunk of the clients whose rows follow each other; None if it is the chunk's.
    `total` [n_rows, k] is the weighted sum over the clients whose changes will arrive, and `touched` [n_rows] how many
    of them changed each row, if the training was told so much and added them up; it then kept no values. columns [C, k]
    are those that each client sends; None for all.
    """

    rows: IntArray
    row_starts: IntArray
    values: NDArray[Any]
    n_rows: int
    order: IntArray | None = None
    columns: BoolArray | None = None
    total: NDArray[Any] | None = None
    touched: FloatArray | None = None

    @classmethod
    def whole(cls, values: NDArray[Any]) -> RowChanges:
        """Return changes of all rows, from values [C, n_rows, k]."""
        n_clients, n_rows = values.shape[:2]
        starts = np.arange(n_clients + 1) * n_rows
        return cls(np.tile(np.arange(n_rows), n_clients), starts, values.reshape(-1, *values.shape[2:]), n_rows)

    @cached_property
    def _positions(self) -> IntArray:
        """The position of each client in `order`, [C]."""
        return np.arange(len(self.row_starts) - 1) if self.order is None else np.argsort(self.order)

    @cached_property
    def counts(self) -> IntArray:
        """The number of rows of each client, [C]."""
        counts = self.row_starts[1:] - self.row_starts[:-1]
        return counts if self.order is None else counts[self._positions]

    @property
    def owners(self) -> IntArray:
        """The place in the chunk of the client of each row, [R]."""
        sizes = np.diff(self.row_starts)
        return np.repeat(np.arange(len(sizes)) if self.order is None else self.order, sizes)

    def scaled(self, factors: FloatArray) -> RowChanges:
        """Return the changes times a factor of each client, [C], in their own type; their values have to be kept."""
        assert self.total is None, "changes that are added up are of no client"
        return replace(self, values=scaled({"rows": self.values}, factors[self.owners])["rows"])

    def span(self, index: int) -> slice:
        """Return the part of `rows` that is of the client at this place of the chunk."""
        position = self._positions[index]
        return slice(int(self.row_starts[position]), int(self.row_starts[position + 1]))

    def of_client(self, index: int) -> tuple[IntArray, NDArray[Any]]:
        """Return the rows [m] of the client at this place of the chunk, and their values [m, k]."""
        span = self.span(index)
        return self.rows[span], self.values[span]

    def matrix(self, index: int) -> NDArray[Any]:
        """Return the whole tensor of the client at this place of the chunk, zeros included."""
        rows, values = self.of_client(index)
        whole = np.zeros((self.n_rows, *values.shape[1:]), dtype=values.dtype)
        whole[rows] = values
        return whole

    def dense(self) -> NDArray[Any]:
        """Return the whole tensor of every client [C, n_rows, k], zeros included."""
        return np.stack([self.matrix(index) for index in range(len(self.row_starts) - 1)])


@dataclass(frozen=True)
class LocalUpdates:
    """Result of local training before anything is sent: y - x for each parameter that trains.

    Shapes: changes and state [C, ...] each, `state` being the model's private parameters; loss [C] over the last local
    epoch; examples [C] trained in all epochs; steps [C] taken; start_loss [C], the mean loss over all of a client's
    training samples of the parameters that it starts from, 0 without samples, None unless the terms ask for it;
    start_gradient [C, ...], the gradient of that loss for each parameter, without the terms of the training;
    rate_sum [C], the sum of the learning rates of the steps taken, None if every step has `training.learning_rate`;
    slots [C, ...], what the terms' rule kept after the last step. `rows` are changes of tensors of which clients train
    some rows; finite [C] are the clients whose training stayed finite, None if their values tell; levels [C], those
    that were chosen with the columns of the rows for a codec to try first, None for its own.
    """

    changes: Arrays
    state: Arrays
    loss: FloatArray
    examples: IntArray
    steps: IntArray
    start_loss: FloatArray | None = None
    rate_sum: FloatArray | None = None
    slots: Arrays = field(default_factory=dict)
    start_gradient: Arrays = field(default_factory=dict)
    rows: Mapping[str, RowChanges] = field(default_factory=dict)
    finite: BoolArray | None = None
    levels: IntArray | None = None

    def scaled(self, factors: FloatArray) -> LocalUpdates:
        """Return the result with changes times a factor of each client, [C], in their own types."""
        rows = {name: part.scaled(factors) for name, part in self.rows.items()}
        return replace(self, changes=scaled(self.changes, factors), rows=rows)

    def mean_rates(self, learning_rate: float) -> FloatArray:
        """Return the mean learning rate of each client's steps, [C]: `learning_rate` without steps or a schedule."""
        if self.rate_sum is None:
            return np.full(len(self.steps), learning_rate)
        return np.where(self.steps > 0, self.rate_sum / np.maximum(self.steps, 1), learning_rate)


class RunInput:
    """The loaded input of a run, a data set or a problem, which has these as fields or properties."""

    if TYPE_CHECKING:

        @property
        def name(self) -> str:
            """The name of the data set or problem."""

        @property
        def source(self) -> str:
            """The file, site or generator that it comes from."""

        @property
        def digest(self) -> str:
            """The sha256 of everything that a run can see of it."""

        @property
        def sizes(self) -> Mapping[str, int]:
            """The sizes to report with a run, such as the number of items, classes or observed entries."""


ITERATION = "iteration"
ITERATION_COLUMNS = frozenset(
    (
        *(ITERATION, "residual", "solver_seconds", "step_wall_seconds", "evaluate_wall_seconds"),
        *("wall_seconds", "log_wall_seconds", "logged_at_ms"),
    )
)
"""The columns of an iteration's row of the journal that are not metrics of the problem."""


class KeptState(Protocol):
    """The state of a run of any kind, as checkpoints keep it."""

    step_name: ClassVar[str]
    """The name of a step, `round` or `iteration`."""

    @property
    def step(self) -> int:
        """The last step that is finished."""
        ...

    def packed(self) -> tuple[Arrays, dict[str, str]]:
        """Return the tensors and the metadata of a checkpoint."""
        ...

    @classmethod
    def unpacked(cls, tensors: Arrays, metadata: Mapping[str, str]) -> Self:
        """Return the state of a checkpoint; raise `KeyError` or `ValueError` if it is not one."""
        ...


class Step(Protocol):
    """A recorded round or iteration."""

    @property
    def step(self) -> int:
        """Its number."""
        ...

    @property
    def metrics(self) -> Mapping[str, float]:
        """The metrics measured after it, empty if there was no evaluation."""
        ...

    @property
    def wall_seconds(self) -> float:
        """The time that it took."""
        ...

    @property
    def state(self) -> KeptState | None:
        """The state after it if a checkpoint is due."""
        ...

    def row(self) -> dict[str, Any]:
        """Return its row of the journal, without metrics and the time since the start."""
        ...

    def entry(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """Return its line of the journal with the whole row."""
        ...
