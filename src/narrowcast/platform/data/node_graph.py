"""A graph whose nodes have features and classes, in which every client trains on the same nodes."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from narrowcast.platform.errors import UserError
from narrowcast.platform.types import IntArray

UNKNOWN = -1
"""The class of a node that none is known of; such a node is in no split."""


@dataclass(frozen=True, eq=False)
class NodeGraph:
    """An undirected graph of n nodes, of which some have to be classified; clients hold the whole of it.

    Shapes: features [n, d] float32; `indptr` [n + 1] and `indices` [2 m] are the neighbours of each node, ascending,
    every edge both ways and none from a node to itself; labels [n], `UNKNOWN` without a class; `train`, `validation`
    and `test` are nodes, disjoint; clusters [n], the part of each node in a partition of the graph, from 0.
    """

    name: str
    source: str
    n_classes: int
    features: NDArray[Any]
    indptr: IntArray
    indices: IntArray
    labels: IntArray
    train: IntArray
    validation: IntArray
    test: IntArray
    clusters: IntArray
    n_clients: int

    targets = "classes of nodes"

    @property
    def n_nodes(self) -> int:
        """The number of nodes, n, isolated ones included."""
        return len(self.labels)

    @property
    def n_edges(self) -> int:
        """The number of edges, m."""
        return len(self.indices) // 2

    @property
    def n_clusters(self) -> int:
        """The number of parts of the partition."""
        return int(self.clusters.max()) + 1

    @cached_property
    def examples(self) -> IntArray:
        """The training nodes of every client, which are the same, [U]."""
        return np.full(self.n_clients, len(self.train))

    @property
    def sizes(self) -> Mapping[str, int]:
        """Sizes shown in reports."""
        return {
            "clients": self.n_clients,
            "classes": self.n_classes,
            "nodes": self.n_nodes,
            "edges": self.n_edges,
            "isolated_nodes": int((np.diff(self.indptr) == 0).sum()),
            "clusters": self.n_clusters,
            "training_nodes": len(self.train),
            "validation_nodes": len(self.validation),
            "test_nodes": len(self.test),
        }

    @cached_property
    def digest(self) -> str:
        """The sha256 of all content that a run can observe."""
        hasher = hashlib.sha256(f"{self.name}\0{self.n_classes}\0{self.n_clients}".encode())
        arrays = (self.features, self.indptr, self.indices, self.labels, self.train, self.validation, self.test)
        for array in (*arrays, self.clusters):
            hasher.update(f"\0{array.dtype.str}\0{array.shape}".encode())
            hasher.update(np.ascontiguousarray(array).data)
        return hasher.hexdigest()


def neighbours(edges: IntArray, n_nodes: int, where: str) -> tuple[IntArray, IntArray]:
    """Return indptr [n + 1] and indices [2 m] of the undirected graph with these edges [k, 2].

    Edges that are listed twice or in both directions count once, and those from a node to itself are left out: a model
    adds its own. Raise `UserError` for an edge to a node that does not exist.
    """
    if len(wrong := np.flatnonzero(((edges < 0) | (edges >= n_nodes)).any(axis=1))):
        first, second = edges[wrong[0]].tolist()
        raise UserError(
            f"{where}: edge {wrong[0]} joins nodes {first} and {second}, but nodes are 0 to {n_nodes - 1}; correct it, "
            "or give the features of all nodes"
        )
    proper = edges[edges[:, 0] != edges[:, 1]]
    both = np.concatenate([proper, proper[:, ::-1]])
    cells = np.unique(both[:, 0] * n_nodes + both[:, 1])
    owners, others = np.divmod(cells, n_nodes)
    return np.concatenate([[0], np.cumsum(np.bincount(owners, minlength=n_nodes))]), others


def check_nodes(labels: IntArray, n_classes: int, splits: Mapping[str, IntArray], where: str) -> None:
    """Raise `UserError` unless the splits are disjoint nodes of known classes, and `train` has one."""
    if len(wrong := np.flatnonzero((labels < UNKNOWN) | (labels >= n_classes))):
        raise UserError(
            f"{where}: label {labels[wrong[0]]} of node {wrong[0]} is not one of 0 to {n_classes - 1}, nor {UNKNOWN} "
            "for none; correct it"
        )
    seen = np.zeros(len(labels), dtype=bool)
    for name, nodes in splits.items():
        if len(wrong := np.flatnonzero((nodes < 0) | (nodes >= len(labels)))):
            raise UserError(f"{where}: {name} has node {nodes[wrong[0]]}, but nodes are 0 to {len(labels) - 1}")
        if len(np.unique(nodes)) < len(nodes) or seen[nodes].any():
            twice = nodes[seen[nodes]] if seen[nodes].any() else nodes[np.diff(np.sort(nodes), prepend=-1) == 0]
            raise UserError(
                f"{where}: {name} has a node that is also elsewhere or twice, such as {twice[0]}; leave one"
            )
        if len(unlabelled := nodes[labels[nodes] == UNKNOWN]):
            raise UserError(f"{where}: {name} has node {unlabelled[0]}, which has no class; leave it out")
        seen[nodes] = True
    if not len(splits["train"]):
        raise UserError(f"{where}: no node is trained on; give at least one")
