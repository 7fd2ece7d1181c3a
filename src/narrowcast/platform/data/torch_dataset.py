"""A user's torch Dataset, built by a factory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import numpy as np
from pydantic import Field, ValidationInfo, field_validator

from narrowcast.platform import plugins
from narrowcast.platform.data.own_samples import TEST, TRAIN, VALIDATION, OwnPart, OwnSamples, channels_first, stacked
from narrowcast.platform.data.samples import Samples
from narrowcast.platform.errors import UserError
from narrowcast.platform.kinds import FOLDERS
from narrowcast.platform.patterns import Factory


class TorchDataset(OwnSamples):
    """Samples of a torch Dataset: `factory` is called with `arguments` and returns it.

    The factory returns one Dataset with `len`, or a mapping with those of `train`, `test` and `validation`. An item is
    (features, label), or (features, label, user), for the partition `natural`; features are tensors, arrays or PIL
    images. All items are read once and kept in memory.

    Importing the factory runs its module's code, so name only code that you would run yourself.
    """

    kind: Literal["torch"] = "torch"
    factory: Factory = Field(description="import path, such as my_package.data:make")
    arguments: dict[str, Any] = Field(default_factory=dict, description="keyword arguments of the factory")

    @field_validator("factory")
    @classmethod
    def _can_be_imported(cls, value: str, info: ValidationInfo) -> str:
        plugins.load(value, (info.context or {}).get(FOLDERS, ()))
        return value

    def load(self) -> Samples:
        """Return the samples partitioned across clients; raise `UserError` if the factory or an item fails."""
        where = f"data.factory = {self.factory}"
        try:
            built = plugins.load(self.factory)(**self.arguments)
        except Exception as error:
            raise UserError(f"{where} failed: {plugins.said(error)}") from error
        datasets = dict(built) if isinstance(built, Mapping) else {TRAIN: built}
        if unknown := [str(name) for name in datasets if name not in (TRAIN, VALIDATION, TEST)]:
            raise UserError(f"{where} returned {', '.join(unknown)}; it must return train, validation and test")
        if TRAIN not in datasets:
            raise UserError(f"{where} returned no train, only {', '.join(map(str, datasets)) or 'nothing'}")
        parts = {name: _read(dataset, f"{where} ({name})") for name, dataset in datasets.items()}
        return self._samples(self.factory.partition(":")[2], self.factory, parts)


def _read(dataset: Any, where: str) -> OwnPart:
    if not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
        raise UserError(f"{where} is {type(dataset).__name__}; it must be a Dataset with a length, not iterable only")
    items = []
    for sample in range(len(dataset)):
        try:
            items.append(dataset[sample])
        except Exception as error:
            raise UserError(f"{where}: sample {sample} failed: {plugins.said(error)}") from error
        if not isinstance(items[-1], tuple | list) or not 2 <= len(items[-1]) == len(items[0]) <= 3:
            raise UserError(f"{where}: sample {sample} must be (features, label), or (features, label, user) for all")
    if not items:
        raise UserError(f"{where}: has no samples; leave it out, or fill it")
    features, *others = zip(*items, strict=True)
    labels, *users = (np.array([_scalar(value) for value in values]) for values in others)
    return OwnPart(where, stacked([_array(value) for value in features], where), labels, *users)


def _scalar(value: Any) -> Any:
    array = _array(value)
    return array.item() if isinstance(array, np.ndarray) and array.size == 1 else array


def _array(value: Any) -> Any:
    """Return tensors and PIL images as arrays, without importing either library."""
    if hasattr(value, "detach"):
        return value.detach().cpu().numpy()
    return channels_first(np.asarray(value)) if hasattr(value, "getbands") else value
