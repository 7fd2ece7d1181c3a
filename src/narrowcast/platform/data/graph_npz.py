"""A graph of one's own in a NumPy .npz file."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from narrowcast.platform.data.graph_source import GraphSource
from narrowcast.platform.data.node_graph import NodeGraph
from narrowcast.platform.data.npz_arrays import npz_arrays
from narrowcast.platform.data.own_files import located
from narrowcast.platform.errors import UserError

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
            found = {name: _array(path, arrays, name) for name in _DIMENSIONS}
        if found["edges"].shape[1] != 2 or len(found["features"]) != len(found["labels"]) or not found["features"].size:
            raise UserError(
                f"{path}: features {list(found['features'].shape)}, labels {list(found['labels'].shape)} and edges "
                f"{list(found['edges'].shape)} do not belong together; expected [n, d], [n] and [k, 2]"
            )
        labels = found["labels"]
        splits = {name: np.sort(found[name]) for name in _SPLITS}
        n_classes = max(2, int(labels.max()) + 1)
        if n_classes > max(2, len(labels)):
            raise UserError(
                f"{path}: label {labels.max()} is more than {len(labels)} nodes can have; number classes from 0"
            )
        return self._graph(path.stem, str(path), found["features"], found["edges"], labels, n_classes, splits)


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
