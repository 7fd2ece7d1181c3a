"""The search space of a study: ranges and choices by dotted path."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from itertools import product
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
from optuna import Trial
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from narrowcast.experiment import Experiment
from narrowcast.platform.config.fields import role_of
from narrowcast.platform.config.files import Section, suggest
from narrowcast.platform.errors import UserError

_NEAR = 0.05
"""Share of a continuous range that counts as its end."""
_GRADED = 3
"""Numbers that make a list a grid, in which an end may hide a better value beyond it."""


class _Dimension(Section):
    """`when` gives the values of other choices, by path, for which the trial has this dimension."""

    model_config = ConfigDict(allow_inf_nan=False)

    when: dict[str, Any] = Field({}, description="values of other dimensions that this one depends on")


class _Range(_Dimension):
    if TYPE_CHECKING:
        log: bool

    @model_validator(mode="after")
    def _can_be_drawn_from(self) -> _Range:
        low, high, step = (getattr(self, name) for name in ("low", "high", "step"))
        if low >= high:
            raise ValueError(f"low = {low} has to be below high = {high}")
        if self.log and low <= 0:
            raise ValueError(f"a logarithmic range has to be above 0, got low = {low}")
        if self.log and step not in (None, 1):
            raise ValueError("a logarithmic range has no step; leave out one of them")
        if step is not None and abs(round((high - low) / step) * step - (high - low)) > 1e-9 * (high - low):
            raise ValueError(f"{high} is not a whole number of steps of {step} above {low}; change high or step")
        return self


class FloatRange(_Range):
    """Numbers from `low` to `high`, uniform, log-uniform (`log`), or in steps."""

    kind: Literal["float"] = "float"
    low: float = Field(description="least value")
    high: float = Field(description="largest value")
    log: bool = Field(False, description="sample the logarithm uniformly")
    step: float | None = Field(None, gt=0, description="distance of the values; null: continuous")

    def draw(self, trial: Trial, path: str) -> Any:
        """Draw the trial's value, as Optuna stores it."""
        return trial.suggest_float(path, self.low, self.high, log=self.log, step=self.step)

    def probes(self) -> dict[str, Any]:
        """Return values by label which show whether the experiment accepts the whole range."""
        middle = self.low + (self.step or (self.high - self.low) / np.pi)
        return {"low": self.low, "high": self.high, "between": middle}

    def grid(self) -> list[Any] | None:
        """Return all values; None if there are infinitely many."""
        if self.step is None:
            return None
        return [float(f"{self.low + self.step * index:.12g}") for index in range(self._n_steps() + 1)]

    def edge(self, drawn: Any) -> Any:
        """Return the end that a value is at, of a continuous range the nearer one within `_NEAR` of it; else None."""
        low, high, value = map(math.log if self.log else float, (self.low, self.high, drawn))
        near = _NEAR * (high - low) if self.step is None else 1e-9 * (high - low)
        return self.low if value - low <= near else self.high if high - value <= near else None

    def _n_steps(self) -> int:
        return round((self.high - self.low) / (self.step or 1))

    def value(self, drawn: Any) -> Any:
        """Return the experiment's value of a stored one."""
        return drawn


class IntRange(_Range):
    """Whole numbers from `low` to `high`, both included."""

    kind: Literal["int"] = "int"
    low: int = Field(description="least value")
    high: int = Field(description="largest value")
    log: bool = Field(False, description="sample the logarithm uniformly")
    step: int = Field(1, ge=1, description="distance of the values")

    def draw(self, trial: Trial, path: str) -> Any:
        """Draw the trial's value, as Optuna stores it."""
        return trial.suggest_int(path, self.low, self.high, log=self.log, step=self.step)

    def probes(self) -> dict[str, Any]:
        """Return values by label which show whether the experiment accepts the whole range."""
        return {"low": self.low, "high": self.high}

    def grid(self) -> list[Any] | None:
        """Return all values."""
        return list(range(self.low, self.high + 1, self.step))

    def edge(self, drawn: Any) -> Any:
        """Return the end that a value is at, None if it is inside."""
        return drawn if drawn in (self.low, self.high) else None

    def value(self, drawn: Any) -> Any:
        """Return the experiment's value of a stored one."""
        return drawn


class Choice(_Dimension):
    """One of several values of any type, also sections and lists, which may be given labels."""

    kind: Literal["choice"] = "choice"
    values: dict[str, Any] | tuple[Any, ...] = Field(
        min_length=1, description="list of the values, or a section of labels with their values"
    )

    @model_validator(mode="after")
    def _are_different(self) -> Choice:
        if len(self._by_label()) < len(self.values):
            raise ValueError(f"{list(self.values)} has a value twice; keep one of them")
        return self

    def _by_label(self) -> dict[Any, Any]:
        """Return the values by what Optuna stores: the value or its label; of a section without a label, its JSON."""
        if isinstance(self.values, dict):
            return self.values
        plain = (str, int, float, bool, type(None))
        return {value if isinstance(value, plain) else json.dumps(value): value for value in self.values}

    def draw(self, trial: Trial, path: str) -> Any:
        """Draw the trial's value, as Optuna stores it."""
        return trial.suggest_categorical(path, list(self._by_label()))

    def probes(self) -> dict[str, Any]:
        """Return the values by label, as they are stored."""
        return {f"values[{index}]": label for index, label in enumerate(self._by_label())}

    def grid(self) -> list[Any]:
        """Return all values, as they are stored."""
        return list(self._by_label())

    def edge(self, drawn: Any) -> Any:
        """Return a value that is the least or largest of three numbers or more; else None."""
        numbers = [value for value in self._by_label().values() if isinstance(value, int | float)]
        graded = len(self.values) == len(numbers) >= _GRADED and not any(isinstance(value, bool) for value in numbers)
        value = self.value(drawn)
        return value if graded and value in (min(numbers), max(numbers)) else None

    def value(self, drawn: Any) -> Any:
        """Return the experiment's value of a stored one."""
        return self._by_label()[drawn]


