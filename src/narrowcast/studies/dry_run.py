"""What a study would cost, from a few timed rounds of a configuration drawn from its space."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import Any

from narrowcast.platform.in_process import InProcess
from narrowcast.platform.play import play
from narrowcast.platform.rounds import measure, start
from narrowcast.platform.threads import one_thread
from narrowcast.studies.study_file import StudyFile
from narrowcast.studies.trial_player import Shared
from narrowcast.tuning.study import draw_one

_WARM_UP, _TIMED = 2, 5  # rounds; the first compile kernels


@dataclass(frozen=True)
class Estimate:
    """Seconds for a whole study without pruning, and what they were reckoned from."""

    drawn: dict[str, Any]
    trials: int
    rounds: int
    round_seconds: float
    evaluation_seconds: float
    seconds: float
    retest_seconds: float


def estimate(file: StudyFile, shared: Shared) -> Estimate:
    """Draw values, time a few rounds and an evaluation, and multiply."""
    settings = file.settings
    drawn = draw_one(settings, file.space)
    experiment = file.build(drawn)
    task = experiment.task(shared.data if experiment.data == shared.source else experiment.data.load())
    state = start(experiment.algorithm, task)
    with one_thread():
        measure(experiment.algorithm, task, state)
        began = time.perf_counter()
        measure(experiment.algorithm, task, state)
        evaluation = time.perf_counter() - began
    few = experiment.model_copy(
        update={"rounds": _WARM_UP + _TIMED, "evaluate_every": _WARM_UP + _TIMED, "checkpoint_every": 10**9}
    )
    walls = [outcome.wall_seconds for outcome in play(few, few.algorithm, task, InProcess(few.algorithm, task), state)]
    timed = walls[_WARM_UP:-1]  # the last has an evaluation in it
    each = sum(timed) / len(timed)
    run = experiment.rounds * each + math.ceil(experiment.rounds / experiment.evaluate_every) * evaluation
    trials = settings.n_trials(file.space)
    again = settings.retest.trials * settings.retest.seeds
    return Estimate(
        drawn,
        trials,
        experiment.rounds,
        each,
        evaluation,
        run * trials * settings.seeds / settings.parallel,
        run * again / settings.parallel,
    )
