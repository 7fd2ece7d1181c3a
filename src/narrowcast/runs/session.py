"""From an experiment to a finished run: what is checked first, the loop with its recorder, and late deliveries."""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from typing import Any

from narrowcast.experiment import Experiment, load_experiment
from narrowcast.platform import plugins
from narrowcast.platform.checkpoint import check_place, load_checkpoint
from narrowcast.platform.config import PLUGINS
from narrowcast.platform.contracts import Dataset
from narrowcast.platform.errors import RunFailed, UserError
from narrowcast.platform.evaluation import measure
from narrowcast.platform.interruption import uninterrupted
from narrowcast.platform.rounds import lockstep
from narrowcast.platform.run import Run
from narrowcast.platform.state import Interrupted, RunState, start
from narrowcast.platform.tracking.journal import Journal, alone
from narrowcast.platform.tracking.mlflow_run import Cursor, Sender, check_store, close_run
from narrowcast.platform.tracking.store_address import hide_password, is_hidden
from narrowcast.platform.tracking.targets import as_metrics, check_targets
from narrowcast.runs.recorder import OnRound, Prepared, checkpoint_place, recorded

logger = logging.getLogger(__name__)
_SYNC_SECONDS = 3600.0


def prepare(experiment: Experiment, output: Path, data: Dataset | None = None) -> Prepared:
    """Check everything that a new run needs: data, read here unless it is given, parts, cluster, store, folder."""
    task = experiment.task(experiment.data.load() if data is None else data)
    run = Run(experiment, experiment.secured_algorithm, task)
    experiment.backend.check(run)
    state = start(run)
    measurable(experiment, run, state)
    writable(output)
    uri = experiment.tracking.resolve(output)
    check_store(uri)
    folder = free_folder(output, experiment.name)
    if experiment.checkpoint_path is not None:
        check_place(checkpoint_place(experiment, folder))
    return Prepared(experiment, task, state, folder, uri)


def measurable(experiment: Experiment, run: Run, state: RunState) -> None:
    """Raise `UserError` for a target whose metric an evaluation does not give; without targets none is made."""
    if experiment.targets:
        check_targets(experiment.targets, measure(run, state))


def share_data(runs: Sequence[Prepared]) -> list[Prepared]:
    """Runs that can be played together: in this process, and on the first one's data, held once."""
    first = runs[0]
    for each in runs:
        if each.experiment.backend.kind != "local":
            raise UserError("replicas are played together in this process; add --backend local")
        if each.experiment.secure.kind != "none":
            raise UserError("replicas are played together in one process; start each run with secure by itself")
        if each.experiment.schedule.kind != "synchronous":
            raise UserError("replicas are played together round by round; start each buffered run by itself")
        if each.task.data.digest != first.task.data.digest:
            raise UserError(f"{each.folder.name} and {first.folder.name} are on different data; play them one by one")
    return [replace(each, task=replace(each.task, data=first.task.data)) for each in runs]


def prepare_resume(folder: Path, changed: Experiment | None) -> Prepared:
    """Check everything that going on with a run needs; `changed` may differ only in what results do not depend on."""
    path = folder / "config.yaml"
    if not path.is_file():
        known = sorted(entry.parent.name for entry in folder.parent.glob("*/config.yaml"))
        raise UserError(f"no run at {folder}; runs in {folder.parent}: {', '.join(known) or 'none'}")
    if changed is not None:
        plugins.check_same(changed.plain(), folder / PLUGINS)
    for file in plugins.changed(folder / PLUGINS):
        logger.warning("%s has changed since the run began; it goes on with the copy in %s", file, folder / PLUGINS)
    experiment = load_experiment(str(path))
    if changed is not None:
        before, now = experiment.identity(), changed.identity()
        if differing := sorted(key for key in before | now if before.get(key) != now.get(key)):
            shown = "; ".join(f"{key} was {before.get(key)!r}, now {now.get(key)!r}" for key in differing[:3])
            raise UserError(f"{folder.name} was run with another configuration: {shown}; resume with its own")
        if changed.checkpoint_path not in (None, experiment.checkpoint_path):
            check_place(checkpoint_place(changed, folder))
    writable(folder)
    with alone(folder):
        state, digest = load_checkpoint(checkpoint_place(experiment, folder))
        written = Journal.open(folder).last_round
    experiment = changed or experiment
    if digest != experiment.digest():
        raise UserError(f"the checkpoint in {folder} is not of its config.yaml; start the run again")
    if written < state.round_index:
        raise UserError(
            f"{folder / 'journal.jsonl'} ends at round {written}, the checkpoint at {state.round_index}; "
            "start the run again"
        )
    if experiment.rounds < written:
        raise UserError(f"{folder.name} has played {written} rounds already; rounds = {experiment.rounds}")
    task = experiment.task(experiment.data.load())
    run = Run(experiment, experiment.secured_algorithm, task)
    experiment.backend.check(run)
    measurable(experiment, run, state)
    uri = experiment.tracking.resolve(folder.parent)
    check_store(uri)
    return Prepared(experiment, task, replace(state, settled_round=written), folder, uri, resuming=True)


