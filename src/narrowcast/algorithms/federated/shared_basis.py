"""What all clients of a round regenerate from one seed: the basis B, and which components each of them trains."""

from __future__ import annotations

from typing import Literal

import numpy as np
from numpy.typing import NDArray

from narrowcast.platform.seeds import generator, stream_keys, uniform_bits
from narrowcast.platform.types import BoolArray, IntArray

BasisKind = Literal["orthonormal", "gaussian"]
"""`orthonormal`: orthogonal rows of norm sqrt(d / r), the polar factor of a Gaussian matrix, as the released code draws
it; `gaussian`: entries N(0, 1/r), as the paper's theory has it."""


def basis_seed(seed: int, round_index: int) -> int:
    """The 64-bit seed that the server sends for the basis of a round."""
    return int(generator(seed, "basis", round_index).integers(2**64, dtype=np.uint64))


def draw_basis(kind: BasisKind, rank: int, dimension: int, seed: int, name: str = "") -> NDArray[np.float32]:
    """B [r, d] of the weight `name` from the round's seed; E[B^T B] = I for both kinds."""
    gaussian = generator(seed, kind + name).standard_normal((rank, dimension))
    if kind == "gaussian":
        return (gaussian / rank**0.5).astype(np.float32)
    left, _, right = np.linalg.svd(gaussian, full_matrices=False)
    return np.ascontiguousarray(left @ right * (dimension / rank) ** 0.5, dtype=np.float32)


def draw_components(
    ranks: IntArray, rank: int, clients: IntArray, seed: int, round_index: int, name: str = ""
) -> BoolArray:
    """A random subset of `ranks[u]` of the `rank` components of the weight `name` for each client, [C, rank]."""
    keys = stream_keys(seed, "components" + name, round_index, clients)
    order = uniform_bits(keys[:, None], np.arange(rank)[None, :]).argsort(axis=1)
    components = np.zeros((len(clients), rank), dtype=bool)
    np.put_along_axis(components, order, np.arange(rank) < ranks[:, None], axis=1)
    return components
