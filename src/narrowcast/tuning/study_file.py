"""A study file: an experiment, a study (objectives, sampler, ...), and the space of values to search."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterable, Mapping
from copy import deepcopy
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from narrowcast.experiment import Experiment, build_experiment, defaults_for, load_experiment
from narrowcast.platform import plugins
from narrowcast.platform.config import plugin_folders, read_yaml, validate
from narrowcast.platform.errors import UserError
from narrowcast.platform.evaluation import measure
from narrowcast.platform.overrides import Defaults, apply_overrides, set_value
from narrowcast.platform.patterns import Name
from narrowcast.platform.redaction import redact_values
from narrowcast.platform.state import start
from narrowcast.platform.tracking.metric_direction import Declared, declared_by
from narrowcast.platform.tracking.metric_labels import shares_of
from narrowcast.runs import packaged
from narrowcast.runs.earlier_runs import of_one_seed, with_earlier_defaults
from narrowcast.tuning.space import Dimension, Space
from narrowcast.tuning.study_settings import StudySettings
from narrowcast.tuning.trial_runner import SharedData

logger = logging.getLogger(__name__)

PACKAGED = packaged.STUDIES
_RENAMED = {"retest": "holdout", "patience_seconds": "storage_timeout_seconds", "executor": "backend"}
"""Keys of `study` in version 0.1, and their names now."""


_EXPERIMENT = "experiment."
"""Before the dotted path of an override of the experiment."""
_AGREED = ("objectives", "constraints", "budget", "seeds")
"""Keys of `study` that all processes of a study, and those that resume it, must agree on."""


class StudySections(BaseModel):
    """A study file: an experiment, the values searched, and the settings of the search."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: Name = Field(max_length=80, description="name of the study; in a file, by default the file's")
    experiment: dict[str, Any] = Field(
        description="experiment of every trial: its name, or `base` with values on top, or all of its sections"
    )
    study: StudySettings = Field(description="objectives, sampler, pruner, budget and workers")
    space: dict[str, Dimension] = Field(min_length=1, description="values to search, by dotted path in the experiment")


class _Overridable(BaseModel):
    """The section of which an override may change a part of the defaults, as it may of the experiment's."""

    study: StudySettings


@dataclass(frozen=True)
class StudyFile:
    """A study file: `values` are its nested plain values, `experiment` those of the whole experiment."""

    name: str
    experiment: dict[str, Any]
    settings: StudySettings
    space: Space
    values: dict[str, Any]
    origin: str
    one_seed: bool = False
    """True for a study that a version began whose server and clients drew from one seed."""

    @cached_property
    def shares(self) -> Declared:
        """The metrics that the experiment's model declares as shares."""
        return shares_of(self.build({}).model)

    def experiment_with(self, params: Mapping[str, Any], **more: Any) -> Experiment:
        """Return the experiment with a trial's parameters, as `narrowcast run` takes it."""
        chosen = deepcopy(self.experiment)
        for path, value in self.space.values(params).items():
            set_value(chosen, path, deepcopy(value), defaults_for(self.origin))
        experiment = build_experiment({**chosen, **more}, self.origin)
        return of_one_seed(experiment) if self.one_seed else experiment

    def build(self, params: Mapping[str, Any], seed: int = 0) -> Experiment:
        """Return the same for a worker, with a seed so many above the file's."""
        seed += int(self.experiment.get("seed", 0))
        experiment = self.experiment_with(params, seed=seed, backend={"kind": "local"})
        # A worker keeps no checkpoint to resume from, and the last round returns a state in any case.
        return experiment.model_copy(update={"checkpoint_every": experiment.rounds})

    def plain(self) -> dict[str, Any]:
        """Return the file's values without passwords."""
        return redact_values(self.values)

    def digest(self, without: Mapping[str, Any] = MappingProxyType({})) -> str:
        """Return the sha256 of what all processes of a study must agree on.

        `without` fields that have these values it is that of an earlier version, with the defaults of that time.
        """
        base = with_earlier_defaults(self.build({})) if without else self.build({})
        identity = {
            path: value for path, value in base.identity().items() if path not in without or without[path] != value
        }
        whole = {
            "experiment": identity | {"rounds": base.rounds},
            "space": {path: each.model_dump(mode="json") for path, each in self.space.dimensions.items()},
            "study": self.settings.model_dump(mode="json", include=set(_AGREED)),
        }
        return hashlib.sha256(json.dumps(whole, sort_keys=True).encode()).hexdigest()

    def check(self, shared: SharedData) -> None:
        """Try every end of the space on the experiment; raise `UserError` for the first that it does not accept."""
        base = self.build({})
        for label, params in self.space.probes():
            try:
                experiment = self.build(params)
                if experiment.data_source == base.data_source:
                    experiment.task(shared.data)
            except UserError as error:
                raise UserError(f"{self.origin}: {label}: {str(error).removeprefix(f'{self.origin}: ')}") from error
        run = shared.run_of(base)
        self.settings.check_measured(measure(run, start(run)), declared_by(base.model))


