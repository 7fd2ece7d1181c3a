"""Runs that differ in their seeds alone, taken together: means, standard deviations and mean curves."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from narrowcast.platform.tracking import curves
from narrowcast.platform.tracking.metric_direction import Declared
from narrowcast.platform.types import FloatArray
from narrowcast.runs.result import Result
from narrowcast.runs.run_settings import SEEDS


@dataclass(frozen=True)
class SeedGroup:
    """One experiment run with one seed or several; `settings` are those of its first run by dotted path."""

    label: str
    runs: tuple[Result, ...]
    settings: Mapping[str, Any]

    @property
    def shares(self) -> Declared:
        """The metrics that the model declares as shares."""
        return self.runs[0].file.shares

    def statistics(self, value: Callable[[Result], float | None]) -> tuple[float, float]:
        """Return mean and standard deviation (n - 1) over the runs; NaN if a run lacks it, or for a single run."""
        values = np.array([np.nan if (each := value(run)) is None else each for run in self.runs], dtype=np.float64)
        return float(values.mean()), float(values.std(ddof=1)) if len(values) > 1 else np.nan

    def curve(self, cost: curves.Cost, metric: str) -> tuple[FloatArray, FloatArray, FloatArray]:
        """Return mean cost, mean and standard deviation (n - 1) of a metric in the rounds that all runs evaluated."""
        of_runs = [_by_round(run, cost, metric) for run in self.runs]
        rounds = sorted(set.intersection(*(set(each) for each in of_runs)))
        points = np.array([[each[index] for index in rounds] for each in of_runs]).reshape(len(of_runs), -1, 2)
        spread = points[:, :, 1].std(axis=0, ddof=1) if len(of_runs) > 1 else np.zeros(len(rounds))
        return points[:, :, 0].mean(axis=0), points[:, :, 1].mean(axis=0), spread


def _by_round(run: Result, cost: curves.Cost, metric: str) -> dict[float, tuple[float, float]]:
    rounds, values = curves.curve(run.history, curves.ROUND, metric)
    spent, _ = curves.curve(run.history, cost, metric)
    return dict(zip(rounds.tolist(), zip(spent.tolist(), values.tolist(), strict=True), strict=True))


def seed_groups(
    runs: Sequence[Result], settings: Sequence[Mapping[str, Any]], labels: Sequence[str], *, by_seed: bool
) -> list[SeedGroup]:
    """Return the groups in the order of their first runs.

    Runs are together if all their settings but the `SEEDS` are the same, and their seeds are all different: runs
    with equal seeds repeat a result and add nothing to a mean. A run whose settings are unknown is by itself.
    """
    together: dict[Any, list[int]] = {}
    for place, (run, of_run) in enumerate(zip(runs, settings, strict=True)):
        fixed = sorted((path, str(value)) for path, value in of_run.items() if path not in SEEDS)
        key = (run.file.algorithm, run.file.data, run.file.rounds, *fixed) if by_seed and of_run else place
        together.setdefault(key, []).append(place)
    groups: list[SeedGroup] = []
    for places in together.values():
        seeds = {tuple(str(settings[place].get(path)) for path in SEEDS) for place in places}
        for members in [places] if len(seeds) == len(places) else [[place] for place in places]:
            of_group = tuple(runs[place] for place in members)
            label = labels[members[0]] if len(members) == 1 else _common_name(of_group)
            groups.append(SeedGroup(label, of_group, settings[members[0]]))
    return _with_different_labels(groups)


def _common_name(runs: Sequence[Result]) -> str:
    names = {re.sub(r"-(seed|data\.seed|client_seed)-\d+", "", run.name) for run in runs}
    return f"{min(names, key=len)} ({len(runs)} seeds)"


def _with_different_labels(groups: list[SeedGroup]) -> list[SeedGroup]:
    labels = [each.label for each in groups]
    return [
        each
        if labels.count(each.label) == 1
        else SeedGroup(f"{each.label} {each.runs[0].name}", each.runs, each.settings)
        for each in groups
    ]
