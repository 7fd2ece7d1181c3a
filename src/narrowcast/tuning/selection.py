"""Choosing among the trials of a study: the best of one objective, the Pareto front of several and its knee."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from narrowcast.platform.types import FloatArray
from narrowcast.tuning.study_settings import COSTS, StudySettings
from narrowcast.tuning.trial_record import TrialRecord

_DECADES = 100.0


def objective_values(trials: Sequence[TrialRecord], objectives: Mapping[str, str]) -> FloatArray:
    """Return the objectives' values, [trials, objectives], negated where minimised, so that higher is better."""
    signs = np.array([1.0 if direction == "maximize" else -1.0 for direction in objectives.values()])
    values = [[trial.metrics[name] for name in objectives] for trial in trials]
    return signs * np.array(values, dtype=np.float64).reshape(len(trials), len(objectives))


def pareto_front(trials: Sequence[TrialRecord], objectives: Mapping[str, str]) -> list[TrialRecord]:
    """Return the feasible, complete trials that no other dominates, ordered by the first objective, best first."""
    usable = _usable(trials)
    values = objective_values(usable, objectives)
    dominated = [bool(((values >= value).all(axis=1) & (values > value).any(axis=1)).any()) for value in values]
    front = [index for index, lost in enumerate(dominated) if not lost]
    front.sort(key=lambda index: (*(-values[index]), usable[index].number))
    return [usable[index] for index in front]


def is_logarithmic(name: str, trials: Sequence[TrialRecord]) -> bool:
    """Return whether an objective is shown and weighed by its logarithm: a cost, or of solves one over two decades."""
    values = np.abs([trial.metrics[name] for trial in trials])
    if not (values > 0).all():
        return False
    of_solves = all("iterations" in trial.metrics for trial in trials)
    return name in COSTS or (of_solves and bool(values.max(initial=1.0) > _DECADES * values.min(initial=1.0)))


def knee(front: Sequence[TrialRecord], objectives: Mapping[str, str]) -> TrialRecord:
    """Return the trial with the largest sum of objectives, each scaled from 0 to 1 along the front.

    Costs, and errors of solves over more than two decades, are scaled by their logarithm. Of a front of one or two
    trials, return the first.
    """
    values = objective_values(front, objectives)
    for column, name in enumerate(objectives):
        if is_logarithmic(name, front):
            values[:, column] = np.sign(values[:, column]) * np.log(np.abs(values[:, column]))
    span = values.max(axis=0) - values.min(axis=0)
    scaled = (values - values.min(axis=0)) / np.where(span > 0, span, 1)
    return front[int(scaled.sum(axis=1).argmax())] if len(front) > 2 else front[0]


def best_trials(trials: Sequence[TrialRecord], settings: StudySettings) -> list[TrialRecord]:
    """Return the trials for hold-out evaluation, at least one, the chosen one first.

    Of one objective these are the best; of several, the knee of the front and others spread evenly along it.
    """
    objectives, at_most = settings.objectives, max(1, settings.holdout.trials)
    if len(objectives) > 1:
        front = pareto_front(trials, objectives)
        if not front:
            return []
        chosen = knee(front, objectives)
        others = [trial for trial in front if trial is not chosen]
        spread = np.linspace(0, len(others) - 1, at_most - 1).round() if others else np.empty(0)
        return [chosen, *(others[index] for index in sorted(set(spread.astype(int).tolist())))]
    usable = _usable(trials)
    values = objective_values(usable, objectives)
    order = sorted(range(len(usable)), key=lambda index: (-values[index, 0], usable[index].number))
    return [usable[index] for index in order[:at_most]]


def _usable(trials: Sequence[TrialRecord]) -> list[TrialRecord]:
    return [trial for trial in trials if trial.state == "complete" and trial.feasible]
