"""Labelled samples of one's own: checks, classes, held-out samples and users, whatever format they come from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from narrowcast.platform.data.classification import (
    DEFAULT_CLIENTS,
    MOST_CLIENTS,
    Classification,
    IntArray,
    Splits,
    hold_out,
)
from narrowcast.platform.data.partition import Natural
from narrowcast.platform.data.samples import Labelled, Samples
from narrowcast.platform.errors import UserError
from narrowcast.platform.seeds import generator

TRAIN, VALIDATION, TEST = "train", "validation", "test"


@dataclass(frozen=True)
class OwnPart:
    """Samples as they were read, whose place in messages is `where`.

    Shapes: features [n, ...]; labels [n], whole numbers or text; users [n], if the samples have users.
    """

    where: str
    features: NDArray[Any]
    labels: NDArray[Any]
    users: NDArray[Any] | None = None


class OwnSamples(Classification):
    """Labelled samples of one's own; the distinct training labels, in ascending order, are the classes.

    Without a test set, `test_share` of the samples is held out, the same for every seed.
    """

    clients: int | None = Field(
        None,
        ge=1,
        le=MOST_CLIENTS,
        description=f"number of clients; null: {DEFAULT_CLIENTS}, or all users with partition natural",
    )
    test_share: float = Field(
        0.2, ge=0, lt=1, description="share of the samples held out for testing if the data have no test set"
    )
    tokens: bool = Field(
        False, description="whole numbers among the features are tokens, which an embedding takes, not quantities"
    )

    def _samples(
        self, name: str, source: str, parts: Mapping[str, OwnPart], classes: Sequence[str] | None = None
    ) -> Samples:
        """Return the parts `train`, `test` and `validation`, of which the last two may be missing, partitioned.

        `classes` are the names of the labels 0, 1, ... if the format has them. Raise `UserError` if samples cannot be
        used.
        """
        train_part = parts[TRAIN]
        known = np.arange(len(classes)) if classes is not None else np.unique(_checked_labels(train_part))
        ready = {key: Labelled(self._features(part), _numbered(part, known)) for key, part in parts.items()}
        _check_alike(ready, parts)
        train, users = ready[TRAIN], None if train_part.users is None else np.asarray(train_part.users)
        if TEST in ready:
            test = ready[TEST]
        else:
            # Of no seed of the experiment's, so that runs with different seeds are tested on the same samples.
            kept, held_out = hold_out(len(train), self.test_share, 0, "test")
            train, test = train.take(kept), train.take(held_out)
            users = None if users is None else users[kept]
        clients, train, numbers = self._clients(train, users)
        if VALIDATION not in ready:
            return self._dealt(name, source, len(known), train, test, clients=clients, users=numbers)
        splits = Splits(train, ready[VALIDATION], test)
        return self._indexed(name, source, len(known), splits, clients=clients, users=numbers)

    def _clients(self, train: Labelled, users: NDArray[Any] | None) -> tuple[int, Labelled, IntArray | None]:
        """Return the number of clients, the samples that are theirs, and the client of each if they are users."""
        if users is None or not isinstance(self.partition, Natural):
            return self.clients or DEFAULT_CLIENTS, train, None
        ids, numbers = np.unique(users, return_inverse=True)
        if self.clients is None or self.clients == len(ids):
            return len(ids), train, numbers
        if self.clients > len(ids):
            raise UserError(f"data.clients is {self.clients}, but the data have {len(ids)} users; omit it")
        chosen = np.sort(generator(self.seed, "users").choice(len(ids), self.clients, replace=False))
        rows = np.flatnonzero(np.isin(numbers, chosen))
        return self.clients, train.take(rows), np.searchsorted(chosen, numbers[rows])

    def _features(self, part: OwnPart) -> NDArray[Any]:
        """Return features as uint8, float32 or, for tokens, int64."""
        features = np.asarray(part.features)
        if features.ndim < 2:
            raise UserError(
                f"{part.where}: features have the shape {list(features.shape)}, expected [samples, features] or more"
            )
        if self.tokens:
            if features.dtype.kind not in "iu":
                raise UserError(f"{part.where}: features are {features.dtype}, not whole numbers; omit data.tokens")
            return np.ascontiguousarray(features, dtype=np.int64)
        if features.dtype.kind not in "buif":
            raise UserError(f"{part.where}: features are {features.dtype}; convert them to numbers")
        if features.dtype != np.uint8:
            with np.errstate(over="ignore"):  # what overflows is found below
                features = features.astype(np.float32)
            if len(wrong := np.argwhere(~np.isfinite(features.reshape(len(features), -1)))):
                raise UserError(
                    f"{part.where}: sample {wrong[0][0]} has a feature that is no finite float32 number; "
                    "replace missing values"
                )
        return np.array(features, order="C")  # torch needs a writable array


def natural_if_users(values: Any) -> Any:
    """Return the values of a section with `partition: natural` if it names users and no partition."""
    named = isinstance(values, Mapping) and values.get("users") is not None and "partition" not in values
    return {**values, "partition": Natural()} if named else values


def stacked(values: Sequence[Any], where: str) -> NDArray[Any]:
    """Return arrays of one shape as one array; raise `UserError` that names the first of another shape."""
    arrays = [np.asarray(value) for value in values]
    for sample, array in enumerate(arrays):
        if array.shape != arrays[0].shape:
            raise UserError(
                f"{where}: sample {sample} has the shape {list(array.shape)}, and the first has "
                f"{list(arrays[0].shape)}; bring all to one shape"
            )
    return np.stack(arrays) if arrays else np.empty((0, 0), dtype=np.float32)


def channels_first(pixels: NDArray[Any]) -> NDArray[Any]:
    """Return an image [height, width] or [height, width, channels] as [channels, height, width]."""
    return pixels[np.newaxis] if pixels.ndim == 2 else np.moveaxis(pixels, -1, 0)


def _checked_labels(part: OwnPart) -> NDArray[Any]:
    labels = np.asarray(part.labels)
    if labels.ndim != 1 or len(labels) != len(part.features):
        raise UserError(
            f"{part.where}: {len(part.features)} samples have labels of the shape {list(labels.shape)}; "
            "give one label for each sample"
        )
    if len(labels) == 0:
        raise UserError(f"{part.where}: has no samples; leave it out, or fill it")
    if part.users is not None and np.shape(part.users) != labels.shape:
        raise UserError(
            f"{part.where}: {len(labels)} samples have users of the shape {list(np.shape(part.users))}; "
            "give one user for each sample"
        )
    if labels.dtype.kind not in "buiUT":
        raise UserError(f"{part.where}: labels are {labels.dtype}; classes are whole numbers or text, so convert them")
    return labels


def _numbered(part: OwnPart, known: NDArray[Any]) -> IntArray:
    """Return the number of each label's class."""
    labels = _checked_labels(part)
    if (wrong := np.flatnonzero(~np.isin(labels, known))).size:
        shown = ", ".join(map(str, known[:10])) + (", ..." if len(known) > 10 else "")
        raise UserError(
            f"{part.where}: label {labels[wrong[0]]} of sample {wrong[0]} is not a class of the training samples "
            f"({shown}); correct or remove such samples"
        )
    return np.searchsorted(known, labels).astype(np.int64)


def _check_alike(ready: Mapping[str, Labelled], parts: Mapping[str, OwnPart]) -> None:
    first = ready[TRAIN].features
    for key, each in ready.items():
        if each.features.shape[1:] != first.shape[1:] or each.features.dtype != first.dtype:
            got, expected = (f"{list(x.shape[1:])} of {x.dtype}" for x in (each.features, first))
            raise UserError(f"{parts[key].where}: features are {got}, those of the training samples {expected}")
