"""Experiments of saved runs, among them runs of versions that had one seed for the server and the clients."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from narrowcast.experiment import Experiment, load_experiment
from narrowcast.platform.config import read_yaml
from narrowcast.platform.links import own_file
from narrowcast.platform.yaml_limits import read_limited
from narrowcast.runs.run_folder import CONFIG

_NEW_FIELDS: Mapping[str, Any] = {
    "client_seed": None,
    "replacement": False,
    "start_from": None,
    "training.shared_negatives": False,
    "training.item_weight_decay": None,
    "training.learning_rate_schedule": None,
    "algorithm.download": None,
    "algorithm.server_optimizer": None,
    "algorithm.aggregator": None,
    "data.predict": "last",
    "data.public": None,
    "data.encoding": None,
    "data.decimal": ".",
    "data.sixteen_bits": "refuse",
    "model.loss": None,
    "model.metrics": None,
    "model.dtype": "float32",
    "model.output": None,
    "model.statistics": "refuse",
    "radio.channel.csi_error_decibel": 0.0,
    "radio.channel.back_off_decibel": 0.0,
}
_NEW_FIELDS_OF_DATA: Mapping[str, Mapping[str, Any]] = {
    "image_folder": {"data.size": None, "data.test_share": 0.2},
    "synthetic": {"data.as_variances": False},
    **{kind: {"data.classes": None} for kind in ("mnist", "fashion-mnist")},
}
_NEW_FIELDS_OF_MODEL: Mapping[str, Mapping[str, Any]] = {
    "vgg9": {"model.channels": [32, 64, 128, 128, 256, 256], "model.hidden": [512, 512]},
}
_PARTIAL_DRAW = {"algorithm.partial_draw": "probability"}
_NEW_FIELDS_OF: Mapping[str, Mapping[str, Any]] = {
    **{kind: {"algorithm.downlink_codec": []} for kind in ("colr", "scolr")},
    "fednova": _PARTIAL_DRAW,
    "submodel": {"algorithm.sliced_layers": None, "algorithm.output_bias": "averaged"},
    "scaffold": {"algorithm.control": "update"},
    "fedprox": {**_PARTIAL_DRAW, "algorithm.drop_partial": False},
}


def new_fields(experiment: Experiment) -> Mapping[str, Any]:
    """Return the dotted paths of the fields that those versions lack, and the values that they imply."""
    of_data = _NEW_FIELDS_OF_DATA.get(experiment.data.kind, {})
    of_model = _NEW_FIELDS_OF_MODEL.get(experiment.model.kind, {})
    return {**_NEW_FIELDS, **of_data, **of_model, **_NEW_FIELDS_OF.get(experiment.algorithm.kind, {})}


def saved_experiment(folder: Path, overrides: Iterable[str] = ()) -> Experiment:
    """Return the experiment of a run's folder, with overrides; `of_one_seed` if an earlier version wrote it."""
    experiment = load_experiment(str(own_file(folder, CONFIG)), overrides)
    return of_one_seed(experiment) if has_one_seed(folder) and experiment.client_seed is None else experiment


def has_one_seed(folder: Path) -> bool:
    """Return whether an earlier version wrote this folder's `config.yaml`, which names every field."""
    return "client_seed" not in read_yaml(read_limited(folder / CONFIG), str(folder / CONFIG))


def with_earlier_defaults(experiment: Experiment) -> Experiment:
    """Return the experiment with the defaults of version 0.1 where it sets no value.

    These are `data.seed`, which was 0, and `clock.compute_overhead_seconds`, which was 10.
    """
    changed: dict[str, object] = {}
    data: Any = experiment.data
    if "seed" in type(data).model_fields and "seed" not in data.model_fields_set:
        changed["data"] = data.model_copy(update={"seed": 0})
    if "compute_overhead_seconds" not in experiment.clock.model_fields_set:
        changed["clock"] = experiment.clock.model_copy(update={"compute_overhead_seconds": 10.0})
    return experiment.model_copy(update=changed)


def of_one_seed(experiment: Experiment) -> Experiment:
    """Return the experiment as earlier versions ran it: `client_seed` is `seed`, and negatives are shared.

    An upload that names its rows differs by the number of positives, which earlier versions did not send.
    """
    experiment = with_earlier_defaults(experiment)
    changed: dict[str, object] = {"client_seed": experiment.seed}
    training = experiment.training
    if getattr(experiment.algorithm, "codes_row_lists", False) and getattr(training, "negatives", 0):
        changed["training"] = training.model_copy(update={"shared_negatives": True})  # type: ignore[attr-defined]
    return experiment.model_copy(update=changed)
