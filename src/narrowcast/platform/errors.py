"""The errors that end a run, and their exit status."""


class UserError(ValueError):
    """Invalid input: one line with the value received, the values allowed and the remedy (exit status 2)."""

    def __str__(self) -> str:
        """Return the line; characters of the input that a terminal would not print are replaced."""
        text = super().__str__()
        return "".join(each if each.isprintable() else " " if each.isspace() else "?" for each in text)


class RunFailed(RuntimeError):  # noqa: N818 - reads as the sentence the user sees
    """A run with valid input that could not be completed (exit status 1)."""


class UnresumableFailure(RunFailed):
    """A failed run that a resume would only repeat: a setting that its results depend on has to change."""


class LearnedNothing(UnresumableFailure):
    """A run whose global model is not the result of its clients' training; resumed, it would end the same way."""


class StoreError(RuntimeError):
    """A call that an MLflow store did not answer, or refused: its reason in one line, without a password."""
