"""YAML files that come with narrowcast, and files of the user's own, found by the same word."""

from __future__ import annotations

from importlib.resources.abc import Traversable
from pathlib import Path

from narrowcast.platform.config import suggest
from narrowcast.platform.errors import UserError


def summaries(folder: Traversable) -> dict[str, str]:
    """The names of a folder's YAML files and what their first comment line says of them."""
    files = sorted((entry for entry in folder.iterdir() if entry.name.endswith(".yaml")), key=lambda entry: entry.name)
    return {entry.name.removesuffix(".yaml"): entry.read_text().splitlines()[0].lstrip("# ") for entry in files}


def read(name_or_path: str, folder: Traversable, what: str) -> tuple[str, str]:
    """The text of a packaged file or of a path, and where it comes from; `UserError` where there is neither."""
    packaged = folder / f"{name_or_path}.yaml"
    if "/" not in name_or_path and packaged.is_file():
        return packaged.read_text(), f"{name_or_path}.yaml"
    path = Path(name_or_path)
    try:
        return path.read_text(), str(path)
    except FileNotFoundError:
        known = list(summaries(folder))
        raise UserError(
            f'no {what} "{name_or_path}": neither a file nor a packaged {what}; packaged: '
            f"{', '.join(known)}{suggest(name_or_path, known)}"
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        article = "an" if what == "experiment" else "a"
        raise UserError(f"{path}: cannot be read as {article} {what} file: {error}") from error
