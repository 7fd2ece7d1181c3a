"""The plan of a run and its predicted costs, from two rounds or iterations that are not kept; nothing is written."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from narrowcast.experiment import Experiment, load_replicas
from narrowcast.platform.errors import UserError
from narrowcast.platform.rounds.loop import LocalBackend
from narrowcast.platform.rounds.state import start
from narrowcast.platform.solving import begin, iterations, loaded_problem
from narrowcast.platform.tracking import units
from narrowcast.platform.types import Arrays
from narrowcast.runs.folder import free_folder
from narrowcast.runs.prepared import are_solves, checked_run
from narrowcast.runs.progress import data_line
from narrowcast.solve_run import Solve, load_solves

_STEPS = 2
Plan = list[tuple[str, str]]


def plan(source: str | Mapping[str, Any] | Experiment | Solve, overrides: Sequence[str], output: Path) -> Plan:
    """Return what a run would be and would cost, as pairs of a label and a text; raise `UserError` as the run would."""
    if are_solves(source, ()):
        solves = load_solves(source, overrides)  # type: ignore[arg-type]
        return [*_solve(solves[0]), *_place([solve.name for solve in solves], output)]
    experiments = load_replicas(source, overrides)  # type: ignore[arg-type]
    return [
        *_experiment(experiments[0], len(experiments)),
        *_place([experiment.name for experiment in experiments], output),
    ]


def _experiment(experiment: Experiment, replicas: int) -> Iterator[tuple[str, str]]:
    run = checked_run(experiment)
    state = start(run)
    task = run.task
    yield "data", data_line(task.data)
    yield "model", f"{experiment.model.kind}, {_numbers(state.server):,} parameters of the server"
    codec = [stage.kind for stage in experiment.algorithm.traits.codec]
    yield "algorithm", experiment.algorithm.kind + (f", uploads by {' + '.join(codec)}" if codec else "")
    yield "training", f"{experiment.training.kind}, {task.training.mode(task)}"
    clients = min(experiment.clients_per_round, task.data.n_clients)
    yield (
        "plan",
        f"{experiment.rounds} rounds of {clients} clients" + (f", {replicas} replicas" if replicas > 1 else ""),
    )
    yield "backend", experiment.backend.kind
    with closing(LocalBackend().run(run, state)) as outcomes:
        measured = list(islice(outcomes, _STEPS))
    if not measured:
        raise UserError(f"{experiment.name}: no round could be tried; raise rounds")
    share = experiment.rounds / len(measured)
    records = [outcome.record for outcome in measured]
    yield "uplink", f"about {units.format_bits(share * sum(record.uplink_bits for record in records))} in all"
    yield "downlink", f"about {units.format_bits(share * sum(record.downlink_bits for record in records))} in all"
    yield "simulated time", f"about {units.format_seconds(share * records[-1].simulated_seconds)}"
    # The first round has what later ones find ready, and the evaluations of both are not those of the whole run.
    seconds = min(outcome.wall_seconds for outcome in measured) * experiment.rounds
    yield "wall time", f"about {units.format_seconds(seconds)} in this process, and its start"
    yield "predicted from", f"{units.counted(len(measured), 'round')}, not kept"


def _solve(solve: Solve) -> Iterator[tuple[str, str]]:
    problem = loaded_problem(solve.problem_source)
    solve.solver.check(problem)
    yield "problem", data_line(problem)
    yield "solver", solve.solver.kind
    yield "plan", f"at most {units.counted(solve.iterations, 'iteration')}"
    recorded = list(islice(iterations(problem, solve.solver, solve, begin(problem, solve.solver, solve.seed)), _STEPS))
    if recorded and math.isfinite(seconds := recorded[-1].solver_seconds / max(1, recorded[-1].step)):
        yield "time of the solver", f"at most about {units.format_short_seconds(seconds * solve.iterations)}"


def _place(names: Sequence[str], output: Path) -> Plan:
    folders = ", ".join(str(free_folder(output, name)) for name in names)
    return [("folder", folders), ("written", "nothing: this is a dry run")]


def _numbers(arrays: Arrays) -> int:
    return sum(int(np.size(values)) for values in arrays.values())
