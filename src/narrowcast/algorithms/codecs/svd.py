"""The best approximation of rank r of each client's update, by singular value decomposition.

A baseline of Nguyen et al., WWW 2024 (arXiv:2401.03748), after Konecny et al., arXiv:1610.05492.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
from numpy.typing import NDArray

from narrowcast.algorithms.codecs.factors import LEFT, RIGHT, Factored
from narrowcast.algorithms.codecs.stage import Shapes, Tensors
from narrowcast.platform.types import Arrays, FloatArray

_VALUES = "/singular_values"


class SVD(Factored):
    """Send the r largest singular values of an update with their vectors.

    `parts: uv` sends U S and V, r (m + d) values; `usv` sends the three separately, r (m + d + 1), as the code released
    with CoLR does.

    Differs from the paper: 1. its tables count r m values, those of U alone; here all factors are counted. 2. the
    decomposition is computed from the smaller Gram matrix in float64, several times faster for thin matrices and equal
    to float32 precision.
    """

    kind: Literal["svd"] = "svd"
    parts: Literal["uv", "usv"] = "uv"

    def factor_shapes(self, name: str, rows: int, columns: int, rank: int) -> Shapes:
        """Return U [m, r], V [d, r], and the singular values [r] with `usv`."""
        shapes = dict(super().factor_shapes(name, rows, columns, rank))
        return shapes if self.parts == "uv" else {**shapes, name + _VALUES: (rank,)}

    def factor(
        self, name: str, matrix: NDArray[np.float32], rank: int, key: int, state: Arrays
    ) -> tuple[Tensors, Arrays]:
        """Return the factors of the truncated decomposition."""
        del key, state
        left, values, right = truncated_svd(matrix, rank)
        if self.parts == "uv":
            return {name + LEFT: (left * values).astype(np.float32), name + RIGHT: right.T.astype(np.float32)}, {}
        return {
            name + LEFT: left.astype(np.float32),
            name + RIGHT: right.T.astype(np.float32),
            name + _VALUES: values.astype(np.float32),
        }, {}

    def product(self, name: str, factors: Tensors) -> NDArray[np.float32]:
        """Return U S V^T; rows of zeros in U cost nothing."""
        if self.parts == "uv":
            return super().product(name, factors)
        left, right = factors[name + LEFT], factors[name + RIGHT].T * factors[name + _VALUES][:, None]
        used = np.flatnonzero(left.any(axis=1))
        matrix = np.zeros((len(left), right.shape[1]), dtype=np.float32)
        matrix[used] = left[used] @ right
        return matrix


def truncated_svd(matrix: NDArray[np.float32], rank: int) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Return U [m, r], the r largest singular values descending, and V [r, d], of a finite matrix [m, d].

    Rows of zeros, of which a client's change has many, cost nothing: their rows of U are zero.
    """
    wide = matrix.shape[0] < matrix.shape[1]
    tall = matrix.T if wide else matrix
    used = np.flatnonzero(tall.any(axis=1))
    dense = tall[used].astype(np.float64)
    _, vectors = np.linalg.eigh(dense.T @ dense)
    right = vectors[:, ::-1][:, :rank]
    image = dense @ right
    values = np.sqrt(np.einsum("mr,mr->r", image, image))
    left = np.zeros((len(tall), rank))
    left[used] = np.divide(image, values, out=np.zeros_like(image), where=values > 0)
    return (right, values, left.T) if wide else (left, values, right.T)
