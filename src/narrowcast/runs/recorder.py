"""Recording of a run: each step goes to the journal, to checkpoints and to MLflow; the end writes the outputs."""

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
from narrowcast.platform.redaction import hide_secrets
from narrowcast.platform.step import KeptState, Step
from narrowcast.platform.tracking.journal import Journal, locked
from narrowcast.platform.tracking.mlflow_run import Cursor, Sender, close_run, monitor_system, open_run, reopen_run
from narrowcast.runs.closing_entries import closing_entries
from narrowcast.runs.recordable import Recordable, WriteOutputs
from narrowcast.runs.run_folder import checkpoint_place, remove_checkpoints, write_config

logger = logging.getLogger(__name__)
OnRound = Callable[[Mapping[str, Any]], None]
"""Called with the journal's row of each round or iteration, and the name of its `run`, once that is on disk."""


@dataclass
class Recorder:
    """Writes the steps of one run, and its outputs at the end."""

    prepared: Recordable
    journal: Journal
    sender: Sender
    on_round: OnRound
    watch: Callable[[Any], None]
    write_outputs: WriteOutputs
    """Has begun to draw what does not depend on the run, so it is made before the first step."""
    state: KeptState
    result: dict[str, Any] | None = None
    log_seconds: float = 0.0

    def write(self, outcome: Step) -> None:
        """Write a step to the journal, its state to a checkpoint if one is due, then report the step."""
        began = time.perf_counter()
        if self.journal.append(outcome, int(host_time().wall() * 1000), self.log_seconds):
            self.sender.notify()
        if outcome.state is not None:
            self.checkpoint(outcome.state)
        self.on_round({"run": self.prepared.folder.name, **self.journal.row_of(outcome.step)})
        self.watch(outcome)
        self.log_seconds = time.perf_counter() - began

    def checkpoint(self, state: KeptState) -> None:
        """Write a checkpoint; raise `RunFailed` if it cannot be written."""
        self.state, config = state, self.prepared.config
        self.journal.sync()  # a resume from the checkpoint needs the steps before it
        place = checkpoint_place(config, self.prepared.folder)
        try:
            save_checkpoint(
                place, state, config.digest(), config.checkpoints_kept, data_sha256=self.prepared.about.digest
            )
        except OSError as error:
            raise RunFailed(
                f"cannot write a checkpoint to {place} ({error}); make room, then resume the run"
            ) from error

    def finish(self, *, keep_checkpoints: bool = True) -> dict[str, Any]:
        """Write the outputs, `result.json` last, without interruption; remove the checkpoints unless they are kept.

        Raise `LearnedNothing` if the run has no result.
        """
        each = self.prepared
        with uninterrupted():
            self.result = self.write_outputs(self.journal, self.state, self.sender.cursor.run_id)
            if keep_checkpoints:
                place = checkpoint_place(each.config, each.folder)
                with suppress(OSError):  # the run has its result
                    prune_checkpoints(place, self.state, each.config.checkpoints_kept)
            else:
                remove_checkpoints(each.config, each.folder)
        return self.result


@contextmanager
def recorded(prepared: Recordable, on_round: OnRound, *, monitored: bool = True) -> Iterator[Recorder]:
    """Open the run's folder and its MLflow run, new or resumed, and close both however the block ends.

    Raise `RunFailed` if the disk is full, or fails.
    """
    try:
        yield from _recorded(prepared, on_round, monitored)
    except OSError as error:
        raise RunFailed(f"cannot write to {prepared.folder} ({error}); make room, then resume the run") from error


def _recorded(prepared: Recordable, on_round: OnRound, monitored: bool) -> Iterator[Recorder]:
    config, folder, uri = prepared.config, prepared.folder, prepared.store_uri
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
        params, tags = flatten(config.plain()), prepared.tags()
        uri, run_id = open_run(config.tracking, folder.parent, folder.name, params, tags, prepared.about)
    except BaseException:
        disk().remove_folder(folder)
        raise
    with locked(folder):
        cursor = Cursor(hide_secrets(uri), run_id)
        cursor.save(folder)
        yield from _recording(prepared, cursor, on_round, monitored)


def _recording(prepared: Recordable, cursor: Cursor, on_round: OnRound, monitored: bool) -> Iterator[Recorder]:
    """Start the journal, the thread that sends it, and the measurement of the machine's load; stop them at the end."""
    config, folder, uri = prepared.config, prepared.folder, prepared.store_uri
    tags = prepared.tags()
    if prepared.outdated:  # before config.yaml is written anew, from which its digest could no longer be had
        place = checkpoint_place(config, folder)
        save_checkpoint(
            place, prepared.state, config.digest(), config.checkpoints_kept, data_sha256=prepared.about.digest
        )
    prepared.keep_inputs()
    write_config(config, folder)
    journal = Journal.open(folder, prepared.state.step)
    sender = Sender(folder, uri, cursor, journal)
    stop_monitor = monitor_system(
        uri, cursor.run_id, enabled=monitored and config.tracking.system_metrics, resume=prepared.resuming
    )
    recorder = Recorder(
        prepared, journal, sender, on_round, prepared.watch(journal), prepared.begin_outputs(), prepared.state
    )
    interrupted = False
    try:
        if not prepared.state.step:
            recorder.checkpoint(prepared.state)
        yield recorder
    except KeyboardInterrupt:
        interrupted = True
        raise
    finally:
        stop_monitor()
        status = "FINISHED" if recorder.result else "KILLED" if interrupted else "FAILED"
        last_tags, costs = closing_entries(recorder.result) if recorder.result else ({}, {})
        sent = sender.close(config.tracking.flush_seconds, status)
        if not (sent and close_run(folder, uri, sender.cursor, {**tags, **last_tags}, costs)):
            logger.warning("not all of this run is in MLflow yet: narrowcast sync %s", folder)
