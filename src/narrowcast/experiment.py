"""An experiment: everything a run is made of, in one frozen model that reads from and writes to YAML.

The model that a run starts from: that of another run or a file, and what no client trains in it.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from copy import deepcopy
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from pydantic import BaseModel, ConfigDict, Field
from safetensors import SafetensorError

from narrowcast import packaged
from narrowcast.algorithms.channel.radio import CellRadio
from narrowcast.algorithms.local_training.factorisation import FactorisationSGD
from narrowcast.algorithms.secure.schemes import AnyScheme, NoProtection, library
from narrowcast.cluster.backend import RayBackend
from narrowcast.platform.config.catalog import (
    ALGORITHMS,
    ATTACKS,
    BACKENDS,
    DATA,
    FLEETS,
    MODEL_DEFAULTS,
    MODELS,
    TRAINING_DEFAULTS,
    TRAININGS,
)
from narrowcast.platform.config.fields import Role, role_of
from narrowcast.platform.config.files import (
    FROZEN,
    MODEL,
    START,
    Defaults,
    apply_overrides,
    flatten,
    plain_values,
    plugin_folders,
    set_value,
    validate,
)
from narrowcast.platform.config.kinds import kind_in
from narrowcast.platform.config.run_fields import Identified, LastingPath, Tracking
from narrowcast.platform.contracts import Algorithm, Fleet, Task, Training
from narrowcast.platform.data.dataset import Dataset, DataSource
from narrowcast.platform.errors import UserError
from narrowcast.platform.models.factorisation import MatrixFactorisation
from narrowcast.platform.models.model import Model
from narrowcast.platform.rounds.adversary import Attack, recruited
from narrowcast.platform.rounds.fleet import Tiers, check_profiles
from narrowcast.platform.rounds.loop import Backend, LocalBackend
from narrowcast.platform.rounds.plan import Plan
from narrowcast.platform.rounds.sampling import cohort_size, drawn_new_clients
from narrowcast.platform.rounds.state import Run
from narrowcast.platform.storage.disk import read_tensors
from narrowcast.platform.tracking.metrics import Targets
from narrowcast.platform.types import Arrays


class _Checked(type(Plan)):  # type: ignore[misc]
    """Makes an experiment built in Python the same as one read from a file: its defaults, checks and errors."""

    def __call__(cls, **values: Any) -> Experiment:
        return build_experiment({"name": "experiment", **values}, "Experiment")


def _default_backend() -> Backend:
    """Return the backend of an experiment that names none; RAY_ADDRESS says that there is a cluster."""
    return RayBackend() if os.environ.get("RAY_ADDRESS") else LocalBackend()


LATER = {"new_clients": 0, "attack": None, "clock.uploads": "parallel", "data.labelled": None}
"""Settings that earlier versions did not have, by dotted path, each with the value for which runs are as they were."""


class Experiment(Plan, Identified, metaclass=_Checked):
    """One federated run: data, model, algorithm, fleet, where it runs and where it is tracked.

    Fields left out have the defaults of an experiment file, `model` and `training` those of its data set; a `UserError`
    names each wrong field.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", arbitrary_types_allowed=True)

    data: Annotated[DataSource, DATA, Role(shared=True)] = Field(
        description="data set and its partition across clients"
    )
    model: Annotated[Model, MODELS] = Field(
        MatrixFactorisation(), description="model that the clients train; its default depends on the data set"
    )
    start_from: LastingPath = Field(
        None,
        description="folder of a finished run of the same model and data, or safetensors file, whose global model is "
        "that before round 1; null: drawn from the seed",
    )
    algorithm: Annotated[Algorithm, ALGORITHMS] = Field(
        description="federated algorithm, with the codec of its uploads"
    )
    secure: AnyScheme = Field(NoProtection(), description="secure aggregation of the updates")
    training: Annotated[Training, TRAININGS] = Field(
        FactorisationSGD(), description="local training of a client; its defaults depend on the data set"
    )
    fleet: Annotated[Fleet, FLEETS] = Field(Tiers(), description="uplink, downlink and compute speed of each client")
    attack: Annotated[Attack, ATTACKS] | None = Field(
        None, description="what the attackers among the clients do; null: all clients are honest"
    )
    radio: CellRadio | None = Field(
        None,
        description="channel, budgets and allocation of a round's bits; null: the links of the fleet, without budgets",
    )
    backend: Annotated[
        Backend, BACKENDS, Role(identity=False, shared=True, not_tuned="study.backend says where trials run")
    ] = Field(
        default_factory=_default_backend,
        description="where clients train: local, in this process, or ray; ray is the default if RAY_ADDRESS is set",
    )
    tracking: Annotated[
        Tracking, Role(identity=False, shared=True, not_tuned="all trials of a study go to one store")
    ] = Field(Tracking(), description="MLflow store of the run")
    targets: Annotated[Targets, Role(identity=False, not_tuned="they do not affect a run")] = Field(
        {}, description="values of metrics; rounds, bits and simulated time until each is reached are reported"
    )

    def task(self, data: Dataset, folder: Path | None = None) -> Task:
        """Return the task of the client hosts; `folder` is that of the run, which may hold a copy of `start_from`.

        Raise `UserError` if the parts of the task do not fit together.
        """
        profiles = check_profiles(self.fleet.profiles(data.examples, self.seed), self.fleet.kind, data.n_clients)
        start = None
        if self.start_from is not None:
            start = start_model(Path(self.start_from), folder, self.model, data, self.seed)
        adversary = None
        if self.attack is not None:
            new = drawn_new_clients(self.new_clients, data.n_clients, self.seed)
            adversary = recruited(self.attack, data, new, self.seed, self.private_seed)
        task = Task(data, profiles, self.model, self.training, self.seed, self.private_seed, start, adversary)
        algorithm = self.secured_algorithm
        Run(self, algorithm, task).check()
        task = pinned(task, folder)
        if not (self.algorithm.traits.global_model or self.evaluate_clients):
            raise UserError(
                f"algorithm.kind = {self.algorithm.kind} has no global model to evaluate; set evaluate_clients = "
                "test, which measures the model of each client"
            )
        if self.radio and self.radio.downlink.kind == "broadcast":
            self._check_one_transmission()
        if self.training.traits.shared_negatives and not algorithm.traits.codes_row_lists:
            raise UserError(
                "training.shared_negatives = true: only row lists of touched rows sent through a codec become shorter, "
                "and this run sends none; leave it out"
            )
        return task

    def _check_one_transmission(self) -> None:
        """Raise `UserError` if clients are sent messages of which the longest does not contain the others."""
        downloads = self.algorithm.traits.downloads
        if downloads == "slices":
            raise UserError(
                f"radio.downlink = broadcast sends all clients the same, and algorithm.kind = {self.algorithm.kind} "
                "as set here sends each its own part of the model; use radio.downlink = unicast, or nested slices"
            )
        if downloads == "by_client":
            raise UserError(
                f"radio.downlink = broadcast sends all clients the same, and algorithm.kind = {self.algorithm.kind} "
                "as set here sends each its own message; use radio.downlink = unicast, or no algorithm.download with "
                "rows = touched or a history"
            )

    @property
    def data_source(self) -> DataSource:
        """The data set with its seed: that of the run, unless `data.seed` is set."""
        return self.data.of_seed(self.seed)

    @property
    def secured_algorithm(self) -> Algorithm:
        """The algorithm with its sum protected as `secure` says; `UserError` where a library for that is missing."""
        if isinstance(self.secure, NoProtection):
            return self.algorithm
        for name in self.secure.needs:
            library(name, f"secure.kind = {self.secure.kind}")
        from narrowcast.algorithms.secure.aggregation import SecureAggregation

        if self.schedule.kind == "buffered":
            raise UserError(
                f"secure.kind = {self.secure.kind}: a buffered schedule weights updates by their age, which needs each "
                "of them; use schedule = synchronous"
            )
        return SecureAggregation(
            self.algorithm, self.secure, cohort_size(self.clients_per_round, self.over_selection, sys.maxsize)
        )

    @classmethod
    def identity_of(cls, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return those of the nested values that are part of the identity, by dotted path.

        With a seed of the clients' own, runs are others than those of version 0.2, whose streams were not hashed.
        Without what `LATER` names, they are those of versions that did not have it.
        """
        own = values.get("client_seed") not in (None, values.get("seed"))
        identity = super().identity_of(values) | ({"client_streams": "hashed"} if own else {})
        return {name: value for name, value in identity.items() if (name, value) not in LATER.items()}


def load_experiment(source: str | Mapping[str, Any] | Experiment, overrides: Iterable[str] = ()) -> Experiment:
    """Return the experiment of a name, file, mapping or object, with overrides `a.b=value`."""
    experiments = load_replicas(source, overrides)
    if len(experiments) > 1:
        raise UserError(f"{experiments[0].name} is one of {len(experiments)} replicas; leave replicas out here")
    return experiments[0]


def load_replicas(source: str | Mapping[str, Any] | Experiment, overrides: Iterable[str] = ()) -> list[Experiment]:
    """Return the experiment of `load_experiment` once for every combination of the values under `replicas`."""
    overrides = list(overrides)
    if isinstance(source, Experiment):
        if not overrides:
            return [source]
        values, origin = plain_values(source), source.name
    else:
        values, origin = packaged.read_experiment(source)
    defaults = defaults_for(origin)
    return [
        build_experiment(experiment, origin)
        for experiment in replicas_of(Experiment, values, origin, defaults, overrides)
    ]


def replicas_of(
    model: type[BaseModel], values: dict[str, Any], origin: str, defaults: Defaults, overrides: Iterable[str]
) -> Iterator[dict[str, Any]]:
    """Yield the values with overrides once for every combination of those under `replicas`, each with its name."""
    values = apply_overrides(values, overrides, defaults)
    grid = _read_grid(model, values.pop("replicas", {}), origin)
    for combination in product(*grid.values()):
        chosen, name = deepcopy(values), str(values["name"])
        for path, value in zip(grid, combination, strict=True):
            set_value(chosen, path, value, defaults)
            name += f"-{path.rpartition('.')[2]}-" + re.sub(r"[^\w.-]", "", str(value))
        yield {**chosen, "name": name}


def defaults_for(origin: str) -> Defaults:
    """Return the defaults of an experiment that is read from a file."""
    return Defaults(
        Experiment,
        plugin_folders(origin),
        lambda values: {"model": _suited_model(values), "training": _suited_training(values)["kind"]},
    )


def _data_kind(values: Mapping[str, Any]) -> str:
    data = values.get("data")
    return data if isinstance(data, str) else str(kind_in(data))


def _suited_model(values: Mapping[str, Any]) -> str:
    return MODEL_DEFAULTS.get(_data_kind(values), "mlp")


def _suited_training(values: Mapping[str, Any]) -> Mapping[str, Any]:
    return TRAINING_DEFAULTS.get(_data_kind(values), {"kind": "sgd"})


def _read_grid(model: type[BaseModel], values: Any, origin: str) -> dict[str, list[Any]]:
    advice = "give a list of different values by dotted path, such as replicas.seed=[0,1,2]"
    if not isinstance(values, dict):
        raise UserError(f"{origin}: replicas = {values!r}: {advice}")
    grid = flatten(values)
    for path, choices in grid.items():
        if not isinstance(choices, list) or not choices or len(set(map(str, choices))) < len(choices):
            raise UserError(f"{origin}: replicas.{path} = {choices!r}: {advice}")
        if role_of(model, path.split(".")[0]).shared:
            raise UserError(f"{origin}: replicas.{path}: replicas share {path.split('.')[0]}; start runs of their own")
    return grid


def build_experiment(values: dict[str, Any], origin: str) -> Experiment:
    """Return the validated experiment, with the default model and the training defaults of its data set."""
    model, training = values.get("model", {}), values.get("training", {})
    if isinstance(model, dict):
        values = {**values, "model": {"kind": _suited_model(values), **model}}
    if isinstance(training, dict):
        defaults = _suited_training(values)
        if training.get("kind", defaults["kind"]) != defaults["kind"]:
            defaults = {}
        values = {**values, "training": {**defaults, **training}}
    return validate(Experiment, values, origin)


def packaged_experiments() -> dict[str, str]:
    """The names of the packaged experiments and what their first comment line says of them."""
    return packaged.summaries(packaged.EXPERIMENTS)


def start_model(source: Path, folder: Path | None, model: Model, data: Any, seed: int) -> Arrays:
    """Return what is trained in the model of a finished run's folder or of a safetensors file, in its precision here.

    The copy in `folder`, that of the run which starts from it, goes first. Raise `UserError` if there is no model, if
    it is damaged, or if its arrays are not those of the model or, where they are not trained, have other values.
    """
    path = source / MODEL if source.is_dir() else source
    if folder is not None and (folder / START).is_file():
        path = folder / START
    try:
        start, _ = read_tensors(path)
    except (OSError, SafetensorError) as error:
        raise UserError(
            f"start_from = {source}: no model there ({error}); give the folder of a finished run, or a safetensors file"
        ) from None
    drawn: Arrays = model.init_server(data, seed)
    whole, fixed = model.of_seed(seed).state(drawn, data), model.of_seed(seed).fixed_names(data)
    has, wanted, also = ({name: list(array.shape) for name, array in part.items()} for part in (start, drawn, whole))
    if has not in (wanted, also):
        raise UserError(f"start_from = {source}: its model has {_listed(has)}, this experiment's {_listed(wanted)}")
    for name in start.keys() & fixed:
        if not np.array_equal(start[name], whole[name], equal_nan=True):
            raise UserError(
                f"start_from = {source}: its {name} is not that of this experiment, which does not train it; build the "
                "module with those values"
            )
    return {name: start[name].astype(values.dtype) for name, values in drawn.items()}


def pinned(task: Task, folder: Path | None) -> Task:
    """Return the task whose hosts refuse other frozen parameters and buffers than this process has built.

    Raise `UserError` if `folder`, that of the run, says that it began with others.
    """
    model = task.model
    sha256 = model.fixed_sha256(task.data)
    if folder is not None and (folder / FROZEN).is_file():
        sha256 = (folder / FROZEN).read_text().strip()
    model = model.pinned(sha256)
    model.fixed_names(task.data)
    return replace(task, model=model)


def _listed(shapes: dict[str, list[int]]) -> str:
    return ", ".join(f"{name} {shape}" for name, shape in shapes.items())
