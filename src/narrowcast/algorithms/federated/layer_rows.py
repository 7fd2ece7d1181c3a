"""The parameters of one hidden layer as a row for each of its units, and as tensors again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from narrowcast.platform.models.hidden_units import HiddenUnits, UnitAxis, Units
from narrowcast.platform.types import Arrays, FloatArray, IntArray

RecurrentMean = Literal["owners", "clients"]
"""The divisor of the weights that a unit reads other units of its layer with: the clients that have it, or all."""


@dataclass(frozen=True)
class LayerRows:
    """The parameters that one hidden layer computes with, weights before biases.

    A unit's row has its incoming weights and its biases. Weights between units of the layer, as of an LSTM, are not in
    it: they follow the units.
    """

    hidden: HiddenUnits
    layer: int

    @property
    def names(self) -> list[str]:
        """The parameters of the layer."""
        return [name for name in self.hidden.axes if self.hidden.owner(name) == self.layer]

    @property
    def recurrent(self) -> list[str]:
        """Those of them that the units of the layer index twice."""
        return [name for name in self.names if len(self._dimensions(name)) > 1]

    def rows(self, parameters: Arrays) -> FloatArray:
        """Return the row of each unit, [L, D]."""
        parts = []
        for name in self._in_rows(parameters):
            values, axis = self._units_first(name, np.asarray(parameters[name], dtype=np.float64))
            blocks = values.reshape(axis.blocks, -1, axis.width, prod(values.shape[1:]))
            parts.append(blocks.swapaxes(0, 1).reshape(blocks.shape[1], -1))
        return np.concatenate(parts, axis=1)

    def prior_mean(self, parameters: Arrays, bias: float, *, on_first_weights: bool) -> FloatArray:
        """Return the mean of a row before any data, [D]: `bias` for biases, or for as many of the first weights."""
        names = self._in_rows(parameters)
        sizes = [parameters[name].size // self.hidden.counts[self.layer] for name in names]
        n_biases = sum(size for name, size in zip(names, sizes, strict=True) if parameters[name].ndim == 1)
        mean = np.zeros(sum(sizes))
        mean[slice(n_biases) if on_first_weights else slice(len(mean) - n_biases, None)] = bias
        return mean

    def tensors(self, rows: FloatArray, like: Arrays) -> dict[str, NDArray[Any]]:
        """Return rows [G, D] as parameters of G units, otherwise of the shapes and types of `like`."""
        tensors, first = {}, 0
        for name in self._in_rows(like):
            values, axis = self._units_first(name, np.asarray(like[name]))
            size = values.size // self.hidden.counts[self.layer]
            blocks = rows[:, first : first + size].reshape(len(rows), axis.blocks, axis.width, -1).swapaxes(0, 1)
            units_first = blocks.reshape(-1, *values.shape[1:])
            tensors[name] = np.moveaxis(units_first, 0, self._dimensions(name)[0]).astype(like[name].dtype)
            first += size
        return tensors

    def recurrent_means(
        self, clients: Sequence[Arrays], units: Sequence[IntArray], owners: IntArray, divisor: RecurrentMean
    ) -> dict[str, NDArray[Any]]:
        """Return the mean of the weights between units, each client's at its units' places among the global ones.

        `owners` [G] are the clients that have each global unit. Their sum of what a unit reads is divided by them, with
        zeros where one of them lacks the unit that is read, as a unit's row is: so a unit that clients have in several
        places is read as often as it is there.
        """
        counts = [*self.hidden.counts]
        counts[self.layer] = len(owners)
        whole, means = self.hidden.resized(counts), {}
        for name in self.recurrent:
            total = np.zeros(())
            for parameters, own in zip(clients, units, strict=True):
                values = np.asarray(parameters[name], dtype=np.float64)
                total = total + whole.put(name, values, self._places(own))
            by_unit, axis = self._units_first(name, total)
            count = np.full(len(owners), len(clients)) if divisor == "clients" else owners
            divisors = np.tile(np.repeat(count, axis.width), axis.blocks).reshape(-1, *[1] * (by_unit.ndim - 1))
            mean = np.moveaxis(by_unit / divisors, 0, self._dimensions(name)[0])
            means[name] = mean.astype(clients[0][name].dtype)
        return means

    def _places(self, own: IntArray) -> Units:
        """Return the units of each layer, of which all but this one's are those that the client has."""
        every = [np.arange(count) for count in self.hidden.counts]
        every[self.layer] = own
        return tuple(every)

    def _in_rows(self, parameters: Arrays) -> list[str]:
        """Return the parameters of a row, weights before biases."""
        twice = self.recurrent
        return sorted((name for name in self.names if name not in twice), key=lambda name: parameters[name].ndim == 1)

    def _dimensions(self, name: str) -> list[int]:
        """Return the dimensions of a parameter that the units of the layer index."""
        axes = self.hidden.axes[name]
        return [dimension for dimension, axis in enumerate(axes) if axis is not None and axis.layer == self.layer]

    def _units_first(self, name: str, values: NDArray[Any]) -> tuple[NDArray[Any], UnitAxis]:
        """Return a parameter with the dimension of the units in front, and what is known of that."""
        dimension = self._dimensions(name)[0]
        axis = self.hidden.axes[name][dimension]
        assert axis is not None, "it is one of the layer's"
        return np.moveaxis(values, dimension, 0), axis
