"""Labelled samples, held once, and which of them each client has."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.int64]


@dataclass(frozen=True)
class Labelled:
    """n samples. Shapes: features [n, ...], uint8 (0 to 255), float32, or int64 tokens; labels [n]."""

    features: NDArray[Any]
    labels: IntArray

    def __len__(self) -> int:
        return len(self.labels)

    def take(self, rows: IntArray) -> Labelled:
        """A copy of some of the samples."""
        return Labelled(self.features[rows], self.labels[rows])


@dataclass(frozen=True, eq=False)
class Samples:
    """A classification data set dealt out to U clients by index, so that no sample is copied.

    Shapes: client u trains on the samples `order[indptr[u]:indptr[u + 1]]` of `train`; indptr [U + 1]. `validation` and
    `test` belong to the server; either may be empty.
    """

    name: str
    source: str
    n_classes: int
    train: Labelled
    validation: Labelled
    test: Labelled
    order: IntArray
    indptr: IntArray

    @property
    def n_clients(self) -> int:
        """The number of clients, U."""
        return len(self.indptr) - 1

    @cached_property
    def examples(self) -> IntArray:
        """The number of training samples of every client, [U]."""
        return np.diff(self.indptr)

    @property
    def sizes(self) -> Mapping[str, int]:
        """What a reader wants to know of its size."""
        return {
            "clients": self.n_clients,
            "classes": self.n_classes,
            "training_samples": len(self.train),
            "validation_samples": len(self.validation),
            "test_samples": len(self.test),
        }

    @cached_property
    def digest(self) -> str:
        """The sha256 of everything a run can see of this data set."""
        hasher = hashlib.sha256(f"{self.name}\0{self.n_classes}".encode())
        arrays = [self.order, self.indptr]
        for part in (self.train, self.validation, self.test):
            arrays += [part.features, part.labels]
        for array in arrays:
            hasher.update(f"\0{array.dtype.str}\0{array.shape}".encode())
            hasher.update(np.ascontiguousarray(array).data)
        return hasher.hexdigest()
