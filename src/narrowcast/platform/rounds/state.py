"""The state of a run: as it changes from round to round (`LiveState`), and as a checkpoint keeps it (`RunState`).

Between them stand their parts: the private state of all clients (`Population`), of which a round touches the rows of
its cohort, the clients in flight of an asynchronous run (`AsyncState`), and the run that a state belongs to (`Run`).
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
import psutil
from numpy.typing import NDArray

from narrowcast.platform.compiled import one_thread
from narrowcast.platform.contracts import Algorithm, Task, Training
from narrowcast.platform.data.dataset import Dataset
from narrowcast.platform.errors import UserError
from narrowcast.platform.rounds.client_contracts import ClientSplit
from narrowcast.platform.rounds.contract_checks import check_attack, check_final, check_traits
from narrowcast.platform.rounds.plan import Plan
from narrowcast.platform.rounds.sampling import drawn_new_clients
from narrowcast.platform.storage.host import allow_signals, host_clock
from narrowcast.platform.traits import Traits
from narrowcast.platform.types import Arrays, BoolArray, FloatArray, IntArray, KeptState, PrefixedArrays, all_finite

SHARE_OF_MEMORY = 0.5
"""Share of the free memory above which zeros are kept in sparse temporary files, which may outgrow the memory."""


@dataclass
class Population:
    """The private state of all clients between rounds: large arrays, of which a round changes the rows of its cohort.

    Shapes: arrays [U, ...] each; last_round [U], the last round in which a client took part, 0 for none.
    """

    arrays: dict[str, NDArray[Any]]
    last_round: IntArray

    @classmethod
    def fresh(cls, initial: Arrays, n_clients: int) -> Population:
        """Return the state before round 1, in which no client has taken part; `initial` is not written to."""
        zeros = sum(values.nbytes for values in initial.values() if _is_zero(values))
        in_files = zeros > SHARE_OF_MEMORY * psutil.virtual_memory().available
        arrays = {name: _own(values, in_files) for name, values in initial.items()}
        return cls(arrays, np.zeros(n_clients, dtype=np.int64))

    def take(self, clients: IntArray) -> Arrays:
        """Return a copy of the rows of `clients`."""
        return {name: values[clients] for name, values in self.arrays.items()}

    def put(self, clients: IntArray, state: Arrays) -> None:
        """Replace the rows of `clients`."""
        for name, values in state.items():
            self.arrays[name][clients] = values

    def participants(self) -> IntArray:
        """Return the clients that have taken part so far; all others have their initial state."""
        return np.flatnonzero(self.last_round)


def _is_zero(values: NDArray[Any]) -> bool:
    """Return whether the array is a broadcast zero."""
    return bool(values.size and not any(values.strides) and not values.flat[0])


def _own(values: NDArray[Any], in_file: bool) -> NDArray[Any]:
    """Return a writable copy; of a broadcast zero only touched rows take memory, or space in a file."""
    if not _is_zero(values):
        return values.copy()
    if not in_file:
        return np.zeros(values.shape, dtype=values.dtype)
    with tempfile.TemporaryFile(prefix="narrowcast-clients-") as file:
        file.truncate(values.nbytes)
        return np.memmap(file, dtype=values.dtype, mode="r+", shape=values.shape)


@dataclass(frozen=True)
class InFlight:
    """Clients that were sent a model and whose update has not been used, in order of arrival and client; all [F].

    `version` counts the server's steps up to the model that a client was sent. Units: `arrives_at` in simulated
    seconds since the start of the run, `seconds` since the client was sent its model.
    """

    client: IntArray
    version: IntArray
    arrives_at: FloatArray
    seconds: FloatArray
    downlink_bits: IntArray

    @classmethod
    def none(cls) -> Self:
        """Return the record of no client."""
        no_clients = np.empty(0, dtype=np.int64)
        return cls(no_clients, no_clients, np.empty(0), np.empty(0), no_clients)

    def __len__(self) -> int:
        return len(self.client)

    def take(self, rows: IntArray | BoolArray | slice) -> Self:
        """Return some of the clients."""
        return type(self)(**{column.name: getattr(self, column.name)[rows] for column in fields(self)})

    def merged(self, others: Self) -> Self:
        """Return these clients and others in order."""
        together = type(self)(
            **{
                column.name: np.concatenate([getattr(self, column.name), getattr(others, column.name)])
                for column in fields(self)
            }
        )
        return together.take(np.lexsort((together.client, together.arrives_at)))


_CLIENTS, _VERSION, _DISPATCHED = "flight/", "version/", "sent_out"  # names in checkpoints, which stay as they are


@dataclass(frozen=True)
class AsyncState:
    """The state of an asynchronous run between two steps of the server.

    `broadcasts` holds, by version, each model that a client in flight was sent. `dispatched` counts the models sent
    since the start of the run.
    """

    in_flight: InFlight = field(default_factory=InFlight.none)
    broadcasts: Mapping[int, Arrays] = field(default_factory=dict)
    dispatched: int = 0

    @classmethod
    def from_arrays(cls, arrays: Arrays) -> Self | None:
        """Read the state from the arrays of a checkpoint; return None if that of a synchronous run is given."""
        if _DISPATCHED not in arrays:
            return None
        broadcasts: dict[int, dict[str, np.ndarray]] = {}
        for name in arrays:
            if name.startswith(_VERSION):
                version, _, tensor = name.removeprefix(_VERSION).partition("/")
                broadcasts.setdefault(int(version), {})[tensor] = arrays[name]
        in_flight = InFlight(**{column.name: arrays[_CLIENTS + column.name] for column in fields(InFlight)})
        return cls(in_flight, broadcasts, int(arrays[_DISPATCHED][0]))

    def to_arrays(self) -> Arrays:
        """Return the state as the arrays of a checkpoint."""
        return {
            _DISPATCHED: np.array([self.dispatched]),
            **{_CLIENTS + column.name: getattr(self.in_flight, column.name) for column in fields(InFlight)},
            **{
                f"{_VERSION}{version}/{name}": values
                for version, tensors in self.broadcasts.items()
                for name, values in tensors.items()
            },
        }

    def dispatch(self, clients: InFlight, version: int, broadcast: Arrays) -> Self:
        """Return the state after more clients were sent this version."""
        if not len(clients):
            return self
        return replace(
            self,
            in_flight=self.in_flight.merged(clients),
            broadcasts={**self.broadcasts, version: broadcast},
            dispatched=self.dispatched + len(clients),
        )

    def without_first(self, count: int) -> Self:
        """Return the state without the first clients to arrive, and without broadcasts that no client has any more."""
        left = self.in_flight.take(slice(count, None))
        broadcasts = {version: self.broadcasts[version] for version in np.unique(left.version).tolist()}
        return replace(self, in_flight=left, broadcasts=broadcasts)


def check_client_evaluation(splits: Sequence[ClientSplit], task: Task) -> None:
    """Raise `UserError` unless model and data can evaluate each client, and some client has samples of each split."""
    model, data = task.model, task.data
    if not splits:
        return
    asked = f"evaluate_clients = {', '.join(splits)}"
    if not model.measures_clients:
        raise UserError(
            f"{asked}: model.kind = {model.kind} has no measure_clients; use another model, or omit evaluate_clients"
        )
    for split in splits:
        try:
            examples = data.examples_of(split)
        except UserError as error:
            raise UserError(f"{asked}: {error}") from error
        if not examples.any():
            share = f"raise data.{split}_share, or " if split != "train" else ""
            raise UserError(
                f"{asked}: no client of {data.name} has {split} samples; {share}evaluate clients on another split"
            )


@dataclass(frozen=True)
class Run:
    """One run, before or between its rounds: everything that its results depend on, except its `RunState`.

    These are the plan of its rounds, the algorithm and the task. `answered` is the file in which its clients write what
    they answer under secure aggregation; None: in memory alone.
    """

    plan: Plan
    algorithm: Algorithm
    task: Task[Dataset, Training]
    answered: Path | None = None

    @cached_property
    def new_clients(self) -> BoolArray | None:
        """Return whether each client never takes part and is measured alone, [U]; None if all may take part."""
        return drawn_new_clients(self.plan.new_clients, self.task.data.n_clients, self.plan.seed)

    def free(self, round_index: int, seconds: float) -> BoolArray | None:
        """Return whether each client can be drawn for a round that begins at that time, [U]; None if all can."""
        free = self.plan.availability.free(self.task.data.n_clients, self.plan.seed, round_index, seconds)
        if self.new_clients is None:
            return free
        return ~self.new_clients if free is None else free & ~self.new_clients

    @cached_property
    def traits(self) -> Traits:
        """The algorithm's, which follow from its fields: they are asked for in every round."""
        return self.algorithm.traits

    @one_thread()
    def check(self) -> None:
        """Raise `UserError` if model, training, algorithm, data and plan do not fit together."""
        check_traits(self.algorithm)
        self._check_labels()
        self.task.model.check(self.task.data)
        self.task.training.check(self.task)
        self.algorithm.check(self.task)
        self._check_factors()
        self._check_statistics()
        self.check_plan()
        check_client_evaluation(self.plan.evaluate_clients, self.task)
        self._check_new_clients()
        check_attack(self.algorithm.plain, self.task, buffered=self.plan.schedule.kind == "buffered")

    def _check_labels(self) -> None:
        """Raise `UserError` if no client has a label, and the algorithm, or an attack, needs some."""
        if self.task.data.labels_at_clients:
            return
        for setting, needs in (
            (f"algorithm.kind = {self.algorithm.kind}", not self.traits.needs_no_labels),
            ("attack", self.task.adversary is not None),
        ):
            if needs:
                raise UserError(
                    f"{setting} needs samples with labels, and with data.labelled.samples = 0 no client has any; let "
                    "clients keep some, or use algorithm.kind = semi_supervised or fedmatch without attacks"
                )

    def _check_new_clients(self) -> None:
        """Raise `UserError` for new clients that nobody measures, or whose private parameters nobody trains."""
        if self.new_clients is None:
            return
        asked = f"new_clients = {self.plan.new_clients:g}"
        if not self.plan.evaluate_clients:
            raise UserError(f"{asked}: new clients are measured alone; set evaluate_clients = test, or leave it out")
        if self.traits.peers or self.traits.stays_silent:
            raise UserError(
                f"{asked}: with algorithm.kind = {self.algorithm.kind} a client that never takes part has no model but "
                "the first; leave it out"
            )
        if private := sorted(self.task.model.client_parameters or ()):
            raise UserError(
                f"{asked}: the {private[0]} of clients that never take part are not trained with model.kind = "
                f"{self.task.model.kind}; leave it out"
            )
        for split in self.plan.evaluate_clients:
            samples = self.task.data.examples_of(split)
            for clients, which in ((self.new_clients, "new"), (~self.new_clients, "other")):
                if not samples[clients].any():
                    raise UserError(f"{asked}: none of the {which} clients has {split} samples; change their number")

    def detached(self) -> Run:
        """Return the run with nothing but the plan of its experiment, for processes that need no more than that."""
        fields = {name: getattr(self.plan, name) for name in Plan.model_fields}
        return replace(self, plan=Plan.model_construct(**fields))

    def _check_factors(self) -> None:
        """Raise `UserError` if the training is one of factors and the algorithm is not."""
        training = self.task.training
        if training.traits.trains_factors and not self.traits.trains_factors:
            raise UserError(
                f"algorithm.kind = {self.algorithm.kind} does not train {self.task.model.kind} by {training.kind}; use "
                "fedmavg or sfmf"
            )

    def _check_statistics(self) -> None:
        """Raise `UserError` if the statistics that clients of a network move cannot be shared, or kept, as it says."""
        statistics = self.task.model.moved_statistics
        if statistics == "refuse":
            return
        setting = f"model.statistics = {statistics}"
        if (settings := self.traits.mean_unless) is None:
            raise UserError(
                f"{setting}: algorithm.kind = {self.algorithm.kind} has no place for what training moves besides the "
                "parameters; use fedavg or fedprox"
            )
        if statistics == "local":
            return
        conflicts = {
            **settings,
            "secure": self.algorithm.secure_sums is not None,
            "schedule = buffered": self.plan.schedule.kind == "buffered",
        }
        if active := [name for name, present in conflicts.items() if present]:
            raise UserError(
                f"{setting}: with {' and '.join(active)} the average of variances may be negative; leave that out, or "
                "set model.statistics = local"
            )

    def check_plan(self) -> None:
        """Raise `UserError` if the plan does not fit the clients, or needs what the algorithm does not offer."""
        plan, algorithm, task = self.plan, self.algorithm, self.task
        plan.availability.check(task.data.n_clients)
        training = task.data.n_clients - (0 if self.new_clients is None else int(self.new_clients.sum()))
        algorithm.check_cohort(min(plan.clients_per_round, training))
        buffered = plan.schedule.kind == "buffered"
        if buffered and algorithm.weighted_by_staleness({}, 1.0) is None:
            raise UserError(
                f"schedule = buffered: {algorithm.kind} as set here cannot count stale updates less; use fedavg or "
                "fedprox without an aggregator"
            )
        if algorithm.secure_sums is not None and not plan.sampling.bounded:
            raise UserError(
                f"secure: sampling = {plan.sampling.kind} may draw more than clients_per_round, for which keys and "
                "sums are laid out; use uniform, or secure=none"
            )
        self._check_turns()
        self._check_links_between_clients()
        if plan.replacement and not self.traits.counts_draws:
            raise UserError(
                f"replacement = true: {algorithm.kind} as set here counts every client once; use fedavg, fedprox, "
                "fednova or qffl, without an aggregator and secure sums"
            )
        if not (buffered or plan.stragglers == "partial"):
            return
        no_clients = np.empty(0, dtype=np.int64)
        broadcast = algorithm.broadcast(algorithm.init(task), task, 1).arrays
        if algorithm.upload_bits(broadcast, task, no_clients) is None:
            setting, advice = ("schedule = buffered", "synchronous") if buffered else ("stragglers = partial", "drop")
            raise UserError(
                f"{setting}: how long the clients of {algorithm.kind} take here is known only after their training; "
                f"use {advice}, or fedavg without a codec"
            )

    def _check_links_between_clients(self) -> None:
        """Raise `UserError` if links between clients have rates, and something else says how fast clients send."""
        plan = self.plan
        conflicts = {"radio": plan.radio is not None, "clock.uploads = sequential": plan.clock.uploads == "sequential"}
        active = [name for name, present in conflicts.items() if present]
        if active and self.algorithm.sending_rates(self.task, np.zeros(1, dtype=np.int64), 1) is not None:
            raise UserError(
                f"algorithm.topology has rates of its links, and {' and '.join(active)} would share other links among "
                "the clients; leave out one of both"
            )

    def _check_turns(self) -> None:
        """Raise `UserError` if uploads cannot take turns, or a sampling that plans with them cannot know the times."""
        plan, algorithm, task = self.plan, self.algorithm, self.task
        sequential, asked = plan.clock.uploads == "sequential", f"sampling = {plan.sampling.kind}"
        conflicts = {
            f"schedule = {plan.schedule.kind}": plan.schedule.kind != "synchronous",
            "radio": plan.radio is not None,
            "stragglers = partial": plan.stragglers == "partial",
        }
        if sequential and (active := [name for name, present in conflicts.items() if present]):
            raise UserError(
                f"clock.uploads = sequential: with {' and '.join(active)} uploads have times of their own; leave that "
                "out, or set clock.uploads = parallel"
            )
        if not plan.sampling.predicts:
            return
        if not sequential:
            raise UserError(f"{asked} plans rounds in which uploads take turns; set clock.uploads = sequential too")
        if algorithm.secure_sums is not None:
            raise UserError(
                f"{asked}: keys of secure sums depend on who is chosen, and so would the times; use uniform, or "
                "secure=none"
            )
        broadcast = algorithm.broadcast(algorithm.init(task), task, 1).arrays
        if algorithm.upload_bits(broadcast, task, np.empty(0, dtype=np.int64)) is None:
            raise UserError(
                f"{asked}: what the clients of {algorithm.kind} send here is known only after their training; use "
                "uniform, or fedavg without a codec"
            )


