"""Data that all parties of a round regenerate: the seed of the basis B, and the components that each client trains."""

from __future__ import annotations

import numpy as np

from narrowcast.platform.seeds import generator, stream_keys, uniform_bits
from narrowcast.platform.types import BoolArray, IntArray


def basis_seed(seed: int, round_index: int) -> int:
    """Return the 64-bit seed that the server sends for the basis of a round."""
    return int(generator(seed, "basis", round_index).integers(2**64, dtype=np.uint64))


def draw_components(
    ranks: IntArray, rank: int, clients: IntArray, seed: int, round_index: int, name: str = ""
) -> BoolArray:
    """Return S_u of each client, [C, rank]: a random subset of `ranks[u]` of the components of the tensor `name`."""
    if (ranks >= rank).all():
        return np.ones((len(clients), rank), dtype=bool)
    keys = stream_keys(seed, "components" + name, round_index, clients)
    order = uniform_bits(keys[:, None], np.arange(rank)[None, :]).argsort(axis=1)
    components = np.zeros((len(clients), rank), dtype=bool)
    np.put_along_axis(components, order, np.arange(rank) < ranks[:, None], axis=1)
    return components
