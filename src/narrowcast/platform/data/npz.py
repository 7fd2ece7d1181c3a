"""Labelled samples of one's own in NumPy's .npz files."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from narrowcast.platform.data.npz_arrays import npz_arrays
from narrowcast.platform.data.own_files import located
from narrowcast.platform.data.own_samples import TRAIN, OwnPart, OwnSamples, natural_if_users, part_names
from narrowcast.platform.data.samples import Samples
from narrowcast.platform.errors import UserError

_log = logging.getLogger(__name__)


class NPZ(OwnSamples):
    """Arrays `x_train`, `y_train`, `x_test`, `y_test`, as in Keras' mnist.npz, or just `x` and `y`.

    Also `x_validation` and `y_validation`, or `_valid`, `_val` or `_dev`. A line says which arrays are left out.
    `x_train.input_ids` and `x_train.attention_mask` are inputs by name, keyword arguments of the module. Features of
    uint8 are images with values 0 to 255. Arrays of Python objects are pickled, and refused.
    """

    kind: Literal["npz"] = "npz"
    path: Path = Field(description="file of the arrays, .npz")
    features: str = Field("x", description="name of the features, before _train, _validation and _test")
    labels: str = Field("y", description="name of the labels, before _train, _validation and _test")
    users: str | None = Field(
        None, description="name of the users, before _train; partition is then natural unless it is given"
    )
    channels_last: bool = Field(False, description="features are [n, height, width, channels] or [n, height, width]")

    _natural = model_validator(mode="before")(natural_if_users)

    def load(self) -> Samples:
        """Return the samples partitioned across clients; raise `UserError` if an array is missing or malformed."""
        path = located(self.path, "path")
        with npz_arrays(path, "features and labels") as arrays:
            parts = self._parts(path, arrays)
        return self._samples(path.stem, str(path), parts)

    def _parts(self, path: Path, arrays: Any) -> dict[str, OwnPart]:
        stem = f"{self.features}_"
        ends = [name.removeprefix(stem).partition(".")[0] for name in arrays.files if name.startswith(stem)]
        suffixes = {part: f"_{end}" for part, end in part_names(dict.fromkeys(ends), f"{path}: {stem}").items()}
        read, parts = set[str](), dict[str, OwnPart]()
        for part, end in ({TRAIN: ""} | suffixes).items():
            inputs = _inputs(arrays.files, self.features + end)
            names = [*inputs.values(), self.labels + end]
            if self.users is not None and (part == TRAIN or self.users + end in arrays.files):
                names.append(self.users + end)
            read |= {*names}
            if missing := [name for name in names if name not in arrays.files]:
                raise UserError(
                    f"{path}: has no array {missing[0]}, only {', '.join(arrays.files) or 'nothing'}; name the arrays "
                    "with data.features, data.labels and data.users"
                )
            others = [arrays[name] for name in names[len(inputs) :]]
            if "" in inputs:
                values = self._channels_first(arrays[names[0]], f"{path}: {names[0]}")
                parts[part] = OwnPart(f"{path}: {names[0]}", values, *others)
            else:
                named = {name: arrays[stored] for name, stored in inputs.items()}
                parts[part] = OwnPart(f"{path}: {self.features}{end}", named, *others)
        if unread := [name for name in arrays.files if name not in read]:
            shown = ", ".join(unread[:5]) + (", ..." if len(unread) > 5 else "")
            _log.warning("%s: left out: arrays %s", path, shown)
        return parts

    def _channels_first(self, values: NDArray[Any], where: str) -> NDArray[Any]:
        if not self.channels_last:
            return values
        if values.ndim not in (3, 4):
            raise UserError(f"{where} has the shape {list(values.shape)}; omit data.channels_last")
        return np.moveaxis(values[..., np.newaxis] if values.ndim == 3 else values, -1, 1)


def _inputs(files: Sequence[str], stem: str) -> dict[str, str]:
    """Return the arrays of a part's features by the names of inputs: those called `stem.name`, or `stem` by ""."""
    named = {name.removeprefix(f"{stem}."): name for name in files if name.startswith(f"{stem}.")}
    return {"": stem} if stem in files or not named else named
