"""Fields and steps shared by the sources of graphs: features, partition and number of clients."""

from __future__ import annotations

from collections.abc import Mapping
from math import sqrt
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from narrowcast.platform.data.graph_partition import clusters_of
from narrowcast.platform.data.node_graph import NodeGraph, check_nodes, neighbours
from narrowcast.platform.errors import UserError
from narrowcast.platform.section import Section
from narrowcast.platform.seeds import generator
from narrowcast.platform.types import IntArray


class GraphSource(Section):
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
