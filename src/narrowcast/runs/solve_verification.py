"""Verification of a solve: its files agree, and iterations, repeated, give the same residuals and metrics."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from narrowcast.platform.atomic_files import read_tensors
from narrowcast.platform.checkpoint import read_checkpoints
from narrowcast.platform.iterations import SolveState, begin, iterations
from narrowcast.platform.solver_contracts import Problem
from narrowcast.platform.tracking.journal import Journal, evaluation, read_locked
from narrowcast.platform.tracking.journal_lines import step_of
from narrowcast.runs.checks import Check, arrays_problem, data_check, difference, table_problem
from narrowcast.runs.run_folder import ANSWER, CONFIG, ITERATIONS, RESULT, checkpoint_place
from narrowcast.runs.solve_outputs import answer_sha256
from narrowcast.runs.solve_result import is_solve_folder, load_solve_result
from narrowcast.solve_run import Solve, load_solve


def verify_solve(folder: Path, count: int) -> Iterator[Check]:
    """Yield the checks of a solve; repeat `count` iterations from the start and from each checkpoint."""
    solve = load_solve(str(folder / CONFIG))
    problem = solve.problem_source.load()
    with read_locked(folder):
        journal = Journal.read(folder)
        rows = {step_of(row): row for row in journal.rounds}
        yield Check("journal", f"the checksums of {len(rows)} iterations", journal.lines.problem)
        states = {0: begin(problem, solve.solver, solve.seed)} if count else {}
        recorded = {}
        for saved in read_checkpoints(checkpoint_place(solve, folder), SolveState):
            subject = f"checkpoint of iteration {saved.step}"
            compared = "sha256 of the file; configuration and residual against config.yaml and the journal"
            if saved.state is None:
                yield Check(subject, compared, saved.problem)
                continue
            wrong = "" if saved.digest == solve.digest() else f"its configuration is not that of {CONFIG}"
            if saved.step and not wrong:
                row = rows.get(saved.step, {})
                wrong = difference({"residual": saved.state.residual}, {"residual": row.get("residual")})
            yield Check(subject, compared, wrong)
            states[saved.step] = saved.state
            if saved.data_sha256:
                recorded[f"the checkpoint of iteration {saved.step}"] = saved.data_sha256
        if is_solve_folder(folder):
            recorded[RESULT] = load_solve_result(folder).file.problem_sha256
        yield (its_problem := replace(data_check(recorded, problem), subject="problem"))
        if its_problem.problem:
            yield Check("iterations and outputs", skipped="they cannot be repeated with different data")
            return
        for state in states.values():
            if count and state.step < journal.last_step:
                yield _repeated(solve, problem, state, rows, count)
        if not is_solve_folder(folder):
            yield Check(RESULT, skipped="the solve is not finished")
            return
        yield from _outputs(folder, solve, journal, states.get(journal.last_step))


def _repeated(solve: Solve, problem: Problem, state: SolveState, rows: dict[int, Any], count: int) -> Check:
    """Repeat iterations in this process and compare those that were recorded with the journal."""
    where = f"the checkpoint of iteration {state.step}" if state.step else "the start"
    subject = f"iterations after {state.step}"
    compared = f"repeated from {where}: each residual and metric"
    unlimited = solve.model_copy(update={"solver_seconds": None, "record_every": 1})
    with closing(iterations(problem, solve.solver, unlimited, state)) as steps:
        for each in steps:
            row = rows.get(each.step)
            if row is not None:
                found = {"residual": each.residual, **each.metrics}
                wrong = difference(found, {name: row[name] for name in found if name in row})
                if wrong:
                    return Check(subject, compared, f"iteration {each.step}: repeated, {wrong}")
            if each.step >= state.step + count:
                break
    return Check(subject, compared)


def _outputs(folder: Path, solve: Solve, journal: Journal, last: SolveState | None) -> Iterator[Check]:
    """Compare the outputs of a finished solve with the journal and the last state."""
    yield Check(
        ITERATIONS, "each value against the journal", table_problem(folder / ITERATIONS, journal.rounds_table())
    )
    file, row = load_solve_result(folder).file, journal.rounds[-1]
    expected = {
        "iterations": step_of(row),
        "residual": row["residual"],
        "solver_seconds": row["solver_seconds"],
        "seed": solve.seed,
        "final": {name: value for name, value in evaluation(row).items() if math.isfinite(value)},
    }
    yield Check(RESULT, "iterations, times and metrics", difference(file.model_dump(), expected))
    if last is None:
        yield Check(ANSWER, skipped="there is no checkpoint of the last iteration")
        return
    compared = f"each array against the last state, and its sha256 against {RESULT}"
    try:
        found = read_tensors(folder / ANSWER)[0]
    except (SafetensorError, OSError) as error:
        yield Check(ANSWER, compared, f"unreadable ({error})")
        return
    wrong = arrays_problem(found, answer := solve.solver.answer(last.arrays))
    if not wrong and answer_sha256(answer) != file.answer_sha256:
        wrong = f"{RESULT} has the answer_sha256 {file.answer_sha256}, the last state {answer_sha256(answer)}"
    yield Check(ANSWER, compared, wrong)
