"""Lookup, download and verification of data sets, and lookup of the files that a user names."""

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

from narrowcast.platform.data.sets import SETS, DataSet
from narrowcast.platform.data.sources import Source
from narrowcast.platform.errors import UserError
from narrowcast.platform.storage.disk import expand_home

VARIABLE = "NARROWCAST_DATA"

_FAILURES = (
    OSError, ValueError, LookupError, EOFError, zipfile.BadZipFile, tarfile.TarError, zlib.error,
    subprocess.SubprocessError,
)  # fmt: skip
"""Errors that a source may raise: of the network, of the package index, of damaged archives."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Status:
    """A row of `narrowcast data list`; `folder` is the data set's folder, or None."""

    name: str
    description: str
    licence: str
    folder: Path | None


def roots() -> list[Path]:
    """Return the folders searched for data sets, in order."""
    named = os.environ.get(VARIABLE)
    cache = Path(os.path.expanduser("~/.cache/narrowcast/data"))  # noqa: PTH111 - unlike Path's, does not raise without a home
    return [expand_home(named), cache] if named else [cache]


def find(name: str, candidates: Sequence[str]) -> Path:
    """Return the folder that holds one of the candidate files.

    Raise `UserError` with the command that fetches the data set.
    """
    folder = _found(name, candidates)
    if folder is None:
        folders = " or ".join(str(root / name) for root in roots())
        wanted = " or ".join(candidates)
        raise UserError(f"{name} was not found: no {wanted} in {folders}; run: narrowcast data fetch {name}")
    return folder


def located(path: Path, field: str, section: str = "data") -> Path:
    """Return the file or folder at `path`: as given, or below the folders searched for data sets.

    Raise `UserError` with the folders searched if there is none.
    """
    path = expand_home(path)
    candidates = [path, *(root / path for root in roots())]
    existing = next((candidate for candidate in candidates if candidate.exists()), None)
    if existing is None:
        searched = ", ".join(dict.fromkeys(str(candidate.absolute()) for candidate in candidates))
        raise UserError(f"{section}.{field} = {path} does not exist (looked for {searched}); give its path")
    return existing


def status() -> list[Status]:
    """Return the status of every data set that can be fetched."""
    return [Status(data.name, data.description, data.licence, _found(data.name, data.files)) for data in SETS.values()]


def fetch(name: str, *, progress: bool) -> Path:
    """Return the folder of a data set, downloading it first if it is not found.

    Raise `UserError` if the name is unknown, no root is writable or every source failed.
    """
    if name not in SETS:
        raise UserError(f"unknown data set {name!r}; known: {', '.join(SETS)}")
    data = SETS[name]
    return _found(name, data.files) or download(data, _writable_root(), progress=progress)


def download(data: DataSet, root: Path, *, progress: bool) -> Path:
    """Fill `root/NAME` from the first source that works; a failed download leaves nothing there.

    Raise `UserError` if every source failed, with the reason of each, or if the folder holds other files.
    """
    folder = root / data.name
    if folder.is_dir() and any(folder.iterdir()):
        raise UserError(f"{folder} holds other files but no {' or '.join(data.files)}; move it away and retry")
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
                        "%s lacks the files of %s (%s); to retry, delete %s and fetch it again",
                        data.name, extra.label, reason, folder,
                    )  # fmt: skip
            fresh.replace(folder)
            return folder
    raise UserError(
        f"{data.name} could not be downloaded ({'; '.join(failures)}); "
        f"put {' or '.join(data.files)} into {folder} by hand"
    )


def _attempt(source: Source, folder: Path, scratch: Path, *, progress: bool) -> str | None:
    """Return the reason why the source failed, or None if it succeeded."""
    scratch.mkdir(exist_ok=True)
    try:
        source.fill(folder, scratch, progress=progress)
    except _FAILURES as error:
        return _reason(error)
    return None


def _reason(error: Exception) -> str:
    """Return the relevant part of an error message; requests buries it in a long chain."""
    import requests  # a quarter of a second, in every process of a run

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
            _log.info("%s is not writable: %s", root, error)
    raise UserError(f"none of {', '.join(map(str, roots()))} is writable; set {VARIABLE} to a writable folder")
