"""The estimated cost of a study, from a few timed rounds or iterations of some configurations drawn from its space."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from narrowcast.platform.errors import RunFailed, UserError
from narrowcast.tuning.study_client import draw_without_study
from narrowcast.tuning.study_file import StudyFile

_CONFIGURATIONS = 6  # several, since ranks, epochs and batches change the cost of a round


@dataclass(frozen=True)
class Estimate:
    """Estimated seconds of all trials without pruning, and of the hold-out evaluation.

    `steps` are the rounds or iterations of a trial that ends by their number. `step_seconds` and `evaluation_seconds`
    are means over the drawn configurations; `params` is the first of them.
    """

    params: dict[str, Any]
    trials: int
    steps: int
    step_seconds: float
    slowest_step_seconds: float
    evaluation_seconds: float
    seconds: float
    holdout_seconds: float


def estimate(file: StudyFile, shared: Any) -> Estimate:
    """Time a few steps and an evaluation of some configurations, and multiply; raise the last error if all fail."""
    settings = file.settings
    drawn = draw_without_study(settings, file.space, _CONFIGURATIONS)
    runs = [file.build(params) for params in drawn]
    timed: list[tuple[float, float]] = []
    for index, each in enumerate(runs):
        try:
            timed.append(file.subject.timed(each, shared))
        except (RunFailed, UserError):  # values that do not fit together or diverge at once, as in some trials
            if index == len(runs) - 1 and not timed:
                raise
    step_seconds, evaluation_seconds = (sum(column) / len(timed) for column in zip(*timed, strict=True))
    first, steps = runs[0], int(getattr(runs[0], file.subject.steps))
    run = steps * step_seconds + math.ceil(steps / first.evaluate_every) * evaluation_seconds
    trials, holdout_runs = settings.n_trials(file.space), settings.holdout.trials * settings.holdout.seeds
    return Estimate(
        params=drawn[0],
        trials=trials,
        steps=steps,
        step_seconds=step_seconds,
        slowest_step_seconds=max(seconds for seconds, _ in timed),
        evaluation_seconds=evaluation_seconds,
        seconds=run * trials * settings.seeds / settings.workers,
        holdout_seconds=run * holdout_runs / settings.workers,
    )
