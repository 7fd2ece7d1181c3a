"""The runs that a table or figure is computed from: an experiment with overrides, once per seed.

Targets are listed without loading experiments, which are imported where one is configured.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from importlib import import_module
from itertools import chain, product
from string import Template
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field, model_validator

from narrowcast.packaged import names_solve
from narrowcast.platform.config.files import Section
from narrowcast.platform.models.rating_baselines import BIASES, USER_MEAN
from narrowcast.platform.tracking.metrics import SUCCESS
from narrowcast.runs.significance import COMPARABLE_SEEDS

if TYPE_CHECKING:
    from narrowcast.experiment import Experiment

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
        from narrowcast.experiment import load_experiment

        of_run = [f"seed={seed}", f"name={name}", "backend.kind=local", "tracking.system_metrics=false"]
        data = [f"data.seed={seed if self.data_seed else 0}"]
        shorter = [f"rounds={rounds}"] if rounds else []
        return load_experiment(self.experiment, [*self.overrides, *data, *of_run, *shorter])


Results = Mapping[str, Sequence[Mapping[str, Any]]]
"""Label of a `RunSpec` -> the result of each seed, in the order of the seeds."""
_DIGITS = 16
"""Hexadecimal digits of a digest in a file of results, which has thousands of rows."""


@cache
def digest_of(experiment: str, overrides: tuple[str, ...]) -> str:
    """Return the first 64 bits of the digest of a packaged experiment or solve with overrides.

    Raise `UserError` if it is not valid.
    """
    from narrowcast.experiment import load_experiment
    from narrowcast.solve_run import load_solve

    load = load_solve if names_solve(experiment) else load_experiment
    return load(experiment, overrides).digest()[:_DIGITS]


def slug(name: str) -> str:
    """Return a name as part of a label: in small letters and figures, with a hyphen for what lies between."""
    return re.sub(r"[^a-z0-9.]+", "-", name.lower()).strip("-")


def best_place(tried: Sequence[Mapping[str, Any]], metric: str = "validation.accuracy") -> int:
    """Return the index of the first result with the highest metric, which counts as 0 if a run failed."""
    reached = [result["final"].get(metric, 0.0) for result in tried]
    return reached.index(max(reached))


def tested_name(metric: str) -> str:
    """Return the name of a metric of test data in a run's result; `attack.success` is of the global model there."""
    return metric if metric == SUCCESS else f"test.{metric}"


Value = float | str
"""A value of a field: a number, or a text as overrides have it."""
Fields = dict[str, Value | tuple[Value, ...]]


class Comparison(Section):
    """Cells of one experiment, tuned over one grid; the first one is the reference.

    `metric`: the one of test data by which cells are compared; that of validation chooses the values. With the success
    of an attack, which is better when lower, cells are tuned on validation accuracy: without training none succeeds.

    `cells`: the overrides of each by its name. In place of them `axes`: by axis the fields of each of its values; cells
    are all combinations but for those of `without`. `grid`: the values that are tried of each field, all combinations;
    a field of an axis has other ones, or a single one, for its cells. Overrides and fields have $FIELD, and $AXIS for
    the name of its value; a field of the grid that none has is itself set. The field `measure` is that of a `RunSpec`.

    Also `name` of a cell, `label` of a run and `lockstep`, which runs that go in lockstep share, are such texts; they
    have $AXIS_slug and $part too, which is empty for test runs. `until`: runs end once the metric is at least this, and
    the fewest rounds are chosen. `least`: values of fields below which there are none, so that they are not an edge.
    """

    experiment: str
    metric: Literal["accuracy", "accuracy.mean", "accuracy.worst_10_percent", "hr@10", "attack.success"] = "accuracy"
    overrides: tuple[str, ...] = ()
    cells: dict[str, tuple[str, ...]] = Field({}, validate_default=False)
    axes: dict[str, dict[str, Fields]] = Field({})
    fields: dict[str, Value] = Field({}, description="fields of all cells")
    without: tuple[dict[str, str], ...] = Field((), description="values of axes whose combinations are not cells")
    grid: dict[str, tuple[Value, ...]] = Field({})
    least: dict[str, float] = Field({})
    name: str = ""
    label: str = ""
    lockstep: str = ""
    until: float | None = None
    tuning_overrides: tuple[str, ...] = Field((), description="what a run on validation data differs in")
    seeds: int = Field(5, ge=2)
    first_seed: int = Field(0, ge=0)
    tuning_seeds: int = Field(COMPARABLE_SEEDS, ge=1)
    data_seed: bool = Field(False, description="data.seed follows the seed, so that replicas differ in the partition")
    so_far: bool = Field(False, description="a table has the first seeds that all cells have, two or more")
    curve: bool = Field(False, description="results have every evaluation")
    memory_gib: float = Field(1.0, gt=0)

    @model_validator(mode="after")
    def _has_labels_of_their_own(self) -> Comparison:
        if bool(self.cells) == bool(self.axes):
            raise ValueError("give either cells or axes")
        for names in (list(self.cells), *map(list, self.axes.values())):
            if len({slug(name) for name in names}) < len(names):
                raise ValueError("names of cells should differ in letters and figures, of which labels are made")
        if len(self.keys) < 2:
            raise ValueError("there should be two cells or more")
        if self.until is not None and self.metric == SUCCESS:
            raise ValueError(f"runs end once the metric is at least `until`, and {SUCCESS} is better when lower")
        return self

    @property
    def chosen_by(self) -> str:
        """The metric of validation data by which the values of a cell are chosen."""
        return f"validation.{'accuracy' if self.metric == SUCCESS else self.metric}"

    @property
    def compared_by(self) -> str:
        """The metric of a run's result by which cells are compared."""
        return tested_name(self.metric)

    @cached_property
    def placeholders(self) -> set[str]:
        """The names that texts have as $NAME."""
        fields = (field for values in self.axes.values() for of_value in values.values() for field in of_value.values())
        texts = (
            *map(str, self.fields.values()),
            *self.overrides,
            *chain.from_iterable(self.cells.values()),
            *map(str, fields),
            self.label,
        )
        return {name for text in texts for name in Template(text).get_identifiers()}

    @property
    def keys(self) -> list[tuple[str, ...]]:
        """The names of each cell: its own, or its value of each axis."""
        if self.cells:
            return [(name,) for name in self.cells]
        every = (dict(zip(self.axes, names, strict=True)) for names in product(*self.axes.values()))
        return [
            tuple(names.values()) for names in every if not any(left.items() <= names.items() for left in self.without)
        ]
