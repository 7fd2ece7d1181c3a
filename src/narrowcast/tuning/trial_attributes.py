"""What narrowcast notes on Optuna's trials, by the names of the attributes."""

from __future__ import annotations

from optuna.trial import FrozenTrial, TrialState

OWNER = "owner"
"""The process that plays the trial."""

AMOUNTS = "amounts"
"""What the trial measured and spent up to its end, and its rounds."""

CURVE = "curve"
"""The points that pruning by one of several objectives looked at."""

REASON = "reason"
"""Why the trial failed."""

VOID = "void"
"""Why a failed trial does not count: it was lost and is tried again, or was one too many."""

RETRY_OF, LOSSES = "retry_of", "losses"
"""The lost trial that this one stands for, and how often that was lost, by what took it."""


def counts(trial: FrozenTrial) -> bool:
    """Whether this is one of the trials that a study asks for."""
    return not (trial.state == TrialState.FAIL and VOID in trial.user_attrs)
