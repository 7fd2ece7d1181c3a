"""A user's samples in the files of other libraries: NumPy's .npz, Hugging Face's `datasets`, torch's `Dataset`."""

from __future__ import annotations

import io
import logging
import sys
import zlib
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps
from pydantic import Field, model_validator

from narrowcast.platform.config import plugins
from narrowcast.platform.config.kinds import Factory
from narrowcast.platform.config.trust import read_json
from narrowcast.platform.data.download import located
from narrowcast.platform.data.own import (
    TRAIN,
    SixteenBits,
    UserSamples,
    UserSplit,
    alike,
    natural_if_users,
    opened,
    part_names,
    pixels,
    stacked,
    with_images_alike,
)
from narrowcast.platform.data.samples import Samples
from narrowcast.platform.data.soundness import seeded_loading
from narrowcast.platform.errors import UserError
from narrowcast.platform.storage.disk import npz_arrays, readable

_log = logging.getLogger(__name__)


class NPZ(UserSamples):
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

    def _parts(self, path: Path, arrays: Any) -> dict[str, UserSplit]:
        stem = f"{self.features}_"
        ends = [name.removeprefix(stem).partition(".")[0] for name in arrays.files if name.startswith(stem)]
        suffixes = {part: f"_{end}" for part, end in part_names(dict.fromkeys(ends), f"{path}: {stem}").items()}
        read, parts = set[str](), dict[str, UserSplit]()
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
                parts[part] = UserSplit(f"{path}: {names[0]}", values, *others)
            else:
                named = {name: arrays[stored] for name, stored in inputs.items()}
                parts[part] = UserSplit(f"{path}: {self.features}{end}", named, *others)
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


