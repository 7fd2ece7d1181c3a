"""A trial: the attributes stored with it in Optuna, and its plain record for tables, plots and MLflow."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from optuna.trial import FrozenTrial, TrialState

from narrowcast.tuning.space import Space

OWNER = "owner"
"""The process that runs the trial."""

METRICS = "amounts"
"""The trial's metrics and costs at its last evaluation, and its rounds."""

CURVE = "curve"
"""The learning curve that pruning by one of several objectives used."""

REASON = "reason"
"""Attribute of a failed trial: the reason of the failure."""

VOID = "void"
"""Attribute of a failed trial that does not count: it was lost and is retried, or was one too many."""

ONE_TOO_MANY = "one more than the study asks for"
"""The `VOID` of a trial that another process had asked for at the same moment."""

RETRY_OF, LOSSES = "retry_of", "losses"
"""The number of the lost trial that this one repeats, and how often that trial was lost, by cause."""


def counts(trial: FrozenTrial) -> bool:
    """Return whether the trial is one of the `study.trials` that the study asks for."""
    return not (trial.state == TrialState.FAIL and VOID in trial.user_attrs)


def is_drawn(trial: FrozenTrial) -> bool:
    """Return whether the trial has a draw of its own: it repeats no other one and was not one too many."""
    return RETRY_OF not in trial.user_attrs and trial.user_attrs.get(VOID) != ONE_TOO_MANY


@dataclass(frozen=True)
class TrialRecord:
    """A trial as tables, plots and MLflow show it.

    `state` is complete, pruned, failed, lost (and retried), running or waiting. `params` are by dotted path as Optuna
    stores them, so a section is given by its label. `metrics` are those of the last evaluation, with the costs.
    """

    number: int
    state: str
    params: Mapping[str, Any]
    metrics: Mapping[str, float] = field(default_factory=dict)
    rounds: int = 0
    feasible: bool = True
    reason: str = ""
    retry_of: int | None = None
    wall_seconds: float = 0.0

    @staticmethod
    def of(trial: FrozenTrial, space: Space) -> TrialRecord:
        """Return the record of Optuna's trial."""
        attributes = trial.user_attrs
        metrics = dict(attributes.get(METRICS, {}))
        rounds = int(metrics.pop("rounds", 0))
        state = "failed" if trial.state == TrialState.FAIL else trial.state.name.lower()
        began, ended = trial.datetime_start, trial.datetime_complete
        return TrialRecord(
            number=trial.number,
            state="lost" if state == "failed" and VOID in attributes else state,
            params={path: trial.params[path] for path in space.dimensions if path in trial.params},
            metrics=metrics,
            rounds=rounds,
            feasible=all(value <= 0 for value in trial.constraints.values()),
            reason=str(attributes.get(REASON, "")),
            retry_of=attributes.get(RETRY_OF),
            wall_seconds=(ended - began).total_seconds() if began and ended else 0.0,
        )
