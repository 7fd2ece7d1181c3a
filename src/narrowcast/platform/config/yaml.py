"""Files in YAML 1.2, read within limits: bytes, values with aliases expanded, and levels of nesting."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.events import AliasEvent, CollectionEndEvent, CollectionStartEvent, Event, ScalarEvent
from ruamel.yaml.parser import Parser

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


def read_yaml(text: str, origin: str) -> Any:
    """Parse YAML 1.2, in which 1e-3 is a number; raise a `UserError` with line and column, also above the limits."""
    try:
        return _load_limited(text, origin)
    except UserError:
        raise
    except LookupError as error:  # of ruamel.yaml, for a tagged number without digits or an invalid truth value
        raise UserError(f"{origin}: not valid YAML: a value is not of its tag; correct the file") from error
    except (YAMLError, ValueError, TypeError) as error:  # a tagged number or date that is not one; a mapping as a key
        marked = error if isinstance(error, MarkedYAMLError) else None
        mark = marked.problem_mark if marked else None
        where = f"{origin}, line {mark.line + 1}, column {mark.column + 1}" if mark else origin
        problem = str((marked.problem if marked else None) or error).splitlines()[0]
        raise UserError(f"{where}: not valid YAML: {problem}; correct the file") from error


def write_yaml(values: Mapping[str, Any], target: Path | TextIO) -> None:
    """Write nested plain values as block-style YAML, in their order."""
    yaml = YAML(pure=True)
    yaml.dump(dict(values), target)


def _load_limited(text: str, origin: str) -> Any:
    """Return the plain values of a text in YAML 1.2; raise `UserError`, before any is built, for too many of them.

    Aliases count as the values that they stand for, which may be exponentially many in the length of the text.
    """
    _check_bytes(len(text), origin)
    if _MANY_BRACKETS.search(text):  # of which the parser would read a thousand ahead, in quadratic time
        raise UserError(f"{origin}: more than {MOST_LEVELS} levels of nesting; shorten the file")
    yaml = YAML(typ="safe", pure=True)
    yaml.Parser = _CountingParser
    try:
        return yaml.load(text)
    except _LimitError as error:
        mark = error.event.start_mark
        where = f"{origin}, line {mark.line + 1}, column {mark.column + 1}"
        raise UserError(f"{where}: {error.problem}; shorten the file") from None


class _LimitError(Exception):
    def __init__(self, event: Event, problem: str) -> None:
        super().__init__(problem)
        self.event, self.problem = event, problem


class _CountingParser(Parser):
    """A parser that counts the values of the events that it gives; a document is built when all have been given."""

    def __init__(self, loader: Any) -> None:
        super().__init__(loader)
        self._sizes: dict[str, int] = {}  # values under each anchor, those of nested aliases included
        self._opened: list[tuple[str | None, int]] = []
        self._values = 0

    def get_event(self) -> Event:
        """Return the next event; raise `_LimitError` for one too many."""
        event: Event = super().get_event()
        before = self._values
        if isinstance(event, AliasEvent):
            if any(anchor == event.anchor for anchor, _ in self._opened):
                raise _LimitError(event, f"*{event.anchor} stands for a value that contains it")
            self._values += self._sizes.get(event.anchor, 1)
        elif isinstance(event, ScalarEvent | CollectionStartEvent):
            self._values += 1
        if isinstance(event, CollectionStartEvent):
            self._opened.append((event.anchor, before))
        elif isinstance(event, CollectionEndEvent):
            anchor, before = self._opened.pop()
            if anchor is not None:
                self._sizes[anchor] = self._values - before
        elif isinstance(event, ScalarEvent) and event.anchor is not None:
            self._sizes[event.anchor] = 1
        if self._values > MOST_VALUES:
            raise _LimitError(event, f"more than {MOST_VALUES} values, aliases counted as what they stand for")
        if len(self._opened) > MOST_LEVELS:
            raise _LimitError(event, f"more than {MOST_LEVELS} levels of nesting")
        return event


def _check_bytes(count: int, origin: str) -> None:
    if count > MOST_BYTES:
        raise UserError(f"{origin}: a YAML file of more than {MOST_BYTES} bytes; keep data in files of their own")
