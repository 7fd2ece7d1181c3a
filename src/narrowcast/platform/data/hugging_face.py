"""Data sets of Hugging Face's `datasets` on disk, as `save_to_disk` writes them."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from narrowcast.platform.data.own_files import located, readable
from narrowcast.platform.data.own_samples import (
    TEST,
    TRAIN,
    VALIDATION,
    OwnPart,
    OwnSamples,
    channels_first,
    natural_if_users,
    stacked,
)
from narrowcast.platform.data.samples import Samples
from narrowcast.platform.errors import UserError

SPLITS = {TRAIN: (TRAIN,), VALIDATION: (VALIDATION, "valid", "val", "dev"), TEST: (TEST,)}
"""The names that splits go by; others are not read."""

_UNREADABLE = (
    OSError,
    ValueError,
    LookupError,
    TypeError,
    AttributeError,
    NotImplementedError,
    SyntaxError,
    zlib.error,
)
"""Errors of datasets, Arrow and Pillow on damaged files."""


class HuggingFace(OwnSamples):
    """A data set that `save_to_disk` of Hugging Face's `datasets` wrote; needs `narrowcast[datasets]`.

    Features are a column of images, which become uint8 [channels, height, width], or of arrays of one shape, or several
    columns of numbers side by side. Nothing is downloaded, and no code of the data set is run.
    """

    kind: Literal["hugging_face"] = "hugging_face"
    path: Path = Field(description="folder that save_to_disk wrote")
    features: tuple[str, ...] = Field(
        min_length=1, description="column of images or arrays, or columns of numbers, which make up a vector"
    )
    labels: str = Field("label", description="column of the labels")
    users: str | None = Field(None, description="column of the users; partition is then natural unless it is given")

    _natural = model_validator(mode="before")(natural_if_users)

    @model_validator(mode="before")
    @classmethod
    def _one_column(cls, values: Any) -> Any:
        if isinstance(values, Mapping) and isinstance(values.get("features"), str):
            return {**values, "features": [values["features"]]}
        return values

    def load(self) -> Samples:
        """Return the samples partitioned across clients; raise `UserError` if a column is missing or unsuitable."""
        try:
            library = import_module("datasets")
        except ImportError as error:
            raise UserError(f"data.kind = {self.kind} needs datasets; pip install 'narrowcast[datasets]'") from error
        path = located(self.path, "path")
        with readable(path, _UNREADABLE, "write it with save_to_disk"):
            splits = self._splits(path, library.load_from_disk(str(path), keep_in_memory=True))
            parts = {part: self._part(f"{path} ({part})", split) for part, split in splits.items()}
        classes = getattr(splits[TRAIN].features[self.labels], "names", None)
        return self._samples(path.name, str(path), parts, classes)

    def _splits(self, path: Path, loaded: Any) -> dict[str, Any]:
        there = dict(loaded) if isinstance(loaded, Mapping) else {TRAIN: loaded}
        splits = {
            part: next(there[name] for name in names if name in there)
            for part, names in SPLITS.items()
            if any(name in there for name in names)
        }
        if TRAIN not in splits:
            raise UserError(f"{path}: has no split train, only {', '.join(there)}; give the folder of one split")
        for split in splits.values():
            split.data.table.validate(full=True)  # reading what a damaged file points to would end the process
        return splits

    def _part(self, where: str, split: Any) -> OwnPart:
        wanted = [*self.features, self.labels, *([self.users] if self.users else [])]
        for name in wanted:
            if name not in split.column_names:
                raise UserError(
                    f"{where}: has no column {name}, only {', '.join(split.column_names)}; name the columns with "
                    "data.features, data.labels and data.users"
                )
        columns = [_values(split, name, where) for name in self.features]
        if len(columns) > 1:
            for name, values in zip(self.features, columns, strict=True):
                if values.ndim != 1:
                    raise UserError(f"{where}: column {name} is no column of numbers; give it alone")
        features = columns[0] if len(columns) == 1 and columns[0].ndim > 1 else np.stack(columns, axis=1)
        others = [np.array(split[name][:]) for name in wanted[len(self.features) :]]
        return OwnPart(where, features, *others)


def _values(split: Any, name: str, where: str) -> NDArray[Any]:
    """Return a column of images, arrays or numbers as one array."""
    kind = type(split.features[name]).__name__
    if kind == "Image":
        images = list(split.select_columns([name])[name])
        mode = "L" if images and images[0].mode in ("1", "L") else "RGB"
        return stacked([channels_first(np.asarray(image.convert(mode))) for image in images], f"{where}: {name}")
    values = split.select_columns([name]).with_format("numpy")[:][name]
    if values.dtype == object:
        values = stacked(list(values), f"{where}: {name}")
    if values.dtype.kind not in "buif":
        raise UserError(f"{where}: column {name} holds {kind} ({values.dtype}), no numbers or images; convert it")
    return np.asarray(values)
