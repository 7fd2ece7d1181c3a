"""The round loop: one generator for a single run and for several in lockstep, synchronous or buffered.

A `Backend` decides where a whole run is executed; that of this process, without a cluster, is here.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Generator, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, cast

import torch

from narrowcast.platform.compiled import one_thread
from narrowcast.platform.config.files import Section
from narrowcast.platform.contracts import Executor
from narrowcast.platform.errors import RunFailed, UserError
from narrowcast.platform.rounds.buffered import OpenStep, close_step, open_step
from narrowcast.platform.rounds.chunks import OpenRound, TrainingCall, naming_round, train_chunks, train_together
from narrowcast.platform.rounds.client_contracts import ClientKeyStore, ClientSplit, SecureRounds, check_answered
from narrowcast.platform.rounds.closing import close_round
from narrowcast.platform.rounds.evaluation import Measure, measure_chunk, with_client_metrics
from narrowcast.platform.rounds.ledger import ChunkResult, ClientMeasures
from narrowcast.platform.rounds.opening import calls_to_repeat, chunks_left, open_round, replaced
from narrowcast.platform.rounds.outcome import Outcome
from narrowcast.platform.rounds.plan import Schedule
from narrowcast.platform.rounds.state import LiveState, Run, RunState, start, stoppable
from narrowcast.platform.types import Arrays, Chunk

Rounds = Generator[dict[int, Outcome | RunFailed], Collection[int] | None, None]
"""Yields the outcome of a round by the place of the run; accepts the places of runs to end early."""

Opened = OpenRound | OpenStep
Calls = Sequence[TrainingCall]
Results = list[ChunkResult] | RunFailed
Train = Callable[[Sequence[tuple[Run, Calls]]], Sequence[Results]]
"""Trains the calls of each run; the results of a run are in the order of its calls and their chunks."""


def rounds(
    run: Run, executor: Executor, state: RunState | None = None, secure: SecureRounds | None = None
) -> Generator[Outcome, None, None]:
    """Run the rounds after `state`, or all of them, and yield the outcome of each.

    Raise `Interrupted` if stopped within a round, and `RunFailed` if the global model is no longer finite.
    """

    def train(work: Sequence[tuple[Run, Calls]]) -> list[list[ChunkResult]]:
        return [[result for call in calls for result in train_call(call)] for _, calls in work]

    def train_call(call: TrainingCall) -> list[ChunkResult]:
        return executor.train(call.broadcast, call.chunks if secure is None else secure.distribute_keys(call.chunks))

    with closing(_loop([run], [state or start(run)], train, secure, executor.measure)) as loop:
        for outcomes in loop:
            if isinstance(outcome := outcomes[0], RunFailed):
                raise outcome
            yield outcome


def lockstep(runs: Sequence[Run], states: Sequence[RunState] | None = None) -> Rounds:
    """Run several runs on the same data round by round in this process, their local training as one program.

    The cost of a round besides its clients' arithmetic, the calls of a tensor program, is then paid once for all runs;
    the results of a run are those that it has alone. A run that fails ends; the others go on. `wall_seconds` is an
    equal share of the time. Raise `Interrupted` if stopped within a round.
    """
    return _loop(runs, states or [start(run) for run in runs], train_together)


def _loop(
    runs: Sequence[Run],
    states: Sequence[RunState],
    train: Train,
    secure: SecureRounds | None = None,
    measure: Measure | None = None,
) -> Rounds:
    live = [LiveState.of(run, state) for run, state in zip(runs, states, strict=True)]
    active = [index for index, state in enumerate(live) if state.rounds_left]
    while active:
        began = time.perf_counter()
        with one_thread():
            opened = [_open(live[index]) for index in active]
            ready = time.perf_counter()
            with stoppable(*live):
                results = train([(opening.run, opening.calls) for opening in opened])
                late = [_calls_to_repeat(*pair) for pair in zip(opened, results, strict=True)]
                repeated = train([(opening.run, calls) for opening, calls in zip(opened, late, strict=True)])
                results = [_replaced(*pair) for pair in zip(results, repeated, strict=True)]
                trained = time.perf_counter()
                if secure is not None:
                    results = [
                        _opened_sums(opening, result, secure, train)
                        for opening, result in zip(opened, results, strict=True)
                    ]
            closed = [
                _close(live[index], opening, result, measure)
                for index, opening, result in zip(active, opened, results, strict=True)
            ]
        moments = (began, ready, trained, time.perf_counter())
        everything = [chunk for result in results if not isinstance(result, RunFailed) for chunk in result]
        outcomes = {
            index: outcome.timed(moments, everything, 1 / len(active)) if isinstance(outcome, Outcome) else outcome
            for index, outcome in zip(active, closed, strict=True)
        }
        ended = (yield outcomes) or ()
        active = [
            index
            for index in active
            if isinstance(outcomes[index], Outcome) and index not in ended and live[index].rounds_left
        ]


def _open(live: LiveState) -> Opened:
    with naming_round(live.round_index + 1):
        match live.run.plan.schedule.kind:
            case "synchronous":
                return open_round(live)
            case "buffered":
                return open_step(live)
        opened: Opened = cast(Schedule, live.run.plan.schedule).open(live)
        return opened


def _calls_to_repeat(opened: Opened, results: Results) -> Calls:
    if isinstance(results, RunFailed) or not isinstance(opened, OpenRound):
        return []
    return calls_to_repeat(opened, results)


def _replaced(results: Results, repeated: Results) -> Results:
    if isinstance(results, RunFailed):
        return results
    return repeated if isinstance(repeated, RunFailed) else replaced(results, repeated)


def _opened_sums(opened: Opened, results: Results, secure: SecureRounds, train: Train) -> Results:
    """Open the sum of a round, and then those that are made of what it says, by the clients that are still there."""
    if isinstance(results, RunFailed):
        return results
    results = secure.open_sum(results)
    while (sent := secure.next_sum(results)) is not None:
        calls = [TrainingCall({**call.broadcast, **sent}, chunks_left(call.chunks, results)) for call in opened.calls]
        (further,) = train([(opened.run, calls)])
        if isinstance(further, RunFailed):
            return further
        results = replaced(results, secure.open_sum(further))
    return results


def _close(live: LiveState, opened: Opened, results: Results, measure: Measure | None) -> Outcome | RunFailed:
    if isinstance(results, RunFailed):
        return results
    try:
        with naming_round(live.round_index + 1):
            return with_client_metrics(live, _closed(live, opened, results), measure)
    except RunFailed as error:
        return error


def _closed(live: LiveState, opened: Any, results: list[ChunkResult]) -> Outcome:
    match live.run.plan.schedule.kind:
        case "synchronous":
            return close_round(live, opened, results)
        case "buffered":
            return close_step(live, opened, results)
    outcome: Outcome = cast(Schedule, live.run.plan.schedule).close(live, opened, results)
    return outcome


class Backend(ABC):
    """Executes a run: in this process, or on a cluster that it starts or joins."""

    if TYPE_CHECKING:

        @property
        def kind(self) -> str:
            """The backend's name in the catalog."""

    @property
    def repeats_rounds(self) -> bool:
        """True if a round that is run again gives the same, which it does not if clients are left out as hosts fail."""
        return True

    @abstractmethod
    def check(self, run: Run) -> None:
        """Raise `UserError` if the backend or the device is not available, before anything is written."""

    @abstractmethod
    def run(self, run: Run, state: RunState) -> Generator[Outcome, None, None]:
        """Run the rounds after `state` and yield the outcome of each; clean up when the iterator ends or is closed."""


