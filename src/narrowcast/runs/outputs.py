"""The outputs of a finished run or solve: tables, figures, the model or answer, `result.json`, and tags for MLflow."""

from __future__ import annotations

import json
import logging
import math
import subprocess
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
from safetensors.numpy import save

from narrowcast._version import __version__
from narrowcast.algorithms.codecs.messages import dense_wire_bits, rows_wire_bits
from narrowcast.experiment import Experiment
from narrowcast.platform.config.files import MODEL
from narrowcast.platform.config.plugins import said
from narrowcast.platform.contracts import Task
from narrowcast.platform.models.model import ITEM_FACTORS
from narrowcast.platform.rounds.evaluation import model_sha256
from narrowcast.platform.rounds.state import RunState
from narrowcast.platform.solving import Problem, SolveState, end_of
from narrowcast.platform.storage.disk import disk, make_folders, sync_all, write_atomically
from narrowcast.platform.storage.journal import Journal, step_of
from narrowcast.platform.tracking.metrics import (
    FractionMetrics,
    RunTargetCost,
    SolveTargetCost,
    declared_by,
    fraction_metrics,
    target_costs,
)
from narrowcast.platform.tracking.partition import write_partition
from narrowcast.platform.tracking.second_process import begin, run_figures
from narrowcast.platform.types import Arrays, arrays_sha256
from narrowcast.runs.folder import ANSWER, ITERATIONS, RESULT
from narrowcast.solve_run import Solve

logger = logging.getLogger(__name__)


def write_outputs(
    folder: Path,
    experiment: Experiment,
    task: Task,
    journal: Journal,
    state: RunState,
    run_id: str,
    partition: Callable[[], bytes] | None,
) -> dict[str, Any]:
    """Write everything that a finished run leaves and return the content of `result.json`, which comes last.

    `partition` returns the figure of the partition as a PNG file; None if no figures are asked for.
    """
    tables = journal.write_tables(task.profiles)
    labelled = labels(experiment, task)
    title = f"{folder.name}: {labelled['algorithm']} on {labelled['data']}"
    plots = begin_plots(tables, title, labelled["shares"]) if partition is not None else _no_plots
    write_model(task.model.state(experiment.algorithm.final(state.server), task.data), folder / MODEL)
    entries = {
        **labelled,
        **measured(journal, experiment, task),
        **baselines_entry(experiment.model, task.data),
        "model_sha256": model_sha256(experiment.algorithm, state),
    }
    drawn = write_partition(task.data, folder / "partition", partition)
    drawn += write_plots(plots, folder / "plots")
    return _write_result(folder, entries, run_id, [*tables.values(), *drawn])


def _write_result(folder: Path, entries: Mapping[str, Any], run_id: str, files: Sequence[Path]) -> dict[str, Any]:
    """Sync the other files of a finished run, write `result.json`, and return its content."""
    result = {
        "name": folder.name,
        **entries,
        "mlflow_run_id": run_id,
        "git_commit": git_commit(),
        "narrowcast_version": __version__,
    }
    sync_all(files)
    write_atomically(folder / RESULT, json.dumps(result, indent=2).encode())
    return result


def labels(experiment: Experiment, task: Task) -> dict[str, Any]:
    """Return the entries of `result.json` that follow from the experiment and its data."""
    return {
        "algorithm": experiment.algorithm.kind,
        "data": task.data.name,
        "backend": experiment.backend.kind,
        "execution": task.training.mode(task),
        "seed": experiment.seed,
        **metrics_entry(experiment.model),
        "data_sha256": task.data.digest,
        **frozen_entry(task),
        **personal_entry(experiment),
        **inputs_entry(task),
    }


def metrics_entry(measuring: Any) -> dict[str, list[str] | None]:
    """Return the entries of `result.json` on metrics that a model or problem declares, null if it declares none."""
    lower, shares = declared_by(measuring), fraction_metrics(measuring)
    return {
        "lower_is_better": None if lower is None else sorted(lower),
        "shares": None if shares is None else sorted(shares),
    }


