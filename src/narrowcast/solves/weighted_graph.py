"""Undirected graphs with weights, in compressed rows, and the files and generators that they come from."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from narrowcast.platform.errors import UserError
from narrowcast.platform.seeds import generator
from narrowcast.platform.storage.disk import readable
from narrowcast.platform.types import FloatArray, IntArray

MOST_VERTICES = 10**7
MOST_WEIGHT = 1e100
"""Largest absolute weight, whose squares and their sums are finite."""
_MOST_DIGITS = 18


@dataclass(frozen=True, eq=False)
class WeightedGraph:
    """Neighbours of each vertex, ascending: indptr [n + 1], indices [2 m] and weights [2 m], every edge both ways."""

    indptr: IntArray
    indices: IntArray
    weights: FloatArray

    @property
    def vertices(self) -> int:
        """The number of vertices n, isolated ones included."""
        return len(self.indptr) - 1

    @property
    def edges(self) -> int:
        """The number of edges m."""
        return len(self.indices) // 2

    @cached_property
    def total(self) -> float:
        """The sum of the weights of all edges."""
        return float(self.weights.sum()) / 2

    @cached_property
    def digest(self) -> str:
        """The sha256 of the graph."""
        digest = hashlib.sha256()
        for array in (self.indptr, self.indices, self.weights):
            digest.update(np.ascontiguousarray(array).data)
        return digest.hexdigest()


def graph_of(vertices: int, first: IntArray, second: IntArray, weight: FloatArray) -> WeightedGraph:
    """Return the graph with edges {first, second}, numbered from 0; raise `UserError` if it is not a valid graph.

    Shapes: first, second and weight [m].
    """
    if not weight.any():
        raise UserError("the graph has no edges of a weight other than 0, so that every cut is 0; give one with edges")
    for name, ends in (("first", first), ("second", second)):
        if len(wrong := np.flatnonzero((ends < 0) | (ends >= vertices))):
            index = int(wrong[0])
            raise UserError(
                f"edge {index + 1} has the {name} vertex {ends[index] + 1}; vertices are numbered from 1 to {vertices}"
            )
    if len(wrong := np.flatnonzero(first == second)):
        raise UserError(f"edge {wrong[0] + 1} joins vertex {first[wrong[0]] + 1} with itself; leave it out")
    if len(wrong := np.flatnonzero(~(np.abs(weight) <= MOST_WEIGHT))):
        raise UserError(
            f"edge {wrong[0] + 1} has the weight {weight[wrong[0]]:g}; give finite weights of at most {MOST_WEIGHT:g}"
        )
    keys = np.minimum(first, second) * vertices + np.maximum(first, second)
    order = np.argsort(keys, kind="stable")
    if len(twice := np.flatnonzero(np.diff(keys[order]) == 0)):
        edge, repeat = order[twice[0]], order[twice[0] + 1]
        pair = f"edges {edge + 1} and {repeat + 1} both join vertices {first[edge] + 1} and {second[edge] + 1}"
        if weight[edge] != weight[repeat]:
            raise UserError(f"{pair}, with weights {weight[edge]:g} and {weight[repeat]:g}: the graph is not symmetric")
        raise UserError(f"{pair}; give each edge once")
    rows = np.concatenate([first, second])
    columns = np.concatenate([second, first])
    order = np.lexsort((columns, rows))
    indptr = np.zeros(vertices + 1, dtype=np.int64)
    np.cumsum(np.bincount(rows, minlength=vertices), out=indptr[1:])
    weights = np.concatenate([weight, weight]).astype(np.float64)
    return WeightedGraph(indptr, columns[order].astype(np.int32), weights[order])


def read_graph(path: Path) -> WeightedGraph:
    """Return the graph of a file in the format of Gset: a line `n m`, then m lines `i j weight`, numbered from 1.

    All weights are 1 if no line has one.
    """
    advice = 'give a line "n m", then a line "i j weight", or "i j", for each edge'
    with readable(path, (OSError, UnicodeDecodeError, ValueError), advice), path.open(encoding="utf-8-sig") as file:
        header = file.readline().split()
        if len(header) != 2 or not all(word.isdecimal() for word in header):
            raise UserError(f"{path}: begins with {' '.join(header)[:60]!r}; {advice}")
        vertices, edges = map(int, header)
        if not 1 <= vertices <= MOST_VERTICES:
            raise UserError(f"{path}: has {vertices} vertices; 1 to {MOST_VERTICES} are allowed")
        rows = [line.split() for line in file if line.strip()]
        if len(rows) != edges:
            raise UserError(f"{path}: has {len(rows)} edges, but its first line says {edges}; is the file cut off?")
        for index, row in enumerate(rows):
            if len(row) not in (2, 3) or len(row) != len(rows[0]):
                reason = "; is the file cut off?" if index == edges - 1 else ""
                raise UserError(f"{path}: edge {index + 1} is {' '.join(row)[:60]!r}{reason}; {advice}")
            if wrong := [end for end in row[:2] if not end.isdecimal() or len(end) > _MOST_DIGITS]:
                numbered = f"vertices are numbered from 1 to {vertices}"
                raise UserError(f"{path}: edge {index + 1} has the vertex {wrong[0]:.30}; {numbered}")
        ends = np.array([row[:2] for row in rows], dtype=np.int64).reshape(-1, 2) - 1
        weight = np.array([row[2] if len(row) == 3 else 1 for row in rows], dtype=np.float64)
    try:
        return graph_of(vertices, ends[:, 0], ends[:, 1], weight)
    except UserError as error:
        raise UserError(f"{path}: {error}") from error


def torus(side: int, seed: int) -> WeightedGraph:
    """Return a square grid of side^2 vertices that is closed in both directions, with weights +1 or -1."""
    node = np.arange(side * side).reshape(side, side)
    first = np.concatenate([node.ravel(), node.ravel()])
    second = np.concatenate([np.roll(node, -1, 0).ravel(), np.roll(node, -1, 1).ravel()])
    sign = 2 * generator(seed, "torus weights").integers(0, 2, len(first)) - 1
    return graph_of(side * side, first, second, sign.astype(np.float64))


def random_graph(vertices: int, edges: int, seed: int) -> WeightedGraph:
    """Return a graph whose edges are drawn uniformly without replacement, with weights 1."""
    random = generator(seed, "graph edges")
    pairs = vertices * (vertices - 1) // 2
    chosen = np.empty(0, dtype=np.int64)
    while len(chosen) < edges:  # a set of distinct draws, since a permutation of all pairs may not fit in memory
        chosen = np.unique(np.concatenate([chosen, random.integers(0, pairs, edges - len(chosen))]))
    # pair q of the upper triangle, counted by columns: column j >= 1 begins at j (j - 1) / 2
    second = ((1 + np.sqrt(1 + 8.0 * chosen)) / 2).astype(np.int64)
    second += second * (second + 1) // 2 <= chosen
    second -= second * (second - 1) // 2 > chosen
    first = chosen - second * (second - 1) // 2
    return graph_of(vertices, first, second, np.ones(edges))
