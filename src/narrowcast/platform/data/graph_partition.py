"""Partition of a graph into parts of nearly equal size with few edges between them, by METIS."""

from __future__ import annotations

import numpy as np

from narrowcast.platform.extras import check_installed
from narrowcast.platform.types import IntArray


def clusters_of(indptr: IntArray, indices: IntArray, n_clusters: int, seed: int) -> IntArray:
    """Return the part of each node, [n], numbered from 0 without gaps; a function of the arguments alone.

    Shapes: indptr [n + 1] and indices [2 m], the neighbours of each node. Raise `UserError` if METIS is missing.

    Source: Karypis and Kumar, A Fast and High Quality Multilevel Scheme for Partitioning Irregular Graphs, SIAM Journal
    on Scientific Computing 1998.
    """
    if n_clusters == 1:
        return np.zeros(len(indptr) - 1, dtype=np.int64)
    check_installed("pymetis", "data.clusters")
    import pymetis

    options = pymetis.Options(seed=seed % 2**31)
    neighbours = pymetis.CSRAdjacency(adj_starts=indptr, adjacent=indices)
    _, parts = pymetis.part_graph(n_clusters, neighbours, options=options)
    return np.unique(np.asarray(parts, dtype=np.int64), return_inverse=True)[1].astype(np.int64)
