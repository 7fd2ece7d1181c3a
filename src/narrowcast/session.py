"""From an experiment to a finished run: folder, journal, checkpoints, plots and MLflow around the round loop."""

from __future__ import annotations

import io
import json
import logging
import math
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from narrowcast import __version__
from narrowcast.algorithms.codecs.dense import dense_wire_bits
from narrowcast.algorithms.codecs.rows import rows_wire_bits
from narrowcast.experiment import Experiment, load_experiment
from narrowcast.platform.checkpoint import check_place, load_checkpoint, save_checkpoint, write_atomically
from narrowcast.platform.config import flatten, write_yaml
from narrowcast.platform.contracts import Dataset, Task
from narrowcast.platform.errors import RunFailed, UserError
from narrowcast.platform.models.matrix_factorisation import ITEM_FACTORS
from narrowcast.platform.replicas import Replica, play_together
from narrowcast.platform.rounds import Outcome, measure, model_sha256, start
from narrowcast.platform.run_state import RunState
from narrowcast.platform.tracking.journal import Journal, alone
from narrowcast.platform.tracking.mlflow_run import (
    Cursor,
    Sender,
    check_store,
    close_run,
    hide_password,
    is_hidden,
    monitor_system,
    open_run,
    reopen_run,
)
from narrowcast.platform.tracking.partition_report import write_partition
from narrowcast.platform.tracking.plots import draw_plots
from narrowcast.platform.tracking.targets import as_metrics, check_targets, reached

logger = logging.getLogger(__name__)
_SYNC_SECONDS = 3600.0
Progress = Callable[[Mapping[str, Any]], None]


@dataclass(frozen=True)
class Prepared:
    """A run that has passed every check and written nothing yet."""

    experiment: Experiment
    task: Task
    state: RunState
    folder: Path
    uri: str
    resuming: bool = False


def prepare(experiment: Experiment, output: Path, data: Dataset | None = None) -> Prepared:
    """Check everything that a new run needs: data, read here unless it is given, parts, cluster, store, folder."""
    task = experiment.task(experiment.data.load() if data is None else data)
    experiment.executor.check(experiment, task)
    state = start(experiment.played, task)
    measurable(experiment, task, state)
    writable(output)
    uri = experiment.tracking.resolve(output)
    check_store(uri)
    folder = free_folder(output, experiment.name)
    if experiment.checkpoint_path is not None:
        check_place(checkpoint_place(experiment, folder))
    return Prepared(experiment, task, state, folder, uri)


def checkpoint_place(experiment: Experiment, folder: Path) -> str:
    """Where the checkpoints of the run in this folder are."""
    elsewhere = experiment.checkpoint_path
    return str(folder / "checkpoint") if elsewhere is None else f"{elsewhere}/{folder.name}"


def measurable(experiment: Experiment, task: Task, state: RunState) -> None:
    """Raise `UserError` for a target whose metric an evaluation does not give; without targets none is made."""
    if experiment.targets:
        check_targets(experiment.targets, measure(experiment.played, task, state))


def share_data(runs: Sequence[Prepared]) -> list[Prepared]:
    """Runs that can be played together: in this process, and on the first one's data, held once."""
    first = runs[0]
    for each in runs:
        if each.experiment.executor.kind != "local":
            raise UserError("replicas are played together in this process; add --executor local")
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
    experiment.executor.check(experiment, task)
    measurable(experiment, task, state)
    uri = experiment.tracking.resolve(folder.parent)
    check_store(uri)
    return Prepared(experiment, task, replace(state, settled_round=written), folder, uri, resuming=True)


def is_begun(folder: Path) -> bool:
    """Whether the folder holds a run to go on with; one that was left before anything was played is removed."""
    if not folder.is_dir():
        return False
    left = {entry.name for entry in folder.iterdir()}
    early = {"journal.jsonl", "tracking.json", "checkpoint", "config.yaml"}
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


def run(prepared: Prepared, progress: Progress) -> dict[str, Any]:
    """Play a run to its end and return its result; on failure or interruption what was reached is kept for a resume."""
    experiment = prepared.experiment
    with recorded(prepared, progress) as recorder:
        outcomes = experiment.executor.play(experiment, experiment.played, prepared.task, prepared.state)
        with closing(outcomes):
            for outcome in outcomes:
                recorder.write(outcome)
        return recorder.finish()


