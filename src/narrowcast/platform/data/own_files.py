"""Lookup of the files and folders that a user names in an experiment."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from narrowcast.platform.data.fetch import roots
from narrowcast.platform.disk import expand_home
from narrowcast.platform.errors import UserError


def located(path: Path, field: str, section: str = "data") -> Path:
    """Return the file or folder at `path`: as given, or below the folders searched for data sets.

    Raise `UserError` with the folders searched if there is none.
    """
    path = expand_home(path)
    places = [path, *(root / path for root in roots())]
    found = next((place for place in places if place.exists()), None)
    if found is None:
        searched = ", ".join(dict.fromkeys(str(place.absolute()) for place in places))
        raise UserError(f"{section}.{field} = {path} does not exist (looked for {searched}); give the path of the data")
    return found


@contextmanager
def readable(path: Path, errors: tuple[type[Exception], ...], advice: str) -> Iterator[None]:
    """Raise `UserError`, with the path and the advice, for one of the errors that a library has on damaged files."""
    try:
        yield
    except UserError:
        raise
    except errors as error:
        reason = (str(error).splitlines() or ["unreadable"])[0]
        raise UserError(f"{path}: {reason:.200}; {advice}") from error
