"""Laws of the execution of rounds: schedules, backends, and the protection of their sums."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from narrowcast.algorithms.federated.fedavg import FedAvg
from narrowcast.algorithms.secure.aggregation import SecureAggregation
from narrowcast.algorithms.secure.schemes import Encryption, Masked, Plain, Protection
from narrowcast.laws.algorithm_cases import MODELS, AlgorithmCase
from narrowcast.laws.law import LawBrokenError, require
from narrowcast.laws.small_tasks import N_CLIENTS, PLAN, Shuffled, close, run, sha256, stepped, task_of
from narrowcast.platform.contracts import Executor, Task
from narrowcast.platform.errors import RunFailed, UserError
from narrowcast.platform.rounds.ledger import ChunkResult
from narrowcast.platform.rounds.loop import Backend, LocalExecutor, rounds
from narrowcast.platform.rounds.outcome import Outcome
from narrowcast.platform.rounds.plan import Plan, Schedule
from narrowcast.platform.rounds.state import Run, start
from narrowcast.platform.types import Arrays, Chunk

ALGORITHM = FedAvg()
FINE = Masked(bits=32, clip=64.0, smallest_group=1)


@dataclass(frozen=True)
class ScheduleCase:
    """A plan with the schedule in it."""

    plan: Plan

    @cached_property
    def task(self) -> Task:
        """A network on eleven clients."""
        return task_of(MODELS["mlp"])

    @cached_property
    def straight(self) -> list[Outcome]:
        """The rounds of a run that nothing interrupts."""
        return run(self.plan, ALGORITHM, self.task)


def schedule_cases(schedule: Schedule) -> dict[str, ScheduleCase]:
    """Return the only case."""
    return {"": ScheduleCase(PLAN.model_copy(update={"schedule": schedule}))}


def the_results_do_not_depend_on_placement(case: ScheduleCase) -> None:
    """Train the chunks of a round in another order."""
    shuffled = run(case.plan, ALGORITHM, case.task, executor=Shuffled(ALGORITHM, case.task))
    require(sha256(ALGORITHM, shuffled) == sha256(ALGORITHM, case.straight), "the models differ")
    require(
        [outcome.record for outcome in shuffled] == [outcome.record for outcome in case.straight], "the records differ"
    )


def the_results_do_not_depend_on_a_resume(case: ScheduleCase) -> None:
    """Go on from the state after rounds 1 and 3."""
    for middle in (1, 3):
        resumed = run(case.plan, ALGORITHM, case.task, state=case.straight[middle - 1].state)
        require(
            sha256(ALGORITHM, resumed) == sha256(ALGORITHM, case.straight), f"after round {middle} the models differ"
        )


def rounds_are_numbered_and_time_does_not_run_backwards(case: ScheduleCase) -> None:
    """Look at the records of all rounds."""
    records = [outcome.record for outcome in case.straight]
    require([record.round for record in records] == list(range(1, case.plan.rounds + 1)), "rounds are not 1, 2, ...")
    require((np.diff([record.simulated_seconds for record in records]) >= 0).all(), "simulated time runs backwards")
    total = sum(record.uplink_bits for record in records)
    require(total == records[-1].total_uplink_bits, "uplink bits do not add up")
    require(sum(record.delivered for record in records), "no update was delivered")


def digest_of_schedule(case: ScheduleCase) -> str:
    """Return the sha256 of the model after the last round."""
    return sha256(ALGORITHM, run(case.plan, ALGORITHM, case.task))


SCHEDULE_LAWS = (
    the_results_do_not_depend_on_placement,
    the_results_do_not_depend_on_a_resume,
    rounds_are_numbered_and_time_does_not_run_backwards,
)


@dataclass(frozen=True)
class BackendCase:
    """A backend, and a run for it."""

    backend: Backend
    run: Run

    @cached_property
    def local_outcomes(self) -> list[Outcome]:
        """The rounds in this process."""
        return run(self.run.plan, self.run.algorithm, self.run.task)

    def outcomes(self, middle: int = 0) -> list[Outcome]:
        """Run on the backend, from the start or from the state after a round."""
        state = self.local_outcomes[middle - 1].state if middle else start(self.run)
        assert state is not None
        return list(self.backend.run(self.run, state))


def backend_cases(backend: Backend) -> dict[str, BackendCase]:
    """Return the only case, after the backend's own check."""
    case = BackendCase(backend, Run(PLAN, ALGORITHM, task_of(MODELS["mlp"])))
    backend.check(case.run)
    return {"": case}


def the_model_is_that_of_the_local_backend(case: BackendCase) -> None:
    """Run the rounds in this process and on the backend."""
    outcomes = case.outcomes()
    require(sha256(ALGORITHM, outcomes) == sha256(ALGORITHM, case.local_outcomes), "the models differ")
    require(
        [outcome.record for outcome in outcomes] == [outcome.record for outcome in case.local_outcomes],
        "the records differ",
    )


def it_resumes_from_a_state(case: BackendCase) -> None:
    """Resume on the backend from a state that was reached in this process."""
    outcomes = case.outcomes(middle=2)
    require(
        [outcome.record for outcome in outcomes] == [outcome.record for outcome in case.local_outcomes[2:]],
        "the records differ",
    )
    require(sha256(ALGORITHM, outcomes) == sha256(ALGORITHM, case.local_outcomes), "the models differ")


BACKEND_LAWS = (the_model_is_that_of_the_local_backend, it_resumes_from_a_state)


