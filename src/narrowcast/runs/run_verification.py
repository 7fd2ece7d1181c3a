"""Verification of a run: its files agree, its model has the metrics of the journal, and rounds can be repeated."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any, get_args

from safetensors import SafetensorError

from narrowcast.experiment import Experiment, load_experiment
from narrowcast.platform.compiled import one_thread
from narrowcast.platform.config.files import MODEL
from narrowcast.platform.data.soundness import load_checked
from narrowcast.platform.rounds.client_contracts import ClientSplit
from narrowcast.platform.rounds.evaluation import measure_all, metrics_of, model_sha256, sha256_of
from narrowcast.platform.rounds.loop import LocalBackend
from narrowcast.platform.rounds.outcome import CLIENT_METRICS_KEY, Outcome
from narrowcast.platform.rounds.state import Run, RunState, start
from narrowcast.platform.storage.checkpoint import read_checkpoints
from narrowcast.platform.storage.disk import read_tensors
from narrowcast.platform.storage.journal import Journal, evaluation
from narrowcast.platform.types import Arrays
from narrowcast.runs.checks import (
    Budget,
    Check,
    Leg,
    Verification,
    arrays_problem,
    clients_problem,
    difference,
    label_checks,
    measured_check,
    rounds_problem,
    table_problem,
)
from narrowcast.runs.folder import CONFIG, RESULT, checkpoint_place, saved_config
from narrowcast.runs.outputs import baselines_entry, labels, measured
from narrowcast.runs.result import ResultFile

_OF_KEYS = (
    *("uplink_bits", "downlink_bits", "total_uplink_bits", "total_downlink_bits", "total_bits"),
    *("round_simulated_seconds", "simulated_seconds", "seconds"),
)
"""The entries of a round and of its clients that are others if new keys are sent."""
UNPROVABLE = "times by the wall clock, git_commit, narrowcast_version, mlflow_run_id, drawn figures"
"""Entries of a run's folder that follow from nothing else there."""


def verify_run(folder: Path, budget: Budget) -> Iterator[Check]:
    """Yield the checks of a run of an experiment."""
    experiment = load_experiment(saved_config(folder))
    task = experiment.task(load_checked(experiment.data_source), folder)
    saved = list(read_checkpoints(checkpoint_place(experiment, folder), RunState))
    run = Run(experiment, experiment.secured_algorithm, task)
    yield from _RunVerification(folder, experiment.digest(), task.data, Journal.read(folder), saved, experiment, run)(
        budget
    )