class LocalBackend(Backend, Section):
    """Execute the whole run in this process."""

    kind: Literal["local"] = "local"

    def check(self, run: Run) -> None:
        """Raise `UserError` if the run asks for a GPU and this machine has none."""
        if run.task.training.device == "cuda" and not torch.cuda.is_available():
            raise UserError("training.device = cuda: this machine has no CUDA device; use cpu, or another machine")

    def run(self, run: Run, state: RunState) -> Generator[Outcome, None, None]:
        """Run the rounds after `state` and yield the outcome of each."""
        if (secure := run.algorithm.secure_sums) is None:
            yield from rounds(run, LocalExecutor(run), state)
            return
        with secure.key_store_process(run.answered) as key_store:
            server = secure.rounds(key_store, run.task)
            check_answered(server, run.answered, state.settled_round)
            yield from rounds(run, LocalExecutor(run, key_store), state, server)


@dataclass(frozen=True)
class LocalExecutor(Executor):
    """Trains the chunks of a round one after the other."""

    run: Run
    key_store: ClientKeyStore | None = None

    def train(self, broadcast: Arrays, chunks: Sequence[Chunk]) -> list[ChunkResult]:
        """Train all chunks and return their results in the order of the chunks."""
        return train_chunks(self.run, broadcast, chunks, self.key_store)

    def measure(
        self, broadcast: Arrays, chunks: Sequence[Chunk], splits: Sequence[ClientSplit]
    ) -> list[ClientMeasures]:
        """Measure the clients of all chunks and return the results in the order of the chunks."""
        return [measure_chunk(self.run, broadcast, chunk, splits) for chunk in chunks]
