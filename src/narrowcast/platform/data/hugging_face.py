"""Data sets of Hugging Face's `datasets` on disk, as `save_to_disk` writes them."""

from __future__ import annotations

import logging
import zlib
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from narrowcast.platform.data.images import SixteenBits, alike, pixels
from narrowcast.platform.data.own_files import located, readable
from narrowcast.platform.data.own_samples import (
    TRAIN,
    OwnPart,
    OwnSamples,
    natural_if_users,
    part_names,
    stacked,
    with_images_alike,
)
from narrowcast.platform.data.samples import Samples
from narrowcast.platform.errors import UserError

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


_log = logging.getLogger(__name__)


class HuggingFace(OwnSamples):
    """A data set that `save_to_disk` of Hugging Face's `datasets` wrote; needs `narrowcast[datasets]`.

    Features are a column of images, which become uint8 [channels, height, width], or of arrays of one shape, or several
    columns of numbers side by side; with `by_name` they are any columns, such as input_ids and attention_mask. Nothing
    is downloaded, and no code of the data set is run.
    """

    kind: Literal["hugging_face"] = "hugging_face"
    path: Path = Field(description="folder that save_to_disk wrote")
    features: tuple[str, ...] = Field(
        min_length=1, description="column of images or arrays, or columns of numbers, which make up a vector"
    )
    by_name: bool = Field(
        False,
        description="each column of features is an input of its own, a keyword argument of the module",
    )
    labels: str = Field("label", description="column of the labels")
    users: str | None = Field(None, description="column of the users; partition is then natural unless it is given")
    sixteen_bits: SixteenBits = Field(
        "refuse", description="grey images of 16 bits a pixel: refuse them, or keep the high_byte of each"
    )

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
        images = [name for name in self.features if _kind(splits[TRAIN], name) == "Image"]
        parts = with_images_alike(parts, images if self.by_name else images and [""])
        classes = getattr(splits[TRAIN].features[self.labels], "names", None)
        return self._samples(path.name, str(path), parts, classes)

    def _splits(self, path: Path, loaded: Any) -> dict[str, Any]:
        there = dict(loaded) if isinstance(loaded, Mapping) else {TRAIN: loaded}
        names = part_names(there, str(path))
        if TRAIN not in names:
            raise UserError(f"{path}: has no split train, only {', '.join(there)}; give the folder of one split")
        if unread := [name for name in there if name not in names.values()]:
            _log.warning("%s: left out: split %s, of %d", path, unread[0], len(unread))
        splits = {part: there[name] for part, name in names.items()}
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
        if not split.num_rows:
            raise UserError(f"{where}: has no samples; leave it out, or fill it")
        columns = {name: self._values(split, name, where) for name in self.features}
        others = [_complete(split, name, where) for name in wanted[len(self.features) :]]
        return OwnPart(where, columns if self.by_name else self._vector(columns, where), *others)

    def _vector(self, columns: Mapping[str, NDArray[Any]], where: str) -> NDArray[Any]:
        """Return the one column of images or arrays, or columns of numbers side by side."""
        first, *others = columns.values()
        if not others and first.ndim > 1:
            return first
        for name, values in columns.items():
            if values.ndim != 1:
                raise UserError(
                    f"{where}: column {name} is no column of numbers; give it alone, or set data.by_name if the module "
                    "takes each column as a keyword argument"
                )
        return np.stack([first, *others], axis=1)

    def _values(self, split: Any, name: str, where: str) -> NDArray[Any]:
        """Return a column of images, arrays or numbers as one array."""
        if _kind(split, name) == "Image":
            return self._images(split, name, where)
        values = split.select_columns([name]).with_format("numpy")[:][name]
        if values.dtype == object:
            values = stacked(list(values), f"{where}: {name}")
        if values.dtype.kind not in "buif":
            raise UserError(
                f"{where}: column {name} holds {_kind(split, name)} ({values.dtype}), no numbers or images; convert it"
            )
        return np.asarray(values)

    def _images(self, split: Any, name: str, where: str) -> NDArray[Any]:
        images, column = [], split.select_columns([name])[name]
        for sample in range(split.num_rows):
            try:
                image = column[sample]
            except _UNREADABLE as error:
                raise UserError(f"{where}: image {name} of sample {sample} cannot be read; replace it") from error
            if image is None:
                raise UserError(f"{where}: sample {sample} has no image in column {name}; remove such samples")
            try:
                images.append(pixels(image, sixteen_bits=self.sixteen_bits))
            except UserError as error:
                raise UserError(f"{where}: image {name} of sample {sample} {error}") from error
        return stacked(alike(images), f"{where}: {name}")


def _kind(split: Any, name: str) -> str:
    return type(split.features.get(name)).__name__


def _complete(split: Any, name: str, where: str) -> NDArray[Any]:
    """Return a column of labels or users; raise `UserError` for the first missing value."""
    values = split[name][:]
    if (missing := next((sample for sample, value in enumerate(values) if value is None), None)) is not None:
        raise UserError(f"{where}: sample {missing} has no value in column {name}; remove such samples")
    try:
        return np.array(values)
    except ValueError as error:
        raise UserError(f"{where}: column {name} has lists of different lengths; give one value per sample") from error
