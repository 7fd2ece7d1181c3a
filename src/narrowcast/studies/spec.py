"""The runs that a table or figure is computed from: an experiment with overrides, once per seed."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any

from narrowcast.experiment import Experiment, load_experiment
from narrowcast.packaged import names_solve
from narrowcast.platform.models.rating_baselines import BIASES, USER_MEAN
from narrowcast.solve_run import load_solve

ACCURACY, CONVERGENCE = "accuracy", "convergence"
BASELINES: Mapping[str, str] = {"user_mean": USER_MEAN, "biases": BIASES, "popularity": "popularity"}
"""The names of baselines of ratings by `RunSpec.measure`."""


@dataclass(frozen=True)
class RunSpec:
    """One setting, run once per seed: a packaged experiment or solve and overrides as on the command line.

    `label` begins the name of the run's folder. Seeds are counted from `first_seed`, and there are at most `most_seeds`
    of them. With `data_seed` the seed of a data set's split and partition follows that of the run, else it is 0.
    `memory_gib`: about how much memory a run needs. In a study, runs with the same `together` go in lockstep, and a run
    ends at the first evaluation at which the metric of `target` is at least its value. With `curve` its result has
    every evaluation, in place of runs of fewer rounds.

    `measure`: `accuracy`, the result of a run; `convergence`, also the test metrics by round of a recorded run, as
    `history`; a name of `BASELINES`; or `package.module:function`, a measurement in place of the run. The function gets
    a `Run` for a recorded table, and the specification, the seed and `test` for a study.
    """

    label: str
    experiment: str
    overrides: tuple[str, ...] = ()
    measure: str = ACCURACY
    first_seed: int = 0
    most_seeds: int | None = None
    data_seed: bool = False
    memory_gib: float = 1.0
    together: str = ""
    target: tuple[str, float] | None = None
    curve: bool = False

    def seeds(self, number: int) -> range:
        """Return the seeds of this run where `number` are asked for."""
        return range(self.first_seed, self.first_seed + min(number, self.most_seeds or number))

    @property
    def text(self) -> str:
        """The experiment and its overrides as on the command line."""
        return shlex.join([self.experiment, *self.overrides])

    @property
    def digest(self) -> str:
        """The digest of the experiment or solve with its overrides, which are the same for all seeds."""
        return digest_of(self.experiment, self.overrides)

    @property
    def measurement(self) -> Any:
        """The function that `measure` names, None if it is the name of something else."""
        module, _, function = self.measure.partition(":")
        return getattr(import_module(module), function) if function else None

    def configured(self, seed: int, name: str, rounds: int | None = None) -> Experiment:
        """Return the experiment of a seed, on the local backend."""
        own = [f"seed={seed}", f"name={name}", "backend.kind=local", "tracking.system_metrics=false"]
        data = [f"data.seed={seed if self.data_seed else 0}"]
        shorter = [f"rounds={rounds}"] if rounds else []
        return load_experiment(self.experiment, [*self.overrides, *data, *own, *shorter])


Results = Mapping[str, Sequence[Mapping[str, Any]]]
"""Label of a `RunSpec` -> the result of each seed, in the order of the seeds."""
_DIGITS = 16
"""Hexadecimal digits of a digest in a file of results, which has thousands of rows."""


@cache
def digest_of(experiment: str, overrides: tuple[str, ...]) -> str:
    """Return the first 64 bits of the digest of a packaged experiment or solve with overrides.

    Raise `UserError` if it is not valid.
    """
    load = load_solve if names_solve(experiment) else load_experiment
    return load(experiment, overrides).digest()[:_DIGITS]


def slug(name: str) -> str:
    """Return a name as part of a label: in small letters and figures, with a hyphen for what lies between."""
    return re.sub(r"[^a-z0-9.]+", "-", name.lower()).strip("-")


def best_place(tried: Sequence[Mapping[str, Any]], metric: str = "validation.accuracy") -> int:
    """Return the place of the first result with the highest metric, which counts as 0 if a run failed."""
    reached = [result["final"].get(metric, 0.0) for result in tried]
    return reached.index(max(reached))
