"""The estimated cost of a study, from a few timed rounds of some configurations drawn from its space."""

from __future__ import annotations

import math
import time
from contextlib import closing
from dataclasses import dataclass
from typing import Any

from narrowcast.experiment import Experiment
from narrowcast.platform.errors import RunFailed, UserError
from narrowcast.platform.evaluation import measure
from narrowcast.platform.local_backend import LocalBackend
from narrowcast.platform.state import start
from narrowcast.platform.threads import one_thread
from narrowcast.tuning.study_client import draw_without_study
from narrowcast.tuning.study_file import StudyFile
from narrowcast.tuning.trial_runner import SharedData

_CONFIGURATIONS = 6  # several, since ranks, epochs and batches change the cost of a round
_WARM_UP, _TIMED = 2, 5  # rounds; the first compile kernels


@dataclass(frozen=True)
class Estimate:
    """Estimated seconds of all trials without pruning, and of the hold-out evaluation.

    `round_seconds` and `evaluation_seconds` are means over the drawn configurations; `params` is the first of them.
    """

    params: dict[str, Any]
    trials: int
    rounds: int
    round_seconds: float
    slowest_round_seconds: float
    evaluation_seconds: float
    seconds: float
    holdout_seconds: float


def estimate(file: StudyFile, shared: SharedData) -> Estimate:
    """Time a few rounds and an evaluation of some configurations, and multiply; raise the last error if all fail."""
    settings = file.settings
    drawn = draw_without_study(settings, file.space, _CONFIGURATIONS)
    experiments = [file.build(params) for params in drawn]
    timed: list[tuple[float, float]] = []
    for index, experiment in enumerate(experiments):
        try:
            timed.append(_time(experiment, shared))
        except (RunFailed, UserError):  # values that do not fit together or diverge at once, as in some trials
            if index == len(experiments) - 1 and not timed:
                raise
    round_seconds, evaluation_seconds = (sum(column) / len(timed) for column in zip(*timed, strict=True))
    first = experiments[0]
    run = first.rounds * round_seconds + math.ceil(first.rounds / first.evaluate_every) * evaluation_seconds
    trials, holdout_runs = settings.n_trials(file.space), settings.holdout.trials * settings.holdout.seeds
    return Estimate(
        params=drawn[0],
        trials=trials,
        rounds=first.rounds,
        round_seconds=round_seconds,
        slowest_round_seconds=max(seconds for seconds, _ in timed),
        evaluation_seconds=evaluation_seconds,
        seconds=run * trials * settings.seeds / settings.workers,
        holdout_seconds=run * holdout_runs / settings.workers,
    )


def _time(experiment: Experiment, shared: SharedData) -> tuple[float, float]:
    """Return the seconds of a round and of an evaluation."""
    rounds = _WARM_UP + _TIMED
    few = experiment.model_copy(update={"rounds": rounds, "evaluate_every": rounds, "checkpoint_every": 10**9})
    run = shared.run_of(few)
    state = start(run)
    with one_thread():
        measure(run, state)
        began = time.perf_counter()
        measure(run, state)
        evaluation = time.perf_counter() - began
    with closing(LocalBackend().run(run, state)) as outcomes:
        seconds = [outcome.wall_seconds for outcome in outcomes]
    timed = seconds[_WARM_UP:-1]  # the last round has an evaluation
    return sum(timed) / len(timed), evaluation
