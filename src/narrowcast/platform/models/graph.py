"""A graph convolutional network for the classes of nodes, on products of sparse matrices with tensors.

Each sum of a product, and of its gradient, is one thread's, so that all hosts agree.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

import numpy as np
import torch
from pydantic import Field
from torch import Tensor
from torch.nn import functional

from narrowcast.platform.config.files import Section
from narrowcast.platform.data.dataset import Dataset
from narrowcast.platform.data.graph import NodeGraph
from narrowcast.platform.errors import UserError
from narrowcast.platform.models.hidden_units import HiddenUnits, UnitAxis
from narrowcast.platform.models.model import Model, Split
from narrowcast.platform.models.networks import Width
from narrowcast.platform.seeds import generator
from narrowcast.platform.types import Arrays, IntArray

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


Drop = Callable[[Tensor], Tensor]


class GCN(Model, Section):
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
                f"model.kind = {self.kind} needs a graph, but {data.name} is not a graph; use data.kind = cora, "
                "citeseer, block_model or graph_npz, or another model"
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
