"""A study file: an experiment, what is sought, and the space of values in which to look for it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from copy import deepcopy
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from narrowcast.experiment import Experiment, build_experiment
from narrowcast.platform.config import apply_overrides, read_yaml, set_value, validate
from narrowcast.platform.contracts import Dataset
from narrowcast.platform.errors import UserError
from narrowcast.platform.evaluation import measure
from narrowcast.platform.run import Run
from narrowcast.platform.state import start
from narrowcast.runs import packaged
from narrowcast.tuning.space import Dimension, Space
from narrowcast.tuning.study_settings import StudySettings

PACKAGED = files("narrowcast") / "experiments" / "studies"


class _Sections(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str = Field(pattern=r"^[A-Za-z0-9][\w.-]*$", max_length=80)
    experiment: dict[str, Any]
    study: StudySettings
    space: dict[str, Dimension] = Field(min_length=1)


@dataclass(frozen=True)
class StudyFile:
    """A study file that was read: `experiment` are plain nested values."""

    name: str
    experiment: dict[str, Any]
    settings: StudySettings
    space: Space
    plain: dict[str, Any]
    origin: str

    def whole(self, drawn: Mapping[str, Any], **more: Any) -> Experiment:
        """The experiment with what was drawn, as `narrowcast run` takes it."""
        chosen = deepcopy(self.experiment)
        for path, value in self.space.values(drawn).items():
            set_value(chosen, path, deepcopy(value))
        return build_experiment({**chosen, **more}, self.origin)

    def build(self, drawn: Mapping[str, Any], seed: int = 0) -> Experiment:
        """The same for a worker, with a seed so many further than the file's."""
        seed += int(self.experiment.get("seed", 0))
        experiment = self.whole(drawn, seed=seed, backend={"kind": "local"})
        # A worker keeps nothing to go on from, and the last round leaves a state in any case.
        return experiment.model_copy(update={"checkpoint_every": experiment.rounds})

    def digest(self) -> str:
        """The sha256 of what all who work on the study have to agree on."""
        whole = {
            "experiment": self.build({}).identity() | {"rounds": self.build({}).rounds},
            "space": {path: each.model_dump(mode="json") for path, each in self.space.dimensions.items()},
            "study": self.settings.identity(),
        }
        return hashlib.sha256(json.dumps(whole, sort_keys=True).encode()).hexdigest()

    def check(self, data: Dataset) -> None:
        """Try every end of the space on the experiment; raises `UserError` for the first that it does not take."""
        base = self.build({})
        for label, drawn in self.space.probes():
            try:
                experiment = self.build(drawn)
                if experiment.data == base.data:
                    experiment.task(data)
            except UserError as error:
                raise UserError(f"{self.origin}: {label}: {str(error).removeprefix(f'{self.origin}: ')}") from error
        if self.settings.trials_together * self.settings.seeds > 1 and base.schedule.kind != "synchronous":
            raise UserError(
                f"{self.origin}: schedule = {base.schedule.kind} is played one run at a time; leave out "
                "study.trials_together and study.seeds"
            )
        task = base.task(data)
        run = Run(base, base.algorithm, task)
        self.settings.check_measured(measure(run, start(run)))


def load_study(name_or_path: str, overrides: Iterable[str] = ()) -> StudyFile:
    """Read a study from a YAML file, or the packaged one of this name; raises `UserError`."""
    text, origin = packaged.read(name_or_path, PACKAGED, "study")
    values = read_yaml(text, origin)
    if not isinstance(values, dict):
        raise UserError(f"{origin}: expected keys and values, got {type(values).__name__}")
    values.setdefault("name", Path(origin).stem)
    values["experiment"] = _experiment(values.get("experiment"), origin)
    values.setdefault("study", {})
    for override in overrides:
        if override.startswith("space."):
            raise UserError(f'"{override}": paths in a space have dots themselves; change the space in the file')
    values = apply_overrides(values, overrides)
    sections = validate(_Sections, values, origin)
    experiment = {**sections.experiment, "name": sections.name}
    space = Space(sections.space)
    sections.study.n_trials(space)  # a grid has to have an end
    return StudyFile(sections.name, experiment, sections.study, space, values, origin)


def _experiment(section: Any, origin: str) -> dict[str, Any]:
    """The values of the section: an experiment's name, or keys and values on top of the `base` that it names."""
    if isinstance(section, str):
        section = {"base": section}
    if not isinstance(section, dict):
        raise UserError(f"{origin}: experiment: name a packaged one or a file, or write one here; got {section!r}")
    base = section.pop("base", None)
    values = packaged.read_experiment(str(base))[0] if base is not None else {}
    if "replicas" in {**values, **section}:
        raise UserError(f"{origin}: experiment.replicas: a study has study.seeds and study.trials_together instead")
    return _merged(values, section)


def _merged(base: Any, over: Any) -> Any:
    """Keys and values on top of others; a section of another kind replaces the one that was there."""
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
    """The names of the packaged studies and what their first comment line says of them."""
    return packaged.summaries(PACKAGED)
