"""Trials: as messages between a study and its workers, as attributes in Optuna, and as plain records.

A worker keeps the data set or problem that its trials share. Records are what tables, plots and MLflow show.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from optuna.trial import FrozenTrial, TrialState

from narrowcast.platform.config.plugins import said
from narrowcast.platform.errors import RunFailed, UserError
from narrowcast.tuning.space import Space

_MOST_OTHERS = 4


@dataclass(frozen=True)
class SharedSource:
    """The data that all workers share, and the source from which they were loaded.

    Other seeds and parameters may have other sources, of which a worker keeps what it loaded last.
    """

    source: Any
    data: Any
    others: list[tuple[Any, Any]] = field(default_factory=list, repr=False, compare=False)

    def loaded(self, source: Any) -> Any:
        """Return the loaded source, from the cache if possible."""
        known = [(self.source, self.data), *self.others]
        cached = next((data for its_source, data in known if its_source == source), None)
        if cached is None:
            cached = source.load()
            self.others[:] = [*self.others[1 - _MOST_OTHERS :], (source, cached)]
        return cached


@dataclass(frozen=True)
class TrialSpec:
    """A trial to run: its experiment or solve once for each seed. Test metrics are dropped unless `on_test`."""

    key: int
    runs: tuple[Any, ...]
    on_test: bool = False


@dataclass(frozen=True)
class TrialBatch:
    """Trials that a worker runs together; `budget` is the most a trial may spend, by column of its rows."""

    trials: tuple[TrialSpec, ...]
    budget: Mapping[str, float]


@dataclass(frozen=True)
class Evaluation:
    """An evaluation of a trial: its row, averaged over the seeds; or None and the reason why the trial failed.

    `round` of the row is the step of the trial, of a solve its iteration. `model_sha256` are those of the trained
    models, or of the answers. `data` are the data sources or problems of its runs, with the sha256 of what they gave.
    """

    key: int
    row: dict[str, Any] | None
    is_last: bool = False
    model_sha256: tuple[str, ...] = ()
    data: tuple[tuple[Any, str], ...] = ()
    failed: str = ""


def reason_of(error: BaseException) -> str:
    """Return why a trial failed, as one line."""
    return str(error) if isinstance(error, UserError | RunFailed) else said(error)


OWNER = "owner"
"""The process that runs the trial."""

METRICS = "amounts"
"""The trial's metrics and costs at its last evaluation, and its rounds."""

CURVE = "curve"
"""The learning curve that pruning by one of several objectives used."""

REASON = "reason"
"""Attribute of a failed trial: the reason of the failure."""

DISCARDED = "void"
"""Attribute of a failed trial that does not count: it was lost and is retried, or was surplus."""

SURPLUS = "one more than the study asks for"
"""The `DISCARDED` of a trial that another process had asked for at the same moment."""

RETRY_OF, LOSSES = "retry_of", "losses"
"""The number of the lost trial that this one repeats, and how often that trial was lost, by cause."""


def counts_towards_total(trial: FrozenTrial) -> bool:
    """Return whether the trial is one of the `study.trials` that the study asks for."""
    return not (trial.state == TrialState.FAIL and DISCARDED in trial.user_attrs)


def is_surplus(trial: FrozenTrial) -> bool:
    """Return whether the trial was one too many, which nobody ran."""
    return trial.user_attrs.get(DISCARDED) == SURPLUS


def is_drawn(trial: FrozenTrial) -> bool:
    """Return whether the trial has a draw of its own: it repeats no other one and was not one too many."""
    return RETRY_OF not in trial.user_attrs and not is_surplus(trial)


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
            state="lost" if state == "failed" and DISCARDED in attributes else state,
            params={path: trial.params[path] for path in space.dimensions if path in trial.params},
            metrics=metrics,
            rounds=rounds,
            feasible=all(value <= 0 for value in trial.constraints.values()),
            reason=str(attributes.get(REASON, "")),
            retry_of=attributes.get(RETRY_OF),
            wall_seconds=(ended - began).total_seconds() if began and ended else 0.0,
        )


def trial_records(trials: Iterable[FrozenTrial], space: Space) -> list[TrialRecord]:
    """Return the records of Optuna's trials but for surplus ones."""
    return [TrialRecord.of(trial, space) for trial in trials if not is_surplus(trial)]