def run_together(runs: Sequence[Prepared], progress: Progress) -> list[dict[str, Any] | RunFailed]:
    """Play runs that share their data in lockstep, in this process; what came of each, in their order."""
    results: dict[int, dict[str, Any] | RunFailed] = {}
    replicas = [Replica(each.experiment, each.experiment.algorithm, each.task, each.state) for each in runs]
    with ExitStack() as stack:
        # The machine's load is that of all of them, and is measured once.
        recorders = [
            stack.enter_context(recorded(each, progress, monitored=place == 0)) for place, each in enumerate(runs)
        ]
        with closing(play_together(replicas)) as rounds:
            for outcomes in rounds:
                for place, outcome in outcomes.items():
                    if isinstance(outcome, RunFailed):
                        results[place] = outcome
                    else:
                        recorders[place].write(outcome)
        for place, recorder in enumerate(recorders):
            if place not in results:
                results[place] = recorder.finish()
    return [results[place] for place in range(len(runs))]


@dataclass
class Recorder:
    """What is written down of a run while it is played."""

    prepared: Prepared
    journal: Journal
    sender: Sender
    progress: Progress
    state: RunState
    result: dict[str, Any] | None = None
    warned: bool = False
    log_seconds: float = 0.0

    def write(self, outcome: Outcome) -> None:
        """Write a round down, and hand it on."""
        began = time.perf_counter()
        if self.journal.append(outcome, int(time.time() * 1000), self.log_seconds):
            self.sender.notify()
        if outcome.state is not None:
            self.keep(outcome.state)
        self.progress(self.journal.rounds[outcome.record.round - 1])
        record = outcome.record
        about = {"run": self.prepared.folder.name, "round": record.round, "clients": outcome.ledger.client.tolist()}
        if record.uplink_bits and not record.delivered and record.late < record.clients and not self.warned:
            self.warned = True
            logger.warning(
                "round %d: no upload could be used, the clients' training diverged; lower training.learning_rate",
                record.round,
                extra=about,
            )
        if logger.isEnabledFor(logging.INFO):
            delivered = outcome.ledger.client[outcome.ledger.delivered].tolist()
            told = {"uplink_bits": record.uplink_bits, "seconds": vars(outcome.timing), "metrics": outcome.metrics}
            logger.info("round %d", record.round, extra={**about, "delivered": delivered, **told})
        self.log_seconds = time.perf_counter() - began

    def keep(self, state: RunState) -> None:
        """Write a checkpoint."""
        self.state, experiment = state, self.prepared.experiment
        place = checkpoint_place(experiment, self.prepared.folder)
        try:
            save_checkpoint(place, state, experiment.digest(), experiment.checkpoints_kept)
        except OSError as error:
            raise RunFailed(
                f"cannot write a checkpoint to {place} ({error}); make room, then resume the run"
            ) from error

    def finish(self) -> dict[str, Any]:
        """Write tables, plots and `result.json`."""
        self.result = finish(self.prepared, self.journal, self.state, self.sender.cursor.run_id)
        return self.result


@contextmanager
def recorded(prepared: Prepared, progress: Progress, *, monitored: bool = True) -> Iterator[Recorder]:
    """A run's folder and its run in MLflow, from its start or resumption to its end, whichever that is."""
    experiment, folder, uri = prepared.experiment, prepared.folder, prepared.uri
    if prepared.resuming:
        with alone(folder):
            cursor = Cursor.load(folder)
            reopen_run(uri, cursor.run_id)
            yield from _recording(prepared, cursor, progress, monitored)
        return
    try:
        folder.mkdir()
    except FileExistsError:
        raise UserError(f"another run has just taken {folder}; start this one again") from None
    try:
        params, tags = flatten(experiment.plain()), run_tags(experiment, prepared.task)
        uri, run_id = open_run(experiment.tracking, folder.parent, folder.name, params, tags, prepared.task.data)
    except BaseException:
        folder.rmdir()
        raise
    with alone(folder):
        cursor = Cursor(hide_password(uri), run_id)
        cursor.save(folder)
        yield from _recording(prepared, cursor, progress, monitored)


def _recording(prepared: Prepared, cursor: Cursor, progress: Progress, monitored: bool) -> Iterator[Recorder]:
    """Open the journal, MLflow and the machine's load, and close all of them."""
    experiment, folder, uri = prepared.experiment, prepared.folder, prepared.uri
    tags = run_tags(experiment, prepared.task)
    write_config(experiment, folder)
    journal = Journal.open(folder)
    sender = Sender(folder, uri, cursor, journal.rounds)
    stop_monitor = monitor_system(
        uri, cursor.run_id, enabled=monitored and experiment.tracking.system_metrics, resume=prepared.resuming
    )
    recorder = Recorder(prepared, journal, sender, progress, prepared.state)
    interrupted = False
    try:
        if not prepared.resuming:
            recorder.keep(prepared.state)
        yield recorder
    except KeyboardInterrupt:
        interrupted = True
        raise
    except OSError as error:
        raise RunFailed(f"cannot go on writing to {folder} ({error}); make room, then resume the run") from error
    finally:
        stop_monitor()
        status = "FINISHED" if recorder.result else "KILLED" if interrupted else "FAILED"
        if recorder.result:
            tags = {**tags, "model_sha256": recorder.result["model_sha256"]}
        sent = sender.close(experiment.tracking.flush_seconds)
        costs = as_metrics(recorder.result["targets"]) if recorder.result else {}
        if not (sent and close_run(folder, uri, sender.cursor, status, tags, costs)):
            logger.warning("not all of this run is in MLflow yet: narrowcast sync %s", folder)


