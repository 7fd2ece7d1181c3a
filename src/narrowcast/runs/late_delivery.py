"""Rounds and files of a run that MLflow missed while its store was down, sent later."""

from __future__ import annotations

import os
from pathlib import Path

from narrowcast.platform.errors import RunFailed, UserError
from narrowcast.platform.redaction import has_hidden, hide_secrets
from narrowcast.platform.tracking.journal import Journal, locked
from narrowcast.platform.tracking.mlflow_run import Cursor, Sender, check_store, close_run
from narrowcast.runs.any_result import read_any_file
from narrowcast.runs.closing_entries import closing_entries
from narrowcast.runs.run_folder import RESULT

_TIMEOUT_SECONDS = 3600.0


def send_missing(folder: Path, uri: str | None) -> int:
    """Send the rounds and files that the MLflow store lacks of a run; return the number of rounds sent.

    `uri` overrides the store that the run started with. Raise `UserError` if its password is needed and not given,
    `RunFailed` if the store stops answering.
    """
    cursor = Cursor.load(folder)
    uri = uri or os.environ.get("MLFLOW_TRACKING_URI") or cursor.uri
    if uri == cursor.uri and has_hidden(uri):
        raise UserError(f"{folder} was tracked at {uri}, whose password is not kept; give it with --tracking-uri")
    with locked(folder):
        check_store(uri)
        cursor = Cursor.load(folder)
        journal = Journal.open(folder)
        sender = Sender(folder, uri, cursor, journal)
        finished = (folder / RESULT).is_file()
        status = "FINISHED" if finished else cursor.status
        tags, costs = closing_entries(read_any_file(folder).model_dump()) if finished else ({}, {})
        if not (sender.close(_TIMEOUT_SECONDS, status) and close_run(folder, uri, sender.cursor, tags, costs)):
            raise RunFailed(f"the store at {hide_secrets(uri)} went down again; try narrowcast sync {folder} later")
    return len(journal.rounds) - cursor.sent_rounds
