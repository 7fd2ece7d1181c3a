"""Formats of log records: text for people, JSON lines for log collectors."""

from __future__ import annotations

import json
import logging
import time
from typing import Any

from narrowcast.platform.redaction import redact, redact_values
from narrowcast.runs.terminal_output import plain

_USUAL = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


class JsonLines(logging.Formatter):
    """One JSON object per record: time, level, logger, message, and its extra fields (run, round, clients)."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the record as one line."""
        given = {name: value for name, value in vars(record).items() if name not in _USUAL and name[0] != "_"}
        line: dict[str, Any] = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **given,
        }
        return json.dumps(redact_values(line), default=lambda value: redact(str(value)))


class Text(logging.Formatter):
    """Level and message of a record."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the record, with the traceback that it may have."""
        return plain(redact(super().format(record)))


def write_log(*, as_json: bool) -> None:
    """Log warnings as text, or everything as JSON with one record per round."""
    for handler in logging.getLogger().handlers:
        handler.setFormatter(JsonLines() if as_json else Text("%(levelname)s: %(message)s"))
    logging.getLogger("narrowcast").setLevel(logging.INFO if as_json else logging.WARNING)
