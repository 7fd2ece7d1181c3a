"""The rounds that clients have answered: a record that outlives their processes, so that none is answered twice.

Two sums of one round over cohorts, or survivors, that differ by a client give that client's update by subtraction, and
so do sums over the same clients after one of them was sent another model. What clients were told in a round is
therefore written down, and synced, before the answer leaves: the cohort with its groups, the list of survivors that a
client accepted with the model that it trained, the sum that a key holder decrypted. A round may be repeated after a
crash, with the same requests and under new masks: it opens the same sum. Everything else is refused.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from narrowcast.platform.errors import UserError, remedy
from narrowcast.platform.storage.disk import disk, make_folders
from narrowcast.platform.types import Arrays, PayloadError, arrays_sha256

NO_MODEL = b""


@dataclass(frozen=True)
class Accepted:
    """The list of survivors that a client accepted in a round, and the hash of the model that it trained there."""

    survivors: frozenset[int]
    model: bytes = NO_MODEL


@dataclass
class _Round:
    cohort: str = ""
    accepted: dict[int, Accepted] = field(default_factory=dict)
    sums: dict[int, str] = field(default_factory=dict)
    survivors: frozenset[int] = frozenset()

    def take(self, entry: Mapping[str, Any]) -> None:
        """Add an entry of the file."""
        if "cohort" in entry:
            self.cohort = str(entry["cohort"])
            return
        survivors = frozenset(map(int, entry["survivors"]))
        self.survivors |= survivors
        if "sum" in entry:
            self.sums[int(entry["group"])] = str(entry["sum"])
        else:
            accepted = Accepted(survivors, bytes.fromhex(entry["model"]))
            self.accepted |= dict.fromkeys(map(int, entry.get("clients", survivors)), accepted)


class AnsweredRounds:
    """The answers of one run, in a file of one JSON line each; without a path they are kept in memory.

    Raise `UserError` for a file that is damaged, that cannot be read or written, or that is not what was written to it.
    """

    def __init__(self, path: Path | None = None) -> None:
        # Lines and not what they say: of a long run that is resumed, most are never looked at.
        self._path, self._lines, self.last = path, dict[int, list[bytes]](), 0
        self._failure: OSError | None = None
        self._size, self._written, self._inode = 0, hashlib.sha256(), -1
        if path is not None:
            try:
                self._read(path)
            except OSError as error:
                raise UserError(_unusable(path, error)) from error

    def survivors(self, round_index: int) -> frozenset[int]:
        """Return the clients over which the sum of a round was opened, or may have been; none if it was not."""
        return self._round(round_index).survivors

    def accepted(self, round_index: int) -> Mapping[int, Accepted]:
        """Return what each client accepted in a round."""
        return self._round(round_index).accepted

    def begin(self, round_index: int, request: Arrays) -> None:
        """Record the request that begins a round.

        Raise `PayloadError` for a round that was begun by another request, and for one before the last that was not
        begun since this object was made; `UserError` if the file is no longer what was written.
        """
        self._check_file()
        cohort = arrays_sha256(request).hex()
        if round_index not in self._lines and round_index <= self.last:
            raise PayloadError(f"round {round_index} comes before round {self.last}, which clients have answered")
        if (known := self._round(round_index).cohort) not in ("", cohort):
            raise PayloadError(f"clients have begun round {round_index} in another cohort, or with other groups")
        if not known:
            self._write({"round": round_index, "cohort": cohort})
        self._lines = {index: lines for index, lines in self._lines.items() if index >= round_index}

    def accept(self, round_index: int, accepted: Mapping[int, Accepted]) -> None:
        """Record what clients, by number, accepted in a round; what is recorded already is not written again."""
        known, clients_of = self.accepted(round_index), dict[Accepted, list[int]]()
        for client, answer in accepted.items():
            if client not in known:
                clients_of.setdefault(answer, []).append(client)
        for answer, clients in clients_of.items():
            answered = {} if answer.survivors == frozenset(clients) else {"clients": sorted(clients)}
            survivors = sorted(answer.survivors)
            self._write({"round": round_index, **answered, "survivors": survivors, "model": answer.model.hex()})

    def open(self, round_index: int, group: int, survivors: Collection[int], integers: Arrays) -> None:
        """Record the sum of a group that is about to leave; raise `PayloadError` if another one left before."""
        total = arrays_sha256(integers).hex()
        if (known := self._round(round_index).sums.get(group)) is None:
            self._write({"round": round_index, "group": group, "survivors": sorted(survivors), "sum": total})
        elif known != total:
            raise PayloadError(
                f"the sum of group {group} in round {round_index} has been opened before, and was another one"
            )

    def _round(self, round_index: int) -> _Round:
        known = _Round()
        for line in self._lines.get(round_index, ()):
            known.take(json.loads(line))
        return known

    def _write(self, entry: Mapping[str, Any]) -> None:
        """Take an entry, and write it down durably."""
        line = json.dumps(entry, separators=(",", ":")).encode() + b"\n"
        if self._path is not None:
            self._check_file()
            try:
                if self._failure is not None:
                    raise self._failure  # after half a line, nothing
                new = not self._path.exists()
                if new:
                    make_folders(self._path.parent, 0o700)
                disk().append(self._path, line)
                disk().sync(self._path)
                if new:
                    disk().sync(self._path.parent)
            except OSError as error:
                self._failure = error
                raise UserError(_unusable(self._path, error)) from error
        self._take(entry, line)

    def _take(self, entry: Mapping[str, Any], line: bytes) -> None:
        round_index = int(entry["round"])
        self._lines.setdefault(round_index, []).append(line)
        self.last = max(self.last, round_index)
        self._size += len(line)
        self._written.update(line)

    def _check_file(self) -> None:
        """Raise `UserError` if somebody has removed or changed the file: clients that come after would not know it."""
        if self._path is None or self._failure is not None:
            return
        try:
            stat = self._path.stat()
            unchanged = stat.st_size == self._size
            if unchanged and stat.st_ino != self._inode:  # put back, or not looked at before
                unchanged = hashlib.sha256(self._path.read_bytes()).digest() == self._written.digest()
        except FileNotFoundError:
            if not self._size:
                return
            changed = "was removed"
        except OSError as error:
            raise UserError(_unusable(self._path, error)) from error
        else:
            if unchanged:
                self._inode = stat.st_ino
                return
            changed = f"was changed ({self._size:,} bytes were written, {stat.st_size:,} are there)"
        raise UserError(
            f"{self._path} {changed}: clients do not answer if what they answered may be forgotten; put it back, then "
            "resume the run, or start a new one"
        )

    def _read(self, path: Path) -> None:
        """Read the file, and cut a last line that is damaged: it was not synced, so that its answer has not left."""
        if not path.exists():
            return
        content, whole = path.read_bytes(), 0
        for line in content.splitlines(keepends=True):
            try:
                entry = json.loads(line if line.endswith(b"\n") else b"")
                _Round().take(entry)
                self._take(entry, line)
            except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
                if whole + len(line) < len(content):
                    raise UserError(
                        f"{path} is damaged, and what clients have answered is not known; start a new run"
                    ) from error
                disk().truncate(path, whole)
                disk().sync(path)
                return
            whole += len(line)


def _unusable(path: Path, error: OSError) -> str:
    return f"clients answer no round that they cannot write down: {path} ({error.strerror}); {remedy(error)}"
