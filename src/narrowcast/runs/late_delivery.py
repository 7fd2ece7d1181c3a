"""Rounds and files of a run that MLflow missed while its store was down, sent later."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

from narrowcast.platform.config import command, flatten, read_yaml, validate
from narrowcast.platform.errors import RunFailed, UserError
from narrowcast.platform.links import own_file
from narrowcast.platform.redaction import has_hidden
from narrowcast.platform.tracking.cursor import Cursor
from narrowcast.platform.tracking.journal import Journal, locked
from narrowcast.platform.tracking.mlflow_run import Sender, check_store, close_run, open_run, why_lost
from narrowcast.platform.tracking.store_address import StoreAddress, Tracking, host_of, local_path
from narrowcast.platform.trust import is_trusted
from narrowcast.platform.yaml_limits import read_limited
from narrowcast.runs.any_result import read_any_file
from narrowcast.runs.closing_entries import closing_entries
from narrowcast.runs.run_folder import CONFIG, RESULT

logger = logging.getLogger(__name__)
_TIMEOUT_SECONDS = 3600.0


def send_missing(folder: Path, uri: str | None) -> int:
    """Send the rounds and files that the MLflow store lacks of a run; return the number of rounds sent.

    `uri` overrides the store that the run started with. A store that does not have the run gets a new one, with all
    rounds. Raise `UserError` if a password is needed and not given, `RunFailed` if the store stops answering.
    """
    store = StoreAddress(uri, "user") if uri else _store(folder)
    if has_hidden(store.uri):
        raise UserError(f"{folder} was tracked at {store.uri}, whose password is not kept; give it with --tracking-uri")
    if store.named_by == "folder":
        _check_place(folder, store)
    with locked(folder):
        check_store(store, f"give --tracking-uri {store.shown}")
        cursor = _cursor(folder, store)
        journal = Journal.open(folder)
        sender = Sender(folder, store, cursor, journal)
        finished = (folder / RESULT).is_file()
        status = "FINISHED" if finished else cursor.status
        tags, costs = closing_entries(read_any_file(folder).model_dump()) if finished else ({}, {})
        if not (sender.close(_TIMEOUT_SECONDS, status) and close_run(folder, store, sender.cursor, tags, costs)):
            raise RunFailed(f"the store at {store.shown} went down again; later run: {command('sync', folder)}")
    return len(journal.rounds) - cursor.sent_rounds


def _store(folder: Path) -> StoreAddress:
    """Return the address of the environment, else that of the folder, which may be another person's.

    What the folder says of credentials counts where the user trusts it.
    """
    if (own := Tracking().resolve(folder.parent)).named_by == "user":
        return own
    has_config, trusted = (folder / CONFIG).is_file(), is_trusted(folder)
    known = Cursor.find(folder) if has_config else Cursor.load(folder)
    saved = _tracking(folder)[0] if known is None or (trusted and has_config) else Tracking()
    store = saved.model_copy(update={"uri": known.uri if known else saved.uri}).resolve(folder.parent)
    if store.named_by == "user" and trusted:
        return store
    return replace(store, named_by="folder")


def _check_place(folder: Path, store: StoreAddress) -> None:
    """Raise `UserError` for a store that a folder may not name.

    That is a database that would be made outside the folder's own place, and one whose driver would be called with
    options of the folder's choice: some of these read files, or load libraries.
    """
    path = local_path(store.uri)
    if path is None and host_of(store.uri) is None:
        raise UserError(
            f"{folder} was tracked at {store.shown}, a database, which is not opened by the word of a folder; give the "
            "address with --tracking-uri"
        )
    if path is not None and not path.exists() and not path.is_relative_to(folder.parent.resolve()):
        raise UserError(f"{folder} was tracked at {store.shown}, which is not there; give a store with --tracking-uri")


def _cursor(folder: Path, store: StoreAddress) -> Cursor:
    """Return the position in the run of the store, which is created if the store does not have it."""
    cursor = Cursor.find(folder)
    lost = why_lost(folder, store, cursor)
    if cursor is not None and not lost:
        return cursor
    tracking, params = _tracking(folder)
    tags, data = ({}, {}) if cursor is None else (cursor.tags, cursor.data)
    new = open_run(folder, tracking, params, tags, data, store)
    new = replace(new, status=cursor.status if cursor else new.status)
    new.save(folder)
    logger.warning("%s; its rounds go to a new run, %s", lost, new.run_id)
    return new


def _tracking(folder: Path) -> tuple[Tracking, dict[str, object]]:
    """Return the settings of the store, and all settings of the run by dotted path, without importing its classes."""
    path = own_file(folder, CONFIG)
    if not path.is_file():
        raise UserError(f"{folder} has no {CONFIG}, which its MLflow run is made from; give a run's folder")
    values = read_yaml(read_limited(path), str(path))
    return validate(Tracking, values.get("tracking") or {}, f"{path}: tracking"), flatten(values)
