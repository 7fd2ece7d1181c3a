"""The checks of an experiment or a solve before anything is written, and the run as the recorder sees it.

Checked are data, parts, backend, targets, store and folder. An experiment that names classes of others is tried: round
1 with one client, of which nothing is kept, finds a method that raises, or that returns another type or shape than its
contract asks for, before the folder of the run and its MLflow run are made.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from narrowcast import packaged
from narrowcast._version import __version__
from narrowcast.algorithms.secure.schemes import Protection
from narrowcast.cluster.backend import RayBackend
from narrowcast.experiment import Experiment, load_experiment
from narrowcast.platform.compiled import one_thread
from narrowcast.platform.config import plugins
from narrowcast.platform.config.files import FROZEN, START
from narrowcast.platform.contracts import Task
from narrowcast.platform.data.dataset import Dataset
from narrowcast.platform.data.soundness import load_checked
from narrowcast.platform.errors import UserError
from narrowcast.platform.rounds.closing import metrics_of_round
from narrowcast.platform.rounds.contract_checks import (
    check_arrays,
    check_broadcast,
    check_final,
    check_metrics,
    check_result,
    check_step,
    check_updates,
    method_of,
    naming,
)
from narrowcast.platform.rounds.evaluation import measure
from narrowcast.platform.rounds.outcome import Outcome
from narrowcast.platform.rounds.state import Run, RunState, start
from narrowcast.platform.solving import Iteration, Problem, SolveState, begin, iterations, loaded_problem, measured
from narrowcast.platform.storage.disk import write_atomically
from narrowcast.platform.storage.journal import Journal
from narrowcast.platform.tracking.metrics import check_targets, fraction_metrics
from narrowcast.platform.tracking.partition import begin_figure, figures_asked
from narrowcast.platform.types import Arrays, Chunk, LocalTerms
from narrowcast.runs.folder import CONFIG, answered_file, has_run
from narrowcast.runs.learning import check_learned, watch_rounds
from narrowcast.runs.outputs import frozen_entry, git_commit, run_tags, write_model, write_outputs, write_solve_outputs
from narrowcast.runs.recordable import PreparedRun, WriteOutputs, check_same_data, checked_store, new_place, to_resume
from narrowcast.solve_run import Solve, load_solve, load_solves

if TYPE_CHECKING:
    from narrowcast.experiment import Experiment
    from narrowcast.platform.contracts import Task


@dataclass(frozen=True, kw_only=True)
class PreparedExperiment(PreparedRun):
    """An experiment that has passed every check and has written nothing yet."""

    experiment: Experiment
    run: Run
    state: RunState

    @property
    def config(self) -> Experiment:
        """The experiment."""
        return self.experiment

    @property
    def task(self) -> Task:
        """The run's task."""
        return self.run.task

    @property
    def input(self) -> Dataset:
        """The data set."""
        return self.task.data

    def tags(self) -> dict[str, str]:
        """Return the tags of the run in MLflow."""
        return run_tags(self.experiment, self.task)

    def keep_inputs(self) -> None:
        """Write a copy of the model that the run starts from, and the sha256 of what is not trained in its model.

        The run is resumed and verified with these.
        """
        if self.task.start is not None:
            write_model(self.task.start, self.folder / START)
        for sha256 in frozen_entry(self.task).values():
            write_atomically(self.folder / FROZEN, f"{sha256}\n".encode())

    def steps(self) -> Generator[Outcome, None, None]:
        """Run the rounds after `state` and yield the outcome of each."""
        run, secure = self.run, self.experiment.secure
        if isinstance(secure, Protection):
            run = replace(run, answered=answered_file(self.folder, secure.keys))
        return self.experiment.backend.run(run, self.state)

    def watch(self, journal: Journal) -> Callable[[Outcome], None]:
        """Return the function to be called after each round."""
        return watch_rounds(self.folder.name, self.experiment, self.run, journal)

    def begin_outputs(self) -> WriteOutputs:
        """Begin to draw the partition, if asked; return the function that writes the outputs of the finished run."""
        partition = begin_figure(self.task.data) if figures_asked() else None

        def write(journal: Journal, state: RunState, run_id: str) -> dict[str, Any]:
            check_learned(self.run, self.experiment, journal, state)
            return write_outputs(self.folder, self.experiment, self.task, journal, state, run_id, partition)

        return write


