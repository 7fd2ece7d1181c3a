"""Recording of a run: each round goes to the journal, to checkpoints and to MLflow; the end writes the outputs."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any

from narrowcast.platform.checkpoint import prune_checkpoints, save_checkpoint
from narrowcast.platform.config import flatten
from narrowcast.platform.disk import disk
from narrowcast.platform.errors import RunFailed, UserError
from narrowcast.platform.host_time import host_time
from narrowcast.platform.interruption import uninterrupted
from narrowcast.platform.outcome import Outcome
from narrowcast.platform.redaction import hide_secrets
from narrowcast.platform.state import RunState
from narrowcast.platform.tracking.journal import Journal, locked
from narrowcast.platform.tracking.mlflow_run import Cursor, Sender, close_run, monitor_system, open_run, reopen_run
from narrowcast.platform.tracking.partition_report import begin_figure
from narrowcast.platform.tracking.targets import as_metrics
from narrowcast.runs.learning_check import MOST_ROUNDS_IN_VAIN, check_learned, nothing_used, why_in_vain
from narrowcast.runs.outputs import run_tags, write_model, write_outputs
from narrowcast.runs.prepare import PreparedRun
from narrowcast.runs.run_folder import START, checkpoint_place, remove_checkpoints, write_config

logger = logging.getLogger(__name__)
OnRound = Callable[[Mapping[str, Any]], None]
"""Called with the journal's row of each round, and the name of its `run`, once that is on disk."""


@dataclass
class Recorder:
    """Writes the rounds of one run, and its outputs at the end."""

    prepared: PreparedRun
    journal: Journal
    sender: Sender
    on_round: OnRound
    partition: Callable[[], bytes]
    """Returns the figure of the partition, which is drawn while the run trains."""
    state: RunState
    result: dict[str, Any] | None = None
    warned: bool = False
    log_seconds: float = 0.0
    in_vain: int | None = 0
    """Rounds with clients so far, while no upload of the run was used; None from then on."""

    def write(self, outcome: Outcome) -> None:
        """Write a round to the journal, its state to a checkpoint if one is due, then report the round."""
        began = time.perf_counter()
        if self.journal.append(outcome, int(host_time().wall() * 1000), self.log_seconds):
            self.sender.notify()
        if outcome.state is not None:
            self.checkpoint(outcome.state)
        self.on_round({"run": self.prepared.folder.name, **self.journal.rounds[outcome.record.round - 1]})
        self._log(outcome)
        if self.in_vain is not None:
            self.in_vain = None if outcome.record.delivered else self.in_vain + bool(outcome.record.clients)
            if self.in_vain == MOST_ROUNDS_IN_VAIN:
                raise nothing_used(self.prepared.experiment, self.journal.ledgers())
        self.log_seconds = time.perf_counter() - began

    def _log(self, outcome: Outcome) -> None:
        record = outcome.record
        about = {"run": self.prepared.folder.name, "round": record.round, "clients": outcome.ledger.client.tolist()}
        if record.clients and not record.delivered and not self.warned:
            self.warned = True
            cause = why_in_vain(self.prepared.experiment, vars(outcome.ledger))
            logger.warning("round %d: no upload was used: %s", record.round, cause, extra=about)
        if logger.isEnabledFor(logging.INFO):
            delivered = outcome.ledger.client[outcome.ledger.delivered].tolist()
            measured = {"uplink_bits": record.uplink_bits, "seconds": vars(outcome.timing), "metrics": outcome.metrics}
            logger.info("round %d", record.round, extra={**about, "delivered": delivered, **measured})

    def checkpoint(self, state: RunState) -> None:
        """Write a checkpoint; raise `RunFailed` if it cannot be written."""
        self.state, experiment = state, self.prepared.experiment
        self.journal.sync()  # a resume from the checkpoint needs the rounds before it
        place = checkpoint_place(experiment, self.prepared.folder)
        try:
            save_checkpoint(place, state, experiment.digest(), experiment.checkpoints_kept)
        except OSError as error:
            raise RunFailed(
                f"cannot write a checkpoint to {place} ({error}); make room, then resume the run"
            ) from error

    def finish(self, *, keep_checkpoints: bool = True) -> dict[str, Any]:
        """Write the outputs, `result.json` last, without interruption; remove the checkpoints unless they are kept.

        Raise `LearnedNothing` if the global model is not the result of the clients' training.
        """
        each = self.prepared
        check_learned(each.run, each.experiment, self.journal, self.state)
        run_id = self.sender.cursor.run_id
        with uninterrupted():
            self.result = write_outputs(
                each.folder, each.experiment, each.task, self.journal, self.state, run_id, self.partition
            )
            if keep_checkpoints:
                place = checkpoint_place(each.experiment, each.folder)
                with suppress(OSError):  # the run has its result
                    prune_checkpoints(place, self.state, each.experiment.checkpoints_kept)
            else:
                remove_checkpoints(each.experiment, each.folder)
        return self.result


