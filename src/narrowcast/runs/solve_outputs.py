"""The outputs of a finished solve: its table of iterations, figures, the answer and `result.json`."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from narrowcast._version import __version__
from narrowcast.platform.atomic_files import write_atomically
from narrowcast.platform.disk import disk, sync_all
from narrowcast.platform.iterations import SolveState, end_of
from narrowcast.platform.solver_contracts import Problem
from narrowcast.platform.tracking.journal import Journal
from narrowcast.platform.tracking.journal_lines import step_of
from narrowcast.platform.tracking.metric_direction import declared_by
from narrowcast.platform.tracking.metric_labels import shares_of
from narrowcast.platform.tracking.second_process import begin, run_figures
from narrowcast.platform.tracking.targets import SolveTargetCost, target_costs
from narrowcast.platform.types import Arrays, arrays_sha256
from narrowcast.runs.outputs import baselines_entry, git_commit, write_model, write_plots
from narrowcast.runs.run_folder import ANSWER, ITERATIONS, RESULT
from narrowcast.solve_run import Solve


def write_solve_outputs(
    folder: Path, solve: Solve, problem: Problem, journal: Journal, state: SolveState, run_id: str
) -> dict[str, Any]:
    """Write everything that a finished solve leaves and return the content of `result.json`, which comes last."""
    table, answer = folder / ITERATIONS, solve.solver.answer(state.arrays)
    disk().fill(table, partial(pq.write_table, journal.rounds_table()))
    title = f"{folder.name}: {solve.solver.kind} on {problem.name}"
    plots = begin(run_figures.solve_figures_of_file, table, title)
    write_model(answer, folder / ANSWER)
    result = {
        "name": folder.name,
        **labels(solve, problem),
        "stopped_by": end_of(solve, state),
        **measured(journal, solve),
        **baselines_entry(problem),
        "answer_sha256": answer_sha256(answer),
        "mlflow_run_id": run_id,
        "git_commit": git_commit(),
        "narrowcast_version": __version__,
    }
    sync_all([table, *write_plots(plots, folder / "plots")])
    write_atomically(folder / RESULT, json.dumps(result, indent=2).encode())
    return result


def labels(solve: Solve, problem: Problem) -> dict[str, Any]:
    """Return the entries of `result.json` that follow from the solve and its problem."""
    lower, shares = declared_by(solve.problem), shares_of(solve.problem)
    return {
        "solver": solve.solver.kind,
        "problem": problem.name,
        "sizes": dict(problem.sizes),
        "problem_sha256": problem.digest,
        "seed": solve.seed,
        "lower_is_better": None if lower is None else sorted(lower),
        "shares": None if shares is None else sorted(shares),
    }


def measured(journal: Journal, solve: Solve) -> dict[str, Any]:
    """Return the entries of `result.json` that follow from the journal."""
    last, lower = journal.rounds[-1], declared_by(solve.problem)
    return {
        "iterations": step_of(last),
        "residual": last["residual"],
        "final": journal.final_metrics(),
        "best": journal.best_metrics(lower),
        "targets": [each.model_dump() for each in target_costs(SolveTargetCost, solve.targets, journal.rounds, lower)],
        "solver_seconds": last["solver_seconds"],
        "wall_seconds": last["wall_seconds"],
    }


def answer_sha256(answer: Arrays) -> str:
    """Return the sha256 of an answer's arrays, their names, types and shapes."""
    return arrays_sha256(answer).hex()
