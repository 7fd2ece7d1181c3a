"""Files of a folder that may be another person's: links are not followed, and JSON is read as plain values.

Links that lead out of a folder, which are not followed: a folder of somebody else may have them on any file.

A link within the folder is as good as a file, and so is a link to the whole folder, since the user has named that.

JSON files that a run or a study has written and reads again.
"""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from narrowcast.platform.config.trust import is_trusted
from narrowcast.platform.errors import UserError, warn_once

logger = logging.getLogger(__name__)


def leads_out(path: Path, folder: Path) -> bool:
    """Return whether a path below the folder is another place, by a link or by `..`."""
    return not _real(path).is_relative_to(_real(folder))


def own_file(folder: Path, name: str) -> Path:
    """Return the path of a file of the folder, which need not exist; raise `UserError` if a link leads out of it."""
    path = folder / name
    if leads_out(path, folder):
        raise UserError(
            f"{path} is a link to {_real(path)}, outside its folder, and is not followed; put the file itself there"
        )
    return path


def own_files(folder: Path) -> list[Path]:
    """Return the files of the folder and of those below it, sorted, without links that lead out, which are logged."""
    files = []
    for path in sorted(folder.rglob("*")):
        if leads_out(path, folder):
            warn_once(logger, f"{path} is a link to {_real(path)}, outside its folder, and is left out")
        elif path.is_file():
            files.append(path)
    return files


def check_shipped(files: Iterable[tuple[str, Path]], source: str, overrides: Iterable[str]) -> None:
    """Raise `UserError` if a file that is to be sent with an experiment lies elsewhere, by the word of its file alone.

    The folder of the experiment's file may be left by the user's own word: an override, or trust in the folder. `files`
    are the settings that name a file, and its path; `source` is the file of the experiment, or no file.
    """
    if not Path(source).is_file():
        return  # a packaged experiment names no files, so that these are from overrides
    folder, given = Path(source).resolve().parent, "\n".join(overrides)
    for setting, path in files:
        if leads_out(path, folder) and not is_trusted(folder) and not _names(given, path):
            raise UserError(
                f"{setting} = {path}: is not below {folder}, the folder of {Path(source).name}, and would be sent with "
                "it; put it there, give it as an override, or trust the folder: narrowcast trust FOLDER"
            )


def _names(text: str, path: Path) -> bool:
    """Return whether a text of YAML has the path, and not one that begins or ends as it does."""
    return re.search(rf"""(?<![^\s=:,"'{{[])(\./)*{re.escape(str(path))}(?![^\s,"'}}\]])""", text) is not None


def _real(path: Path) -> Path:
    return Path(os.path.realpath(path))  # which, unlike `resolve`, takes links in a circle


def read_json(path: Path, remedy: str) -> dict[str, Any]:
    """Return the object in a JSON file; raise `UserError` with the remedy if it is unreadable or no object."""
    own_file(path.parent, path.name)
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path}: unreadable ({error}); {remedy}") from error
    if not isinstance(content, dict):
        raise UserError(f"{path}: expected an object, got {type(content).__name__}; {remedy}")
    return content
