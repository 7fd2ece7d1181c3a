"""Products of sparse matrices with tensors, and their gradients; each sum is one thread's, so that hosts agree."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from narrowcast.platform.data.node_graph import NodeGraph
from narrowcast.platform.types import IntArray

if TYPE_CHECKING:
    from scipy.sparse import csr_array

_SPARSE = 0.1
"""Share of features that are not 0 below which they are multiplied as a sparse matrix."""


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, matrix: csr_array, transposed: csr_array, values: Tensor) -> Tensor:
        ctx.transposed = transposed
        return torch.from_numpy(matrix @ values.detach().numpy())

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, None, Tensor]:
        return None, None, torch.from_numpy(ctx.transposed @ gradients[0].contiguous().numpy())


def propagate(adjacency: csr_array, values: Tensor) -> Tensor:
    """Return a symmetric matrix [n, n] times values [n, h]."""
    product: Tensor = _Product.apply(adjacency, adjacency, values)  # type: ignore[no-untyped-call]
    return product


class Features:
    """The features [n, d] of some nodes, sparse if most of them are 0, and their product with weights [d, h].

    Dense ones are kept by column, so that a slice that reads some columns copies whole runs of memory.
    """

    def __init__(self, by_column: Tensor | None, sparse: csr_array | None = None) -> None:
        self._by_column, self._sparse = by_column, sparse
        self._transposed = None if sparse is None else sparse.T.tocsr()

    @classmethod
    def of(cls, values: np.ndarray) -> Features:
        """Return the features of an array [n, d]."""
        from scipy.sparse import csr_array  # takes a tenth of a second

        if np.count_nonzero(values) <= _SPARSE * values.size:
            return cls(None, csr_array(values))
        return cls(torch.from_numpy(np.array(values.T, order="C")))

    def at(self, nodes: IntArray | None, columns: IntArray | None) -> Features:
        """Return the features of some nodes and columns; None stands for all."""
        if nodes is None and columns is None:
            return self
        if self._sparse is not None:
            rows = self._sparse if nodes is None else self._sparse[nodes]
            return Features(None, rows if columns is None else rows[:, columns])
        assert self._by_column is not None, "features are sparse or dense"
        values = self._by_column
        values = values if columns is None else values[torch.from_numpy(columns)]
        return Features(values if nodes is None else values[:, torch.from_numpy(nodes)])

    def times(self, weights: Tensor) -> Tensor:
        """Return the product with weights, [n, h]."""
        if self._by_column is not None:
            return self._by_column.t() @ weights
        product: Tensor = _Product.apply(self._sparse, self._transposed, weights)  # type: ignore[no-untyped-call]
        return product


@lru_cache(maxsize=2)
def features_of(data: NodeGraph) -> Features:
    """Return the features of all nodes of a graph."""
    return Features.of(data.features)


@lru_cache(maxsize=2)
def adjacency_of(data: NodeGraph, self_loops: bool) -> csr_array:
    """Return the normalised adjacency matrix of the whole graph."""
    return normalised(_plain(data), self_loops)


def adjacency_among(data: NodeGraph, nodes: IntArray, self_loops: bool) -> csr_array:
    """Return the normalised adjacency matrix of the graph that some nodes, ascending, have among themselves."""
    return normalised(_plain(data)[nodes][:, nodes], self_loops)


@lru_cache(maxsize=2)
def _plain(data: NodeGraph) -> csr_array:
    from scipy.sparse import csr_array

    ones = np.ones(len(data.indices), dtype=np.float32)
    return csr_array((ones, data.indices, data.indptr), shape=(data.n_nodes, data.n_nodes))


def normalised(adjacency: csr_array, self_loops: bool) -> csr_array:
    """Return D^-1/2 A D^-1/2 in float32, A with an edge from each node to itself if asked for, D its degrees.

    A node without edges has a row of zeros.
    """
    from scipy.sparse import csr_array, eye_array

    if self_loops:
        adjacency = csr_array(adjacency + eye_array(adjacency.shape[0], dtype=np.float32, format="csr"))
    degrees = np.diff(adjacency.indptr)
    roots = np.where(degrees > 0, np.maximum(degrees, 1) ** -0.5, 0.0)
    owners = np.repeat(np.arange(len(degrees)), degrees)
    scaled = (roots[owners] * roots[adjacency.indices]).astype(np.float32)
    return csr_array((scaled, adjacency.indices, adjacency.indptr), shape=adjacency.shape)
