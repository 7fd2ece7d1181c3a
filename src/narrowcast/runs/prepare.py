"""The checks of a run before anything is written: data, parts, backend, targets, store, folder."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from narrowcast.algorithms.secure.protection import Protection
from narrowcast.cluster.ray_backend import RayBackend
from narrowcast.experiment import Experiment, load_experiment
from narrowcast.platform.atomic_files import write_atomically
from narrowcast.platform.config import FROZEN, START
from narrowcast.platform.contracts import Dataset, Task
from narrowcast.platform.data.soundness import load_checked
from narrowcast.platform.errors import UserError
from narrowcast.platform.evaluation import measure
from narrowcast.platform.outcome import Outcome
from narrowcast.platform.run import Run
from narrowcast.platform.state import RunState, start
from narrowcast.platform.threads import one_thread
from narrowcast.platform.tracking.journal import Journal
from narrowcast.platform.tracking.metric_labels import shares_of
from narrowcast.platform.tracking.partition_report import begin_figure
from narrowcast.platform.tracking.targets import check_targets
from narrowcast.runs.learning_check import check_learned
from narrowcast.runs.outputs import frozen_entry, run_tags, write_model, write_outputs
from narrowcast.runs.recordable import PreparedRun, WriteOutputs
from narrowcast.runs.round_watch import watch_rounds
from narrowcast.runs.run_folder import answered_file
from narrowcast.runs.run_place import check_same_data, checked_store, new_place, to_resume
from narrowcast.runs.trial_round import try_round


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
        """Begin to draw the partition; return the function that writes the outputs of the finished run."""
        partition = begin_figure(self.task.data)

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
    run = _checked(experiment, data)
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
    run = _checked(experiment, data, folder)
    # Without a checkpoint, a power cut came before the first one.
    state = start(run) if kept is None else kept.state
    _check_targets(run, experiment, state)
    store = checked_store(experiment, folder.parent)
    state = replace(state, settled_round=written)
    return PreparedExperiment(experiment=experiment, run=run, state=state, folder=folder, store=store, resuming=True)


def prepare_lockstep(runs: Sequence[PreparedExperiment]) -> list[PreparedExperiment]:
    """Check that runs can go in lockstep in this process, and let those with the same data share one object."""
    by_digest = {each.task.data.digest: each.task.data for each in reversed(runs)}
    for each in runs:
        if each.experiment.backend.kind != "local":
            raise UserError("replicas run in lockstep in this process; add --backend local")
        if each.experiment.secure.kind != "none":
            raise UserError("replicas cannot run in lockstep with secure; start each run by itself")
        if each.experiment.schedule.kind != "synchronous":
            raise UserError("replicas cannot run in lockstep with a buffered schedule; start each run by itself")
    shared = [replace(each.task, data=by_digest[each.task.data.digest]) for each in runs]
    return [replace(each, run=replace(each.run, task=task)) for each, task in zip(runs, shared, strict=True)]


def _checked(experiment: Experiment, data: Dataset | None = None, folder: Path | None = None) -> Run:
    """Return the run of an experiment after the checks of its parts and of its backend."""
    task = experiment.task(load_data(experiment) if data is None else data, folder)
    run = Run(experiment, experiment.secured_algorithm, task)
    experiment.backend.check(run)
    return run


def _check_targets(run: Run, experiment: Experiment, state: RunState) -> None:
    """Raise `UserError` for a target whose metric an evaluation does not give; evaluate only if there are targets."""
    if experiment.targets:
        check_targets(experiment.targets, measure(run, state), shares_of(experiment.model) or ())