@contextmanager
def recorded(prepared: PreparedRun, on_round: OnRound, *, monitored: bool = True) -> Iterator[Recorder]:
    """Open the run's folder and its MLflow run, new or resumed, and close both however the block ends.

    Raise `RunFailed` if the disk is full, or fails.
    """
    try:
        yield from _recorded(prepared, on_round, monitored)
    except OSError as error:
        raise RunFailed(f"cannot write to {prepared.folder} ({error}); make room, then resume the run") from error


def _recorded(prepared: PreparedRun, on_round: OnRound, monitored: bool) -> Iterator[Recorder]:
    experiment, folder, uri = prepared.experiment, prepared.folder, prepared.store_uri
    if prepared.resuming:
        with locked(folder):
            cursor = replace(Cursor.load(folder), closed=False)
            reopen_run(uri, cursor.run_id)
            yield from _recording(prepared, cursor, on_round, monitored)
        return
    try:
        disk().make_folder(folder)
        disk().sync(folder.parent)
    except FileExistsError:
        raise UserError(f"another run has just taken {folder}; start this one again") from None
    try:
        params, tags = flatten(experiment.plain()), run_tags(experiment, prepared.task)
        uri, run_id = open_run(experiment.tracking, folder.parent, folder.name, params, tags, prepared.task.data)
    except BaseException:
        disk().remove_folder(folder)
        raise
    with locked(folder):
        cursor = Cursor(hide_secrets(uri), run_id)
        cursor.save(folder)
        yield from _recording(prepared, cursor, on_round, monitored)


def _recording(prepared: PreparedRun, cursor: Cursor, on_round: OnRound, monitored: bool) -> Iterator[Recorder]:
    """Start the journal, the thread that sends it, and the measurement of the machine's load; stop them at the end."""
    experiment, folder, uri = prepared.experiment, prepared.folder, prepared.store_uri
    tags = run_tags(experiment, prepared.task)
    if prepared.outdated:  # before config.yaml is written anew, from which its digest could no longer be had
        place = checkpoint_place(experiment, folder)
        save_checkpoint(place, prepared.state, experiment.digest(), experiment.checkpoints_kept)
    if prepared.task.start is not None:
        write_model(prepared.task.start, folder / START)
    write_config(experiment, folder)
    journal = Journal.open(folder, prepared.state.round_index)
    sender = Sender(folder, uri, cursor, journal)
    stop_monitor = monitor_system(
        uri, cursor.run_id, enabled=monitored and experiment.tracking.system_metrics, resume=prepared.resuming
    )
    recorder = Recorder(prepared, journal, sender, on_round, begin_figure(prepared.task.data), prepared.state)
    if any(row["delivered"] for row in journal.rounds):
        recorder.in_vain = None
    interrupted = False
    try:
        if not prepared.state.round_index:
            recorder.checkpoint(prepared.state)
        yield recorder
    except KeyboardInterrupt:
        interrupted = True
        raise
    finally:
        stop_monitor()
        status = "FINISHED" if recorder.result else "KILLED" if interrupted else "FAILED"
        if recorder.result:
            tags = {**tags, "model_sha256": recorder.result["model_sha256"]}
        sent = sender.close(experiment.tracking.flush_seconds, status)
        costs = as_metrics(recorder.result["targets"]) if recorder.result else {}
        if not (sent and close_run(folder, uri, sender.cursor, tags, costs)):
            logger.warning("not all of this run is in MLflow yet: narrowcast sync %s", folder)
