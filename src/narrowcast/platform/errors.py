"""The two errors that end a run, and their exit status."""


class UserError(ValueError):
    """Invalid input: one line with the value received, the values allowed and the remedy (exit status 2)."""


class RunFailed(RuntimeError):  # noqa: N818 - reads as the sentence the user sees
    """A run with valid input that could not be completed (exit status 1)."""
