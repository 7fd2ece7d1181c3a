"""The position of a run in its MLflow store, `tracking.json`, and the place of its folder, by which others know it.

Apart from the store and its sender, as both use it, and as reading it takes no MLflow.
"""

from __future__ import annotations

import hashlib
import json
import socket
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from narrowcast.platform.errors import UserError
from narrowcast.platform.storage.disk import write_atomically
from narrowcast.platform.storage.journal import is_left

CURSOR = "tracking.json"


@dataclass(frozen=True)
class Cursor:
    """The part of a run that the store has.

    Attributes:
        uri: the address of the store, without secrets.
        run_id: MLflow's id of the run.
        sent_rounds: the number of the journal's rows that the store has.
        closed: True once the run has ended in the store, with its artifacts.
        status: MLflow's status of the run at its end.
        folder: the run's folder, by which a copy of it is known; empty if an earlier version wrote this.
        tags: the tags that the run was opened with.
        data: the fields of MLflow's `Dataset` that it was opened with.

    """

    uri: str
    run_id: str
    sent_rounds: int = 0
    closed: bool = False
    status: str = "FAILED"
    folder: str = ""
    tags: Mapping[str, str] = field(default_factory=dict)
    data: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def load(cls, folder: Path) -> Cursor:
        """Read `tracking.json` of a run's folder; raise `UserError` if there is none."""
        try:
            return cls(**json.loads((folder / CURSOR).read_text()))
        except (OSError, ValueError, TypeError) as error:
            raise UserError(f"{folder} holds no run that was tracked ({error}); give a run's folder") from error

    @classmethod
    def find(cls, folder: Path) -> Cursor | None:
        """Read `tracking.json`; return None if it is missing or damaged."""
        try:
            return cls.load(folder)
        except UserError:
            return None

    def save(self, folder: Path) -> None:
        """Write `tracking.json`."""
        write_atomically(folder / CURSOR, json.dumps(asdict(self)).encode())


def place_of(folder: Path) -> str:
    """Return the value of the tag `PLACE`: a folder of this machine, which the store is not told."""
    return hashlib.sha256(f"{socket.gethostname()}:{folder}".encode()).hexdigest()[:16]


def is_abandoned(folder: Path, run_id: str, *, of_study: bool) -> bool:
    """Return whether a folder has this MLflow run, not ended, and no process is at work on it.

    Studies have no `tracking.json`: the store has the folder of each.
    """
    cursor = Cursor.find(folder)
    known = of_study if cursor is None else cursor.run_id == run_id and not cursor.closed
    return known and is_left(folder)