_TENSORS = ("participants", "last_round", "update_bits")
_SERVER_STATE, _CLIENT_STATES, _SCHEDULE = (
    PrefixedArrays("server/"),
    PrefixedArrays("clients/"),
    PrefixedArrays("schedule/"),
)
_NUMBERS = ("round_index", "uplink_bits", "downlink_bits", "resumed_after")


@dataclass(frozen=True)
class RunState:
    """Everything that the next round depends on; clients that never took part are in their initial state.

    Shapes: participants [P] ascending; last_round [P], the last round in which each took part; clients [P, ...], the
    private state of each; update_bits [rounds so far], the size of each round's update broadcast, 0 if there was none.
    `schedule` is the state of an asynchronous schedule. Rounds up to `settled_round` are in the journal already, so
    that repeating them must give the same results. `resumed_after` is the last round before the run was last resumed,
    0 if it never was: keys that live in a process only are no older.
    """

    round_index: int
    server: Arrays
    participants: IntArray
    last_round: IntArray
    clients: Arrays
    update_bits: IntArray
    uplink_bits: int
    downlink_bits: int
    simulated_seconds: float
    schedule: AsyncState | None = None
    settled_round: int = 0
    resumed_after: int = 0

    step_name: ClassVar[str] = "round"

    @property
    def step(self) -> int:
        """The last round that is finished."""
        return self.round_index

    def packed(self) -> tuple[Arrays, dict[str, str]]:
        """Return the tensors and the metadata of a checkpoint."""
        tensors = {name: getattr(self, name) for name in _TENSORS}
        schedule = {} if self.schedule is None else self.schedule.to_arrays()
        states = {**_SERVER_STATE.add(self.server), **_CLIENT_STATES.add(self.clients), **_SCHEDULE.add(schedule)}
        tensors |= {name: np.asarray(array, order="C") for name, array in states.items()}
        numbers = {name: str(getattr(self, name)) for name in _NUMBERS}
        return tensors, {**numbers, "simulated_seconds": self.simulated_seconds.hex()}

    @classmethod
    def unpacked(cls, tensors: Arrays, metadata: Mapping[str, str]) -> Self:
        """Return the state of a checkpoint; raise `KeyError` or `ValueError` if it is not one."""
        return cls(
            round_index=int(metadata["round_index"]),
            uplink_bits=int(metadata["uplink_bits"]),
            downlink_bits=int(metadata["downlink_bits"]),
            resumed_after=int(metadata.get("resumed_after", 0)),
            simulated_seconds=float.fromhex(metadata["simulated_seconds"]),
            participants=tensors["participants"],
            last_round=tensors["last_round"],
            update_bits=tensors["update_bits"],
            server=_SERVER_STATE.of(tensors),
            clients=_CLIENT_STATES.of(tensors),
            schedule=AsyncState.from_arrays(_SCHEDULE.of(tensors)),
        )


