"""Recording of a run: each step goes to the journal, to checkpoints and to MLflow; the end writes the outputs."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any

from narrowcast.platform.atomic_files import remove_parts
from narrowcast.platform.checkpoint import prune_checkpoints, remove_checkpoints, save_checkpoint
from narrowcast.platform.config import flatten
from narrowcast.platform.disk import disk, remove_tree, writing
from narrowcast.platform.errors import RunFailed, UnresumableFailure, UserError, remedy
from narrowcast.platform.host_time import host_time
from narrowcast.platform.interruption import uninterrupted
from narrowcast.platform.step import KeptState, Step
from narrowcast.platform.tracking.cursor import Cursor
from narrowcast.platform.tracking.journal import Journal, locked
from narrowcast.platform.tracking.mlflow_run import (
    Sender,
    close_run,
    monitor_system,
    open_run,
    reopen_run,
    why_lost,
)
from narrowcast.runs.closing_entries import closing_entries
from narrowcast.runs.recordable import PreparedRun, WriteOutputs
from narrowcast.runs.run_folder import CONFIG, checkpoint_place, remove_local_checkpoints, write_config

logger = logging.getLogger(__name__)
OnRound = Callable[[Mapping[str, Any]], None]
"""Called with the journal's row of each round or iteration, and the name of its `run`, once that is on disk."""


@dataclass
class Recorder:
    """Writes the steps of one run, and its outputs at the end."""

    prepared: PreparedRun
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
        """Write a checkpoint; raise `RunFailed` if it cannot be written, or if somebody has changed the journal."""
        self.state, config = state, self.prepared.config
        self.journal.check_file()
        self.journal.sync()  # a resume from the checkpoint needs the steps before it
        self._keep_config()
        place = checkpoint_place(config, self.prepared.folder)
        try:
            save_checkpoint(
                place, state, config.digest(), config.checkpoints_kept, data_sha256=self.prepared.input.digest
            )
        except OSError as error:
            raise RunFailed(
                f"cannot write a checkpoint to {place} ({error}); {remedy(error)}, then resume the run"
            ) from error

    def _keep_config(self) -> None:
        """Write `config.yaml` again if somebody has removed it: without it there is no run to resume or to read."""
        each = self.prepared
        if not (each.folder / CONFIG).is_file():
            logger.warning("%s was removed, and is written again", each.folder / CONFIG)
            write_config(each.config, each.folder)

    def finish(self, *, keep_checkpoints: bool = True) -> dict[str, Any]:
        """Write the outputs, `result.json` last, without interruption; remove the checkpoints unless they are kept.

        Raise `LearnedNothing` if the run has no result.
        """
        each = self.prepared
        with uninterrupted():
            self._keep_config()
            self.result = self.write_outputs(self.journal, self.state, self.sender.cursor.run_id)
            if keep_checkpoints:
                place = checkpoint_place(each.config, each.folder)
                with suppress(OSError):  # the run has its result
                    prune_checkpoints(place, self.state, each.config.checkpoints_kept)
            else:
                remove_local_checkpoints(each.config, each.folder)
        return self.result


@contextmanager
def recorded(prepared: PreparedRun, on_round: OnRound, *, monitored: bool = True) -> Iterator[Recorder]:
    """Open the run's folder and its MLflow run, new or resumed, and close both however the block ends.

    Raise `RunFailed` if the disk is full, or fails.
    """
    with writing(prepared.folder, "resume the run"):
        yield from _recorded(prepared, on_round, monitored)


def _recorded(prepared: PreparedRun, on_round: OnRound, monitored: bool) -> Iterator[Recorder]:
    folder = prepared.folder
    if prepared.resuming:
        with locked(folder):
            yield from _recording(prepared, _reopened(prepared), on_round, monitored)
        return
    try:
        disk().make_folder(folder)
        disk().sync(folder.parent)
    except FileExistsError:
        raise UserError(f"another run has just taken {folder}; start this one again") from None
    try:
        cursor = _opened(prepared)
    except BaseException:
        disk().remove_folder(folder)
        raise
    with locked(folder):
        yield from _recording(prepared, cursor, on_round, monitored)


def _opened(prepared: PreparedRun) -> Cursor:
    """Create the MLflow run."""
    config = prepared.config
    params = flatten(config.plain())
    return open_run(prepared.folder, config.tracking, params, prepared.tags(), prepared.input, prepared.store)


def _reopened(prepared: PreparedRun) -> Cursor:
    """Continue the MLflow run; if the store does not have it any more, create one that gets the rounds so far too."""
    folder, store = prepared.folder, prepared.store
    cursor = Cursor.find(folder)
    lost = why_lost(folder, store, cursor)
    if cursor is not None and not lost:
        reopen_run(store, cursor.run_id)
        return replace(cursor, closed=False)
    cursor = _opened(prepared)
    logger.warning("%s; its rounds go to a new run, %s", lost, cursor.run_id)
    return cursor


def _recording(prepared: PreparedRun, cursor: Cursor, on_round: OnRound, monitored: bool) -> Iterator[Recorder]:
    """Record a run whose MLflow run is open, and close that whatever is raised.

    A new run leaves no folder if it fails before its first checkpoint, or before its first step by what a resume would
    repeat.
    """
    config, folder, store = prepared.config, prepared.folder, prepared.store
    recorder: Recorder | None = None
    sender: Sender | None = None
    stop_monitor: Callable[[], None] | None = None
    resumable, interrupted, refused = prepared.resuming, False, True
    try:
        remove_parts(folder)
        cursor.save(folder)
        prepared.keep_inputs()
        write_config(config, folder)
        journal = Journal.open(folder, prepared.state.step)
        watch, write_outputs = prepared.watch(journal), prepared.begin_outputs()
        sender = Sender(folder, store, cursor, journal)
        measured = monitored and config.tracking.system_metrics
        stop_monitor = monitor_system(store, cursor.run_id, enabled=measured, resume=prepared.resuming)
        recorder = Recorder(prepared, journal, sender, on_round, watch, write_outputs, prepared.state)
        if not prepared.state.step:
            recorder.checkpoint(prepared.state)
        resumable = True
        yield recorder
    except BaseException as error:
        interrupted = isinstance(error, KeyboardInterrupt)
        refused = isinstance(error, UserError | UnresumableFailure)
        raise
    finally:
        result = None if recorder is None else recorder.result
        status = "FINISHED" if result else "KILLED" if interrupted else "FAILED"
        last_tags, costs = closing_entries(result) if result else ({}, {})
        closed = False
        try:
            if stop_monitor is not None:
                stop_monitor()
            sent = sender is None or sender.close(config.tracking.flush_seconds, status)
            last = replace(cursor, status=status) if sender is None else sender.cursor
            closed = sent and close_run(folder, store, last, {**prepared.tags(), **last_tags}, costs)
        finally:  # also if this is interrupted
            if refused and not prepared.resuming and not (recorder is not None and recorder.journal.rounds):
                resumable = False
                with suppress(OSError, UserError):
                    remove_checkpoints(checkpoint_place(config, folder))
            if not resumable:
                remove_tree(folder)
            elif not closed:
                logger.warning("not all of this run is in MLflow yet: narrowcast sync %s", folder)
