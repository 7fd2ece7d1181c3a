"""The errors that end a run, and their exit status."""

from __future__ import annotations

import errno

_MOST_SHOWN = 80
"""Characters of a wrong value that an error shows."""


class _OneLine(Exception):  # noqa: N818 - a part of errors
    """An error whose message says all: IPython shows it without the frames that it passed."""

    def _render_traceback_(self) -> list[str]:
        return [f"{type(self).__name__}: {self}", *getattr(self, "__notes__", ())]


class UserError(_OneLine, ValueError):
    """Invalid input: one line with the value received, the values allowed and the remedy (exit status 2)."""

    def __str__(self) -> str:
        """Return the line; characters of the input that a terminal would not print are replaced."""
        text = super().__str__()
        return "".join(each if each.isprintable() else " " if each.isspace() else "?" for each in text)


class RunFailed(_OneLine, RuntimeError):  # noqa: N818 - reads as the sentence the user sees
    """A run with valid input that could not be completed (exit status 1)."""


class UnresumableFailure(RunFailed):
    """A failed run that a resume would only repeat: a setting that its results depend on has to change."""


class StoreRefused(UserError):  # noqa: N818 - reads as the sentence the user sees
    """An MLflow store that does not take a run, which is not to blame for it."""


class LearnedNothing(UnresumableFailure):
    """A run whose global model is not the result of its clients' training; resumed, it would end the same way."""


class StoreError(RuntimeError):
    """A call that an MLflow store did not answer, or refused: its reason in one line, without a password."""


def described(error: BaseException) -> str:
    """Return the class of an error and the first line of its message; of a `ValidationError`, its first problem."""
    from pydantic import ValidationError

    message = str(error.errors()[0]["msg"]) if isinstance(error, ValidationError) else str(error)
    return f"{type(error).__name__}: {(message.strip().splitlines() or ['no message'])[0]}"


_OF_THE_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS)


def disk_failure(error: BaseException | None) -> OSError | None:
    """Return the error of a disk that is full, read-only or broken if it is this one or its cause, else None."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in _OF_THE_DISK:
            return error
        error = error.__cause__
    return None


def shown(value: object) -> str:
    """Return a wrong value, shortened, with its type."""
    text = repr(value)
    return f"{text if len(text) <= _MOST_SHOWN else f'{text[:_MOST_SHOWN]} ...'} ({type(value).__name__})"
