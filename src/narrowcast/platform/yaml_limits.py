"""Limits of the YAML files that are read: bytes, values with aliases expanded, and levels of nesting."""

from __future__ import annotations

import re
from pathlib import Path

from ruamel.yaml import YAML
from ruamel.yaml.events import AliasEvent, CollectionEndEvent, CollectionStartEvent, Event, ScalarEvent

from narrowcast.platform.errors import UserError

MOST_BYTES = 2**20
MOST_VALUES = 100_000
MOST_LEVELS = 50
_MANY_BRACKETS = re.compile(rf"(?:[\[{{]\s*){{{MOST_LEVELS + 1}}}")


def read_limited(path: Path) -> str:
    """Return the text of a YAML file; raise `UserError` if it is too large or no UTF-8 text, `OSError` as `open`."""
    with path.open("rb") as stream:
        content = stream.read(MOST_BYTES + 1)
    _check_bytes(len(content), str(path))
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not a text in UTF-8 (byte {error.start}); correct the file") from error


def check_limits(text: str, origin: str) -> None:
    """Raise `UserError` for a text that stands for too many values; nothing is built from it.

    Aliases count as the values that they stand for, which may be exponentially many in the length of the text.
    """
    _check_bytes(len(text), origin)
    if _MANY_BRACKETS.search(text):  # of which the parser would read a thousand ahead, in quadratic time
        raise UserError(f"{origin}: more than {MOST_LEVELS} levels of nesting; shorten the file")
    sizes: dict[str, int] = {}  # values under each anchor, those of nested aliases included
    opened: list[tuple[str | None, int]] = []
    values = 0
    for event in YAML(typ="safe", pure=True).parse(text):
        before = values
        if isinstance(event, AliasEvent):
            if any(anchor == event.anchor for anchor, _ in opened):
                raise _refused(event, origin, f"*{event.anchor} stands for a value that contains it")
            values += sizes.get(event.anchor, 1)
        elif isinstance(event, ScalarEvent | CollectionStartEvent):
            values += 1
        if isinstance(event, CollectionStartEvent):
            opened.append((event.anchor, before))
        elif isinstance(event, CollectionEndEvent):
            anchor, before = opened.pop()
            if anchor is not None:
                sizes[anchor] = values - before
        elif isinstance(event, ScalarEvent) and event.anchor is not None:
            sizes[event.anchor] = 1
        if values > MOST_VALUES:
            raise _refused(event, origin, f"more than {MOST_VALUES} values, aliases counted as what they stand for")
        if len(opened) > MOST_LEVELS:
            raise _refused(event, origin, f"more than {MOST_LEVELS} levels of nesting")


def _refused(event: Event, origin: str, problem: str) -> UserError:
    mark = event.start_mark
    return UserError(f"{origin}, line {mark.line + 1}, column {mark.column + 1}: {problem}; shorten the file")


def _check_bytes(count: int, origin: str) -> None:
    if count > MOST_BYTES:
        raise UserError(f"{origin}: a YAML file of more than {MOST_BYTES} bytes; keep data in files of their own")
