"""The lines of a journal: JSON with a checksum that covers the line and all lines before it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from narrowcast.platform.step import ITERATION

_KEYS, _OPTIONAL, _KEYS_OF_SOLVE = {"clients", "round"}, {"client_metrics"}, {ITERATION}
_NAME = b', "sha256": "'
_DIGITS = 64
_SUFFIX = len(_NAME) + _DIGITS + len(b'"}')


@dataclass
class Lines:
    """The intact lines at the beginning of a journal.

    Attributes:
        rows: the round or iteration of each line, without the clients' ledgers.
        size: the length of the lines in bytes.
        checksum: the checksum of the last line.
        problem: what is wrong with the line after them, empty if there is none.
        incomplete: True if that line is the last one and has no end.

    """

    rows: list[dict[str, Any]] = field(default_factory=list)
    size: int = 0
    checksum: bytes = b""
    problem: str = ""
    incomplete: bool = False


def encoded(entry: Mapping[str, Any], before: bytes) -> tuple[bytes, bytes]:
    """Return the line of an entry, and its checksum: the sha256 of the checksum `before` it and the entry's JSON."""
    body = json.dumps(entry).encode()
    checksum = _checksum(before, body)
    return body[:-1] + _NAME + checksum + b'"}\n', checksum


def read_lines(stream: Iterable[bytes]) -> Lines:
    """Return the lines of a file up to the first that is not intact or not of the next round or a later iteration."""
    found = Lines()
    for number, line in enumerate(stream, start=1):
        if not line.endswith(b"\n"):
            found.problem, found.incomplete = f"line {number} is incomplete", True
            return found
        try:
            body, written = _parted(line[:-1])
            row = _row(body, found.rows)
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            found.problem = f"line {number}: {error}"
            return found
        checksum = _checksum(found.checksum, body)
        if written != checksum:
            found.problem = f"line {number}: its checksum is not that of the lines up to it"
            return found
        found.rows.append(row)
        found.size, found.checksum = found.size + len(line), checksum
    return found


def _row(body: bytes, before: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    entry = json.loads(body)
    if set(entry) == _KEYS_OF_SOLVE:
        row: dict[str, Any] = entry[ITERATION]
        if row[ITERATION] <= (before[-1][ITERATION] if before else 0):
            raise ValueError("an iteration is repeated")
        return row
    if set(entry) - _OPTIONAL != _KEYS:
        raise ValueError("not a round with its clients")
    row = entry["round"]
    if row["round"] != len(before) + 1:
        raise ValueError("a round is missing")
    return row


def step_name(row: Mapping[str, Any]) -> str:
    """Return the name of the column that numbers the rows: `round`, or `iteration` in the journal of a solve."""
    return "round" if "round" in row else ITERATION


def step_of(row: Mapping[str, Any]) -> int:
    """Return the round of a row, or its iteration in the journal of a solve."""
    step: int = row[step_name(row)]
    return step


def _parted(line: bytes) -> tuple[bytes, bytes]:
    """Return the JSON that a checksum covers, and the checksum; raise `ValueError` if the line has none."""
    suffix = line[-_SUFFIX:]
    if not (suffix.startswith(_NAME) and suffix.endswith(b'"}')):
        raise ValueError("it has no checksum")
    return line[:-_SUFFIX] + b"}", suffix[len(_NAME) : -2]


def _checksum(before: bytes, body: bytes) -> bytes:
    return hashlib.sha256(before + body).hexdigest().encode()