def load_study(name_or_path: str, overrides: Iterable[str] = ()) -> StudyFile:
    """Read a study from a YAML file, or the packaged one of this name; raise `UserError`."""
    text, origin = packaged.read(name_or_path, PACKAGED, "study")
    return build_study(read_yaml(text, origin), origin, overrides)


def build_study(values: Any, origin: str, overrides: Iterable[str] = ()) -> StudyFile:
    """Validate the nested plain values of a study file, after the overrides; raise `UserError`."""
    if not isinstance(values, dict):
        raise UserError(f"{origin}: expected keys and values, got {type(values).__name__}")
    if not values.keys() & {"experiment", "study", "space"} and values.keys() & {"data", "algorithm"}:
        raise packaged.is_an_experiment(origin, origin)
    values.setdefault("name", Path(origin).stem)
    values["experiment"] = _experiment(values.get("experiment"), origin)
    values.setdefault("study", {})
    inside, outside = list[str](), list[str]()
    for override in overrides:
        (inside if override.startswith(_EXPERIMENT) else outside).append(override)
        if override.startswith("space."):
            raise UserError(f'"{override}": paths in a space have dots themselves; change the space in the file')
        if (key := override.partition("=")[0].partition(".")[0]) in Experiment.model_fields and key != "name":
            raise UserError(f'"{override}" is a setting of the experiment; write experiment.{override}')
    _rename_keys(values["study"], origin)
    apply_overrides(values["experiment"], [each.removeprefix(_EXPERIMENT) for each in inside], defaults_for(origin))
    values = apply_overrides(values, outside, Defaults(_Overridable, plugin_folders(origin)))
    _rename_keys(values["study"], origin)  # of the overrides
    sections = validate(StudySections, values, origin)
    experiment = {**sections.experiment, "name": sections.name}
    space = Space(sections.space)
    sections.study.n_trials(space)  # raises for a grid over an infinite range
    return StudyFile(sections.name, experiment, sections.study, space, values, origin)


def _rename_keys(study: Any, origin: str) -> None:
    """Translate the keys of version 0.1, in place."""
    for former, name in _RENAMED.items():
        if isinstance(study, dict) and former in study:
            logger.warning("%s: study.%s is now study.%s", origin, former, name)
            study[name] = _merged(study.get(name, {}), study.pop(former))


def _experiment(section: Any, origin: str) -> dict[str, Any]:
    """Return the values of the section: an experiment's name, or values on top of the `base` that it names."""
    if isinstance(section, str):
        section = {"base": section}
    if not isinstance(section, dict):
        raise UserError(f"{origin}: experiment: name a packaged one or a file, or write one here; got {section!r}")
    base = section.pop("base", None)
    values = packaged.read_experiment(str(base))[0] if base is not None else {}
    if base is not None and plugins.files_of(values, plugin_folders(str(base))):
        load_experiment(str(base))  # imports its classes from its own folder
    if {"problem", "solver"} & (values.keys() | section.keys()):
        raise UserError(
            f"{origin}: experiment names a problem and a solver, and studies search experiments only; compare settings "
            'of a solve as replicas, such as "narrowcast run FILE replicas.solver.rank=[2,3,4]"'
        )
    if "replicas" in {**values, **section}:
        raise UserError(f"{origin}: experiment.replicas: a study has study.seeds and study.trials_together instead")
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
