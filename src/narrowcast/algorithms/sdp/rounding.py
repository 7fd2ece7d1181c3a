"""Cuts from unit vectors by random hyperplanes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from narrowcast.algorithms.sdp.vector_kernels import cut_values
from narrowcast.algorithms.sdp.weighted_graph import WeightedGraph
from narrowcast.platform.seeds import generator
from narrowcast.platform.types import FloatArray, IntArray

TOGETHER = 64
"""Hyperplanes of one product."""


@dataclass(frozen=True, eq=False)
class Roundings:
    """The cuts of all hyperplanes [count], and the sides, 0 or 1, of the best one [n]."""

    cuts: FloatArray
    sides: IntArray


def round_by_hyperplanes(graph: WeightedGraph, vectors: FloatArray, count: int, seed: int, first: int = 0) -> Roundings:
    """Return the cuts of `count` random hyperplanes, those numbered from `first`.

    A hyperplane depends on the seed and its number alone, so that parts of a set can be computed anywhere.

    Source: Goemans and Williamson, Journal of the ACM 42(6), 1995, section 2.
    """
    cuts, best, sides = np.empty(count), -np.inf, np.zeros(graph.vertices, dtype=np.int64)
    for begin in range(0, count, TOGETHER):
        numbers = range(first + begin, first + min(begin + TOGETHER, count))
        normals = [generator(seed, "hyperplane", each).standard_normal(vectors.shape[1]) for each in numbers]
        signs = np.ascontiguousarray((vectors @ np.array(normals).T >= 0).astype(np.int8))
        found = cut_values(graph.indptr, graph.indices, graph.weights, signs)
        cuts[begin : begin + len(found)] = found
        if found.max() > best:
            best, sides = float(found.max()), signs[:, int(found.argmax())].astype(np.int64)
    return Roundings(cuts, sides)
