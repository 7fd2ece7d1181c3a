"""The errors that end a run, their exit status, and the texts of errors and warnings."""

from __future__ import annotations

import errno
import logging
import re
from functools import cache

_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_NOT_ASCII = re.compile(r"[^ -~]")
_MOST_SHOWN = 80
"""Characters of a wrong value that an error shows."""


def notes_of(error: BaseException) -> list[str]:
    """Return the notes that were added to an error."""
    return getattr(error, "__notes__", [])  # which Python makes with the first note


class _OneLine(Exception):  # noqa: N818 - a part of errors
    """An error whose message says all: IPython shows it without the frames that it passed."""

    def _render_traceback_(self) -> list[str]:
        return [f"{type(self).__name__}: {self}", *notes_of(self)]


class UserError(_OneLine, ValueError):
    """Invalid input: one line with the value received, the values allowed and the remedy (exit status 2)."""

    def __str__(self) -> str:
        """Return the line; characters of the input that a terminal would not print are replaced."""
        return printable(super().__str__())


class RunFailed(_OneLine, RuntimeError):  # noqa: N818 - reads as the sentence the user sees
    """A run with valid input that could not be completed (exit status 1)."""


class UnresumableFailure(RunFailed):
    """A failure that resuming cannot fix: a setting that the results depend on has to change."""


class StoreRefused(UserError):  # noqa: N818 - reads as the sentence the user sees
    """An MLflow store that does not take a run, which is not to blame for it."""


class NoLearningError(UnresumableFailure):
    """A run whose global model is not the result of its clients' training; resumed, it would end the same way."""


class StoreError(RuntimeError):
    """A call that an MLflow store did not answer, or refused: its reason in one line, without a password."""


def printable(text: str, keep: str = "", *, instead: str = "?") -> str:
    """Return the text without what a terminal or page would not print but obey: escapes, controls, other directions.

    Spaces of any kind become one, other characters `instead`, but for those to `keep`; colours are left out.
    """
    if text.isprintable():
        return text

    def replaced(match: re.Match[str]) -> str:
        character = match.group()
        if character.isprintable() or character in keep:
            return character
        return " " if character.isspace() else instead

    return _NOT_ASCII.sub(replaced, _COLOUR.sub("", text))


def described(error: BaseException) -> str:
    """Return the class of an error and the first line of its message; of a `ValidationError`, its first problem."""
    from pydantic import ValidationError

    message = str(error.errors()[0]["msg"]) if isinstance(error, ValidationError) else str(error)
    return f"{type(error).__name__}: {(message.strip().splitlines() or ['no message'])[0]}"


@cache
def warn_once(logger: logging.Logger, text: str) -> None:
    """Log a warning that this process has not logged yet."""
    logger.warning("%s", text)


_OF_THE_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS)


def disk_failure(error: BaseException | None) -> OSError | None:
    """Return the error of a disk that is full, read-only or broken if it is this one or its cause, else None."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in _OF_THE_DISK:
            return error
        error = error.__cause__
    return None


_REMEDIES = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT), "make room"),
    errno.EFBIG: "raise the limit for the size of a file (ulimit -f)",
    errno.EIO: "see to the disk, which fails (the kernel's log says more)",
    errno.EROFS: "mount the disk so that it can be written",
    **dict.fromkeys((errno.EACCES, errno.EPERM), "let this user write there"),
    errno.ENAMETOOLONG: "give a shorter name, or another output folder",
    **dict.fromkeys(
        (errno.EISDIR, errno.ENOTDIR, errno.EEXIST, errno.ENOTEMPTY), "remove what has the place of a file"
    ),
    errno.ENOENT: "put back the folder that was removed",
    **dict.fromkeys((errno.EMFILE, errno.ENFILE), "raise the limit for open files (ulimit -n)"),
    errno.ESTALE: "mount the network's disk again",
}


def remedy(error: OSError) -> str:
    """Return what to do about a file that cannot be written."""
    return _REMEDIES.get(error.errno or 0, "mend that")


def shown(value: object) -> str:
    """Return a wrong value, shortened, with its type."""
    text = repr(value)
    return f"{text if len(text) <= _MOST_SHOWN else f'{text[:_MOST_SHOWN]} ...'} ({type(value).__name__})"