def write_config(experiment: Experiment, folder: Path) -> None:
    """Write `config.yaml`, every default filled in."""
    config = io.StringIO()
    write_yaml(experiment.plain(), config)
    write_atomically(folder / "config.yaml", config.getvalue().encode())


def finish(prepared: Prepared, journal: Journal, state: RunState, run_id: str) -> dict[str, Any]:
    """Write tables, plots and `result.json`."""
    experiment, task, folder = prepared.experiment, prepared.task, prepared.folder
    rounds, clients = journal.write_tables(task.profiles)
    write_partition(task.data, folder / "partition")
    draw_plots(rounds, clients, folder / "plots", f"{folder.name}: {experiment.algorithm.kind} on {task.data.name}")
    participations = sum(row["clients"] for row in journal.rounds)
    result = {
        "name": folder.name,
        "algorithm": experiment.algorithm.kind,
        "data": task.data.name,
        "executor": experiment.executor.kind,
        "execution": task.training.mode(task),
        "final": {name: value for name, value in journal.final_metrics().items() if math.isfinite(value)},
        "best": journal.best_metrics(),
        "targets": [each.model_dump() for each in reached(experiment.targets, journal.rounds)],
        "rounds": state.round_index,
        "uplink_bits": state.uplink_bits,
        "downlink_bits": state.downlink_bits,
        "full_uplink_bits": participations * full_upload_bits(experiment, task),
        "simulated_seconds": state.simulated_seconds,
        "wall_seconds": journal.rounds[-1]["wall_seconds"],
        "model_sha256": model_sha256(experiment.algorithm, state),
        "mlflow_run_id": run_id,
        "seed": experiment.seed,
        "git_commit": git_commit(),
        "narrowcast_version": __version__,
    }
    write_atomically(folder / "result.json", json.dumps(result, indent=2).encode())
    return result


def full_upload_bits(experiment: Experiment, task: Task) -> int:
    """What one upload of the whole model weighs in float32; of an item matrix, every row and the row mask."""
    model = experiment.model.init_server(task.data, experiment.seed)
    if ITEM_FACTORS in model:
        n_items, dimension = model[ITEM_FACTORS].shape
        return rows_wire_bits(n_rows=n_items, sent_rows=n_items, rank=dimension, layout="all", mask=True)
    return dense_wire_bits(sum(values.size for values in model.values()))


def run_tags(experiment: Experiment, task: Task) -> dict[str, str]:
    """The tags that runs are found by."""
    return {
        "algorithm": experiment.algorithm.kind,
        "data": experiment.data.kind,
        "executor": experiment.executor.kind,
        "execution": task.training.mode(task),
        "seed": str(experiment.seed),
        "git_commit": git_commit() or "unknown",
        "narrowcast_version": __version__,
    }


def git_commit() -> str | None:
    """The commit of the checkout that narrowcast is imported from, marked where it has changes; None elsewhere."""
    git = ["git", "-C", str(Path(__file__).parent)]
    commands = (
        [
            *git,
            "ls-files",
            "--error-unmatch",
            Path(__file__).name,
        ],  # fails where another project's checkout surrounds us
        [*git, "describe", "--always", "--dirty", "--abbrev=40"],
    )
    try:
        answers = [
            subprocess.run(command, capture_output=True, text=True, timeout=10, check=True) for command in commands
        ]
    except (OSError, subprocess.SubprocessError):
        return None
    return answers[-1].stdout.strip()


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
        sent = sender.close(_SYNC_SECONDS)
        path, status, tags, costs = folder / "result.json", "FAILED", {}, {}
        if path.is_file():
            result = json.loads(path.read_text())
            status, tags = "FINISHED", {"model_sha256": result["model_sha256"]}
            costs = as_metrics(result.get("targets", []))
        if not (sent and close_run(folder, uri, sender.cursor, status, tags, costs)):
            raise RunFailed(f"the store at {hide_password(uri)} went down again; try narrowcast sync {folder} later")
    return len(journal.rounds) - cursor.sent_rounds
