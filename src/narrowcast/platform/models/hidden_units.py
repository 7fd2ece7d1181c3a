"""The hidden units of a network: the dimensions of its parameters that they index, so that slices can be taken."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import nn

from narrowcast.platform.errors import UserError
from narrowcast.platform.models.model import Model
from narrowcast.platform.types import Arrays, FloatArray, IntArray

Units = tuple[IntArray, ...]
"""The units of each hidden layer that a slice has, ascending."""
Index = tuple[Any, ...]
"""An index of numpy that selects the entries of a slice in a parameter."""


@dataclass(frozen=True)
class UnitAxis:
    """A dimension of a parameter with `blocks` x units x `width` entries, for the units of one hidden layer.

    `blocks` are stacked gates, as in an LSTM; `width` is the number of entries of a unit, as of a flattened channel.
    """

    layer: int
    blocks: int = 1
    width: int = 1

    def places(self, units: IntArray, n_units: int) -> IntArray:
        """Return the entries of the dimension that belong to some of n units, in the order of the entries."""
        rows = np.arange(self.blocks)[:, None] * n_units + units
        entries: IntArray = (rows.reshape(-1, 1) * self.width + np.arange(self.width)).ravel()
        return entries


@dataclass(frozen=True)
class HiddenUnits:
    """The number of units of each hidden layer, and for each parameter the units that index its dimensions.

    `axes` has an entry for the first one or two dimensions of a parameter, None where no hidden units index it.
    `outputs` are the parameters of the last layer, whose first dimension are the outputs of the network. With
    `reads_units` the units of the first of these layers are the features that the network reads, in the order of the
    data; a slice is told which of them are its own.
    """

    counts: tuple[int, ...]
    axes: Mapping[str, tuple[UnitAxis | None, ...]]
    outputs: tuple[str, ...]
    reads_units: bool = False

    def index(self, name: str, units: Units) -> Index:
        """Return the index of a slice's entries in one parameter."""
        axes = self.axes[name]
        indices = [slice(None) if axis is None else axis.places(units[axis.layer], self._count(axis)) for axis in axes]
        return np.ix_(*indices) if all(axes) and len(axes) > 1 else tuple(indices)

    def take(self, parameters: Arrays, units: Units) -> dict[str, NDArray[Any]]:
        """Return the entries of a slice in each parameter, as new arrays."""
        return {name: np.asarray(values)[self.index(name, units)].copy() for name, values in parameters.items()}

    def n_values(self, parameters: Arrays, counts: Sequence[int]) -> int:
        """Return the number of values in a slice with so many units of each layer."""
        total = 0
        for name, values in parameters.items():
            size = values.size
            for axis in filter(None, self.axes[name]):
                size = size // self._count(axis) * counts[axis.layer]
            total += size
        return total

    def squares(self, parameters: Arrays) -> tuple[FloatArray, ...]:
        """Return the sum of squares of all entries that a unit indexes, for each layer [units]."""
        sums = tuple(np.zeros(count) for count in self.counts)
        for name, values in parameters.items():
            for dimension, axis in enumerate(self.axes[name]):
                if axis is not None:
                    rows = np.moveaxis(np.asarray(values, dtype=np.float64), dimension, 0)
                    of_rows = np.square(rows).reshape(len(rows), -1).sum(axis=1)
                    sums[axis.layer][:] += of_rows.reshape(axis.blocks, -1, axis.width).sum(axis=(0, 2))
        return sums

    def owner(self, name: str) -> int:
        """Return the last layer whose units a parameter has: that which it computes; outputs follow all layers."""
        if name in self.outputs:
            return len(self.counts)
        return max((axis.layer for axis in self.axes[name] if axis), default=-1)

    def resized(self, counts: Sequence[int]) -> HiddenUnits:
        """Return the same layers with so many units."""
        return replace(self, counts=tuple(counts))

    def counts_in(self, parameters: Arrays) -> tuple[int, ...]:
        """Return the number of units of each layer in these parameters; those of `counts` for layers that have none."""
        counts = {
            axis.layer: values.shape[dimension] // (axis.blocks * axis.width)
            for name, values in parameters.items()
            for dimension, axis in enumerate(self.axes[name])
            if axis
        }
        return tuple(counts.get(layer, own) for layer, own in enumerate(self.counts))

    def put(self, name: str, values: NDArray[Any], units: Units) -> NDArray[Any]:
        """Return a parameter of all units that has the entries of a slice in their places, and zeros elsewhere."""
        shape = list(values.shape)
        for dimension, axis in enumerate(self.axes[name]):
            if axis:
                shape[dimension] = axis.blocks * self._count(axis) * axis.width
        whole = np.zeros(shape, dtype=values.dtype)
        whole[self.index(name, units)] = values
        return whole

    def _count(self, axis: UnitAxis) -> int:
        return self.counts[axis.layer]


def check_all_trained(model: Model, data: Any, kind: str) -> None:
    """Raise `UserError` for a network with frozen parameters or buffers, which have no units that slices could have."""
    if names := model.fixed_names(data):
        raise UserError(
            f"algorithm.kind = {kind} gives clients some of a network's units, and {min(names)} of model.kind = "
            f"{model.kind} is not trained, so that it would stay whole; train it, or use fedavg"
        )


def units_of_chain(module: nn.Module) -> HiddenUnits:
    """Return the hidden units of a chain of linear layers, convolutions, and layers without parameters.

    The entries of a flattened channel are adjacent, as `nn.Flatten` leaves them.
    """
    layers = [(name, layer) for name, layer in module.named_children() if isinstance(layer, nn.Linear | nn.Conv2d)]
    counts, axes = list[int](), dict[str, tuple[UnitAxis | None, ...]]()
    for index, (name, layer) in enumerate(layers):
        rows = UnitAxis(index) if index < len(layers) - 1 else None
        columns = UnitAxis(index - 1, width=layer.weight.shape[1] // counts[-1]) if counts else None
        axes[f"{name}.weight"] = (rows, columns)
        if layer.bias is not None:
            axes[f"{name}.bias"] = (rows,)
        counts.append(layer.weight.shape[0])
    outputs = tuple(name for name in axes if name.rpartition(".")[0] == layers[-1][0])
    return HiddenUnits(tuple(counts[:-1]), axes, outputs)
