"""Labelled samples of one's own in NumPy's .npz files."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any, Literal

import numpy as np
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
    Features of uint8 are images with values 0 to 255. Arrays of Python objects are pickled, and refused.
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
        ends = [name.removeprefix(stem) for name in arrays.files if name.startswith(stem)]
        suffixes = {part: f"_{end}" for part, end in part_names(ends, f"{path}: {stem}").items()}
        read, parts = set[str](), dict[str, OwnPart]()
        for part, end in ({TRAIN: ""} | suffixes).items():
            names = [self.features + end, self.labels + end]
            if self.users is not None and (part == TRAIN or self.users + end in arrays.files):
                names.append(self.users + end)
            read |= {*names}
            if missing := [name for name in names if name not in arrays.files]:
                raise UserError(
                    f"{path}: has no array {missing[0]}, only {', '.join(arrays.files) or 'nothing'}; name the arrays "
                    "with data.features, data.labels and data.users"
                )
            values, *others = (arrays[name] for name in names)
            if self.channels_last:
                if values.ndim not in (3, 4):
                    raise UserError(f"{path}: {names[0]} has the shape {list(values.shape)}; omit data.channels_last")
                values = np.moveaxis(values[..., np.newaxis] if values.ndim == 3 else values, -1, 1)
            parts[part] = OwnPart(f"{path}: {names[0]}", values, *others)
        if unread := [name for name in arrays.files if name not in read]:
            shown = ", ".join(unread[:5]) + (", ..." if len(unread) > 5 else "")
            _log.warning("%s: left out: arrays %s", path, shown)
        return parts
