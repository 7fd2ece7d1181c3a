"""Laws of samplers and pruners of studies."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from optuna import create_study, logging
from optuna.trial import TrialState

from narrowcast.laws.law import require
from narrowcast.tuning.pruning import Pruner
from narrowcast.tuning.samplers import PerTrialSeededSampler, Sampler
from narrowcast.tuning.space import Choice, FloatRange, Space

logging.set_verbosity(logging.ERROR)  # as `storage`; a line for each study of a law says nothing
_TRIALS = 14


@dataclass(frozen=True)
class Proposing:
    """A sampler on a space of ten combinations of a range and a choice."""

    sampler: Sampler
    space: Space

    def proposals(self, seed: int, interrupted_at: Sequence[int] = ()) -> list[dict[str, Any]]:
        """Return what the trials of a study draw; an interruption starts over with a new process's sampler."""
        sampler = self._fresh(seed)
        study = create_study(direction="maximize", sampler=sampler)
        drawn = []
        for number in range(_TRIALS):
            if number in interrupted_at:
                study.sampler = self._fresh(seed)
            trial = study.ask()
            drawn.append(self.space.draw(trial))
            study.tell(trial, -abs(float(drawn[-1]["training.learning_rate"]) - 0.4), TrialState.COMPLETE)
        return drawn

    def _fresh(self, seed: int) -> PerTrialSeededSampler:
        settings: Sampler = pickle.loads(pickle.dumps(self.sampler))
        return PerTrialSeededSampler(settings, seed, self.space, [False])


def sampler_cases(sampler: Sampler) -> dict[str, Proposing]:
    """Return the only case."""
    rate = FloatRange(low=0.1, high=0.9, step=0.2)
    return {"": Proposing(sampler, Space({"training.learning_rate": rate, "chunk_size": Choice(values=(10, 20))}))}


def proposals_depend_on_the_seed_the_trial_and_what_had_finished(case: Proposing) -> None:
    """Draw the trials of a study in one process, and in three one after the other."""
    require(case.proposals(0) == case.proposals(0, interrupted_at=(3, 11)), "after a restart the proposals are others")


def proposals_are_inside_the_space(case: Proposing) -> None:
    """Look at what the trials of two studies draw."""
    for drawn in (*case.proposals(0), *case.proposals(1)):
        rate, size = drawn["training.learning_rate"], drawn["chunk_size"]
        require(0.1 - 1e-9 <= rate <= 0.9 + 1e-9, f"training.learning_rate = {rate} is outside of 0.1 to 0.9")
        require(size in (10, 20), f"chunk_size = {size} is not 10 or 20")


SAMPLER_LAWS = (proposals_depend_on_the_seed_the_trial_and_what_had_finished, proposals_are_inside_the_space)


def pruning_is_the_same_each_time(pruner: Pruner) -> None:
    """Report the same learning curves to two studies."""
    require(_stopped(pruner) == _stopped(pickle.loads(pickle.dumps(pruner))), "other trials are stopped")


def the_best_trial_is_not_stopped(pruner: Pruner) -> None:
    """Report learning curves of which each lies above the one before."""
    rising = _stopped(pruner)
    require(
        not any(rising), f"trials {[number for number, early in enumerate(rising) if early]} were stopped as the best"
    )


def _stopped(pruner: Pruner) -> list[bool]:
    study = create_study(direction="maximize", pruner=pruner.make(), study_name="laws")
    stopped = []
    for number in range(12):
        trial, early = study.ask(), False
        for step in range(1, 9):
            trial.report(0.3 + 0.01 * number + 0.001 * step, step)
            early = early or trial.should_prune()
        stopped.append(early)
        study.tell(trial, 0.3 + 0.01 * number)
    return stopped


PRUNER_LAWS = (pruning_is_the_same_each_time, the_best_trial_is_not_stopped)
