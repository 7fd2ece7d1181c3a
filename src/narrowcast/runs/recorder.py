"""What is written down of a run while it is played: journal, checkpoints, MLflow, and its folder."""

from __future__ import annotations

import io
import logging
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from narrowcast.experiment import Experiment
from narrowcast.platform import plugins
from narrowcast.platform.atomic_files import write_atomically
from narrowcast.platform.checkpoint import save_checkpoint
from narrowcast.platform.config import PLUGINS, flatten, write_yaml
from narrowcast.platform.contracts import Task
from narrowcast.platform.errors import RunFailed, UserError
from narrowcast.platform.interruption import uninterrupted
from narrowcast.platform.outcome import Outcome
from narrowcast.platform.state import RunState
from narrowcast.platform.tracking.journal import Journal, alone
from narrowcast.platform.tracking.mlflow_run import Cursor, Sender, close_run, monitor_system, open_run, reopen_run
from narrowcast.platform.tracking.store_address import hide_password
from narrowcast.platform.tracking.targets import as_metrics
from narrowcast.runs.run_result import run_tags, write_result

logger = logging.getLogger(__name__)
OnRound = Callable[[Mapping[str, Any]], None]


@dataclass(frozen=True)
class Prepared:
    """A run that has passed every check and written nothing yet."""

    experiment: Experiment
    task: Task
    state: RunState
    folder: Path
    uri: str
    resuming: bool = False


def checkpoint_place(experiment: Experiment, folder: Path) -> str:
    """Where the checkpoints of the run in this folder are."""
    elsewhere = experiment.checkpoint_path
    return str(folder / "checkpoint") if elsewhere is None else f"{elsewhere}/{folder.name}"


def forget_state(experiment: Experiment, folder: Path) -> None:
    """Remove the checkpoints on this machine of a run that is over, if there are any."""
    shutil.rmtree(checkpoint_place(experiment, folder), ignore_errors=True)


@dataclass
class Recorder:
    """What is written down of a run while it is played."""

    prepared: Prepared
    journal: Journal
    sender: Sender
    progress: OnRound
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

    def finish(self, *, keep_state: bool = True) -> dict[str, Any]:
        """Write tables, plots and `result.json`, and forget the state unless it is kept; no signal comes in between."""
        each = self.prepared
        run_id = self.sender.cursor.run_id
        with uninterrupted():
            self.result = write_result(each.folder, each.experiment, each.task, self.journal, self.state, run_id)
            if not keep_state:
                forget_state(each.experiment, each.folder)
        return self.result


@contextmanager
def recorded(prepared: Prepared, progress: OnRound, *, monitored: bool = True) -> Iterator[Recorder]:
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


def _recording(prepared: Prepared, cursor: Cursor, progress: OnRound, monitored: bool) -> Iterator[Recorder]:
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
        sent = sender.close(experiment.tracking.flush_seconds, status)
        costs = as_metrics(recorder.result["targets"]) if recorder.result else {}
        if not (sent and close_run(folder, uri, sender.cursor, tags, costs)):
            logger.warning("not all of this run is in MLflow yet: narrowcast sync %s", folder)


def write_config(experiment: Experiment, folder: Path) -> None:
    """Write `config.yaml`, every default filled in, and the modules that the experiment's own classes come from."""
    config = io.StringIO()
    write_yaml(experiment.plain(), config)
    plugins.keep(experiment.plain(), folder / PLUGINS)
    write_atomically(folder / "config.yaml", config.getvalue().encode())
