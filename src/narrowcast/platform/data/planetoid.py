"""Cora, CiteSeer and Pubmed: papers that cite one another, in the files and splits of Planetoid.

The files are pickles, of which `pickles` reads the arrays without running them.
"""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from narrowcast.platform.data.download import find
from narrowcast.platform.data.graph import UNKNOWN, GraphSource, NodeGraph
from narrowcast.platform.data.pickles import ADVICE, SPARSE_MATRIX, UNREADABLE, Record, array_of, read_pickle, size_of
from narrowcast.platform.errors import UserError
from narrowcast.platform.storage.disk import readable
from narrowcast.platform.types import IntArray

_MOST_VALUES = 2**28


def read_features(path: Path) -> NDArray[np.float32]:
    """Return the dense features of a sparse matrix in compressed rows, [n, d]."""
    matrix = read_pickle(path)
    with readable(path, UNREADABLE, ADVICE):
        if not (isinstance(matrix, Record) and matrix.name == SPARSE_MATRIX and isinstance(matrix.state, dict)):
            raise UserError(f"{path}: has no sparse matrix; {ADVICE}")
        n_rows, n_columns = map(size_of, matrix.state["_shape"])
        indptr, columns = (array_of(matrix.state[name]).astype(np.int64) for name in ("indptr", "indices"))
        with np.errstate(over="ignore", invalid="ignore"):  # refused below as not finite
            values = array_of(matrix.state["data"]).astype(np.float32)
        rises = indptr.shape == (n_rows + 1,) and indptr[0] == 0 and (np.diff(indptr) >= 0).all()
        inside = columns.ndim == 1 and ((columns >= 0) & (columns < n_columns)).all()
        if not (0 < n_rows * n_columns <= _MOST_VALUES and rises and inside):
            raise UserError(f"{path}: is not a matrix in compressed rows; {ADVICE}")
        if not indptr[-1] == len(columns) == len(values):
            raise UserError(f"{path}: has {len(columns)} columns for {len(values)} values; {ADVICE}")
        if not np.isfinite(values).all():
            raise UserError(f"{path}: has a value that is not finite in float32; {ADVICE}")
        features = np.zeros((n_rows, n_columns), dtype=np.float32)
        features[np.repeat(np.arange(n_rows), np.diff(indptr)), columns] = values
    return features


def read_classes(path: Path) -> tuple[IntArray, int]:
    """Return the class of each row of a one-hot matrix, [n], and the number of classes."""
    with readable(path, UNREADABLE, ADVICE):
        classes = array_of(read_pickle(path))
        if classes.ndim != 2:
            raise UserError(f"{path}: has no matrix of classes; {ADVICE}")
        if not ((classes == 0) | (classes == 1)).all() or not (classes.sum(axis=1) == 1).all():
            raise UserError(f"{path}: a row has not one class; {ADVICE}")
    return classes.argmax(axis=1).astype(np.int64), classes.shape[1]


def read_edges(path: Path) -> IntArray:
    """Return the edges of lists of neighbours, [k, 2], in the order of the nodes."""
    lists = read_pickle(path)
    with readable(path, UNREADABLE, ADVICE):
        if not isinstance(lists, dict) or not all(type(neighbours) is list for neighbours in lists.values()):
            raise UserError(f"{path}: has no lists of neighbours; {ADVICE}")
        if sum(map(len, lists.values())) > path.stat().st_size:  # one list may be named many times
            raise UserError(f"{path}: has more neighbours than bytes; {ADVICE}")
        pairs = [(node, neighbour) for node, neighbours in lists.items() for neighbour in neighbours]
        if not pairs or not all(type(end) is int for pair in pairs for end in pair):
            raise UserError(f"{path}: neighbours are not numbers of nodes; {ADVICE}")
        return np.array(sorted(pairs), dtype=np.int64)


def read_index(path: Path) -> IntArray:
    """Return the numbers in a text file, one a line."""
    with readable(path, UNREADABLE, ADVICE):
        numbers = np.array(path.read_text(encoding="ascii").split(), dtype=np.int64)
    if not len(numbers):
        raise UserError(f"{path}: is empty; {ADVICE}")
    return numbers


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
        fits = all(len(matrix) == len(labels) for matrix, labels in zip(features, classes, strict=False))
        same = len({array.shape[1] for array in features}) == 1 and len({count for _, count in read}) == 1
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
