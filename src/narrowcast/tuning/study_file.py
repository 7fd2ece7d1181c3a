"""A study file: an experiment or a solve, a study (objectives, sampler, ...), and the space of values to search."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from pydantic import Field

from narrowcast import packaged
from narrowcast.platform.config import plugins
from narrowcast.platform.config.fields import Name
from narrowcast.platform.config.files import (
    Defaults,
    Section,
    apply_overrides,
    not_a_mapping,
    plugin_folders,
    set_value,
    validate,
)
from narrowcast.platform.config.kinds import plain_values
from narrowcast.platform.config.redaction import redact_values
from narrowcast.platform.config.yaml import read_yaml
from narrowcast.platform.errors import UserError
from narrowcast.platform.tracking.metrics import FractionMetrics
from narrowcast.tuning.settings import StudySettings
from narrowcast.tuning.space import Dimension, Space
from narrowcast.tuning.subject import ExperimentKind, RunKind, SolveKind

PACKAGED = packaged.STUDIES
_OF_RUNS = {"data", "algorithm"}
"""Sections of an experiment, and of no solve or study."""
_AGREED = ("objectives", "constraints", "budget", "seeds")
"""Keys of `study` that all processes of a study, and those that resume it, must agree on."""


class StudySections(Section):
    """A study file: an experiment or a solve, the values searched, and the settings of the search."""

    name: Name = Field(max_length=80, description="name of the study; in a file, by default the file's")
    experiment: dict[str, Any] | None = Field(
        None, description="experiment of every trial: its name, or `base` with values on top, or all of its sections"
    )
    solve: dict[str, Any] | None = Field(
        None, description="the same, for trials that are solves; in place of experiment"
    )
    study: StudySettings = Field(description="objectives, sampler, pruner, budget and workers")
    space: dict[str, Dimension] = Field(min_length=1, description="values to search, by dotted path in the experiment")


class _Overridable(Section):
    """The section of which an override may change a part of the defaults, as it may of the run's."""

    study: StudySettings


@dataclass(frozen=True)
class StudyFile:
    """A study file: `values` are its nested plain values, `base` those of the whole experiment or solve."""

    name: str
    subject: RunKind
    base: dict[str, Any]
    settings: StudySettings
    space: Space
    values: dict[str, Any]
    origin: str

    @cached_property
    def shares(self) -> FractionMetrics:
        """The metrics that are declared as shares."""
        return self.subject.shares(self.build({}))

    def run_with(self, params: Mapping[str, Any], **more: Any) -> Any:
        """Return the experiment or solve with a trial's parameters, as `narrowcast run` takes it."""
        chosen = deepcopy(self.base)
        for path, value in self.space.values(params).items():
            set_value(chosen, path, deepcopy(value), self.subject.defaults(self.origin))
        return self.subject.build({**chosen, **more}, self.origin)

    def build(self, params: Mapping[str, Any], seed: int = 0) -> Any:
        """Return the same for a worker, with a seed so many above the file's."""
        return self.subject.of_worker(self.run_with(params, seed=seed + int(self.base.get("seed", 0))))

    def plain(self) -> dict[str, Any]:
        """Return the file's values without passwords."""
        return redact_values(self.values)

    def digest(self) -> str:
        """Return the sha256 of what all processes of a study must agree on."""
        agreed = {
            self.subject.section: self.subject.identity(self.build({})),
            "space": {path: dimension.model_dump(mode="json") for path, dimension in self.space.dimensions.items()},
            "study": self.settings.model_dump(mode="json", include=set(_AGREED)),
        }
        return hashlib.sha256(json.dumps(agreed, sort_keys=True).encode()).hexdigest()

    def check(self, shared: Any) -> None:
        """Try every end of the space on the run; raise `UserError` for the first that it does not accept."""
        base = self.build({})
        for label, params in self.space.probes():
            try:
                self.subject.check(self.build(params), shared)
            except UserError as error:
                raise UserError(f"{self.origin}: {label}: {str(error).removeprefix(f'{self.origin}: ')}") from error
        subject = self.subject
        selectable, measured = subject.selectable(base, shared)
        of_attack = all(path.startswith("attack.") for path in self.space.dimensions)
        costs, declared = subject.costs, subject.declared(base)
        self.settings.check_measured(subject.section, selectable, measured, costs, declared, of_attack=of_attack)