def start(run: Run) -> RunState:
    """Return the state before round 1; raise `UserError` if the first weights are not finite, or not the model's."""
    no_clients, server = np.empty(0, dtype=np.int64), run.algorithm.init(run.task)
    if not all_finite(*check_final(run.algorithm, run.task, server).values()):
        raise UserError("the first weights of the model are not finite; initialise them with finite values")
    return RunState(
        round_index=0,
        server=server,
        participants=no_clients,
        last_round=no_clients,
        clients={name: values[:0] for name, values in run.algorithm.init_clients(run.task).items()},
        update_bits=no_clients,
        uplink_bits=0,
        downlink_bits=0,
        simulated_seconds=0.0,
    )


class Interrupted(KeyboardInterrupt):
    """The runs were stopped within a round; `states` holds the state of each after its last finished round."""

    def __init__(self, states: Sequence[KeptState]) -> None:
        super().__init__()
        self.states = states


@dataclass
class LiveState:
    """A run between two rounds, changed in place, unlike `RunState`, so that a round costs no more than its cohort.

    `rotation` [U] is the order in which sampling visits the clients. `kept_at` is the time of the last
    snapshot, on the monotonic clock. `resumed_after` holds the rounds after which the run was resumed: the last time
    but one, as the state has it, and the last time; 0 stands for a run that was never resumed.
    """

    run: Run
    rotation: IntArray
    round_index: int
    server: Arrays
    population: Population
    update_bits: list[int]
    uplink_bits: int
    downlink_bits: int
    simulated_seconds: float
    schedule: AsyncState | None
    resumed_after: tuple[int, int] = (0, 0)
    kept_at: float = field(default_factory=lambda: host_clock().monotonic())

    @classmethod
    def of(cls, run: Run, state: RunState) -> LiveState:
        """Return the live state that continues from a kept one."""
        n_clients = run.task.data.n_clients
        population = Population.fresh(run.algorithm.init_clients(run.task), n_clients)
        population.put(state.participants, state.clients)
        population.last_round[state.participants] = state.last_round
        return cls(
            run=run,
            rotation=run.plan.sampling.order(run.plan.seed, n_clients),
            round_index=state.round_index,
            server=state.server,
            population=population,
            update_bits=state.update_bits.tolist(),
            uplink_bits=state.uplink_bits,
            downlink_bits=state.downlink_bits,
            simulated_seconds=state.simulated_seconds,
            schedule=state.schedule,
            resumed_after=(state.resumed_after, max(state.round_index, state.settled_round)),
        )

    @property
    def rounds_left(self) -> bool:
        """Return whether the plan has rounds that this run has not done."""
        return self.round_index < self.run.plan.rounds

    def keys_since(self) -> int:
        """Return the round after which the keys of the coming round were made; a repeated round has its old keys."""
        before, now = self.resumed_after
        return now if self.round_index >= now else before

    def snapshot(self) -> RunState:
        """Return the state to keep in order to continue from here."""
        self.kept_at = host_clock().monotonic()
        participants = self.population.participants()
        return RunState(
            round_index=self.round_index,
            server=self.server,
            participants=participants,
            last_round=self.population.last_round[participants],
            clients=self.population.take(participants),
            update_bits=np.array(self.update_bits, dtype=np.int64),
            uplink_bits=self.uplink_bits,
            downlink_bits=self.downlink_bits,
            simulated_seconds=self.simulated_seconds,
            schedule=self.schedule,
            resumed_after=self.keys_since(),
        )


@contextmanager
def stoppable(*runs: LiveState) -> Iterator[None]:
    """Allow signals to stop the runs within this block, which must not change them; raise `Interrupted` if one does."""
    try:
        with allow_signals():
            yield
    except KeyboardInterrupt:
        raise Interrupted([run.snapshot() for run in runs]) from None
