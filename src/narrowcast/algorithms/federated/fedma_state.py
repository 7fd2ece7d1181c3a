"""The arrays of FedMA's server and clients between rounds, and the networks that clients train in each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from narrowcast.algorithms.uploads.prefixed_arrays import PrefixedArrays
from narrowcast.platform.models.hidden_units import HiddenUnits
from narrowcast.platform.types import Arrays, BoolArray, IntArray

MATCHING = PrefixedArrays("matching/")
"""The server state besides the last whole model."""
MATCHED = PrefixedArrays("matching/layers/")
"""The layers of the present pass that are matched."""
OWN = PrefixedArrays("own/")
"""A client's own layers, of its own width and those of the layer before, [U, ...]."""
CLIENTS, EXAMPLES, CLASSES = "clients", "examples", "classes"
SENT = PrefixedArrays("sent/")
"""The uploads of a layer: client numbers [k], examples in all [k] and by class [k, classes], tensors [k, ...]."""
_LAYER, _PASS, _UNITS = (MATCHING.name(name) for name in ("layer", "pass", "units"))


@dataclass(frozen=True)
class Progress:
    """The progress of matching, as the server keeps and sends it.

    `layer` is the next to match, of `len(hidden.counts)` hidden ones and the last; `passes` are those completed.
    `hidden` has the clients' own numbers of units, `units` [U, L] for each layer the global unit of each unit of a
    client, -1 for clients of which none are known. `layers` are those that are matched in this pass.
    """

    hidden: HiddenUnits
    layer: int
    passes: int
    layers: Arrays
    units: tuple[IntArray, ...]

    @classmethod
    def fresh(cls, hidden: HiddenUnits, n_clients: int) -> Progress:
        """Return the progress before round 1."""
        units = tuple(np.full((n_clients, count), -1) for count in hidden.counts)
        return cls(hidden, 0, 0, {}, units)

    @classmethod
    def of(cls, arrays: Arrays, hidden: HiddenUnits) -> Progress:
        """Return the progress in a server state or a broadcast."""
        units = tuple(np.asarray(arrays[f"{_UNITS}/{layer}"]) for layer in range(len(hidden.counts)))
        return cls(hidden, int(arrays[_LAYER]), int(arrays[_PASS]), MATCHED.of(arrays), units)

    def arrays(self) -> dict[str, NDArray[Any]]:
        """Return the arrays of a server state or a broadcast, besides the last whole model."""
        return {
            _LAYER: np.array(self.layer),
            _PASS: np.array(self.passes),
            **MATCHED.add(self.layers),
            **{f"{_UNITS}/{layer}": units for layer, units in enumerate(self.units)},
        }

    @property
    def at_head(self) -> bool:
        """Return whether all hidden layers are matched."""
        return self.layer == len(self.hidden.counts)

    @property
    def counts(self) -> tuple[int, ...]:
        """The number of units of each layer in this round: global ones before `layer`, a client's own from there on."""
        return self.hidden.counts_in(self.layers)

    @property
    def names(self) -> list[str]:
        """The parameters of the layer that is matched next."""
        return [name for name in self.hidden.axes if self.hidden.owner(name) == self.layer]

    @property
    def trained(self) -> list[str]:
        """The parameters of all layers that are not matched yet."""
        return [name for name in self.hidden.axes if self.hidden.owner(name) >= self.layer]

    def takes_part(self, clients: IntArray) -> BoolArray:
        """Return whether each client's units of the layer before are matched, [C]; all take part in a first layer."""
        if not self.layer:
            return np.ones(len(clients), dtype=bool)
        known: BoolArray = self.units[self.layer - 1][clients, 0] >= 0
        return known

    def in_places(self, name: str, values: NDArray[Any], client: int) -> NDArray[Any]:
        """Return a client's parameter of the next layer with its inputs at the places of their global units."""
        before = self.layer - 1
        if not any(axis and axis.layer == before for axis in self.hidden.axes[name]):
            return values
        places = [np.arange(count) for count in self.hidden.counts]
        places[before] = self.units[before][client]
        return self.hidden.resized(self.counts).put(name, values, tuple(places))

    def slice_of(self, model: Arrays, client: int) -> dict[str, NDArray[Any]]:
        """Return a client's units of the last whole model; the first ones if its own are not known."""
        known = all(units[client, 0] >= 0 for units in self.units)
        units = tuple(each[client] if known else np.arange(each.shape[1]) for each in self.units)
        return self.hidden.resized(self.hidden.counts_in(model)).take(model, units)
