"""Graphs drawn from a stochastic block model: as many nodes as one asks for, without a download."""

from __future__ import annotations

from typing import Literal, Self

import numpy as np
from pydantic import Field, model_validator

from narrowcast.platform.data.graph_source import GraphSource
from narrowcast.platform.data.node_graph import NodeGraph
from narrowcast.platform.errors import UserError
from narrowcast.platform.seeds import generator
from narrowcast.platform.types import IntArray

MOST_EDGES, MOST_VALUES = 5 * 10**7, 5 * 10**8


class BlockModel(GraphSource):
    """Nodes in blocks of equal size, which are joined more often within a block; the block is the class.

    Every node has `degree` edges on average, of which the share `within` stays in its block. Features are normal around
    a mean of the block, which is itself normal with the standard deviation `separation`.

    Reference: Holland, Laskey and Leinhardt, Stochastic Blockmodels: First Steps, Social Networks 1983. Differs from
    it: 1. the numbers of edges within and between blocks are not drawn, but those expected, before edges that are drawn
    twice count once.
    """

    kind: Literal["block_model"] = "block_model"
    row_normalised: bool = Field(False, description="divide the features of a node by their sum, if that is not 0")
    nodes: int = Field(1000, ge=10, le=10**7, description="number of nodes")
    blocks: int = Field(5, ge=2, le=1000, description="number of blocks, which are the classes")
    degree: float = Field(10.0, ge=0, le=1000, allow_inf_nan=False, description="mean number of edges of a node")
    within: float = Field(0.8, ge=0, le=1, description="share of the edges whose ends are in one block")
    features: int = Field(32, ge=1, le=10**5, description="number of features")
    separation: float = Field(0.3, ge=0, le=1e3, description="standard deviation of the blocks' means, of a feature")
    train_share: float = Field(0.1, gt=0, le=0.8, description="share of the nodes for training")
    held_out_share: float = Field(0.1, gt=0, le=0.4, description="share for validation, and the same for testing")

    @model_validator(mode="after")
    def _shares_fit(self) -> Self:
        if self.train_share + 2 * self.held_out_share > 1:
            raise ValueError("train_share and twice held_out_share are more than all nodes; lower one")
        if self.blocks > self.nodes // 2:
            raise ValueError(f"{self.blocks} blocks of {self.nodes} nodes have less than two each; lower blocks")
        return self

    def load(self) -> NodeGraph:
        """Draw the graph; raise `UserError` if it would not fit in memory."""
        n_edges = round(self.nodes * self.degree / 2)
        if n_edges > MOST_EDGES or self.nodes * self.features > MOST_VALUES:
            raise UserError(
                f"block_model: {n_edges} edges and {self.nodes * self.features} features, but at most {MOST_EDGES} and "
                f"{MOST_VALUES} are allowed; lower nodes, degree or features"
            )
        random = generator(self.seed or 0, "block model")
        blocks = np.arange(self.nodes) * self.blocks // self.nodes
        means = self.separation * random.standard_normal((self.blocks, self.features))
        features = (means[blocks] + random.standard_normal((self.nodes, self.features))).astype(np.float32)
        edges = self._edges(n_edges, blocks, random)
        ends = np.cumsum([round(share * self.nodes) for share in (self.train_share, *[self.held_out_share] * 2)])
        parts = np.split(random.permutation(self.nodes), ends)[:3]
        splits = dict(zip(("train", "validation", "test"), map(np.sort, parts), strict=True))
        return self._graph(self.kind, "drawn", features, edges, blocks, self.blocks, splits)

    def _edges(self, n_edges: int, blocks: IntArray, random: np.random.Generator) -> IntArray:
        """Return the drawn edges [k, 2]; the second end is anywhere in a block that is the first one's or another."""
        first = random.integers(0, self.nodes, n_edges)
        shift = random.integers(1, self.blocks, n_edges)
        stays = np.arange(n_edges) < round(self.within * n_edges)
        block = (blocks[first] + np.where(stays, 0, shift)) % self.blocks
        starts = np.searchsorted(blocks, np.arange(self.blocks + 1))
        second = starts[block] + (random.random(n_edges) * np.diff(starts)[block]).astype(np.int64)
        return np.stack([first, second], axis=1)
