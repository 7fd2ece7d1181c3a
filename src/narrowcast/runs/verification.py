"""Verification of a run's folder: what its files say of one another, and what a repetition says of them.

The checks of a solve are here and those of an experiment in `run_verification`. Those of a solve are that its files
agree, that its answer has the metrics of the journal, and that iterations can be repeated.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_args

from safetensors import SafetensorError

from narrowcast.packaged import names_solve
from narrowcast.platform.compiled import one_thread
from narrowcast.platform.config import plugins
from narrowcast.platform.config.plugins import said
from narrowcast.platform.config.trust import is_looking, looking, remedy
from narrowcast.platform.config.yaml import read_limited, read_yaml
from narrowcast.platform.errors import UserError
from narrowcast.platform.solving import Problem, SolveState, Status, begin, end_of, iterations, loaded_problem
from narrowcast.platform.storage.checkpoint import read_checkpoints
from narrowcast.platform.storage.disk import read_tensors
from narrowcast.platform.storage.journal import ROUNDS, Journal, evaluation, read_locked, step_of
from narrowcast.platform.types import ITERATION, Arrays
from narrowcast.runs.checks import (
    Budget,
    Check,
    Leg,
    Verification,
    arrays_problem,
    clients_problem,
    difference,
    iterations_problem,
    label_checks,
    measured_check,
    rounds_problem,
    table_problem,
)
from narrowcast.runs.folder import ANSWER, CONFIG, ITERATIONS, RESULT, checkpoint_place, saved_config
from narrowcast.runs.outputs import answer_sha256, baselines_entry, solve_labels, solve_measures
from narrowcast.runs.result import SolveFile
from narrowcast.runs.run_verification import UNPROVABLE, verify_run
from narrowcast.solve_run import Solve, load_solve

_OF_THE_CLOCK = f"milliseconds of the solver: their sums agree, and no file proves them; {UNPROVABLE}"


def _problem_of(solve: Solve) -> Problem:
    return loaded_problem(solve.problem_source)


def verify_solve(folder: Path, budget: Budget, load: Callable[[Solve], Problem] = _problem_of) -> Iterator[Check]:
    """Yield the checks of a solve, whose problem `load` returns."""
    solve = load_solve(saved_config(folder))
    problem, journal = load(solve), Journal.read(folder)
    saved = list(read_checkpoints(checkpoint_place(solve, folder), SolveState))
    yield from _SolveVerification(folder, solve.digest(), problem, journal, saved, solve, problem)(budget)


@dataclass
class _SolveVerification(Verification[SolveState]):
    solve: Solve
    problem: Problem

    run_kind, step_name, data_kind, result_file = "solve", ITERATION, "problem", SolveFile
    state_figures, unprovable = "residual and time", _OF_THE_CLOCK

    def journal_checks(self) -> Iterator[Check]:
        compared = f"the checksums of {len(self.rows)} iterations"
        yield Check("journal", compared, self.journal.lines.problem)
        yield Check("sums", "times of the iterations", iterations_problem(self.journal.rounds))

    def state_problem(self, state: SolveState, row: Mapping[str, Any]) -> str:
        if not state.step:
            return ""
        figures = {"residual": state.residual, "solver_seconds": state.solver_seconds}
        return difference(figures, {name: row.get(name) for name in figures})

    def outputs(self, result: Mapping[str, Any]) -> Iterator[Check]:
        if not self.rows:
            yield Check(RESULT, problem="the journal has no intact iterations")
            return
        path = self.folder / ITERATIONS
        yield Check(ITERATIONS, "each value against the journal", table_problem(path, self.journal.rounds_table()))
        yield from self._result(result)
        yield from self._answer(result)

    def repeated(self, leg: Leg) -> Check:
        """Repeat iterations in this process; compare those that were recorded, and the state after them."""
        where = f"the checkpoint of iteration {leg.origin}" if leg.origin else "the start"
        subject, compared = (
            f"iterations {leg.origin + 1} to {leg.last}",
            f"repeated from {where}: residuals and metrics",
        )
        state = self.states.get(leg.origin) or begin(self.problem, self.solve.solver, self.solve.seed)
        stopping = _AsRecorded(leg.last, self.solve.tolerance, self.rows)
        reached, end = leg.origin, None
        with closing(iterations(self.problem, self.solve.solver, stopping, state)) as steps:
            for step in steps:
                reached, row = step.step, self.rows.get(step.step, {})
                names = {"residual", *evaluation(row)}
                measured = {"residual": step.residual, **step.metrics}
                if wrong := difference(measured, {name: row[name] for name in row if name in names}):
                    return Check(subject, compared, f"iteration {step.step}: repeated, {wrong}")
                end = step.state
        if reached != leg.last or end is None:
            return Check(subject, compared, f"repeated, the solve ends at iteration {reached}")
        if reached == self.journal.last_step:
            self.last = end
        if (kept := self.states.get(reached)) is None:
            return Check(subject, compared)
        wrong = arrays_problem(kept.arrays, end.arrays, "the iterations before")
        wrong = wrong or difference({"status": kept.status}, {"status": end.status})
        compared += f", and the checkpoint of iteration {reached}"
        return Check(subject, compared, wrong and f"its checkpoint differs: {wrong}")

    def _result(self, result: Mapping[str, Any]) -> Iterator[Check]:
        measures = solve_measures(self.journal, self.solve)
        wrong = difference(result, measures) or self._other_end(result["stopped_by"])
        yield Check(RESULT, "iterations, metrics, best values, targets, times and end against the journal", wrong)
        expected = solve_labels(self.solve, self.problem)
        baselines = {"baselines": {}} | baselines_entry(self.problem)
        of = f"{CONFIG} and the problem"
        yield from label_checks(result, self.solve.name, expected, baselines, of)

    def _other_end(self, stopped_by: str) -> str:
        """Return whether a solve cannot have been ended by what it says, in words."""
        row = self.journal.rounds[-1]
        state = self.last or SolveState(step_of(row), {}, row["solver_seconds"], row["residual"])
        state = replace(state, solver_seconds=row["solver_seconds"])  # a repetition has a time of its own
        possible = [end_of(self.solve, state) or "an end by the solver itself"]
        if self.last is None:
            possible += sorted(set(get_args(Status)) - {"running", "diverged"})
        return "" if stopped_by in possible else f"stopped_by is {stopped_by}, not {' or '.join(possible)}"

    def _answer(self, result: Mapping[str, Any]) -> Iterator[Check]:
        """Compare the answer with the last state, measure it, and compare its sha256."""
        try:
            answer: Arrays = read_tensors(self.folder / ANSWER)[0]
        except (SafetensorError, OSError) as error:
            yield Check(ANSWER, "each array, and its metrics", f"unreadable ({error})")
            return
        wrong, compared = "", f"its sha256 against {RESULT}"
        if self.last is not None:
            compared = f"each array against the last state, and its sha256 against {RESULT}"
            wrong = arrays_problem(answer, self.solve.solver.answer(self.last.arrays))
        if not wrong and (sha256 := answer_sha256(answer)) != result["answer_sha256"]:
            wrong = f"{RESULT} has the answer_sha256 {result['answer_sha256']}, the answer {sha256}"
        yield Check(ANSWER, compared, wrong)
        if not wrong:
            with one_thread():
                metrics = self.problem.measure(answer)
            recorded = evaluation(self.journal.rounds[-1])
            yield measured_check(
                "the answer's metrics", "measured again: each metric of the last row", metrics, recorded
            )


@dataclass(frozen=True)
class _AsRecorded:
    """Ends after `iterations`, and records and measures what the journal has, whatever the configuration says now."""

    iterations: int
    tolerance: float | None
    rows: Mapping[int, Mapping[str, Any]]
    solver_seconds: float | None = None

    def records(self, iteration: int) -> bool:
        """Return whether the journal has this iteration."""
        return iteration in self.rows

    def evaluates(self, iteration: int) -> bool:
        """Return whether the journal has metrics of this iteration."""
        return bool(evaluation(self.rows.get(iteration, {})))

    def keeps(self, iteration: int, seconds: float) -> bool:
        """Return False: the state at the end is returned anyway."""
        del iteration, seconds
        return False


_OF_FILES = (ArithmeticError, AttributeError, LookupError, OSError, TypeError, ValueError)
"""Errors of comparisons with files that are missing, or that the platform does not write."""


def verify(folder: Path, rounds: int | None = None, *, trust: bool = False, seed: int | None = None) -> list[Check]:
    """Return the checks of a run, whose files are only read; repeat `rounds` rounds or iterations, drawn with `seed`.

    By default as many as took the run 20 seconds. Code of the run's own runs only with `trust`, or in a trusted folder;
    without, the checks that need none are made. Raise `UserError` if there is no run, if its configuration or data
    cannot be read, or if it is being written.
    """
    budget = Budget(rounds) if seed is None else Budget(rounds, seed=seed)
    with looking(folder, trust=trust):  # so that all checks are made before it ends
        return list(verify_folder(folder, budget))


def verify_folder(folder: Path, budget: Budget) -> Iterator[Check]:
    """Yield the checks of a run that is looked at, see `verify`."""
    if not (folder / CONFIG).is_file():
        raise UserError(f"no run at {folder}; give the name of a run, a study or a benchmark, or its folder")
    with read_locked(folder):
        if is_looking() and (code := code_in(folder / CONFIG)):
            yield from guarded(_without_code(folder, code))
        elif names_solve(str(folder / CONFIG)):
            yield from guarded(verify_solve(folder, budget))
        else:
            yield from guarded(verify_run(folder, budget))


def guarded(checks: Iterator[Check]) -> Iterator[Check]:
    """Yield the checks; an error in between, of files that are damaged in some other way, is a failed check."""
    try:
        yield from checks
    except UserError:
        raise
    except _OF_FILES as error:
        yield Check("everything else", problem=f"the files cannot be compared ({said(error)})")


def code_in(file: Path) -> str:
    """Return what a configuration names that would run as code, if anything."""
    values = read_yaml(read_limited(file), str(file))
    return next((f"the program {program}" for program in _programs_in(values)), "") or next(
        plugins.specs_in(values), ""
    )


def _programs_in(values: Any) -> Iterator[str]:
    if isinstance(values, Mapping):
        if values.get("kind") == "program":
            yield " ".join(map(str, values.get("command") or ()))
        values = list(values.values())
    if isinstance(values, list):
        yield from (program for part in values for program in _programs_in(part))


def _without_code(folder: Path, code: str) -> Iterator[Check]:
    """Yield the checks that need no class of the configuration."""
    journal = Journal.read(folder)
    yield Check("journal", "the checksum of each line", journal.lines.problem)
    of_solve = journal.step_name != "round"
    if of_solve:
        problem = iterations_problem(journal.rounds)
    else:
        problem = rounds_problem(journal.rounds) or clients_problem(journal.rounds, journal.ledgers(), None)
    yield Check("sums", "bits and times of the rows", problem)
    if journal.rounds and (folder / RESULT).is_file():
        table = ITERATIONS if of_solve else ROUNDS
        yield Check(table, "each value against the journal", table_problem(folder / table, journal.rounds_table()))
        result: dict[str, Any] = json.loads((folder / RESULT).read_bytes())
        last, lower = journal.rounds[-1], result.get("lower_is_better")
        figures = {"final": journal.final_metrics(), "best": journal.best_metrics(lower)}
        figures |= {name: last[name] for name in ("solver_seconds", "simulated_seconds", "residual") if name in last}
        figures |= {name: last[f"total_{name}"] for name in ("uplink_bits", "downlink_bits") if f"total_{name}" in last}
        yield Check(RESULT, "metrics, bits and times against the journal", difference(result, figures))
    reason = f"{code} is code of the run's own, which looking does not run; {remedy(folder)}"
    yield Check("everything else", skipped=reason)
