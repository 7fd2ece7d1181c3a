"""Labelled samples, stored once, and the index that partitions them across clients."""

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
    """n labelled samples. Shapes: features [n, ...], uint8 (0 to 255), float32, or int64 tokens; labels [n]."""

    features: NDArray[Any]
    labels: IntArray

    def __len__(self) -> int:
        return len(self.labels)

    def take(self, rows: IntArray) -> Labelled:
        """Return a copy of the samples at `rows`."""
        return Labelled(self.features[rows], self.labels[rows])


@dataclass(frozen=True, eq=False)
class Samples:
    """A classification data set partitioned across U clients by index, without copying samples.

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
        """Number of clients, U."""
        return len(self.indptr) - 1

    @cached_property
    def examples(self) -> IntArray:
        """Number of training samples of every client, [U]."""
        return np.diff(self.indptr)

    @property
    def sizes(self) -> Mapping[str, int]:
        """Sizes shown in reports."""
        return {
            "clients": self.n_clients,
            "classes": self.n_classes,
            "training_samples": len(self.train),
            "validation_samples": len(self.validation),
            "test_samples": len(self.test),
        }

    @cached_property
    def digest(self) -> str:
        """The sha256 of all content that a run can observe."""
        hasher = hashlib.sha256(f"{self.name}\0{self.n_classes}".encode())
        arrays = [self.order, self.indptr]
        for part in (self.train, self.validation, self.test):
            arrays += [part.features, part.labels]
        for array in arrays:
            hasher.update(f"\0{array.dtype.str}\0{array.shape}".encode())
            hasher.update(np.ascontiguousarray(array).data)
        return hasher.hexdigest()