def _list_alone(value: Any) -> Any:
    return {"kind": "choice", "values": value} if isinstance(value, list) else value


Dimension = Annotated[
    Annotated[FloatRange | IntRange | Choice, Field(discriminator="kind")],
    BeforeValidator(_list_alone, json_schema_input_type=FloatRange | IntRange | Choice | tuple[Any, ...]),
]


def edges(space: Space, drawn: Mapping[str, Any]) -> dict[str, Any]:
    """Return the ends of the ranges and lists that drawn parameters are at, by path."""
    ends = {path: space.dimensions[path].edge(value) for path, value in drawn.items()}
    return {path: end for path, end in ends.items() if end is not None}


class Space:
    """The dimensions, each after those that it depends on; raise `UserError` if there is no such order."""

    def __init__(
        self, dimensions: Mapping[str, FloatRange | IntRange | Choice], model: type[BaseModel] = Experiment
    ) -> None:
        """Order the dimensions; the fields of `model` say which of them cannot be tuned."""
        for path in dimensions:
            if (why := role_of(model, path.partition(".")[0]).not_tuned) is not None:
                raise UserError(f"space.{path} cannot be tuned: {why}")
        self.dimensions = dict(dimensions)
        for path, dimension in dimensions.items():
            for other, wanted in dimension.when.items():
                self._check_condition(path, other, wanted)
        left, order = dict(dimensions), list[str]()
        while left:
            # A section's kind comes before its fields, since setting the kind clears the section.
            ready = [path for path in left if not any(other in left for other in self._before(path))]
            if not ready:
                raise UserError(f"space: the conditions of {', '.join(left)} depend on each other; remove one")
            order.extend(ready)
            left = {path: dimension for path, dimension in left.items() if path not in ready}
        self.dimensions = {path: dimensions[path] for path in order}

    def _check_condition(self, path: str, other: str, wanted: Any) -> None:
        choice = self.dimensions.get(other)
        if not isinstance(choice, Choice) or other == path:
            known = [name for name, dimension in self.dimensions.items() if isinstance(dimension, Choice)]
            raise UserError(
                f"space.{path}.when: {other} is not a choice of this space; choices are "
                f"{', '.join(known) or 'none'}{suggest(other, known)}"
            )
        labels = choice.grid()
        for value in _listed(wanted):
            if value not in labels:
                raise UserError(f"space.{path}.when: {other} is never {value!r}; it is one of {labels}")

    def _before(self, path: str) -> list[str]:
        section = [path.rsplit(".", depth)[0] for depth in range(1, path.count(".") + 1)]
        kinds = [f"{settings}.kind" for settings in section] + section
        return [*self.dimensions[path].when, *(kind for kind in kinds if kind != path)]

    def active(self, path: str, drawn: Mapping[str, Any]) -> bool:
        """Return whether the conditions of a dimension hold among the values drawn before it."""
        return all(
            other in drawn and drawn[other] in _listed(wanted) for other, wanted in self.dimensions[path].when.items()
        )

    def draw(self, trial: Trial) -> dict[str, Any]:
        """Draw a trial's parameters by path."""
        drawn: dict[str, Any] = {}
        for path, dimension in self.dimensions.items():
            if self.active(path, drawn):
                drawn[path] = dimension.draw(trial, path)
        return drawn

    def values(self, drawn: Mapping[str, Any]) -> dict[str, Any]:
        """Return the experiment's values of drawn parameters, kinds before their fields."""
        return {path: dimension.value(drawn[path]) for path, dimension in self.dimensions.items() if path in drawn}

    def probes(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield a label and parameters for every end and choice of each dimension, the others at their first value."""
        for path, dimension in self.dimensions.items():
            for label, drawn in dimension.probes().items():
                yield f"space.{path}.{label} = {drawn!r}", self._with(path, drawn)

    def _with(self, path: str, drawn: Any) -> dict[str, Any]:
        """Return parameters with one value, those that its conditions require, and the first of every other."""
        wanted, queue = {path: drawn}, [path]
        while queue:
            for other, values in self.dimensions[queue.pop()].when.items():
                wanted[other] = _listed(values)[0]
                queue.append(other)
        chosen: dict[str, Any] = {}
        for name, dimension in self.dimensions.items():
            if self.active(name, chosen):
                chosen[name] = wanted.get(name, next(iter(dimension.probes().values())))
        return chosen

    def grid(self) -> list[dict[str, Any]]:
        """Return every combination once, as stored; raise `UserError` for an infinite range."""
        for path, dimension in self.dimensions.items():
            if dimension.grid() is None:
                raise UserError(
                    f"study.sampler = grid: space.{path} is a range without steps; give it a step, or a list of values"
                )
        distinct: dict[str, dict[str, Any]] = {}
        for combination in product(*(dimension.grid() or [] for dimension in self.dimensions.values())):
            drawn: dict[str, Any] = {}
            for path, value in zip(self.dimensions, combination, strict=True):
                if self.active(path, drawn):
                    drawn[path] = value
            distinct.setdefault(json.dumps(drawn), drawn)
        return list(distinct.values())


def _listed(wanted: Any) -> list[Any]:
    return wanted if isinstance(wanted, list) else [wanted]
