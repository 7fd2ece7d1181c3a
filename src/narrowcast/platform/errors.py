"""The two ways a run can end badly, and what the command line makes of them."""


class UserError(ValueError):
    """Bad input: one line that says what was got, what is allowed and what to do (exit status 2)."""


class RunFailed(RuntimeError):  # noqa: N818 - reads as the sentence the user sees
    """A run that started from good input and could not be finished (exit status 1)."""
