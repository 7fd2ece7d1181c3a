"""Cora, CiteSeer and Pubmed: papers that cite one another, in the files and splits of Planetoid."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar, Literal

import numpy as np
from pydantic import Field

from narrowcast.platform.data.fetch import find
from narrowcast.platform.data.graph_source import GraphSource
from narrowcast.platform.data.node_graph import UNKNOWN, NodeGraph
from narrowcast.platform.data.planetoid_files import read_classes, read_edges, read_features, read_index
from narrowcast.platform.errors import UserError
from narrowcast.platform.types import IntArray

FOLDER = "planetoid"
VALIDATION_NODES = 500


class _Planetoid(GraphSource):
    """Features of words, 20 training papers of each class, 500 for validation and 1000 for testing.

    References: Sen et al., Collective Classification in Network Data, AI Magazine 2008; Yang, Cohen and Salakhutdinov,
    Revisiting Semi-Supervised Learning with Graph Embeddings, ICML 2016 (arXiv:1603.08861): files and split.
    """

    stem: ClassVar[str]

    def load(self) -> NodeGraph:
        """Return the graph; raise `UserError` if a file is missing or malformed."""
        folder = find(FOLDER, (f"ind.{self.stem}.graph",))
        features, classes, n_trained, n_classes, index = self._papers(folder)
        tested = np.sort(index)
        # Test papers without features or class are listed nowhere: they are the gaps in the sorted numbers.
        n_all = len(features[0])
        n_nodes = int(tested[-1]) + 1
        if tested[0] != n_all or len(np.unique(index)) != len(index) or len(index) != len(features[1]):
            raise UserError(
                f"{folder}: the test papers of {self.stem} do not follow the others; download the files again"
            )
        words = np.zeros((n_nodes, features[0].shape[1]), dtype=np.float32)
        labels = np.full(n_nodes, UNKNOWN)
        words[:n_all], labels[:n_all] = features[0], classes[0]
        words[index], labels[index] = features[1], classes[1]
        edges = read_edges(_existing(folder, f"ind.{self.stem}.graph"))
        splits = self._splits(n_trained, tested)
        return self._graph(self.stem, str(folder), words, edges, labels, n_classes, splits)

    def _splits(self, n_trained: int, tested: IntArray) -> dict[str, IntArray]:
        """Return the nodes of each split."""
        validation = np.arange(n_trained, n_trained + VALIDATION_NODES)
        return {"train": np.arange(n_trained), "validation": validation, "test": tested}

    def _papers(self, folder: Path) -> tuple[list[np.ndarray], list[IntArray], int, int, IntArray]:
        """Return features and classes of all but the test papers, and of these; sizes; the numbers of test papers."""
        paths = {part: _existing(folder, f"ind.{self.stem}.{part}") for part in ("allx", "ally", "tx", "ty", "y")}
        features = [read_features(paths[part]) for part in ("allx", "tx")]
        read = [read_classes(paths[part]) for part in ("ally", "ty", "y")]
        classes = [labels for labels, _ in read]
        fits = all(len(each) == len(labels) for each, labels in zip(features, classes, strict=False))
        same = len({each.shape[1] for each in features}) == 1 and len({count for _, count in read}) == 1
        if not (fits and same and np.array_equal(classes[0][: len(classes[2])], classes[2])):
            raise UserError(f"{folder}: the files of {self.stem} do not belong together; download them again")
        index = read_index(_existing(folder, f"ind.{self.stem}.test.index"))
        return features, classes[:2], len(classes[2]), read[0][1], index


class Cora(_Planetoid):
    """2708 papers on machine learning in seven classes, 1433 words, 5278 citations.

    `split: dgl` has the ranges of DGL's first version: nodes 0 to 139 for training, 200 to 499 for validation, 500 to
    1499 for testing. DGL counts them in the order of `cora.content`; here they are counted in that of Planetoid, since
    its files lack the other one, so that only the sizes are the same, and the training nodes are those of Planetoid.
    """

    stem = "cora"
    kind: Literal["cora"] = "cora"
    split: Literal["planetoid", "dgl"] = Field(
        "planetoid", description="nodes that are trained on, validated and tested"
    )

    def _splits(self, n_trained: int, tested: IntArray) -> dict[str, IntArray]:
        if self.split == "planetoid":
            return super()._splits(n_trained, tested)
        return {"train": np.arange(140), "validation": np.arange(200, 500), "test": np.arange(500, 1500)}


class CiteSeer(_Planetoid):
    """3327 papers in six classes, 3703 words, 4552 citations; 48 papers are isolated, of which 15 have no features."""

    stem = "citeseer"
    kind: Literal["citeseer"] = "citeseer"


class PubMed(_Planetoid):
    """19,717 papers on diabetes in three classes, 500 words, 44,324 citations."""

    stem = "pubmed"
    kind: Literal["pubmed"] = "pubmed"


def _existing(folder: Path, name: str) -> Path:
    path = folder / name
    if not path.is_file():
        raise UserError(
            f"{folder} has no {name}; put that file of github.com/kimiyoung/planetoid, folder data, there, or use "
            "another graph"
        )
    return path
