"""A graph convolutional network for the classes of nodes, on sparse products."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any, ClassVar, Literal, Self

import numpy as np
import torch
from pydantic import Field
from torch import Tensor
from torch.nn import functional

from narrowcast.platform.contracts import Dataset, Split
from narrowcast.platform.data.node_graph import NodeGraph
from narrowcast.platform.errors import UserError
from narrowcast.platform.models.hidden_units import HiddenUnits, UnitAxis
from narrowcast.platform.models.networks import Width
from narrowcast.platform.models.sparse_products import Features, adjacency_of, features_of, propagate
from narrowcast.platform.section import Section
from narrowcast.platform.seeds import generator
from narrowcast.platform.types import Arrays

Drop = Callable[[Tensor], Tensor]


class GCN(Section):
    """H' = norm(relu(A H W + b)) for each hidden layer, and scores A H W + b after the last one.

    A is the adjacency matrix with an edge from each node to itself, normalised to D^-1/2 A D^-1/2. Weights [in, out]
    begin uniform (Glorot and Bengio), biases at 0. The features count as the first of the layers whose units can be
    sliced, so that sub-networks may read some of them.

    Source: Kipf and Welling, Semi-Supervised Classification with Graph Convolutional Networks, ICLR 2017
    (arXiv:1609.02907). Differs from the paper: 1. features are not dropped, only hidden units, and all weights decay
    alike, as in the code released with GIST. 2. `layer_norm: graph` is that code's: one mean and variance over all
    nodes and units together, test nodes included, without trained scales; `node` has one for each node.
    """

    lower_is_better: ClassVar[frozenset[str]] = frozenset(("loss",))
    shares: ClassVar[frozenset[str]] = frozenset(("accuracy",))

    kind: Literal["gcn"] = "gcn"
    hidden: tuple[Width, ...] = Field((16,), min_length=1, max_length=100, description="units of each hidden layer")
    layer_norm: Literal["none", "graph", "node"] = Field(
        "none", description="normalisation after each hidden layer: none, over the whole graph, or of each node"
    )
    dropout: float = Field(0.5, ge=0, lt=1, description="share of the hidden units that a step of training drops")
    self_loops: bool = Field(True, description="add an edge from each node to itself")

    def check(self, data: Dataset) -> None:
        """Raise `UserError` unless the data are a graph."""
        if not isinstance(data, NodeGraph):
            raise UserError(
                f"model.kind = {self.kind} needs a graph, but {data.name} is none; use data.kind = cora, citeseer, "
                "block_model or graph_npz, or another model"
            )

    def init_server(self, data: NodeGraph, seed: int) -> Arrays:
        """Draw the weights."""
        random, parameters = generator(seed, "gcn"), {}
        for layer, (inputs, outputs) in enumerate(pairwise(self._widths(data))):
            bound = (6 / (inputs + outputs)) ** 0.5
            parameters[f"layers.{layer}.weight"] = random.uniform(-bound, bound, (inputs, outputs)).astype(np.float32)
            parameters[f"layers.{layer}.bias"] = np.zeros(outputs, dtype=np.float32)
        return parameters

    def init_clients(self, data: NodeGraph, seed: int) -> Arrays:
        """Return no arrays: no parameter is private."""
        del data, seed
        return {}

    def evaluate(self, server: Arrays, clients: Arrays, data: NodeGraph, split: Split) -> Mapping[str, float]:
        """Return the accuracy and the mean cross-entropy on the nodes of a split; empty if there are none."""
        del clients
        if not len(nodes := getattr(data, split)):
            return {}
        parameters = {name: torch.from_numpy(np.array(values)) for name, values in server.items()}
        with torch.no_grad():
            scores = self.scores(parameters, features_of(data), adjacency_of(data, self.self_loops))[nodes]
        wanted = torch.from_numpy(data.labels[nodes])
        loss = functional.cross_entropy(scores.to(torch.float64), wanted)
        return {"accuracy": float((scores.argmax(1) == wanted).to(torch.float64).mean()), "loss": float(loss)}

    def scores(
        self, parameters: Mapping[str, Tensor], features: Features, adjacency: Any, drop: Drop | None = None
    ) -> Tensor:
        """Return the scores of all nodes, [n, classes]; `drop` is applied to each hidden layer."""
        last, values = len(self.hidden), None
        for layer in range(last + 1):
            weight, bias = (parameters[f"layers.{layer}.{part}"] for part in ("weight", "bias"))
            product = features.times(weight) if values is None else values @ weight
            values = propagate(adjacency, product) + bias
            if layer < last:
                values = self._normalised(torch.relu(values))
                values = values if drop is None else drop(values)
        assert values is not None, "there is a layer"
        return values

    def _normalised(self, values: Tensor) -> Tensor:
        if self.layer_norm == "none":
            return values
        return functional.layer_norm(values, values.shape if self.layer_norm == "graph" else values.shape[1:])

    def hidden_units(self, data: NodeGraph) -> HiddenUnits:
        """Return the features and the units of the hidden layers."""
        axes = dict[str, tuple[UnitAxis | None, ...]]()
        last = len(self.hidden)
        for layer in range(last + 1):
            units = UnitAxis(layer + 1) if layer < last else None
            axes[f"layers.{layer}.weight"] = (UnitAxis(layer), units)
            axes[f"layers.{layer}.bias"] = (units,)
        outputs = (f"layers.{last}.weight", f"layers.{last}.bias")
        return HiddenUnits((data.features.shape[1], *self.hidden), axes, outputs, reads_units=True)

    def narrowed(self, counts: Sequence[int]) -> Self:
        """Return the network with so many units in each hidden layer; the first count is that of the features."""
        return self.model_copy(update={"hidden": tuple(counts[1:])})

    def multiplications(self, data: NodeGraph, counts: Sequence[int]) -> int:
        """Return the multiplications of a forward pass with so many features and hidden units."""
        widths, edges = [*counts, data.n_classes], len(data.indices) + data.n_nodes
        dense = sum(inputs * outputs for inputs, outputs in pairwise(widths))
        return data.n_nodes * dense + edges * sum(widths[1:])

    def _widths(self, data: NodeGraph) -> list[int]:
        return [data.features.shape[1], *self.hidden, data.n_classes]
