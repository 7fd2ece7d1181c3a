"""Programs that break one promise each, put together from the real one through its seams; histories have to notice."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
from simulated_disk import SimulatedDisk
from simulated_host import SimulatedTime

from narrowcast.cluster.decisions import FailurePolicy
from narrowcast.cluster.executor import RayExecutor
from narrowcast.platform.config.run_fields import StoreAddress
from narrowcast.platform.rounds.state import RunState
from narrowcast.platform.storage.disk import disk, make_folders
from narrowcast.platform.storage.host import host_clock
from narrowcast.platform.storage.journal import Journal
from narrowcast.platform.tracking import cursor, sender
from narrowcast.runs import folder, outputs, session

Variant = Callable[[], AbstractContextManager[Any]]


def _never_synced(which: Callable[[Path], bool]) -> Variant:
    whole = SimulatedDisk.sync

    def sync(self: SimulatedDisk, path: Path) -> None:
        if not which(path):
            whole(self, path)

    return lambda: patch.object(SimulatedDisk, "sync", sync)


def _in_place() -> ExitStack:
    def write(path: Path, content: bytes, **_: Any) -> None:
        make_folders(path.parent)
        disk().write_with(path, lambda place: place.write_bytes(content))
        disk().sync(path)
        disk().sync(path.parent)

    stack = ExitStack()
    for module in (cursor, outputs, folder):
        stack.enter_context(patch.object(module, "write_atomically", write))
    return stack


def _position_first() -> AbstractContextManager[Any]:
    def send(self: sender.Sender) -> None:
        before = self.cursor.sent_rounds
        self._journal.sync()
        self.cursor = replace(self.cursor, sent_rounds=len(self._journal.rounds))
        self.cursor.save(self._folder)
        try:
            if rows := self._journal.rounds[before:]:
                sender.send_rounds(self._store, self.cursor.run_id, rows)
        except sender.StoreError:
            self.cursor = replace(self.cursor, sent_rounds=before)

    return patch.object(sender.Sender, "_send", send)


def _sent_before_synced() -> AbstractContextManager[Any]:
    def send(self: sender.Sender) -> None:
        try:
            before = self.cursor.sent_rounds
            if rows := self._journal.rounds[before:]:
                sent = sender.send_rounds(self._store, self.cursor.run_id, rows)
                self.cursor = replace(self.cursor, sent_rounds=before + sent)
            self.cursor.save(self._folder)
        except sender.StoreError:
            pass

    return patch.object(sender.Sender, "_send", send)


def _new_stamps() -> AbstractContextManager[Any]:
    whole = sender.send_rounds

    def send(store: StoreAddress, run_id: str, rows: Any) -> int:
        return whole(store, run_id, [{**row, "logged_at_ms": int(host_clock().wall() * 1000)} for row in rows])

    return patch.object(sender, "send_rounds", send)


def _order_of_arrival() -> AbstractContextManager[Any]:
    whole = RayExecutor.train

    def train(self: RayExecutor, broadcast: Any, chunks: Any) -> Any:
        before = len(self.incidents)
        results = whole(self, broadcast, chunks)
        return results[::-1] if len(self.incidents) > before else results

    return patch.object(RayExecutor, "train", train)


def _clients_forgotten() -> AbstractContextManager[Any]:
    whole = RunState.packed

    def packed(self: RunState) -> Any:
        return whole(replace(self, clients={name: np.zeros_like(each) for name, each in self.clients.items()}))

    return patch.object(RunState, "packed", packed)


def _checkpoint_first() -> AbstractContextManager[Any]:
    whole = session.Recorder.write

    def write(self: session.Recorder, outcome: Any) -> None:
        if outcome.state is not None:
            self.checkpoint(outcome.state)
        whole(self, outcome)

    return patch.object(session.Recorder, "write", write)


VARIANTS: dict[str, Variant] = {
    "the journal is not synced": _never_synced(lambda path: path.name == "journal.jsonl"),
    "a file is not synced before it is renamed": _never_synced(lambda path: path.suffix == ".part"),
    "a folder is not synced after a renaming": _never_synced(lambda path: path.is_dir()),
    "files are replaced in place": _in_place,
    "the checkpoint is written before the round's line": _checkpoint_first,
    "the clients' state is not in the checkpoint": _clients_forgotten,
    "a cut line stays in the journal": lambda: patch.object(SimulatedDisk, "truncate", lambda *_: None),
    "a repeated round is written again": lambda: patch.object(Journal, "last_step", 0),
    "the position is saved before the rounds are sent": _position_first,
    "rounds are sent before they are synced": _sent_before_synced,
    "a round that is sent again has another time stamp": _new_stamps,
    "checkpoint intervals follow the wall clock": lambda: patch.object(SimulatedTime, "monotonic", SimulatedTime.wall),
    "clients of a failed host are dropped": lambda: patch.object(
        FailurePolicy, "decide", lambda policy, _: ("drop", policy)
    ),
    "sums fold in the order of arrival": _order_of_arrival,
}
