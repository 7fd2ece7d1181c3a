"""The checks of a run before anything is written: data, parts, backend, targets, store, folder."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from narrowcast.experiment import Experiment
from narrowcast.platform import plugins
from narrowcast.platform.checkpoint import NoCheckpointError, check_place, load_checkpoint
from narrowcast.platform.config import PLUGINS, read_yaml
from narrowcast.platform.contracts import Dataset, Task
from narrowcast.platform.disk import disk
from narrowcast.platform.errors import UserError
from narrowcast.platform.evaluation import measure
from narrowcast.platform.run import Run
from narrowcast.platform.state import RunState, start
from narrowcast.platform.tracking.journal import Journal, locked
from narrowcast.platform.tracking.mlflow_run import check_store
from narrowcast.platform.tracking.targets import check_targets
from narrowcast.platform.yaml_limits import read_limited
from narrowcast.runs.earlier_runs import has_one_seed, of_one_seed, saved_experiment
from narrowcast.runs.run_folder import CONFIG, checkpoint_place, free_folder, make_writable

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class PreparedRun:
    """A run that has passed every check and has written nothing yet; `store_uri` is that of MLflow."""

    experiment: Experiment
    run: Run
    state: RunState
    folder: Path
    store_uri: str
    resuming: bool = False
    outdated: bool = False
    """True if the checkpoint to resume from was written with the field names of an earlier version."""

    @property
    def task(self) -> Task:
        """The run's task."""
        return self.run.task


def prepare(experiment: Experiment, output: Path, data: Dataset | None = None) -> PreparedRun:
    """Check a new run and choose its folder in `output`; `data` is loaded here unless given."""
    run = _checked(experiment, data)
    state = start(run)
    _check_targets(run, experiment, state)
    created = not output.exists()
    make_writable(output)
    folder = free_folder(output, experiment.name)
    try:
        if experiment.checkpoint_path is not None:  # before the store, of which a new file would be left
            check_place(checkpoint_place(experiment, folder))
        uri = _checked_store(experiment, output)
    except UserError:
        if created:
            with suppress(OSError):
                disk().remove_folder(output)
        raise
    return PreparedRun(experiment, run, state, folder, uri)


def prepare_resume(folder: Path, changed: Experiment | None) -> PreparedRun:
    """Check a run that is to be resumed; `changed` may differ only in settings that results do not depend on."""
    path = folder / CONFIG
    if not path.is_file():
        known = sorted(entry.parent.name for entry in folder.parent.glob(f"*/{CONFIG}"))
        raise UserError(f"no run at {folder}; runs in {folder.parent}: {', '.join(known) or 'none'}")
    if changed is not None:
        plugins.check_same(changed.plain(), folder / PLUGINS)
    for file in plugins.changed(folder / PLUGINS):
        logger.warning("%s has changed since the run began; it resumes with the copy in %s", file, folder / PLUGINS)
    saved = saved_experiment(folder)
    if changed is not None and changed.client_seed is None and has_one_seed(folder):
        changed = of_one_seed(changed)
    experiment = changed or saved
    if changed is not None:
        _check_same(folder, saved, changed)
        if changed.checkpoint_path not in (None, saved.checkpoint_path):
            check_place(checkpoint_place(changed, folder))
    make_writable(folder)
    with locked(folder):
        journal = Journal.read(folder)
        written, kept = journal.last_round, None
        try:
            kept = load_checkpoint(checkpoint_place(saved, folder), written, journal.extent)
        except NoCheckpointError:
            if written:
                raise
    if kept is not None and kept[1] not in experiment.digests(read_yaml(read_limited(path), str(path))):
        raise UserError(f"the checkpoint in {folder} is not of its {CONFIG}; start the run again")
    if experiment.rounds < written:
        raise UserError(
            f"{folder.name} has finished {written} rounds already and rounds = {experiment.rounds}; raise rounds"
        )
    run = _checked(experiment, folder=folder)
    state, digest = kept or (start(run), experiment.digest())  # a power cut came before the first checkpoint
    _check_targets(run, experiment, state)
    uri = _checked_store(experiment, folder.parent)
    state, outdated = replace(state, settled_round=written), digest != experiment.digest()
    return PreparedRun(experiment, run, state, folder, uri, resuming=True, outdated=outdated)


def prepare_lockstep(runs: Sequence[PreparedRun]) -> list[PreparedRun]:
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


def _check_same(folder: Path, saved: Experiment, changed: Experiment) -> None:
    before, now = saved.identity(), changed.identity()
    if differing := sorted(key for key in before | now if before.get(key) != now.get(key)):
        shown = "; ".join(f"{key} was {before.get(key)!r}, now {now.get(key)!r}" for key in differing[:3])
        raise UserError(f"{folder.name} was run with another configuration: {shown}; resume with its own")


def _checked(experiment: Experiment, data: Dataset | None = None, folder: Path | None = None) -> Run:
    """Return the run of an experiment after the checks of its parts and of its backend."""
    task = experiment.task(experiment.data_source.load() if data is None else data, folder)
    run = Run(experiment, experiment.secured_algorithm, task)
    experiment.backend.check(run)
    return run


def _checked_store(experiment: Experiment, output: Path) -> str:
    """Return the URI of the tracking store after the check that it answers."""
    uri = experiment.tracking.resolve(output)
    check_store(uri)
    return uri


def _check_targets(run: Run, experiment: Experiment, state: RunState) -> None:
    """Raise `UserError` for a target whose metric an evaluation does not give; evaluate only if there are targets."""
    if experiment.targets:
        check_targets(experiment.targets, measure(run, state), getattr(experiment.model, "shares", ()))
