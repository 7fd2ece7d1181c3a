"""The tuning of a frontier: equal trials for every method, and the best trial of each in each band of uplink.

Points of the space are those of one Latin hypercube. They do not depend on results, so trials run in any order and on
any machine, and the common dimensions take the same values in every method's study.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from importlib.resources import files
from string import Template
from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from narrowcast.platform.config.files import Section, validate
from narrowcast.platform.config.yaml import read_yaml
from narrowcast.studies.execution import Plan, Planned
from narrowcast.studies.results import Rows
from narrowcast.studies.spec import Results, RunSpec
from narrowcast.studies.tuning import TEST_SEEDS, finished

_STUDIES = files("narrowcast_papers.frontier")
_DESIGN = (
    *((3, 3, 3, 3, 3, 3), (2, 5, 0, 5, 0, 4), (4, 6, 5, 1, 4, 6), (6, 1, 1, 0, 2, 2)),
    *((0, 2, 6, 2, 1, 1), (1, 0, 2, 4, 6, 5), (5, 4, 4, 6, 5, 0)),
)
"""Cells of the points, the centre first; no two dimensions correlate by more than 0.22, the least that was found."""
_DIGITS = 3


class Range(Section):
    """Numbers from `low` to `high`, both included; log-uniform with `log`, whole with `integer`."""

    low: float
    high: float
    log: bool = False
    integer: bool = False

    def at(self, place: float) -> str:
        """Return the value at a place in [0, 1), rounded to three significant digits."""
        if self.integer and self.log:
            return f"{math.floor(self.low * ((self.high + 1) / self.low) ** place):d}"
        if self.integer:
            return f"{math.floor(self.low + (self.high + 1 - self.low) * place):d}"
        value = self.low * (self.high / self.low) ** place if self.log else self.low + (self.high - self.low) * place
        return f"{value:.{_DIGITS}g}"


class Choice(Section):
    """One of several values, which take equal parts of [0, 1)."""

    values: tuple[Any, ...] = Field(min_length=1)

    def at(self, place: float) -> str:
        """Return the value at a place in [0, 1), as an override has it."""
        value = self.values[int(place * len(self.values))]
        return value if isinstance(value, str) else json.dumps(value)


Dimension = Annotated[
    Range | Choice, BeforeValidator(lambda value: {"values": value} if isinstance(value, list) else value)
]


class Tuning(Section):
    """The seed, the number of trials of each method, and what differs from a test run."""

    seed: int
    trials: int = Field(ge=1, le=len(_DESIGN))
    overrides: tuple[str, ...] = ()


class Method(Section):
    """A compression method: its overrides, its own dimensions, and its bands if they are not the study's.

    `memory_gib`: memory of a run, if it is much.
    """

    name: str
    experiment: str | None = None
    overrides: tuple[str, ...] = ()
    space: dict[str, Dimension] = Field({})
    bands: tuple[int, ...] | None = None
    memory_gib: float = 1.0


class Study(Section):
    """The methods of a frontier. `bands`: the uplink of a band is at most `dense_bits` / band a round."""

    name: str
    metric: str
    dense_bits: int
    bands: tuple[int, ...]
    experiment: str
    overrides: tuple[str, ...] = ()
    data_seed: bool = Field(False, description="data.seed follows the seed, so that replicas differ in the partition")
    tuning: Tuning
    space: dict[str, Dimension]
    methods: dict[str, Method]

    def trial(self, method: str, number: int) -> RunSpec:
        """Return the tuning run of a trial, 0, 1, ..."""
        return self._run(method, number, f"tuning-{self.name}", self.tuning.overrides, self.tuning.seed)

    def test(self, method: str, number: int) -> RunSpec:
        """Return the test run at the settings of a trial."""
        return self._run(method, number, f"frontier-{self.name}", (), 0)

    @property
    def trials(self) -> tuple[RunSpec, ...]:
        """The trials of all methods: the first of each, then the second of each, ..."""
        return tuple(self.trial(method, number) for number in range(self.tuning.trials) for method in self.methods)

    def _run(self, name: str, number: int, label: str, overrides: tuple[str, ...], seed: int) -> RunSpec:
        method = self.methods[name]
        space = {**self.space, **method.space}
        places = point(number)
        values = {path: each.at(place) for (path, each), place in zip(space.items(), places, strict=False)}
        own = tuple(Template(each).substitute(values) for each in method.overrides)
        common = tuple(f"{path}={values[path]}" for path in self.space)
        return RunSpec(
            f"{label}-{name.replace('_', '-')}-{number:02d}",
            method.experiment or self.experiment,
            (*self.overrides, *own, *common, *overrides),
            first_seed=seed,
            data_seed=self.data_seed,
            memory_gib=method.memory_gib,
        )

    def winners(self, results: Results) -> dict[str, dict[int, int]]:
        """Return for each method whose trials are all finished the best trial of each band that it can meet."""
        found = {}
        for name, method in self.methods.items():
            runs = [results.get(self.trial(name, number).label) for number in range(self.tuning.trials)]
            if all(runs):
                best = {band: self._best([run[0] for run in runs if run], band) for band in method.bands or self.bands}
                found[name] = {band: trial for band, trial in best.items() if trial is not None}
        return found

    def _best(self, runs: Sequence[Mapping[str, Any]], band: int) -> int | None:
        metric = f"validation.{self.metric}"
        fitting = {
            number: run["final"].get(metric, 0.0)
            for number, run in enumerate(runs)
            if band * self.share(run) <= 1 and "error" not in run
        }
        return max(fitting, key=lambda number: fitting[number]) if fitting else None

    def share(self, run: Mapping[str, Any]) -> float:
        """Return a run's uplink as a fraction of updates in float32."""
        return float(run["uplink_bits"]) / (run["rounds"] * self.dense_bits)

    def share_of_total(self, run: Mapping[str, Any]) -> float:
        """Return a run's uplink and downlink as a fraction of both in float32."""
        return float(run["uplink_bits"] + run["downlink_bits"]) / (2 * run["rounds"] * self.dense_bits)


def point(number: int) -> tuple[float, ...]:
    """Return the point of a trial in the unit cube, the centre of a cell of the design in every dimension."""
    return tuple((cell + 0.5) / len(_DESIGN) for cell in _DESIGN[number])


def read_tuning_study(name: str) -> Study:
    """Return the study of this name."""
    origin = f"{name}.yaml"
    return validate(Study, {"name": name, **read_yaml((_STUDIES / origin).read_text(), origin)}, origin)


def tuning_results(rows: Rows, study: Study) -> dict[str, list[Mapping[str, Any]]]:
    """Return the results of a study's trials by label."""
    return {spec.label: found for spec in study.trials if (found := finished(rows, spec))}


def tuning_plan(name: str) -> Plan:
    """Return the plan of a study's trials."""

    def plan(rows: Rows) -> Iterator[Planned]:
        del rows
        study = read_tuning_study(name)
        for spec in study.trials:
            yield Planned(f"tuning-{name}", spec, spec.first_seed, test=False)

    return plan


def frontier_plan(name: str) -> Plan:
    """Return the plan of the test runs of the best trials, of methods whose trials are all finished."""

    def plan(rows: Rows) -> Iterator[Planned]:
        study = read_tuning_study(name)
        winners = study.winners(tuning_results(rows, study))
        chosen = [(method, trial) for method, best in winners.items() for trial in dict.fromkeys(best.values())]
        for seed in range(TEST_SEEDS):
            for method, trial in chosen:
                yield Planned(f"frontier-{name}", study.test(method, trial), seed)

    return plan
