"""Parts of a flat mapping of arrays, each under a prefix of its own: a server state, client states, a partial sum."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray

from narrowcast.platform.types import Arrays


@dataclass(frozen=True)
class PrefixedArrays:
    """The arrays whose names begin with `prefix`; checkpoints store them under these names."""

    prefix: str

    def name(self, name: str) -> str:
        """Return the full name of an array of this part."""
        return self.prefix + name

    def add(self, arrays: Arrays) -> dict[str, NDArray[Any]]:
        """Return arrays under their full names."""
        return {self.prefix + name: values for name, values in arrays.items()}

    def of(self, arrays: Arrays) -> dict[str, NDArray[Any]]:
        """Return the arrays of this part under their own names."""
        return {
            name.removeprefix(self.prefix): values for name, values in arrays.items() if name.startswith(self.prefix)
        }

    def without(self, arrays: Arrays) -> dict[str, NDArray[Any]]:
        """Return all other arrays."""
        return {name: values for name, values in arrays.items() if not name.startswith(self.prefix)}


CODEC = PrefixedArrays("codec/")
"""Client state that codecs keep: error memories, warm factors; [U, ...]."""
CONTROL = PrefixedArrays("control/")
"""Control variates: c_u [U, ...] of the clients, c of the server."""
BASIS = PrefixedArrays("basis/")
"""The random basis of each weight of a network, in a broadcast."""
UPDATE = PrefixedArrays("update/")
"""The change that the last round made to each tensor, in a server state."""