@one_thread()
def prepare(experiment: Experiment, output: Path, data: Dataset | None = None) -> PreparedExperiment:
    """Check a new run and choose its folder in `output`; `data` is loaded here unless given."""
    run = checked_run(experiment, data)
    state = start(run)
    _check_targets(run, experiment, state)
    folder, store = new_place(experiment, output)
    return PreparedExperiment(experiment=experiment, run=run, state=state, folder=folder, store=store)


def load_data(experiment: Experiment) -> Dataset:
    """Load the data of a new run; if they are missing, the error names the libraries that are missing too."""
    try:
        return load_checked(experiment.data_source)
    except UserError as error:
        raise UserError("; ".join([str(error), *_missing_libraries(experiment)])) from error


def _missing_libraries(experiment: Experiment) -> Iterator[str]:
    """Yield the advice for libraries of the backend and of `secure` that are not installed."""
    try:
        if isinstance(experiment.backend, RayBackend):
            experiment.backend.check_installed()
    except UserError as error:
        yield str(error)
    try:
        _ = experiment.secured_algorithm
    except UserError as error:
        yield str(error)


@one_thread()
def checked_run(experiment: Experiment, data: Dataset | None = None) -> Run:
    """Return the run of a new experiment after every check that needs neither its folder nor its store."""
    run = _checked_run(experiment, data)
    try_round(experiment, run.task)
    return run


@one_thread()
def prepare_resume(folder: Path, changed: Experiment | None) -> PreparedExperiment:
    """Check a run that is to be resumed; `changed` may differ only in settings that results do not depend on."""
    experiment, kept, journal = to_resume(folder, changed, load_experiment, RunState)
    if experiment.rounds < (written := journal.last_step):
        raise UserError(
            f"{folder.name} has finished {written} rounds already and rounds = {experiment.rounds}; raise rounds"
        )
    data = experiment.data_source.load()
    if kept is not None and not kept.data_sha256 and kept.state.participants[-1:] >= data.n_clients:
        raise UserError(
            f"{folder.name} has trained client {kept.state.participants[-1]}, but {data.source} has {data.n_clients} "
            "clients now; put back the files as they were, or start a new run with these"
        )
    check_same_data(folder, kept, data)
    run = _checked_run(experiment, data, folder)
    # Without a checkpoint, a power cut came before the first one.
    state = start(run) if kept is None else kept.state
    _check_targets(run, experiment, state)
    store = checked_store(experiment, folder.parent)
    state = replace(state, settled_round=written)
    return PreparedExperiment(experiment=experiment, run=run, state=state, folder=folder, store=store, resuming=True)


def prepare_lockstep(runs: Sequence[PreparedExperiment]) -> list[PreparedExperiment]:
    """Check that runs can go in lockstep in this process, and let those with the same data share one object."""
    by_digest = {prepared.task.data.digest: prepared.task.data for prepared in reversed(runs)}
    for run in runs:
        if run.experiment.backend.kind != "local":
            raise UserError("replicas run in lockstep in this process; add --backend local")
        if run.experiment.secure.kind != "none":
            raise UserError("replicas cannot run in lockstep with secure; start each run by itself")
        if run.experiment.schedule.kind != "synchronous":
            raise UserError("replicas cannot run in lockstep with a buffered schedule; start each run by itself")
    shared = [replace(prepared.task, data=by_digest[prepared.task.data.digest]) for prepared in runs]
    return [
        replace(prepared, run=replace(prepared.run, task=task)) for prepared, task in zip(runs, shared, strict=True)
    ]


def _checked_run(experiment: Experiment, data: Dataset | None = None, folder: Path | None = None) -> Run:
    """Return the run of an experiment after the checks of its parts and of its backend."""
    task = experiment.task(load_data(experiment) if data is None else data, folder)
    run = Run(experiment, experiment.secured_algorithm, task)
    experiment.backend.check(run)
    return run


def _check_targets(run: Run, experiment: Experiment, state: RunState) -> None:
    """Raise `UserError` for a target whose metric an evaluation does not give; evaluate only if there are targets."""
    if experiment.targets:
        check_targets(experiment.targets, measure(run, state), fraction_metrics(experiment.model) or ())


logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class PreparedSolve(PreparedRun):
    """A solve that has passed every check and has written nothing yet."""

    solve: Solve
    problem: Problem
    state: SolveState
    labels: Mapping[str, str] = field(default_factory=dict)
    """More tags of the run in MLflow."""

    @property
    def config(self) -> Solve:
        """The solve."""
        return self.solve

    @property
    def input(self) -> Problem:
        """The problem."""
        return self.problem

    def tags(self) -> dict[str, str]:
        """Return the tags of the run in MLflow."""
        return {
            "solver": self.solve.solver.kind,
            "problem": self.problem.name,
            "seed": str(self.solve.seed),
            "git_commit": git_commit() or "unknown",
            "narrowcast_version": __version__,
            **self.labels,
        }

    def steps(self) -> Generator[Iteration, None, None]:
        """Run the iterations after `state` and yield those that are recorded."""
        return iterations(self.problem, self.solve.solver, self.solve, self.state)

    def watch(self, journal: Journal) -> Callable[[Iteration], None]:
        """Return the function to be called after each recorded iteration."""
        del journal

        def watch(iteration: Iteration) -> None:
            if logger.isEnabledFor(logging.INFO):
                about = {"run": self.folder.name, "iteration": iteration.step, "residual": iteration.residual}
                logger.info("iteration %d", iteration.step, extra={**about, "metrics": iteration.metrics})

        return watch

    def begin_outputs(self) -> WriteOutputs:
        """Return the function that writes the outputs of the finished solve."""
        figures = figures_asked()

        def write(journal: Journal, state: SolveState, run_id: str) -> dict[str, Any]:
            return write_solve_outputs(self.folder, self.solve, self.problem, journal, state, run_id, figures=figures)

        return write


def prepare_solve(solve: Solve, output: Path, problem: Problem | None = None) -> PreparedSolve:
    """Check a new solve, make its first state and choose its folder; `problem` is loaded here unless given."""
    problem, state = _begun(solve, problem)
    folder, store = new_place(solve, output)
    return PreparedSolve(solve=solve, problem=problem, state=state, folder=folder, store=store)


def resume_solve(folder: Path, changed: Solve | None, problem: Problem | None = None) -> PreparedSolve:
    """Check a solve that is to be resumed; `changed` may differ only in settings that results do not depend on.

    `problem` is loaded here unless given.
    """
    solve, kept, journal = to_resume(folder, changed, load_solve, SolveState)
    if solve.iterations < (written := journal.last_step):
        raise UserError(
            f"{folder.name} has finished {written} iterations already and iterations = {solve.iterations}; raise "
            "iterations"
        )
    if kept is None:
        problem, state = _begun(solve, problem)
    else:
        problem = problem or loaded_problem(solve.problem_source)
        check_same_data(folder, kept, problem)
        problem, state = _checked_solve(solve, problem), kept.state
        if written > state.step:
            state = replace(state, settled=(written, float(journal.rounds[-1]["solver_seconds"])))
    store = checked_store(solve, folder.parent)
    return PreparedSolve(solve=solve, problem=problem, state=state, folder=folder, store=store, resuming=True)


def _checked_solve(solve: Solve, problem: Problem | None = None) -> Problem:
    """Return the problem after the check that the solver takes it."""
    problem = problem or loaded_problem(solve.problem_source)
    solve.solver.check(problem)
    return problem


def _begun(solve: Solve, problem: Problem | None = None) -> tuple[Problem, SolveState]:
    """Return the problem and the first state, whose answer is measured only if there are targets."""
    problem = _checked_solve(solve, problem)
    state = begin(problem, solve.solver, solve.seed)
    if solve.targets:
        metrics = measured(problem, solve.solver, state)
        check_targets(solve.targets, metrics, fraction_metrics(solve.problem) or ())
    return problem, state


def are_solves(source: object, folders: Sequence[Path]) -> bool:
    """Return whether a file, a mapping, an object or, without them, the runs to be resumed are solves."""
    if isinstance(source, str | Mapping):
        return packaged.names_solve(source)
    if source is not None or not folders:
        return isinstance(source, Solve)
    config = folders[0] / CONFIG
    return config.is_file() and packaged.names_solve(str(config))