@dataclass(frozen=True)
class SecureCase:
    """A scheme for the sum of a network's updates."""

    scheme: Protection

    @cached_property
    def task(self) -> Task:
        """A network on eleven clients."""
        return task_of(MODELS["mlp"])

    def rounds(self, scheme: Protection, *, lossy: bool, answered: Path | None = None) -> list[Outcome]:
        """Run three rounds of six clients, the clients' keys in this process too; see `KeyStore` for `answered`."""
        algorithm = SecureAggregation(ALGORITHM, scheme, 6)
        algorithm.check(self.task)
        secured = Run(PLAN.model_copy(update={"rounds": 3}), algorithm, self.task)
        key_store = algorithm.key_store(answered)
        executor: Any = LocalExecutor(secured, key_store)
        executor = Losing(executor) if lossy else executor
        return list(rounds(secured, executor, None, algorithm.rounds(key_store, self.task)))


@dataclass(frozen=True)
class Losing(Executor):
    """Loses the uploads of the first client of each chunk, after their masks are agreed."""

    executor: Any

    def train(self, broadcast: Arrays, chunks: Sequence[Chunk]) -> list[ChunkResult]:
        """Train all chunks of a round, one chunk in three with a loss."""
        lost = [replace(chunk, lost=(np.arange(len(chunk.clients)) == 0) & (chunk.index % 3 == 0)) for chunk in chunks]
        results: list[ChunkResult] = self.executor.train(broadcast, lost)
        return results


def secure_cases(scheme: Any) -> dict[str, SecureCase]:
    """Return the only case; none for a scheme that protects nothing."""
    return {"": SecureCase(scheme)} if isinstance(scheme, Protection) else {}


def the_sum_is_exact(case: SecureCase) -> None:
    """Compare with the same integers in the clear, bit by bit."""
    fields = {name: getattr(case.scheme, name) for name in Protection.model_fields if name not in ("kind", "keys")}
    clear, protected = (case.rounds(scheme, lossy=False) for scheme in (Plain(**fields), case.scheme))
    require(sha256(ALGORITHM, protected) == sha256(ALGORITHM, clear), "the model differs from that of kind = plain")


def the_sum_of_those_that_arrive_is_exact(case: SecureCase) -> None:
    """Lose some uploads after the masks are agreed."""
    fields = {name: getattr(case.scheme, name) for name in Protection.model_fields if name not in ("kind", "keys")}
    clear, protected = (case.rounds(scheme, lossy=True) for scheme in (Plain(**fields), case.scheme))
    require(sha256(ALGORITHM, protected) == sha256(ALGORITHM, clear), "the model differs from that of kind = plain")


def the_bits_of_protection_are_counted(case: SecureCase) -> None:
    """Compare the bits of an upload with those of an update in float32."""
    protected, plain = case.rounds(case.scheme, lossy=False), run(PLAN, ALGORITHM, case.task)
    least = plain[0].record.uplink_bits * case.scheme.bits / 32
    require(protected[0].record.uplink_bits >= least, "an upload has fewer bits than its values need")


def a_round_is_answered_once(case: SecureCase) -> None:
    """Repeat all rounds under new keys, as they were and then with other losses."""
    if not isinstance(case.scheme, Encryption | Masked):
        return  # nothing is hidden
    with TemporaryDirectory() as folder:
        answered = Path(folder) / "answered.jsonl"
        first = case.rounds(case.scheme, lossy=False, answered=answered)
        try:
            again = case.rounds(case.scheme, lossy=False, answered=answered)
        except RunFailed as error:
            raise LawBrokenError(f"a round is not repeated as it was: {error}") from error
        require(sha256(ALGORITHM, again) == sha256(ALGORITHM, first), "a round that is repeated gives another model")
        with suppress(RunFailed):
            repeated = case.rounds(case.scheme, lossy=True, answered=answered)
            require(not repeated[0].record.delivered, "a second sum of a round is opened, over other clients")


def a_protected_sum_gives_the_model_of_the_plain_sum(case: AlgorithmCase) -> None:
    """Protect round 1 by masks, on a grid below the rounding of float32; a method that does not add up refuses it.

    Clients train on a copy in another memory than the server's, which is given the sum that the layout declares alone.
    """
    algorithm, task = case.algorithm, case.task
    secured = SecureAggregation(algorithm, FINE, N_CLIENTS)
    try:
        secured.check(task)
    except UserError:
        return
    plan = PLAN.model_copy(update={"rounds": 1, "clients_per_round": N_CLIENTS, "chunk_size": N_CLIENTS})
    server, key_store = Run(plan, secured, task), secured.key_store()
    clients: Run = pickle.loads(pickle.dumps(server))
    (outcome,) = rounds(server, LocalExecutor(clients, key_store), None, secured.rounds(key_store, task))
    assert outcome.state is not None
    got, wanted = secured.final(outcome.state.server), stepped(algorithm, task, case.free)
    require(np.array_equal(outcome.ledger.delivered, case.free.ledger.delivered), "other clients deliver under masks")
    require(close(got, wanted, case.before, 1e-3), "under masks the model is another")


SUM_LAWS = (a_protected_sum_gives_the_model_of_the_plain_sum,)
"""Laws of algorithms whose sums may be protected."""
SECURE_LAWS = (
    the_sum_is_exact,
    the_sum_of_those_that_arrive_is_exact,
    the_bits_of_protection_are_counted,
    a_round_is_answered_once,
)
