"""What a study has found: its trials as plain rows, the best ones, the Pareto front and the point to choose on it."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from optuna.trial import FrozenTrial, TrialState

from narrowcast.platform.types import FloatArray
from narrowcast.tuning.space import Space
from narrowcast.tuning.study_settings import COSTS, StudySettings
from narrowcast.tuning.trial_attributes import AMOUNTS, REASON, RETRY_OF, VOID


@dataclass(frozen=True)
class TrialRow:
    """A trial as tables, plots and MLflow show it; `amounts` are what it measured and spent up to its end."""

    number: int
    state: str
    """complete, pruned, failed, lost (and tried again), running or waiting"""
    drawn: Mapping[str, Any]
    """By path, a section under its name."""
    amounts: Mapping[str, float] = field(default_factory=dict)
    rounds: int = 0
    feasible: bool = True
    reason: str = ""
    retry_of: int | None = None
    wall_seconds: float = 0.0


def trial_row(trial: FrozenTrial, space: Space) -> TrialRow:
    """The plain row of Optuna's trial."""
    attributes = trial.user_attrs
    amounts = dict(attributes.get(AMOUNTS, {}))
    rounds = int(amounts.pop("rounds", 0))
    state = {TrialState.FAIL: "failed"}.get(trial.state, trial.state.name.lower())
    ended = trial.datetime_complete
    return TrialRow(
        trial.number,
        "lost" if state == "failed" and VOID in attributes else state,
        {path: trial.params[path] for path in space.dimensions if path in trial.params},
        amounts,
        rounds,
        all(value <= 0 for value in trial.constraints.values()),
        str(attributes.get(REASON, "")),
        attributes.get(RETRY_OF),
        (ended - trial.datetime_start).total_seconds() if ended and trial.datetime_start else 0.0,
    )


def objective_values(rows: Sequence[TrialRow], objectives: Mapping[str, str]) -> FloatArray:
    """What the trials reached, [trials, objectives], turned so that more is better in every column."""
    signs = np.array([1.0 if direction == "maximize" else -1.0 for direction in objectives.values()])
    values = [[row.amounts[name] for name in objectives] for row in rows]
    return signs * np.array(values, dtype=np.float64).reshape(len(rows), len(objectives))


def pareto_front(rows: Sequence[TrialRow], objectives: Mapping[str, str]) -> list[TrialRow]:
    """The feasible, complete trials that none of them beats in every objective, by the first objective; best first."""
    usable = [row for row in rows if row.state == "complete" and row.feasible]
    values = objective_values(usable, objectives)
    beaten = [
        bool(((values >= value).all(axis=1) & (values > value).any(axis=1)).any()) for value in values
    ]  # fmt: skip
    front = [place for place, lost in enumerate(beaten) if not lost]
    front.sort(key=lambda place: (*(-values[place]), usable[place].number))
    return [usable[place] for place in front]


def knee(front: Sequence[TrialRow], objectives: Mapping[str, str]) -> TrialRow:
    """The point of a front that lies furthest above the plane through its ends; costs on a logarithmic scale.

    Each objective runs from 0, the worst on the front, to 1. Below three points it is the first.
    """
    values = objective_values(front, objectives)
    for column, name in enumerate(objectives):
        if name in COSTS and (np.abs(values[:, column]) > 0).all():
            values[:, column] = np.sign(values[:, column]) * np.log(np.abs(values[:, column]))
    span = values.max(axis=0) - values.min(axis=0)
    scaled = (values - values.min(axis=0)) / np.where(span > 0, span, 1)
    return front[int(scaled.sum(axis=1).argmax())] if len(front) > 2 else front[0]


def best_trials(rows: Sequence[TrialRow], settings: StudySettings, at_most: int) -> list[TrialRow]:
    """The trials worth a second look, the chosen one first: of one objective the best, of several along the front."""
    objectives = settings.objectives
    if len(objectives) > 1:
        front = pareto_front(rows, objectives)
        if not front:
            return []
        chosen = knee(front, objectives)
        others = [row for row in front if row is not chosen]
        wanted = np.linspace(0, len(others) - 1, max(0, at_most - 1)).round() if others else np.empty(0)
        return [chosen, *(others[place] for place in sorted(set(wanted.astype(int).tolist())))]
    usable = [row for row in rows if row.state == "complete" and row.feasible]
    values = objective_values(usable, objectives)
    order = sorted(range(len(usable)), key=lambda place: (-values[place, 0], usable[place].number))
    return [usable[place] for place in order[: max(1, at_most)]]


def hypervolume(points: FloatArray, reference: FloatArray) -> float:
    """The area that points [n, 2] dominate beyond a reference point [2]; more is better in both columns."""
    area, height = 0.0, float(reference[1])
    inside = points[(points > reference).all(axis=1)]
    for x, y in inside[np.argsort(-inside[:, 0])]:
        if y > height:
            area += (x - reference[0]) * (y - height)
            height = float(y)
    return area


def write_table(rows: Sequence[TrialRow], space: Space, path: Path) -> None:
    """All trials as a CSV file."""
    amounts = list(dict.fromkeys(name for row in rows for name in row.amounts))
    head = ("trial", "state", "rounds", "feasible", "wall_seconds", "retry_of", "reason")
    with path.open("w", newline="") as stream:
        writer = csv.writer(stream)
        writer.writerow([*head, *space.dimensions, *amounts])
        for row in rows:
            facts: list[Any] = [row.number, row.state, row.rounds, row.feasible, round(row.wall_seconds, 3)]
            facts += ["" if row.retry_of is None else row.retry_of, row.reason]
            drawn = [row.drawn.get(name, "") for name in space.dimensions]
            writer.writerow([*facts, *drawn, *(row.amounts.get(name, "") for name in amounts)])
