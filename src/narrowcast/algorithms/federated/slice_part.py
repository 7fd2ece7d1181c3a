"""The clients of a chunk that train one slice of the model, and the terms of their local steps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from narrowcast.platform.contracts import LocalCall, Task
from narrowcast.platform.data.samples import Samples
from narrowcast.platform.models.hidden_units import HiddenUnits, Units
from narrowcast.platform.types import Arrays, BoolArray, Chunk, IntArray, LocalTerms


@dataclass(frozen=True)
class SlicePart:
    """The clients at `places` of a chunk, which train the same units.

    `labels` [outputs] are those that they have samples of, None if all outputs are trained.
    """

    hidden: HiddenUnits
    places: IntArray
    units: Units
    labels: BoolArray | None = None

    @property
    def counts(self) -> list[int]:
        """The number of units of each hidden layer."""
        return [len(units) for units in self.units]

    def call(self, model: Arrays, chunk: Chunk, task: Task, *, scaler: bool) -> LocalCall:
        """Return the training of the slice, by a network that has its units alone."""
        narrow = replace(task, model=task.model.narrowed(self.counts))  # type: ignore[attr-defined] # HasHiddenUnits
        server = self.hidden.take(model, self.units)
        factors = self._factors(server, scaler=scaler)
        columns = self.units[0] if self.hidden.reads_units else None
        terms = LocalTerms(rebuild=_rebuild if factors else None, frozen=factors, columns=columns)
        return LocalCall(server, chunk.take(self.places), narrow, terms)

    def _factors(self, server: Arrays, *, scaler: bool) -> dict[str, NDArray[Any]]:
        """Return the factors of parameters in local training, of shapes that broadcast with theirs.

        A layer's weights and biases divided by its share of units divide its outputs before their activation; weights
        and biases of 0 give the score 0.
        """
        factors: dict[str, NDArray[Any]] = {}
        for name, axes in self.hidden.axes.items():
            if scaler and axes[0] is not None:
                layer = axes[0].layer
                factors[name] = np.array([self.hidden.counts[layer] / self.counts[layer]], dtype=server[name].dtype)
        if self.labels is not None:
            factors |= {name: self.of_labels(server[name]).astype(server[name].dtype) for name in self.hidden.outputs}
        return factors

    def of_labels(self, output: NDArray[Any]) -> NDArray[Any]:
        """Return `labels` in a shape that broadcasts with a parameter of the last layer."""
        assert self.labels is not None, "asked for where labels are masked"
        return self.labels.reshape(-1, *[1] * (output.ndim - 1))

    def add(self, total: Arrays, weights: Arrays, added: Arrays, weight: float) -> None:
        """Add the weighted sum of the clients' changes of the slice to `total`, and its weight to each entry's."""
        for name, values in added.items():
            index = self.hidden.index(name, self.units)
            masked = self.labels is not None and name in self.hidden.outputs
            counts = self.of_labels(values) if masked else 1.0
            total[name][index] += values * counts
            weights[name][index] += weight * counts


def labels_of(data: Samples, clients: IntArray) -> BoolArray:
    """Return the classes of which each client has training samples, [C, classes]."""
    return class_counts_of(data, clients) > 0


def class_counts_of(data: Samples, clients: IntArray) -> IntArray:
    """Return the number of each client's training samples of each class, [C, classes]."""
    rows, sizes = data.of_clients("train").rows(clients)
    counts = np.zeros((len(clients), data.n_classes), dtype=np.int64)
    np.add.at(counts, (np.repeat(np.arange(len(clients)), sizes), data.train.labels[rows]), 1)
    return counts


def _rebuild(trained: Mapping[str, Any], frozen: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the parameters of a slice, some of them times their factor."""
    return {name: values * frozen[name] if name in frozen else values for name, values in trained.items()}
