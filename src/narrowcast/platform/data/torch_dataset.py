"""A user's torch Dataset, built by a factory."""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from pydantic import Field, ValidationInfo, field_validator

from narrowcast.platform import plugins
from narrowcast.platform.data.images import SixteenBits, alike, pixels
from narrowcast.platform.data.own_samples import (
    TRAIN,
    OwnPart,
    OwnSamples,
    part_names,
    stacked,
    with_images_alike,
)
from narrowcast.platform.data.samples import Samples
from narrowcast.platform.data.soundness import seeded_loading
from narrowcast.platform.errors import UserError
from narrowcast.platform.kinds import FOLDERS
from narrowcast.platform.patterns import Factory

_log = logging.getLogger(__name__)
_COMPARED = 8
"""Items that are read again, to find random ones."""


class TorchDataset(OwnSamples):
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

    @field_validator("factory")
    @classmethod
    def _can_be_imported(cls, value: str, info: ValidationInfo) -> str:
        plugins.load(value, (info.context or {}).get(FOLDERS, ()))
        return value

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
        return {name: _bytes_of(each) for name, each in value.items()}
    if isinstance(value, tuple | list):
        return [_bytes_of(each) for each in value]
    if _is_tensor(value):
        tensor = value.detach().cpu()
        value = tensor.float() if str(tensor.dtype) == "torch.bfloat16" else tensor  # NumPy has no bfloat16
    return np.asarray(value).tobytes()


def _read(dataset: Any, where: str, sixteen_bits: SixteenBits) -> tuple[OwnPart, frozenset[str]]:
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
    return OwnPart(where, inputs.get("", inputs), labels, *users), images


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
    text = [each.dtype.kind in "UT" for each in arrays]
    if any(text) and not all(text):
        number, words = text.index(False), text.index(True)
        raise UserError(f"{where}: sample {number} has a number, and sample {words} has text; give one or the other")
    return stacked([each.reshape(()) if each.size == 1 else each for each in arrays], where)


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
