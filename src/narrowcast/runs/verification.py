"""Verification of a run: its files agree with one another, and a few rounds, repeated, give the same results."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError

from narrowcast.experiment import Experiment
from narrowcast.platform import plugins
from narrowcast.platform.atomic_files import read_tensors
from narrowcast.platform.checkpoint import Saved, read_checkpoints
from narrowcast.platform.config import read_yaml
from narrowcast.platform.data.soundness import load_checked
from narrowcast.platform.errors import UserError
from narrowcast.platform.evaluation import model_sha256
from narrowcast.platform.local_backend import LocalBackend
from narrowcast.platform.outcome import CLIENT_METRICS, Outcome
from narrowcast.platform.run import Run
from narrowcast.platform.state import RunState, start
from narrowcast.platform.tracking.journal import Journal, read_locked
from narrowcast.platform.trust import is_looking, looking, remedy
from narrowcast.runs.checks import Check, arrays_problem, data_check, difference, table_problem
from narrowcast.runs.earlier_runs import has_one_seed, saved_experiment
from narrowcast.runs.outputs import measured
from narrowcast.runs.packaged import names_solve, read_values
from narrowcast.runs.result_file import ResultFile
from narrowcast.runs.run_folder import CONFIG, MODEL, RESULT, checkpoint_place
from narrowcast.runs.solve_verification import verify_solve
from narrowcast.runs.start_model import whole_model

_OF_HEADERS = (
    *("uplink_bits", "downlink_bits", "total_uplink_bits", "total_downlink_bits"),
    *("round_simulated_seconds", "simulated_seconds", "seconds"),
)
"""The entries of a round and of its clients that follow from the size of headers."""


def verify(folder: Path, rounds: int = 3, *, trust: bool = False) -> list[Check]:
    """Return the checks of a run, whose files are only read; repeat `rounds` rounds from the start and each checkpoint.

    Code of the run's own runs only with `trust`, or in a trusted folder; without, the checks that need none are made.
    Raise `UserError` if there is no run, if its configuration or data cannot be read, or if it is being written.
    """
    if not (folder / CONFIG).is_file():
        raise UserError(f"no run at {folder}; give the name of a run, or its folder")
    with looking(folder, trust=trust):  # so that all checks are made before it ends
        return list(_checks(folder, rounds))


def _checks(folder: Path, rounds: int) -> Iterator[Check]:
    if is_looking() and (code := _code_of(folder)):
        yield from _without_code(folder, code)
    elif names_solve(str(folder / CONFIG)):
        yield from verify_solve(folder, rounds)
    else:
        experiment = saved_experiment(folder)
        with read_locked(folder):
            yield from _Verification(folder, experiment).checks(rounds)


def _code_of(folder: Path) -> str:
    """Return what the configuration names that would run as code, if anything."""
    values, _ = read_values(str(folder / CONFIG))
    solver = values.get("solver")
    if isinstance(solver, Mapping) and solver.get("kind") == "program":
        return f"the program {' '.join(map(str, solver.get('command', ())))}"
    return next(iter(plugins.specs_in(values)), "")


def _without_code(folder: Path, code: str) -> Iterator[Check]:
    """Yield the checks that need no class of the configuration."""
    with read_locked(folder):
        lines = Journal.read(folder).lines
    yield Check("journal", "the checksum of each line", lines.problem)
    rest = f"{code} is code of the run's own, which looking does not run; {remedy(folder)}"
    yield Check("everything else", skipped=rest)


class _Verification:
    def __init__(self, folder: Path, experiment: Experiment) -> None:
        self._folder, self._experiment, self._earlier = folder, experiment, has_one_seed(folder)
        task = experiment.task(load_checked(experiment.data_source), folder)
        self._run = Run(experiment, experiment.secured_algorithm, task)
        self._journal = Journal.read(folder)
        self._saved = list(read_checkpoints(checkpoint_place(experiment, folder), RunState))
        self._last: RunState | None = None

    def checks(self, rounds: int) -> Iterator[Check]:
        journal = self._journal
        yield self._journal_itself()
        for saved in self._saved:
            yield self._checkpoint(saved)
        states = {each.state.round_index: each.state for each in self._saved if each.state is not None}
        result, problem = self._read_result()
        yield (its_data := self._data(result))
        if its_data.problem:
            yield Check("rounds and outputs", skipped="they cannot be repeated with different data")
            return
        for state in ({0: start(self._run)} | states).values():
            if (count := min(rounds, journal.last_step - state.round_index)) > 0:
                yield self._repeated(state, count)
        if result is None:
            yield Check(RESULT, skipped="" if problem else "the run is not finished", problem=problem)
            return
        yield from self._tables()
        yield self._result(result)
        yield self._model(result, self._last or states.get(result.rounds))

    def _read_result(self) -> tuple[ResultFile | None, str]:
        """Return the content of `result.json`, or why it cannot be read; neither if the run is not finished."""
        path = self._folder / RESULT
        if not path.is_file():
            return None, ""
        try:
            return ResultFile.model_validate_json(path.read_bytes()), ""
        except ValueError as error:
            return None, f"unreadable ({str(error).splitlines()[0]})"

    def _data(self, result: ResultFile | None) -> Check:
        recorded = {f"the checkpoint of round {each.step}": each.data_sha256 for each in self._saved}
        recorded |= {} if result is None else {RESULT: result.data_sha256 or ""}
        return data_check({file: sha256 for file, sha256 in recorded.items() if sha256}, self._run.task.data)

    def _journal_itself(self) -> Check:
        journal = self._journal
        lines, rows = journal.lines, journal.rounds
        problem = lines.problem
        for name in ("uplink_bits", "downlink_bits"):
            if not problem and [row[f"total_{name}"] for row in rows] != np.cumsum([r[name] for r in rows]).tolist():
                problem = f"total_{name} is not the sum of the rounds' {name}"
        if lines.unprotected and not problem:
            return Check("journal", f"{len(rows)} rounds, {lines.unprotected} of them without checksums (version 0.1)")
        return Check("journal", f"the checksums of {len(rows)} rounds, and the sums of bits", problem)

    def _checkpoint(self, saved: Saved[RunState]) -> Check:
        subject = f"checkpoint of round {saved.step}"
        compared = "sha256 of the file; configuration, bits and simulated time against config.yaml and the journal"
        if saved.state is None:
            return Check(subject, compared, saved.problem)
        path = self._folder / CONFIG
        if saved.digest not in self._experiment.digests(read_yaml(path.read_text(), str(path))):
            return Check(subject, compared, f"its configuration is not that of {CONFIG}")
        if saved.step > self._journal.last_step:
            return Check(subject, compared, f"the journal ends at round {self._journal.last_step}")
        row = self._journal.rounds[saved.step - 1] if saved.step else {}
        names = {
            "uplink_bits": "total_uplink_bits",
            "downlink_bits": "total_downlink_bits",
            "simulated_seconds": "simulated_seconds",
        }
        its = {name: getattr(saved.state, name) for name in names}
        return Check(
            subject, compared, difference(its, {name: row.get(each, 0 * its[name]) for name, each in names.items()})
        )

    def _repeated(self, state: RunState, count: int) -> Check:
        """Repeat rounds in this process and compare them with the journal."""
        first, last = state.round_index + 1, state.round_index + count
        where = f"the checkpoint of round {state.round_index}" if state.round_index else "the start"
        subject = f"round {first}" if count == 1 else f"rounds {first} to {last}"
        other_headers = bool(self._journal.rounds) and "total_bits" not in self._journal.rounds[0]  # as in version 0.1
        left_out = _OF_HEADERS if other_headers else ()
        but = ", but for bits and times, since messages had other headers" * other_headers
        compared = f"repeated from {where}: each number of the round and of its clients{but}"
        if getattr(self._experiment.backend, "on_failure", "") == "drop":
            return Check(subject, skipped="with backend.on_failure=drop, rounds depend on failures")
        lines = islice(self._journal.entries(), first - 1, last)
        entries = dict(enumerate(lines, start=first))
        with closing(LocalBackend().run(self._run, state)) as outcomes:
            for outcome in islice(outcomes, count):
                number = outcome.record.round
                row = _results(outcome)
                there = {name: value for name, value in self._journal.rounds[number - 1].items() if name in row}
                problem = difference(row, there, left_out)
                problem = problem or difference(_ledger(outcome), entries[number]["clients"], left_out)
                again = {name: values.tolist() for name, values in outcome.client_metrics.items()}
                measured = entries[number].get(CLIENT_METRICS, {})
                problem = problem or difference(again, {name: measured[name] for name in measured if name in again})
                if problem:
                    return Check(subject, compared, f"round {number}: repeated, {problem}")
                if number == self._experiment.rounds:
                    self._last = outcome.state
        return Check(subject, compared)

    def _tables(self) -> Iterator[Check]:
        for name, expected in self._journal.tables(self._run.task.profiles).items():
            yield Check(name, "each value against the journal", table_problem(self._folder / name, expected))

    def _result(self, result: ResultFile) -> Check:
        compared = "rounds, final and best metrics, targets, bits and times against the journal"
        if not self._journal.rounds:
            return Check(RESULT, compared, "the journal has no rounds")
        its = measured(self._journal, self._experiment, self._run.task)
        expected = {"rounds": its["rounds"], "seed": self._experiment.seed, **its}
        if result.touched_uplink_bits is None:
            del expected["touched_uplink_bits"]
        return Check(RESULT, compared, difference(json.loads(result.model_dump_json()), expected))

    def _model(self, result: ResultFile, last: RunState | None) -> Check:
        """Compare the trained model, its sha256 and the last state."""
        path, algorithm = self._folder / MODEL, self._experiment.algorithm
        if last is None:
            every = f"--rounds {result.rounds} repeats the run"
            return Check(MODEL, skipped=f"there is no checkpoint of the last round; {every}")
        compared, problem = f"each array against the last state, and that state's sha256 against {RESULT}", ""
        if self._earlier and not path.is_file():
            compared = f"the last state's sha256 against {RESULT}; version 0.1 wrote no model"
        else:
            try:
                problem = arrays_problem(
                    read_tensors(path)[0], whole_model(self._run.task, algorithm.final(last.server))
                )
            except (SafetensorError, OSError) as error:
                problem = f"unreadable ({error})"
        if not problem and (found := model_sha256(algorithm, last)) != result.model_sha256:
            problem = f"{RESULT} has the model_sha256 {result.model_sha256}, the last state {found}"
        return Check(MODEL, compared, problem)


def _results(outcome: Outcome) -> dict[str, Any]:
    return {**asdict(outcome.record), **outcome.metrics}


def _ledger(outcome: Outcome) -> dict[str, Any]:
    return {name: values.tolist() for name, values in vars(outcome.ledger).items()}