@dataclass
class _RunVerification(Verification[RunState]):
    experiment: Experiment
    run: Run

    run_kind, step_name, data_kind, result_file = "run", "round", "data", ResultFile
    state_figures, unprovable = "bits and simulated time", UNPROVABLE

    def journal_checks(self) -> Iterator[Check]:
        lines, rows = self.journal.lines, self.journal.rounds
        yield Check("journal", f"the checksums of {len(rows)} rounds", lines.problem)
        problem = rounds_problem(rows) or clients_problem(rows, self.journal.ledgers(), self.experiment)
        yield Check("sums", "bits and times of the rounds, and of their clients; clients, losses, ranks", problem)

    def state_problem(self, state: RunState, row: Mapping[str, Any]) -> str:
        names = {
            "uplink_bits": "total_uplink_bits",
            "downlink_bits": "total_downlink_bits",
            "simulated_seconds": "simulated_seconds",
        }
        totals = {name: getattr(state, name) for name in names}
        return difference(totals, {name: row.get(column, 0 * totals[name]) for name, column in names.items()})

    def repetitions(self, budget: Budget) -> Iterator[Check]:
        """Measure the states of checkpoints again, then repeat rounds."""
        for state in self.states.values():
            if evaluation(self._row(state.step)):
                yield self._evaluated(state)
        if self.experiment.backend.repeats_rounds:
            yield from super().repetitions(budget)
        else:
            yield Check("rounds", skipped="with backend.on_failure=drop, rounds depend on failures")

    def outputs(self, result: Mapping[str, Any]) -> Iterator[Check]:
        for name, expected in self.journal.tables(self.run.task.profiles).items():
            yield Check(name, "each value against the journal", table_problem(self.folder / name, expected))
        yield from self._result(result)
        yield from self._model(result)

    def _row(self, step: int) -> Mapping[str, Any]:
        return self.rows.get(step, {})

    @cached_property
    def _measuring(self) -> Run:
        """The run with the evaluations of clients that any round of the journal has; a resume may change them."""
        names = {name for entry in self.journal.entries() for name in entry.get(CLIENT_METRICS_KEY, {})}
        recorded = {name.partition(".")[0] for name in names}
        splits = tuple(split for split in get_args(ClientSplit) if split in recorded)
        plan = self.experiment.model_copy(update={"evaluate_clients": splits})
        return replace(self.run, plan=plan)

    def _evaluated(self, state: RunState) -> Check:
        """Measure a state again and compare it with the journal."""
        subject = f"model of round {state.round_index}"
        with one_thread():
            measured, of_clients = measure_all(self._measuring, state)
        (entry,) = islice(self.journal.entries(), state.round_index - 1, state.round_index)
        expected = evaluation(self._row(state.round_index))
        # Named apart from the statistics over clients, which are metrics of the round.
        measured |= {f"clients: {name}": values.tolist() for name, values in of_clients.items()}
        expected |= {f"clients: {name}": values for name, values in entry.get(CLIENT_METRICS_KEY, {}).items()}
        return measured_check(
            subject, "its checkpoint, measured again: each metric, of each client too", measured, expected
        )

    def repeated(self, leg: Leg) -> Check:
        """Repeat rounds in this process; compare them with the journal, and the state with that of a checkpoint."""
        first, count = leg.origin + 1, leg.last - leg.origin
        where = f"the checkpoint of round {leg.origin}" if leg.origin else "the start"
        subject = f"round {first}" if count == 1 else f"rounds {first} to {leg.last}"
        resumed_after, why = self._resumed(leg)
        left_out = _OF_KEYS if why else ()
        but = f", but for bits and times, since {why}" if why else ""
        compared = f"repeated from {where}: each number of the round and of its clients{but}"
        entries = dict(enumerate(islice(self.journal.entries(), leg.origin, leg.last), start=first))
        origin = self.states[leg.origin] if leg.origin in self.states else start(self.run)
        origin = replace(origin, settled_round=resumed_after)
        with closing(LocalBackend().run(self._as_recorded(leg), origin)) as outcomes:
            for outcome in islice(outcomes, count):
                number = outcome.record.round
                entry, row = entries[number], self._row(number)
                repeated = {**outcome.record.row(), **outcome.metrics}
                recorded = {name: value for name, value in row.items() if name in repeated}
                recorded |= evaluation(row)
                problem = difference(repeated, recorded, left_out)
                problem = problem or difference(_ledger(outcome), entry["clients"], left_out)
                measured_again = {name: values.tolist() for name, values in outcome.client_metrics.items()}
                problem = problem or difference(measured_again, entry.get(CLIENT_METRICS_KEY, {}))
                problem = problem or self._other_state(outcome.state)
                if problem:
                    return Check(subject, compared, f"round {number}: repeated, {problem}")
                if outcome.state is not None and number == self.journal.last_step:
                    self.last = outcome.state
        if leg.last == leg.end and leg.end in self.states:
            compared += f", and the checkpoint of round {leg.end}"
        return Check(subject, compared)

    def _resumed(self, leg: Leg) -> tuple[int, str]:
        """Return the round after which the run was resumed within a leg, or its last round, and why that is not known.

        New keys of secure sums are sent, and counted, when a run is resumed.
        """
        end, never = self.states.get(leg.end), self.journal.last_step
        after = end.resumed_after if end is not None else 0
        known = end is not None and not (after and leg.origin == 0)  # a checkpoint has the last resume alone
        secure = self.run.algorithm.secure_sums is not None
        why = "new keys are sent when a run is resumed" if secure and not known else ""
        return (after if 0 < after >= leg.origin else never), why

    def _as_recorded(self, leg: Leg) -> Run:
        """Return the run so that it evaluates what the journal has of these rounds, and keeps the state at the end."""
        plan, span = self._measuring.plan, range(leg.origin + 1, leg.last + 1)
        evaluated = {number for number in span if evaluation(self._row(number))}
        asked = {number for number in span if plan.evaluates(number)}
        every = plan.evaluate_every if evaluated == asked else 1  # a resume may change it, and no result depends on it
        update = {"evaluate_every": every, "checkpoint_every": leg.end, "checkpoint_seconds": math.inf}
        return replace(self._measuring, plan=plan.model_copy(update=update))

    def _other_state(self, state: RunState | None) -> str:
        """Return how a state differs from the checkpoint of its round, in words; empty if there is none."""
        if state is None or (kept := self.states.get(state.round_index)) is None:
            return ""
        saved, expected = kept.packed(), state.packed()
        problem = arrays_problem(saved[0], expected[0], "the rounds before")
        return problem and f"its checkpoint differs: {problem}"

    def _result(self, result: Mapping[str, Any]) -> Iterator[Check]:
        compared = "rounds, final and best metrics, targets, bits and times against the journal"
        if not self.journal.rounds:
            yield Check(RESULT, compared, "the journal has no rounds")
            return
        expected = measured(self.journal, self.experiment, self.run.task)
        problem = difference(result, {"rounds": expected["rounds"], **expected})
        if not (problem or evaluation(self.journal.rounds[-1])):
            problem = "the journal has no evaluation of the last round"
        yield Check(RESULT, compared, problem)
        none: dict[str, Any] = {"frozen_sha256": None, "personal": False, "inputs": {}}
        expected = none | labels(self.experiment, self.run.task)
        baselines = {"baselines": {}} | baselines_entry(self.experiment.model, self.run.task.data)
        of = f"{CONFIG} and the data"
        yield from label_checks(result, self.experiment.name, expected, baselines, of)

    def _model(self, result: Mapping[str, Any]) -> Iterator[Check]:
        """Compare the trained model with the last state, or measure it; compare its sha256."""
        path, algorithm = self.folder / MODEL, self.experiment.algorithm
        try:
            arrays = read_tensors(path)[0]
        except (SafetensorError, OSError) as error:
            yield Check(MODEL, "against the last state", f"unreadable ({error})")
            return
        if self.last is None:
            yield from self._measured_model(arrays, result)
            return
        compared = f"each array against the last state, and that state's sha256 against {RESULT}"
        whole = self.run.task.model.state(algorithm.final(self.last.server), self.run.task.data)
        problem = arrays_problem(arrays, whole)
        if not problem and (sha256 := model_sha256(algorithm, self.last)) != result["model_sha256"]:
            problem = f"{RESULT} has the model_sha256 {result['model_sha256']}, the last state {sha256}"
        yield Check(MODEL, compared, problem)

    def _measured_model(self, arrays: Arrays, result: Mapping[str, Any]) -> Iterator[Check]:
        """Measure the trained model by itself, as far as it needs nothing that only a checkpoint has."""
        run, begun = self.run, start(self.run)
        without = f"there is no checkpoint of the last round; --rounds {result['rounds']} repeats the run"
        of_clients = run.task.model.client_parameters  # of which only a checkpoint has the values
        if of_clients is None or of_clients:
            yield Check(MODEL, skipped=without)
            return
        model = {name: arrays[name] for name in run.algorithm.final(begun.server) if name in arrays}
        if problem := arrays_problem(arrays, run.task.model.state(model, run.task.data), "the experiment"):
            yield Check(MODEL, "what is not trained in it", problem)
            return
        with one_thread():
            measured = metrics_of(run.task, model, {})
        if self.experiment.algorithm.traits.global_model:
            recorded = {name: value for name, value in evaluation(self.journal.rounds[-1]).items() if name in measured}
            yield measured_check(MODEL, "measured again: each metric against the last round", measured, recorded)
        if begun.clients:
            yield Check("model_sha256", skipped=without)
            return
        yield Check(
            "model_sha256", f"{RESULT} against {MODEL}", difference(result, {"model_sha256": sha256_of(model, {})})
        )


def _ledger(outcome: Outcome) -> dict[str, Any]:
    return {name: values.tolist() for name, values in vars(outcome.ledger).items()}
