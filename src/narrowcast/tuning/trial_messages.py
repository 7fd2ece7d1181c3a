"""The messages between a study and its workers: trials to run, and their evaluations."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from narrowcast.platform.errors import RunFailed, UserError
from narrowcast.platform.plugins import said


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
