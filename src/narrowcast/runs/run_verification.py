"""Verification of a run: its files agree, its model has the metrics of the journal, and rounds can be repeated."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel
from safetensors import SafetensorError

from narrowcast._version import __version__
from narrowcast.experiment import Experiment, load_experiment
from narrowcast.platform.compiled import one_thread
from narrowcast.platform.config.files import MODEL
from narrowcast.platform.data.soundness import load_checked
from narrowcast.platform.rounds.client_contracts import ClientSplit
from narrowcast.platform.rounds.evaluation import measure_all, metrics_of, model_sha256, sha256_of
from narrowcast.platform.rounds.loop import LocalBackend
from narrowcast.platform.rounds.outcome import CLIENT_METRICS_KEY, Outcome
from narrowcast.platform.rounds.state import Run, RunState, start
from narrowcast.platform.storage.checkpoint import Checkpoint, read_checkpoints
from narrowcast.platform.storage.disk import read_tensors
from narrowcast.platform.storage.journal import Journal, evaluation
from narrowcast.platform.types import Arrays
from narrowcast.runs.checks import (
    Budget,
    Check,
    Leg,
    arrays_problem,
    clients_problem,
    coverage,
    data_check,
    difference,
    legs_of,
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
    journal = Journal.read(folder)
    saved = list(read_checkpoints(checkpoint_place(experiment, folder), RunState))
    yield from _RunVerification(
        folder, experiment, Run(experiment, experiment.secured_algorithm, task), journal, saved
    )(budget)


@dataclass
class _RunVerification:
    folder: Path
    experiment: Experiment
    run: Run
    journal: Journal
    saved: list[Checkpoint[RunState]]
    last: RunState | None = None
    """The state after the last round, once it is known."""

    def __call__(self, budget: Budget) -> Iterator[Check]:
        yield from self._journal_itself()
        for saved in self.saved:
            yield self._checkpoint(saved)
        result, problem = read_result(self.folder, ResultFile)
        yield (its_data := self._data(result))
        if its_data.problem:
            yield Check("rounds and outputs", skipped="they cannot be repeated with different data")
            return
        for step in self._states:
            if evaluation(self._row(step)):
                yield self._evaluated(self._states[step])
        self.last = self._states.get(self.journal.last_step)
        yield from self._rounds(budget)
        if result is None:
            yield Check(RESULT, skipped="" if problem else "the run is not finished", problem=problem)
        else:
            yield from self._tables()
            yield from self._result(result)
            yield from self._model(result)
        yield Check("the rest", skipped=UNPROVABLE)

    @cached_property
    def _states(self) -> dict[int, RunState]:
        """The states of the checkpoints by round."""
        return {
            checkpoint.state.round_index: checkpoint.state for checkpoint in self.saved if checkpoint.state is not None
        }

    def _row(self, step: int) -> Mapping[str, Any]:
        return self.journal.rounds[step - 1] if 0 < step <= self.journal.last_step else {}

    @cached_property
    def _measuring(self) -> Run:
        """The run with the evaluations of clients that any round of the journal has; a resume may change them."""
        names = {name for entry in self.journal.entries() for name in entry.get(CLIENT_METRICS_KEY, {})}
        recorded = {name.partition(".")[0] for name in names}
        splits = tuple(split for split in get_args(ClientSplit) if split in recorded)
        plan = self.experiment.model_copy(update={"evaluate_clients": splits})
        return replace(self.run, plan=plan)

    def _data(self, result: Mapping[str, Any] | None) -> Check:
        recorded = {f"the checkpoint of round {checkpoint.step}": checkpoint.data_sha256 for checkpoint in self.saved}
        recorded |= {} if result is None else {RESULT: result["data_sha256"] or ""}
        return data_check({file: sha256 for file, sha256 in recorded.items() if sha256}, self.run.task.data)

    def _journal_itself(self) -> Iterator[Check]:
        lines, rows = self.journal.lines, self.journal.rounds
        yield Check("journal", f"the checksums of {len(rows)} rounds", lines.problem)
        problem = rounds_problem(rows) or clients_problem(rows, self.journal.ledgers(), self.experiment)
        yield Check("sums", "bits and times of the rounds, and of their clients; clients, losses, ranks", problem)

    def _checkpoint(self, saved: Checkpoint[RunState]) -> Check:
        subject = f"checkpoint of round {saved.step}"
        compared = "sha256 of the file; configuration, bits and simulated time against config.yaml and the journal"
        if saved.state is None:
            return Check(subject, compared, saved.problem)
        if saved.digest != self.experiment.digest():
            return Check(subject, compared, f"its configuration is not that of {CONFIG}")
        if saved.state.round_index != saved.step:
            return Check(subject, compared, f"its state is that of round {saved.state.round_index}")
        if saved.step > self.journal.last_step:
            return Check(subject, compared, f"the journal ends at round {self.journal.last_step}")
        row = self._row(saved.step)
        names = {
            "uplink_bits": "total_uplink_bits",
            "downlink_bits": "total_downlink_bits",
            "simulated_seconds": "simulated_seconds",
        }
        totals = {name: getattr(saved.state, name) for name in names}
        return Check(
            subject,
            compared,
            difference(totals, {name: row.get(column, 0 * totals[name]) for name, column in names.items()}),
        )

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

    def _rounds(self, budget: Budget) -> Iterator[Check]:
        """Repeat rounds within the budget, and say which part of all that is."""
        journal = self.journal
        if not self.experiment.backend.repeats_rounds:
            yield Check("rounds", skipped="with backend.on_failure=drop, rounds depend on failures")
            return
        recorded = [row["round"] for row in journal.rounds]
        took = journal.rounds[-1]["wall_seconds"] if recorded else 0.0
        count = budget.count(len(recorded), took)
        legs = legs_of(recorded, {0, *self._states} if count else (), count, budget.draws())
        for leg in legs:
            yield self._repeated(leg)
        if recorded:
            yield coverage(legs, recorded, "rounds", budget)

    def _repeated(self, leg: Leg) -> Check:
        """Repeat rounds in this process; compare them with the journal, and the state with that of a checkpoint."""
        first, count = leg.origin + 1, leg.last - leg.origin
        where = f"the checkpoint of round {leg.origin}" if leg.origin else "the start"
        subject = f"round {first}" if count == 1 else f"rounds {first} to {leg.last}"
        resumed_after, why = self._resumed(leg)
        left_out = _OF_KEYS if why else ()
        but = f", but for bits and times, since {why}" if why else ""
        compared = f"repeated from {where}: each number of the round and of its clients{but}"
        entries = dict(enumerate(islice(self.journal.entries(), leg.origin, leg.last), start=first))
        origin = self._states[leg.origin] if leg.origin in self._states else start(self.run)
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
        if leg.last == leg.end and leg.end in self._states:
            compared += f", and the checkpoint of round {leg.end}"
        return Check(subject, compared)

    def _resumed(self, leg: Leg) -> tuple[int, str]:
        """Return the round after which the run was resumed within a leg, or its last round, and why that is not known.

        New keys of secure sums are sent, and counted, when a run is resumed.
        """
        end, never = self._states.get(leg.end), self.journal.last_step
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
        if state is None or (kept := self._states.get(state.round_index)) is None:
            return ""
        saved, expected = kept.packed(), state.packed()
        problem = arrays_problem(saved[0], expected[0], "the rounds before")
        return problem and f"its checkpoint differs: {problem}"

    def _tables(self) -> Iterator[Check]:
        for name, expected in self.journal.tables(self.run.task.profiles).items():
            yield Check(name, "each value against the journal", table_problem(self.folder / name, expected))

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


def read_result(folder: Path, kind: type[BaseModel]) -> tuple[dict[str, Any] | None, str]:
    """Return the content of `result.json`, or why it cannot be read; neither if the run is not finished."""
    path = folder / RESULT
    if not path.is_file():
        return None, ""
    try:
        values: dict[str, Any] = json.loads(path.read_bytes())
        return {**values, **json.loads(kind.model_validate(values).model_dump_json())}, ""
    except (ValueError, RecursionError) as error:
        return None, f"unreadable ({str(error).splitlines()[0]})"


def label_checks(
    result: Mapping[str, Any], name: str, expected: Mapping[str, Any], baselines: Mapping[str, Any], of: str
) -> Iterator[Check]:
    """Yield the checks of the labels in `result.json`, which follow from `of`, and of its baselines, measured again.

    The run's name is that of its configuration, with a number where that was taken.
    """
    if result.get("narrowcast_version") != __version__:  # another version may have other labels, or none
        expected = {label: value for label, value in expected.items() if result.get(label)}
        baselines = baselines if result["baselines"] else {}
    is_named = re.fullmatch(rf"{re.escape(name)}(-\d+)?", result["name"])
    wrong = difference(result, expected) if is_named else f"name is {result['name']}, not {name}"
    yield Check("labels", f"name and all else that follows from {of}", wrong)
    if baselines:
        yield measured_check("baselines", f"measured again, against {RESULT}", result, baselines)


def _ledger(outcome: Outcome) -> dict[str, Any]:
    return {name: values.tolist() for name, values in vars(outcome.ledger).items()}