_UNREADABLE_DATASET = (
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


class HuggingFace(UserSamples):
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
        with readable(path, _UNREADABLE_DATASET, "write it with save_to_disk"):
            _check_names(path)
            splits = self._splits(path, library.load_from_disk(str(path), keep_in_memory=True))
            parts = {part: self._part(f"{path} ({part})", split) for part, split in splits.items()}
        images = [name for name in self.features if _kind(splits[TRAIN], name) == "Image"]
        parts = with_images_alike(parts, images if self.by_name else images and [""])
        labels = splits[TRAIN].features[self.labels]
        classes = labels.names if isinstance(labels, library.ClassLabel) else None
        return self._samples(path.name, str(path), parts, classes)

    def _splits(self, path: Path, loaded: Any) -> dict[str, Any]:
        by_split = dict(loaded) if isinstance(loaded, Mapping) else {TRAIN: loaded}
        names = part_names(by_split, str(path))
        if TRAIN not in names:
            raise UserError(f"{path}: has no split train, only {', '.join(by_split)}; give the folder of one split")
        if unread := [name for name in by_split if name not in names.values()]:
            _log.warning("%s: left out: split %s, of %d", path, unread[0], len(unread))
        splits = {part: by_split[name].with_format(None) for part, name in names.items()}
        for split in splits.values():
            split.data.table.validate(full=True)  # reading what a damaged file points to would end the process
        return splits

    def _part(self, where: str, split: Any) -> UserSplit:
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
        return UserSplit(where, columns if self.by_name else self._vector(columns, where), *others)

    def _vector(self, columns: Mapping[str, NDArray[Any]], where: str) -> NDArray[Any]:
        """Return the one column of images or arrays, or columns of numbers side by side."""
        first, *further = columns.values()
        if not further and first.ndim > 1:
            return first
        for name, values in columns.items():
            if values.ndim != 1:
                raise UserError(
                    f"{where}: column {name} is not a column of numbers; give it alone, or set data.by_name if the "
                    "module takes each column as a keyword argument"
                )
        return np.stack([first, *further], axis=1)

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
            named = [*content.get("splits", ()), *(file["filename"] for file in content.get("_data_files", ()))]
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


_COMPARED = 8
"""Items that are read again, to find random ones."""


class TorchDataset(UserSamples):
    """Samples of a torch Dataset: `factory` is called with `arguments` and returns it.

    The factory returns one Dataset with `len`, or a mapping with those of `train`, `test` and `validation`. An item is
    (features, label), or (features, label, user), for the partition `natural`; features are tensors, arrays or PIL
    images, or a dict of them by the names of the module's arguments. All items are read once and kept in memory;
    random ones are drawn from `seed`.

    Importing the factory runs its module's code, so name only code that you would run yourself.
    """

    kind: Literal["torch"] = "torch"
    factory: Factory = Field(description="import path, such as my_package.data:make")
    arguments: dict[str, Any] = Field(default_factory=dict, description="keyword arguments of the factory")
    sixteen_bits: SixteenBits = Field(
        "refuse", description="grey PIL images of 16 bits a pixel: refuse them, or keep the high_byte of each"
    )

    def load(self) -> Samples:
        """Return the samples partitioned across clients; raise `UserError` if the factory or an item fails."""
        where = f"data.factory = {self.factory}"
        with seeded_loading(self.seed):
            datasets = self._datasets(where)
            read = {name: _read(dataset, f"{where} ({name})", self.sixteen_bits) for name, dataset in datasets.items()}
            random = [name for name, dataset in datasets.items() if _first_items(dataset) != _first_items(dataset)]
        if random:
            self._check_keyed(where, random)
        images = frozenset.intersection(*(images for _, images in read.values()))
        parts = with_images_alike({name: part for name, (part, _) in read.items()}, images)
        return self._samples(self.factory.partition(":")[2], self.factory, parts)

    def _check_keyed(self, where: str, random: Sequence[str]) -> None:
        """Warn of random items, which are read once; raise `UserError` if data.seed does not decide them."""
        of_builds = []
        for _ in range(2):
            with seeded_loading(self.seed):
                datasets = self._datasets(where)
                of_builds.append([_first_items(datasets[name]) for name in random])
        if of_builds[0] != of_builds[1]:
            raise UserError(
                f"{where} ({', '.join(random)}): items are random, by a generator that nothing seeds; draw from torch, "
                "numpy.random or random, which are seeded by data.seed, or give the generator a seed"
            )
        _log.warning(
            "%s (%s): items are random; each is read once, drawn from data.seed: draw in the module's forward for "
            "other draws in each step",
            where,
            ", ".join(random),
        )

    def _datasets(self, where: str) -> dict[str, Any]:
        try:
            built = plugins.load(self.factory)(**self.arguments)
        except (Exception, SystemExit) as error:
            raise UserError(f"{where} failed: {plugins.said(error)}") from error
        datasets = dict(built) if isinstance(built, Mapping) else {TRAIN: built}
        names = part_names(map(str, datasets), where)
        if unknown := [str(name) for name in datasets if name not in names.values()]:
            raise UserError(f"{where} returned {', '.join(unknown)}; it must return train, validation and test")
        if TRAIN not in names:
            raise UserError(f"{where} returned no train, only {', '.join(map(str, datasets)) or 'nothing'}")
        return {part: datasets[name] for part, name in names.items()}


def _first_items(dataset: Any) -> list[Any]:
    """Return the bytes of the first items, to compare them with another reading."""
    return [_bytes_of(dataset[sample]) for sample in range(min(len(dataset), _COMPARED))]


def _bytes_of(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _bytes_of(entry) for name, entry in value.items()}
    if isinstance(value, tuple | list):
        return [_bytes_of(entry) for entry in value]
    if _is_tensor(value):
        tensor = value.detach().cpu()
        value = tensor.float() if str(tensor.dtype) == "torch.bfloat16" else tensor  # NumPy has no bfloat16
    return np.asarray(value).tobytes()


def _read(dataset: Any, where: str, sixteen_bits: SixteenBits) -> tuple[UserSplit, frozenset[str]]:
    """Return the samples of a Dataset, and the names of inputs that were images, "" for the one array."""
    if not {"__len__", "__getitem__"} <= {*dir(dataset)}:
        raise UserError(f"{where} is {type(dataset).__name__}; it must be a Dataset with a length, not iterable only")
    items = []
    for sample in range(len(dataset)):
        try:
            items.append(dataset[sample])
        except (Exception, SystemExit) as error:
            raise UserError(f"{where}: sample {sample} failed: {plugins.said(error)}") from error
        if not isinstance(items[-1], tuple | list) or not 2 <= len(items[-1]) == len(items[0]) <= 3:
            raise UserError(f"{where}: sample {sample} must be (features, label), or (features, label, user) for all")
    if not items:
        raise UserError(f"{where}: has no samples; leave it out, or fill it")
    features, *others = zip(*items, strict=True)
    labels, *users = (_column(values, f"{where}: labels or users") for values in others)
    inputs, images = {}, frozenset[str]()
    for name, values in _by_name(features, where).items():
        arrays = [_array(value, f"{where}: sample {sample}", sixteen_bits) for sample, value in enumerate(values)]
        if all(map(_is_image, values)):
            arrays, images = alike(arrays), images | {name}
        inputs[name] = stacked(arrays, f"{where}: {name}" if name else where)
    return UserSplit(where, inputs.get("", inputs), labels, *users), images


def _by_name(features: Sequence[Any], where: str) -> dict[str, list[Any]]:
    """Return the values of each input of the samples; the name of the one input of samples without names is empty."""
    if not isinstance(features[0], Mapping):
        return {"": list(features)}
    names = features[0].keys()
    for sample, values in enumerate(features):
        if not isinstance(values, Mapping) or values.keys() != names:
            got = ", ".join(map(str, values)) if isinstance(values, Mapping) else type(values).__name__
            raise UserError(
                f"{where}: sample {sample} has the inputs {got}, and the first {', '.join(map(str, names))}; give all "
                "samples the same"
            )
    return {str(name): [values[name] for values in features] for name in names}


def _column(values: Sequence[Any], where: str) -> NDArray[Any]:
    """Return labels or users as one array; raise `UserError` for the first missing value, or other shape."""
    if (missing := next((sample for sample, value in enumerate(values) if value is None), None)) is not None:
        raise UserError(f"{where}: sample {missing} has None; remove such samples")
    arrays = [np.asarray(_array(value, where)) for value in values]
    text = [array.dtype.kind in "UT" for array in arrays]
    if any(text) and not all(text):
        number, words = text.index(False), text.index(True)
        raise UserError(f"{where}: sample {number} has a number, and sample {words} has text; give one or the other")
    return stacked([array.reshape(()) if array.size == 1 else array for array in arrays], where)


def _is_tensor(value: Any) -> bool:
    torch = sys.modules.get("torch")  # not imported for data sets without it
    return torch is not None and isinstance(value, torch.Tensor)


def _is_image(value: Any) -> bool:
    return isinstance(value, Image.Image)


def _array(value: Any, where: str, sixteen_bits: SixteenBits = "refuse") -> Any:
    """Return tensors and PIL images as arrays, without importing torch."""
    if _is_tensor(value):
        tensor = value.detach().cpu()
        return (tensor.float() if str(tensor.dtype) == "torch.bfloat16" else tensor).numpy()  # NumPy has no bfloat16
    if not _is_image(value):
        return value
    try:
        return pixels(value, sixteen_bits=sixteen_bits)
    except UserError as error:
        raise UserError(f"{where}: its image {error}") from error