def personal_entry(experiment: Experiment) -> dict[str, bool]:
    """Return the entry of `result.json` that clients have models of their own, empty if they use the global one."""
    return {"personal": True} if experiment.algorithm.personalises else {}


def baselines_entry(measuring: Any, *data: Any) -> dict[str, Any]:
    """Return the entry of `result.json` with the metrics of a model's or problem's baselines, empty without any.

    Baselines of others' classes that fail are left out with a warning: the run has been trained.
    """
    try:
        measured = {
            str(name): {metric: float(value) for metric, value in metrics.items() if math.isfinite(value)}
            for name, metrics in measuring.baselines(*data).items()
        }
    except Exception as error:
        logger.warning("the baselines of %s are left out: %s", type(measuring).__name__, said(error))
        return {}
    with_metrics = {name: metrics for name, metrics in measured.items() if metrics}
    return {"baselines": with_metrics} if with_metrics else {}


def inputs_entry(task: Task) -> dict[str, Any]:
    """Return the entry of `result.json` with type, shape and range of the training samples' inputs, empty without."""
    arrays = {name: values for name, values in task.data.inputs.items() if values.size}
    inputs = {
        name: {
            "dtype": str(values.dtype),
            "shape": list(values.shape[1:]),
            "low": float(values.min()),
            "high": float(values.max()),
        }
        for name, values in arrays.items()
    }
    return {"inputs": inputs} if inputs else {}


def begin_plots(tables: Mapping[str, Path], title: str, shares: FractionMetrics) -> Callable[[], Mapping[str, bytes]]:
    """Begin to draw the figures of a run if there is a second process; return the function that returns them."""
    return begin(run_figures.figures_of_files, dict(tables), title, shares)


def _no_plots() -> dict[str, bytes]:
    return {}


def write_plots(drawn: Callable[[], Mapping[str, bytes]], folder: Path) -> list[Path]:
    """Write the figures of a run as PNG files and return their paths."""
    if not (figures := drawn()):
        return []
    make_folders(folder)
    for name, content in figures.items():
        disk().write_with(folder / f"{name}.png", partial(Path.write_bytes, data=content))
    return [folder / f"{name}.png" for name in figures]


def measured(journal: Journal, experiment: Experiment, task: Task) -> dict[str, Any]:
    """Return the entries of `result.json` that follow from the journal."""
    last, lower = journal.rounds[-1], declared_by(experiment.model)
    participations = sum(row["clients"] for row in journal.rounds)
    return {
        "final": journal.final_metrics(),
        "best": journal.best_metrics(lower),
        "targets": [
            target.model_dump() for target in target_costs(RunTargetCost, experiment.targets, journal.rounds, lower)
        ],
        "rounds": last["round"],
        "uplink_bits": last["total_uplink_bits"],
        "downlink_bits": last["total_downlink_bits"],
        "total_bits": last["total_uplink_bits"] + last["total_downlink_bits"],
        "full_uplink_bits": (full := participations * full_upload_bits(experiment, task)),
        "touched_uplink_bits": touched_uplink_bits(journal, full),
        "simulated_seconds": last["simulated_seconds"],
        "wall_seconds": last["wall_seconds"],
    }


def touched_uplink_bits(journal: Journal, full: int) -> int:
    """Return the uplink if clients sent their changed rows in float32: `full` for models without rows."""
    return sum(row["touched_bits"] for row in journal.rounds) or full


def write_model(model: Arrays, path: Path, metadata: Mapping[str, str] | None = None) -> None:
    """Write the global model's arrays by name to a safetensors file, with metadata if there is some."""
    arrays = {name: np.asarray(values, order="C") for name, values in model.items()}
    write_atomically(path, save(arrays, dict(metadata) if metadata else None))


