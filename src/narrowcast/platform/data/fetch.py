"""Where data sets are looked for, and how they are downloaded and checked."""

from __future__ import annotations

import logging
import os
import subprocess
import tarfile
import tempfile
import zipfile
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import requests

from narrowcast.platform.data.sets import SETS, DataSet
from narrowcast.platform.data.sources import Source
from narrowcast.platform.errors import UserError

VARIABLE = "NARROWCAST_DATA"

_FAILURES = (
    OSError, ValueError, LookupError, EOFError, zipfile.BadZipFile, tarfile.TarError, zlib.error,
    subprocess.SubprocessError,
)  # fmt: skip
"""What a source may raise: the web, the package index and damaged archives."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Status:
    """A row of `narrowcast data list`; `found` is the folder, if any."""

    name: str
    description: str
    licence: str
    found: Path | None


def roots() -> list[Path]:
    """The folders that hold data sets, in the order they are searched."""
    named = os.environ.get(VARIABLE)
    cache = Path("~/.cache/narrowcast/data").expanduser()
    return [Path(named).expanduser(), cache] if named else [cache]


def find(name: str, candidates: Sequence[str]) -> Path:
    """The folder of a data set that holds one of the candidate files, or a `UserError` on how to get it."""
    folder = _found(name, candidates)
    if folder is None:
        places = " or ".join(str(root / name) for root in roots())
        wanted = " or ".join(candidates)
        raise UserError(f"{name} is not here: no {wanted} in {places}; run: narrowcast data fetch {name}")
    return folder


def status() -> list[Status]:
    """Every data set that can be fetched, and where it was found."""
    return [Status(data.name, data.description, data.licence, _found(data.name, data.files)) for data in SETS.values()]


def fetch(name: str, *, progress: bool) -> Path:
    """Download a data set unless it is found, and return its folder.

    Raises a `UserError` when the name is unknown, no root can be written or every source failed.
    """
    if name not in SETS:
        raise UserError(f"no data set {name!r} to fetch; there are {', '.join(SETS)}")
    data = SETS[name]
    return _found(name, data.files) or download(data, _writable_root(), progress=progress)


def download(data: DataSet, root: Path, *, progress: bool) -> Path:
    """Fill `root/NAME` from the first source that works; on failure nothing is left there.

    Raises a `UserError` when every source failed, each named with its reason, or the folder is taken.
    """
    folder = root / data.name
    if folder.is_dir() and any(folder.iterdir()):
        raise UserError(f"{folder} holds no {' or '.join(data.files)} but other files; move it away and retry")
    failures = []
    for source in data.sources:
        with tempfile.TemporaryDirectory(dir=root, prefix=".fetch-") as name:
            fresh, scratch = Path(name, "fresh"), Path(name, "scratch")
            fresh.mkdir()
            if reason := _attempt(source, fresh, scratch, progress=progress):
                failures.append(f"{source.label}: {reason}")
                continue
            for extra in data.extras:
                if reason := _attempt(extra, fresh, scratch, progress=progress):
                    _log.warning(
                        "%s comes without what %s has (%s); to try again, delete %s and fetch it anew",
                        data.name, extra.label, reason, folder,
                    )  # fmt: skip
            fresh.replace(folder)
            return folder
    raise UserError(
        f"{data.name} could not be fetched ({'; '.join(failures)}); put {' or '.join(data.files)} into {folder} by hand"
    )


def _attempt(source: Source, folder: Path, scratch: Path, *, progress: bool) -> str | None:
    """Why the source failed, or None if it did not."""
    scratch.mkdir(exist_ok=True)
    try:
        source.fill(folder, scratch, progress=progress)
    except _FAILURES as error:
        return _reason(error)
    return None


def _reason(error: Exception) -> str:
    """The few words that matter of an error; requests buries them in a long chain."""
    text = str(error)
    known = {
        "NameResolutionError": "name not resolved",
        "Connection refused": "connection refused",
        "timed out": "timed out",
        "unreachable": "network unreachable",
    }
    if isinstance(error, requests.ConnectionError | requests.Timeout | subprocess.TimeoutExpired):
        return next((words for sign, words in known.items() if sign in text), type(error).__name__)
    return text.partition(". ")[0].partition("\n")[0]


def _found(name: str, candidates: Sequence[str]) -> Path | None:
    for root in roots():
        if any((root / name / candidate).is_file() for candidate in candidates):
            return root / name
    return None


def _writable_root() -> Path:
    for root in roots():
        try:
            root.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=root):
                return root
        except OSError as error:
            _log.info("%s cannot be written: %s", root, error)
    raise UserError(f"none of {', '.join(map(str, roots()))} can be written; set {VARIABLE} to a folder that can")