def is_begun(folder: Path) -> bool:
    """Whether the folder holds a run to go on with; one that was left before anything was played is removed."""
    if not folder.is_dir():
        return False
    left = {entry.name for entry in folder.iterdir()}
    early = {"journal.jsonl", "tracking.json", "checkpoint", "config.yaml", PLUGINS}
    if "config.yaml" not in left and {name.removesuffix(".part") for name in left} <= early:
        shutil.rmtree(folder)
        return False
    return True


def writable(folder: Path) -> None:
    """Make the folder, or raise `UserError` where nothing can be written there."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / ".writable"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise UserError(f"cannot write to {folder} ({error.strerror}); give another folder with --output") from error


def free_folder(output: Path, name: str) -> Path:
    """OUTPUT/name, or OUTPUT/name-2 and so on where that is taken."""
    folder, number = output / name, 1
    while folder.exists():
        number += 1
        folder = output / f"{name}-{number}"
    return folder


def run(prepared: Prepared, progress: OnRound, *, keep_state: bool = True) -> dict[str, Any]:
    """Play a run to its end and return its result; on failure or interruption what was reached is kept for a resume.

    Without `keep_state` its checkpoints on this machine, which may be gigabytes, go once the result is written.
    """
    experiment = prepared.experiment
    with recorded(prepared, progress) as recorder:
        run = Run(experiment, experiment.secured_algorithm, prepared.task)
        outcomes = experiment.backend.run(run, prepared.state)
        with closing(outcomes), uninterrupted():
            try:
                for outcome in outcomes:
                    recorder.write(outcome)
            except Interrupted as stop:
                recorder.keep(stop.states[0])
                raise
        return recorder.finish(keep_state=keep_state)


def run_together(runs: Sequence[Prepared], progress: OnRound) -> list[dict[str, Any] | RunFailed]:
    """Play runs that share their data in lockstep, in this process; what came of each, in their order."""
    results: dict[int, dict[str, Any] | RunFailed] = {}
    replicas = [Run(each.experiment, each.experiment.algorithm, each.task) for each in runs]
    with ExitStack() as stack:
        # The machine's load is that of all of them, and is measured once.
        recorders = [
            stack.enter_context(recorded(each, progress, monitored=place == 0)) for place, each in enumerate(runs)
        ]
        with closing(lockstep(replicas, [each.state for each in runs])) as rounds, uninterrupted():
            try:
                for outcomes in rounds:
                    for place, outcome in outcomes.items():
                        if isinstance(outcome, RunFailed):
                            results[place] = outcome
                        else:
                            recorders[place].write(outcome)
            except Interrupted as stop:
                for recorder, state in zip(recorders, stop.states, strict=True):
                    recorder.keep(state)
                raise
        for place, recorder in enumerate(recorders):
            if place not in results:
                results[place] = recorder.finish()
    return [results[place] for place in range(len(runs))]


def sync(folder: Path, uri: str | None) -> int:
    """Send what the store missed of a run; the number of rounds sent."""
    cursor = Cursor.load(folder)
    uri = uri or os.environ.get("MLFLOW_TRACKING_URI") or cursor.uri
    if uri == cursor.uri and is_hidden(uri):
        raise UserError(f"{folder} was tracked at {uri}, whose password is not kept; give it with --tracking-uri")
    with alone(folder):
        check_store(uri)
        cursor = Cursor.load(folder)
        journal = Journal.open(folder)
        sender = Sender(folder, uri, cursor, journal.rounds)
        path, status, tags, costs = folder / "result.json", cursor.status, {}, {}
        if path.is_file():
            result = json.loads(path.read_text())
            status, tags = "FINISHED", {"model_sha256": result["model_sha256"]}
            costs = as_metrics(result.get("targets", []))
        if not (sender.close(_SYNC_SECONDS, status) and close_run(folder, uri, sender.cursor, tags, costs)):
            raise RunFailed(f"the store at {hide_password(uri)} went down again; try narrowcast sync {folder} later")
    return len(journal.rounds) - cursor.sent_rounds