def frozen_entry(task: Task) -> dict[str, str]:
    """Return the entry of `result.json` for what no client trains in the model; nothing if all is trained."""
    sha256 = task.model.fixed_sha256(task.data)
    return {} if sha256 is None else {"frozen_sha256": sha256}


def full_upload_bits(experiment: Experiment, task: Task) -> int:
    """Return the bits of one upload of the whole model in float32; for item factors, all rows and the row mask."""
    model = task.model.init_server(task.data, experiment.seed)
    if ITEM_FACTORS in model:
        n_items, dimension = model[ITEM_FACTORS].shape
        return rows_wire_bits(n_rows=n_items, sent_rows=n_items, rank=dimension, layout="all", mask=True)
    return dense_wire_bits(sum(values.size for values in model.values()))


def run_tags(experiment: Experiment, task: Task) -> dict[str, str]:
    """Return the tags of the run in MLflow."""
    return {
        "algorithm": experiment.algorithm.kind,
        "data": experiment.data.kind,
        "backend": experiment.backend.kind,
        "execution": task.training.mode(task),
        "seed": str(experiment.seed),
        "git_commit": git_commit() or "unknown",
        "narrowcast_version": __version__,
    }


@cache
def git_commit() -> str | None:
    """Return the commit of the checkout that narrowcast is imported from, `-dirty` if it has changes, or None."""
    git = ["git", "-C", str(Path(__file__).parent)]
    commands = (
        # fails if narrowcast is installed inside the checkout of another project
        [*git, "ls-files", "--error-unmatch", Path(__file__).name],
        [*git, "describe", "--always", "--dirty", "--abbrev=40"],
    )
    try:
        answers = [
            subprocess.run(command, capture_output=True, text=True, timeout=10, check=True) for command in commands
        ]
    except (OSError, subprocess.SubprocessError):
        return None
    return answers[-1].stdout.strip()


def write_solve_outputs(
    folder: Path, solve: Solve, problem: Problem, journal: Journal, state: SolveState, run_id: str, *, figures: bool
) -> dict[str, Any]:
    """Write everything that a finished solve leaves and return the content of `result.json`, which comes last."""
    table, answer = folder / ITERATIONS, solve.solver.answer(state.arrays)
    disk().write_with(table, partial(pq.write_table, journal.rounds_table()))
    title = f"{folder.name}: {solve.solver.kind} on {problem.name}"
    plots = begin(run_figures.solve_figures_of_file, table, title) if figures else _no_plots
    write_model(answer, folder / ANSWER)
    entries = {
        **solve_labels(solve, problem),
        "stopped_by": end_of(solve, state),
        **solve_measures(journal, solve),
        **baselines_entry(problem),
        "answer_sha256": answer_sha256(answer),
    }
    return _write_result(folder, entries, run_id, [table, *write_plots(plots, folder / "plots")])


def solve_labels(solve: Solve, problem: Problem) -> dict[str, Any]:
    """Return the entries of `result.json` that follow from the solve and its problem."""
    return {
        "solver": solve.solver.kind,
        "problem": problem.name,
        "sizes": dict(problem.sizes),
        "problem_sha256": problem.digest,
        "seed": solve.seed,
        **metrics_entry(solve.problem),
    }


def solve_measures(journal: Journal, solve: Solve) -> dict[str, Any]:
    """Return the entries of `result.json` that follow from the journal."""
    last, lower = journal.rounds[-1], declared_by(solve.problem)
    return {
        "iterations": step_of(last),
        "residual": last["residual"],
        "final": journal.final_metrics(),
        "best": journal.best_metrics(lower),
        "targets": [
            target.model_dump() for target in target_costs(SolveTargetCost, solve.targets, journal.rounds, lower)
        ],
        "solver_seconds": last["solver_seconds"],
        "wall_seconds": last["wall_seconds"],
    }


def answer_sha256(answer: Arrays) -> str:
    """Return the sha256 of an answer's arrays, their names, types and shapes."""
    return arrays_sha256(answer).hex()
