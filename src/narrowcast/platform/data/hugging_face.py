"""Data sets of Hugging Face's `datasets` on disk, as `save_to_disk` writes them."""

from __future__ import annotations

import io
import logging
import zlib
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps
from pydantic import Field, model_validator

from narrowcast.platform.data.images import SixteenBits, alike, opened, pixels
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
from narrowcast.platform.json_files import read_json

_UNREADABLE = (
    OSError,
    ValueError,
    LookupError,
    TypeError,
    AttributeError,
    NotImplementedError,
    SyntaxError,
    MemoryError,
    zlib.error,
)
"""Errors of datasets, Arrow and Pillow on damaged files."""
_PLAIN = ("Value", "ClassLabel", "Array2D", "Array3D", "Array4D", "Array5D")
"""Features whose values are in the file; lists of these are too."""
_log = logging.getLogger(__name__)


class HuggingFace(OwnSamples):
    """A data set that `save_to_disk` of Hugging Face's `datasets` wrote; needs `narrowcast[datasets]`.

    Features are a column of images, which become uint8 [channels, height, width], or of arrays of one shape, or several
    columns of numbers side by side; with `by_name` they are any columns, such as input_ids and attention_mask. Images
    are decoded from the bytes in the folder; a path or an address in place of them is refused, never followed. Nothing
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
            _check_names(path)
            splits = self._splits(path, library.load_from_disk(str(path), keep_in_memory=True))
            parts = {part: self._part(f"{path} ({part})", split) for part, split in splits.items()}
        images = [name for name in self.features if _kind(splits[TRAIN], name) == "Image"]
        parts = with_images_alike(parts, images if self.by_name else images and [""])
        labels = splits[TRAIN].features[self.labels]
        classes = labels.names if isinstance(labels, library.ClassLabel) else None
        return self._samples(path.name, str(path), parts, classes)

    def _splits(self, path: Path, loaded: Any) -> dict[str, Any]:
        there = dict(loaded) if isinstance(loaded, Mapping) else {TRAIN: loaded}
        names = part_names(there, str(path))
        if TRAIN not in names:
            raise UserError(f"{path}: has no split train, only {', '.join(there)}; give the folder of one split")
        if unread := [name for name in there if name not in names.values()]:
            _log.warning("%s: left out: split %s, of %d", path, unread[0], len(unread))
        splits = {part: there[name].with_format(None) for part, name in names.items()}
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
        _check_plain(split, name, where)
        with np.errstate(over="ignore"):  # float32 is what the library makes of numbers; infinite ones are refused
            values = split.select_columns([name]).with_format("numpy")[:][name]
        if values.dtype == object:
            values = stacked(list(values), f"{where}: {name}")
        if values.dtype.kind not in "buif":
            raise UserError(
                f"{where}: column {name} holds {_kind(split, name)} ({values.dtype}), no numbers or images; convert it"
            )
        return np.asarray(values)

    def _images(self, split: Any, name: str, where: str) -> NDArray[Any]:
        images, feature = [], split.features[name]
        column = split.select_columns([name]).cast_column(name, type(feature)(decode=False))[name]
        for sample in range(split.num_rows):
            stored = column[sample]
            if stored is None:
                raise UserError(f"{where}: sample {sample} has no image in column {name}; remove such samples")
            image_name = f"{where}: image {name} of sample {sample}"
            if stored["bytes"] is None:
                raise UserError(
                    f"{image_name} is a path or an address without the image, and neither is followed; put the images "
                    "themselves into the data set, as save_to_disk does with files of this machine"
                )
            with opened(io.BytesIO(stored["bytes"]), image_name, "replace it") as image:
                images.append(pixels(_in_mode(image, feature.mode), sixteen_bits=self.sixteen_bits))
        return stacked(alike(images), f"{where}: {name}")


def _check_names(path: Path) -> None:
    """Raise `UserError` if the records of a data set name files outside its folder."""
    for record in (path / "dataset_dict.json", path / "state.json", *path.glob("*/state.json")):
        if record.is_file():
            content = read_json(record, "write it with save_to_disk")
            named = [*content.get("splits", ()), *(each["filename"] for each in content.get("_data_files", ()))]
            if wrong := [name for name in named if Path(name).name != name or name == ".."]:
                raise UserError(
                    f"{record}: names {wrong[0]!r:.100}, which is not in its folder; write it with save_to_disk"
                )


def _in_mode(image: Image.Image, mode: str | None) -> Image.Image:
    """Return an image in the mode that its column declares, upright, as `datasets` would."""
    return image if mode in (None, image.mode) else ImageOps.exif_transpose(image).convert(mode)


def _kind(split: Any, name: str) -> str:
    return type(split.features.get(name)).__name__


def _check_plain(split: Any, name: str, where: str) -> None:
    """Raise `UserError` for a column that `datasets` would decode: from bytes, but also from files and addresses."""
    feature = split.features[name]
    while type(feature).__name__ in ("List", "LargeList", "Sequence"):
        feature = feature.feature
    if (kind := type(feature).__name__) not in _PLAIN:
        raise UserError(f"{where}: column {name} holds {kind}, no numbers or images; convert it")


def _complete(split: Any, name: str, where: str) -> NDArray[Any]:
    """Return a column of labels or users; raise `UserError` for the first missing value."""
    _check_plain(split, name, where)
    values = split[name][:]
    if (missing := next((sample for sample, value in enumerate(values) if value is None), None)) is not None:
        raise UserError(f"{where}: sample {missing} has no value in column {name}; remove such samples")
    try:
        return np.array(values)
    except ValueError as error:
        raise UserError(f"{where}: column {name} has lists of different lengths; give one value per sample") from error