def load_study(source: str | Mapping[str, Any], overrides: Iterable[str] = ()) -> StudyFile:
    """Read a study from a YAML file, the packaged one of a name, or a mapping of values; raise `UserError`."""
    if isinstance(source, Mapping):
        return build_study(plain_values(source), str(source.get("name", "study")), overrides)
    text, origin = packaged.read(source, PACKAGED, "study")
    return build_study(read_yaml(text, origin), origin, overrides)


def build_study(values: Any, origin: str, overrides: Iterable[str] = ()) -> StudyFile:
    """Validate the nested plain values of a study file, after the overrides; raise `UserError`."""
    if not isinstance(values, dict):
        raise UserError(f"{origin}: {not_a_mapping(values)}")
    if values.keys().isdisjoint(("experiment", "solve", "study", "space")) and values.keys() & _OF_RUNS:
        raise packaged.is_an_experiment(origin, origin)
    if {"experiment", "solve"} <= values.keys():
        raise UserError(f"{origin}: a study has an experiment or a solve, not both; remove one of the sections")
    values.setdefault("name", Path(origin).stem)
    subject: RunKind = SolveKind() if "solve" in values else ExperimentKind()
    values[subject.section] = _base(values.get(subject.section), subject, origin)
    values.setdefault("study", {})
    of_run, inside, outside = f"{subject.section}.", list[str](), list[str]()
    for override in _by_field(overrides, subject.section):
        (inside if override.startswith(of_run) else outside).append(override)
        if override.startswith("space."):
            raise UserError(f'"{override}": paths in a space have dots themselves; change the space in the file')
        if (key := override.partition("=")[0].partition(".")[0]) in subject.model.model_fields and key != "name":
            raise UserError(f'"{override}" is a setting of the {subject.section}; write {subject.section}.{override}')
    defaults = subject.defaults(origin)
    apply_overrides(values[subject.section], [override.removeprefix(of_run) for override in inside], defaults)
    values = apply_overrides(values, outside, Defaults(_Overridable, plugin_folders(origin)))
    sections = validate(StudySections, values, origin)
    base = {**getattr(sections, subject.section), "name": sections.name}
    space = Space(sections.space, subject.model)
    sections.study.n_trials(space)  # raises for a grid over an infinite range
    return StudyFile(sections.name, subject, base, sections.study, space, values, origin)


def _by_field(overrides: Iterable[str], section: str) -> Iterator[str]:
    """Yield the overrides, one that gives the section a mapping as one for each of its fields."""
    for override in overrides:
        path, _, text = override.partition("=")
        value = read_yaml(text, f"override {path}") if path == section else None
        if isinstance(value, dict):
            yield from (f"{section}.{key}={json.dumps(entry)}" for key, entry in value.items())
        else:
            yield override


def _base(section: Any, subject: RunKind, origin: str) -> dict[str, Any]:
    """Return the values of the section: a run's name, or values on top of the `base` that it names."""
    name = subject.section
    if isinstance(section, str):
        section = {"base": section}
    if not isinstance(section, dict):
        raise UserError(f"{origin}: {name}: name a packaged one or a file, or write one here; got {section!r}")
    base = section.pop("base", None)
    values = packaged.read_experiment(str(base))[0] if base is not None else {}
    of_solve, keys = ({"problem", "solver"} & (values.keys() | section.keys())), (values.keys() | section.keys())
    if of_solve and name == "experiment":
        raise UserError(f"{origin}: experiment has a problem and a solver; write it as the section solve")
    if name == "solve" and keys & _OF_RUNS:
        raise UserError(f"{origin}: solve has the sections of an experiment; write it as the section experiment")
    if base is not None and plugins.files_of(values, plugin_folders(str(base))):
        subject.build(values, str(base))  # imports its classes from its own folder
    if "replicas" in {**values, **section}:
        raise UserError(f"{origin}: {name}.replicas: a study has study.seeds and study.trials_together instead")
    return _merged(values, section)


def _merged(base: Any, over: Any) -> Any:
    """Return values on top of others; a section of another kind replaces the former one."""
    if isinstance(base, str):
        base = {"kind": base}
    if (
        not isinstance(base, dict)
        or not isinstance(over, dict)
        or over.get("kind", base.get("kind")) != base.get("kind")
    ):
        return over
    return {**base, **{key: _merged(base[key], value) if key in base else value for key, value in over.items()}}


def packaged_studies() -> dict[str, str]:
    """Return the names of the packaged studies, with the first comment line of each."""
    return packaged.summaries(PACKAGED)
