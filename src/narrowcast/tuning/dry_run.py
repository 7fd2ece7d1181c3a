"""What a study would cost, from a few timed rounds of some configurations drawn from its space."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import Any

from narrowcast.experiment import Experiment
from narrowcast.platform.errors import RunFailed, UserError
from narrowcast.platform.evaluation import measure
from narrowcast.platform.local_backend import LocalExecutor
from narrowcast.platform.rounds import rounds
from narrowcast.platform.run import Run
from narrowcast.platform.state import start
from narrowcast.platform.threads import one_thread
from narrowcast.tuning.study_client import draw_some
from narrowcast.tuning.study_file import StudyFile
from narrowcast.tuning.trial_runner import Shared

_DRAWN = 6  # configurations, since ranks, epochs and batches make rounds of one study cost differently
_WARM_UP, _TIMED = 2, 5  # rounds; the first compile kernels


@dataclass(frozen=True)
class Estimate:
    """Seconds for a whole study without pruning, and what they were reckoned from; of rounds the dearest, too."""

    drawn: dict[str, Any]
    trials: int
    rounds: int
    round_seconds: float
    dearest_round_seconds: float
    evaluation_seconds: float
    seconds: float
    retest_seconds: float


def estimate(file: StudyFile, shared: Shared) -> Estimate:
    """Draw values, time a few rounds and an evaluation of each, and multiply; raises what fails where all fail."""
    settings = file.settings
    drawn = draw_some(settings, file.space, _DRAWN)
    experiments = [file.build(each) for each in drawn]
    timed: list[tuple[float, float]] = []
    for place, experiment in enumerate(experiments):
        try:
            timed.append(_time(experiment, shared))
        except (RunFailed, UserError):  # values that do not go together, or diverge at once: so will some trials
            if place == len(experiments) - 1 and not timed:
                raise
    each = sum(a_round for a_round, _ in timed) / len(timed)
    evaluation = sum(an_evaluation for _, an_evaluation in timed) / len(timed)
    first = experiments[0]
    run = first.rounds * each + math.ceil(first.rounds / first.evaluate_every) * evaluation
    trials = settings.n_trials(file.space)
    again = settings.retest.trials * settings.retest.seeds
    return Estimate(
        drawn[0],
        trials,
        first.rounds,
        each,
        max(a_round for a_round, _ in timed),
        evaluation,
        run * trials * settings.seeds / settings.parallel,
        run * again / settings.parallel,
    )


def _time(experiment: Experiment, shared: Shared) -> tuple[float, float]:
    """Seconds of a round and of an evaluation."""
    task = experiment.task(shared.data if experiment.data == shared.source else experiment.data.load())
    run = Run(experiment, experiment.algorithm, task)
    state = start(run)
    with one_thread():
        measure(run, state)
        began = time.perf_counter()
        measure(run, state)
        evaluation = time.perf_counter() - began
    few = experiment.model_copy(
        update={"rounds": _WARM_UP + _TIMED, "evaluate_every": _WARM_UP + _TIMED, "checkpoint_every": 10**9}
    )
    run = Run(few, few.algorithm, task)
    walls = [outcome.wall_seconds for outcome in rounds(run, LocalExecutor(run), state)]
    timed = walls[_WARM_UP:-1]  # the last has an evaluation in it
    return sum(timed) / len(timed), evaluation
