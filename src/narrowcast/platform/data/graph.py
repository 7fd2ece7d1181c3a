"""Graphs whose nodes are classified: the data set, the base of its sources, and graphs in NumPy .npz files.

Every client holds the whole graph. Its nodes are also divided into clusters of nearly equal size with few edges between
them, by METIS.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from math import sqrt
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from narrowcast.platform.config.files import Section
from narrowcast.platform.config.plugins import check_installed
from narrowcast.platform.data.dataset import Dataset, DataSource
from narrowcast.platform.data.download import located
from narrowcast.platform.errors import UserError
from narrowcast.platform.seeds import generator
from narrowcast.platform.storage.disk import npz_arrays
from narrowcast.platform.types import IntArray


def clusters_of(indptr: IntArray, indices: IntArray, n_clusters: int, seed: int) -> IntArray:
    """Return the part of each node, [n], numbered from 0 without gaps; a function of the arguments alone.

    The parts have nearly equal sizes and few edges between them. Shapes: indptr [n + 1] and indices [2 m], the
    neighbours of each node. Raise `UserError` if METIS is missing.

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


UNKNOWN = -1
"""The class of a node that none is known of; such a node is in no split."""


@dataclass(frozen=True, eq=False)
class NodeGraph(Dataset):
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
    directed = np.concatenate([proper, proper[:, ::-1]])
    cells = np.unique(directed[:, 0] * n_nodes + directed[:, 1])
    owners, ends = np.divmod(cells, n_nodes)
    return np.concatenate([[0], np.cumsum(np.bincount(owners, minlength=n_nodes))]), ends


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


class GraphSource(DataSource, Section):
    """A graph that each of `clients` trains on as a whole, as sub-networks of one model do."""

    clients: int = Field(1, ge=1, le=10_000, description="number of clients; each has the whole graph")
    row_normalised: bool = Field(True, description="divide the features of a node by their sum, if that is not 0")
    projected_features: int | None = Field(
        None, ge=1, le=10**5, description="dimensions of a random Gaussian projection of the features; null: none"
    )
    clusters: int = Field(
        1, ge=1, le=10**6, description="parts that the graph is cut into, of which training may take some at a time"
    )
    seed: int | None = Field(None, ge=0, description="seed of the projection and the partition; null: that of the run")

    def _graph(
        self,
        name: str,
        source: str,
        features: NDArray[Any],
        edges: IntArray,
        labels: IntArray,
        n_classes: int,
        splits: Mapping[str, IntArray],
    ) -> NodeGraph:
        """Return the graph of checked arrays: features [n, d], edges [k, 2], labels [n], nodes of each split."""
        check_nodes(labels, n_classes, splits, source)
        if not np.isfinite(features).all():
            raise UserError(f"{source}: a feature is not finite; correct it")
        indptr, indices = neighbours(edges, len(labels), source)
        if self.clusters > len(labels):
            raise UserError(f"data.clusters = {self.clusters}: {name} has {len(labels)} nodes; use at most as many")
        return NodeGraph(
            name=name,
            source=source,
            n_classes=n_classes,
            features=self._projected(self._normalised(features)),
            indptr=indptr,
            indices=indices,
            labels=labels,
            **splits,
            clusters=clusters_of(indptr, indices, self.clusters, self.seed or 0),
            n_clients=self.clients,
        )

    def _normalised(self, features: NDArray[Any]) -> NDArray[np.float32]:
        """Return float32 features, each row divided by its sum if asked for; rows of zeros stay."""
        if self.row_normalised:
            sums = features.sum(axis=1, dtype=np.float64, keepdims=True).astype(features.dtype)
            features = features / np.where(sums != 0, sums, 1)
        return np.ascontiguousarray(features, dtype=np.float32)

    def _projected(self, features: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return the features times a matrix of entries N(0, 1/k), k the number of dimensions that are left."""
        if (kept := self.projected_features) is None:
            return features
        random = generator(self.seed or 0, "graph projection")
        matrix = random.standard_normal((features.shape[1], kept)) / sqrt(kept)
        return (features @ matrix.astype(np.float32)).astype(np.float32)


_SPLITS = ("train", "validation", "test")
_DIMENSIONS = {"features": 2, "edges": 2, "labels": 1, **dict.fromkeys(_SPLITS, 1)}
_TYPES = {"features": "iuf"}


class GraphNPZ(GraphSource):
    """Arrays `features` [n, d], `edges` [k, 2] and `labels` [n], and the nodes `train`, `validation` and `test`.

    Nodes and classes are numbered from 0, and a node without a class has the label -1. Edges are undirected: one that
    is listed in both directions counts once. Nodes without edges may have features and classes like all others.
    """

    kind: Literal["graph_npz"] = "graph_npz"
    path: Path = Field(description="file of the arrays, .npz")
    row_normalised: bool = Field(False, description="divide the features of a node by their sum, if that is not 0")

    def load(self) -> NodeGraph:
        """Return the graph; raise `UserError` if an array is missing or malformed, or an edge has no node."""
        path = located(self.path, "path")
        with npz_arrays(path, "the arrays") as arrays:
            fields = {name: _array(path, arrays, name) for name in _DIMENSIONS}
        if (
            fields["edges"].shape[1] != 2
            or len(fields["features"]) != len(fields["labels"])
            or not fields["features"].size
        ):
            raise UserError(
                f"{path}: features {list(fields['features'].shape)}, labels {list(fields['labels'].shape)} and edges "
                f"{list(fields['edges'].shape)} do not belong together; expected [n, d], [n] and [k, 2]"
            )
        labels = fields["labels"]
        splits = {name: np.sort(fields[name]) for name in _SPLITS}
        n_classes = max(2, int(labels.max()) + 1)
        if n_classes > max(2, len(labels)):
            raise UserError(
                f"{path}: label {labels.max()} is more than {len(labels)} nodes can have; number classes from 0"
            )
        return self._graph(path.stem, str(path), fields["features"], fields["edges"], labels, n_classes, splits)


def _array(path: Path, arrays: Any, name: str) -> NDArray[Any]:
    if name not in arrays.files:
        raise UserError(f"{path}: has no array {name}, only {', '.join(arrays.files) or 'nothing'}; add it")
    values = arrays[name]
    kinds = _TYPES.get(name, "iu")
    if values.ndim != _DIMENSIONS[name] or (values.dtype.kind not in kinds and values.size):
        raise UserError(
            f"{path}: {name} is {values.dtype} {list(values.shape)}, expected "
            f"{'numbers' if name == 'features' else 'whole numbers'} in {_DIMENSIONS[name]} dimensions; write it so"
        )
    return values if name == "features" else values.astype(np.int64)