def prepare_solves(
    source: Any, overrides: Sequence[str], output: Path, folders: Sequence[Path], *, resume_if_begun: bool
) -> list[PreparedSolve]:
    """Prepare a solve, once for each replica, or those in `folders`; see `session.prepare_runs`."""
    if folders:
        return [_named(folder, source, overrides) for folder in folders]
    solves = load_solves(source, overrides)
    if resume_if_begun and len(solves) == 1 and has_run(output / solves[0].name):
        return [resume_solve(output / solves[0].name, solves[0])]
    problems = {repr(solve.problem_source): solve.problem_source for solve in solves}
    loaded = {key: loaded_problem(source) for key, source in problems.items()}
    return [prepare_solve(solve, output, loaded[repr(solve.problem_source)]) for solve in solves]


def _named(folder: Path, source: Any, overrides: Sequence[str]) -> PreparedSolve:
    config = folder / CONFIG
    changes = source is not None or (overrides and config.is_file())
    return resume_solve(folder, load_solve(str(config) if source is None else source, overrides) if changes else None)


def try_round(experiment: Experiment, task: Task) -> None:
    """Train the client with the fewest examples for one epoch, and step the server; nothing of it is kept.

    Raise `UserError` if a class of the experiment breaks its contract. Experiments of classes of the package are not
    tried, nor those whose clients train in other processes, since a module can end the one that it is in, or on a
    device that this machine lacks.
    """
    elsewhere = experiment.backend.kind != "local" or (task.training.device == "cuda" and not torch.cuda.is_available())
    if elsewhere or not plugins.named_in(experiment.plain()) or not task.data.examples.any():
        return
    model, algorithm = task.model, experiment.algorithm
    with _tried(model, "init_server"):
        check_arrays(model.init_server(task.data, task.seed), method_of(model, "init_server"))
    with _tried(algorithm, "init"):
        server = check_arrays(algorithm.init(task), method_of(algorithm, "init"))
    with _tried(algorithm, "init_clients"):
        clients = check_arrays(algorithm.init_clients(task), method_of(algorithm, "init_clients"))
    for name, values in clients.items():
        if len(values) != task.data.n_clients:
            raise UserError(
                f"{method_of(algorithm, 'init_clients')} returned {len(values)} rows for {name}; return a row for each "
                f"of {task.data.n_clients} clients"
            )
    with _tried(algorithm, "broadcast"):
        broadcast = algorithm.broadcast(server, task, 1)
        check_broadcast(broadcast, method_of(algorithm, "broadcast"))
    chunk = _smallest_client(task, clients)
    _try_training(task, chunk)
    with _tried(algorithm, "train"):
        result = algorithm.train(broadcast.arrays, chunk, task)
        check_result(result, chunk, method_of(algorithm, "train"))
    with _tried(algorithm, "step"), np.errstate(over="ignore", invalid="ignore"):
        try:
            total = algorithm.fold([result.partial])
            stepped = algorithm.step(server, broadcast.arrays, total, task, 1)
        except UserError:
            return  # some servers refuse one client
        check_step(algorithm, server, stepped, grows=algorithm.traits.grows)
    with _tried(algorithm, "step_metrics"):
        metrics_of_round(algorithm, [result], algorithm.step_metrics(server, stepped, total, task))
    with _tried(algorithm, "final"):
        final = check_final(algorithm, task, stepped)
    if algorithm.traits.global_model:
        with _tried(model, "evaluate"):
            check_metrics(model.evaluate(final, clients, task.data, "validation"), method_of(model, "evaluate"))


def _smallest_client(task: Task, clients: Arrays) -> Chunk:
    examples = task.data.examples
    client = np.flatnonzero(examples == examples[examples > 0].min())[:1]
    state = {name: values[client] for name, values in clients.items()}
    return Chunk(1, 0, client, state, epochs=np.ones(1, dtype=np.int64))


def _try_training(task: Task, chunk: Chunk) -> None:
    """Train the clients of the chunk from the model's own parameters, if the training is a class of others."""
    if plugins.is_own(task.training):
        return
    server = task.initial_parameters()
    with _tried(task.training, "train"):
        updates = task.training.train(server, chunk, task, LocalTerms())
        check_updates(updates, server, len(chunk.clients), method_of(task.training, "train"))


def _tried(value: object, method: str) -> AbstractContextManager[None]:
    return naming(value, method, ", tried with one client before round 1")
