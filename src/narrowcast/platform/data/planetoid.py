"""Cora, CiteSeer and Pubmed: papers that cite one another, in the files and splits of Planetoid.

The files are pickles of Python 2, and are read without an unpickler. A pickle names functions that are called while it
is read, and some of those of arrays take pointers, so that a file from the web may run any code. Here the opcodes of a
file make nothing but numbers, strings, lists and records of what was named; the arrays are made from those records
afterwards, by types on a list and with checked sizes.
"""

from __future__ import annotations

import pickletools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from narrowcast.platform.data.download import find
from narrowcast.platform.data.graph import UNKNOWN, GraphSource, NodeGraph
from narrowcast.platform.errors import UserError
from narrowcast.platform.storage.disk import readable
from narrowcast.platform.types import IntArray

_MOST_VALUES = 2**28
_OPCODES = {opcode.code: opcode for opcode in pickletools.opcodes}
_ADVICE = "download the file again"
_UNREADABLE = (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError, MemoryError, OverflowError)
"""Errors of pickletools and NumPy on damaged files."""
_MATRIX, _LISTS = "scipy.sparse.csr csr_matrix", "collections defaultdict"
_ARRAY, _TYPE = "numpy.core.multiarray _reconstruct", "numpy dtype"
_NAMES = {_MATRIX, _LISTS, _ARRAY, _TYPE, "numpy ndarray", "__builtin__ list"}
_TYPES = {name: np.dtype(f"<{name}") for name in ("i4", "i8", "f4", "f8")}
_STATE_OF_TYPE = (3, "<", None, None, None, -1, -1, 0)


@dataclass(frozen=True)
class _Name:
    """A name in a pickle, which stands for nothing."""

    name: str


@dataclass(eq=False)
class _Record:
    """An object as a pickle describes it: the name that it calls, the arguments, and the state that it sets."""

    name: str
    arguments: Any
    state: Any = None


_MARK = _Name("")


def read_features(path: Path) -> NDArray[np.float32]:
    """Return the dense features of a sparse matrix in compressed rows, [n, d]."""
    matrix = _read(path)
    with readable(path, _UNREADABLE, _ADVICE):
        if not (isinstance(matrix, _Record) and matrix.name == _MATRIX and isinstance(matrix.state, dict)):
            raise UserError(f"{path}: has no sparse matrix; {_ADVICE}")
        n_rows, n_columns = map(_size, matrix.state["_shape"])
        indptr, columns = (_array(matrix.state[name]).astype(np.int64) for name in ("indptr", "indices"))
        with np.errstate(over="ignore", invalid="ignore"):  # refused below as not finite
            values = _array(matrix.state["data"]).astype(np.float32)
        rises = indptr.shape == (n_rows + 1,) and indptr[0] == 0 and (np.diff(indptr) >= 0).all()
        inside = columns.ndim == 1 and ((columns >= 0) & (columns < n_columns)).all()
        if not (0 < n_rows * n_columns <= _MOST_VALUES and rises and inside):
            raise UserError(f"{path}: is not a matrix in compressed rows; {_ADVICE}")
        if not indptr[-1] == len(columns) == len(values):
            raise UserError(f"{path}: has {len(columns)} columns for {len(values)} values; {_ADVICE}")
        if not np.isfinite(values).all():
            raise UserError(f"{path}: has a value that is not finite in float32; {_ADVICE}")
        features = np.zeros((n_rows, n_columns), dtype=np.float32)
        features[np.repeat(np.arange(n_rows), np.diff(indptr)), columns] = values
    return features


def read_classes(path: Path) -> tuple[IntArray, int]:
    """Return the class of each row of a one-hot matrix, [n], and the number of classes."""
    with readable(path, _UNREADABLE, _ADVICE):
        classes = _array(_read(path))
        if classes.ndim != 2:
            raise UserError(f"{path}: has no matrix of classes; {_ADVICE}")
        if not ((classes == 0) | (classes == 1)).all() or not (classes.sum(axis=1) == 1).all():
            raise UserError(f"{path}: a row has not one class; {_ADVICE}")
    return classes.argmax(axis=1).astype(np.int64), classes.shape[1]


def read_edges(path: Path) -> IntArray:
    """Return the edges of lists of neighbours, [k, 2], in the order of the nodes."""
    lists = _read(path)
    with readable(path, _UNREADABLE, _ADVICE):
        if not isinstance(lists, dict) or not all(type(neighbours) is list for neighbours in lists.values()):
            raise UserError(f"{path}: has no lists of neighbours; {_ADVICE}")
        if sum(map(len, lists.values())) > path.stat().st_size:  # one list may be named many times
            raise UserError(f"{path}: has more neighbours than bytes; {_ADVICE}")
        pairs = [(node, neighbour) for node, neighbours in lists.items() for neighbour in neighbours]
        if not pairs or not all(type(end) is int for pair in pairs for end in pair):
            raise UserError(f"{path}: neighbours are not numbers of nodes; {_ADVICE}")
        return np.array(sorted(pairs), dtype=np.int64)


def read_index(path: Path) -> IntArray:
    """Return the numbers in a text file, one a line."""
    with readable(path, _UNREADABLE, _ADVICE):
        numbers = np.array(path.read_text(encoding="ascii").split(), dtype=np.int64)
    if not len(numbers):
        raise UserError(f"{path}: is empty; {_ADVICE}")
    return numbers


def _size(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError("a size is not a number")
    return value


def _array(record: Any) -> NDArray[Any]:
    """Return the array that a record describes: version 1, shape, type, order and bytes."""
    if not (isinstance(record, _Record) and record.name == _ARRAY and isinstance(record.state, tuple)):
        raise ValueError("is not an array")
    version, shape, type_, by_columns, content = record.state
    sizes = list(map(_size, shape))
    if version != 1 or not isinstance(type_, _Record) or type_.name != _TYPE or type_.state != _STATE_OF_TYPE:
        raise ValueError("an array has a type that is not one of numbers in little-endian order")
    name = type_.arguments[0]
    if type(name) is not str or name not in _TYPES:
        raise ValueError(f"an array has a type that is not one of {', '.join(_TYPES)}")
    values = np.frombuffer(content.encode("latin1"), _TYPES[name])
    return values.reshape(sizes, order="F" if by_columns is True else "C")


def _read(path: Path) -> Any:
    with readable(path, _UNREADABLE, _ADVICE), path.open("rb") as file:
        return _tree(file)


def _opcodes(file: IO[bytes]) -> Iterator[tuple[str, Any]]:
    """Yield the names and arguments of a pickle's opcodes, as `pickletools.genops` does.

    That decodes escapes in lines of text, and warns of those that Python does not know; the lines of names have none.
    """
    while code := file.read(1):
        opcode = _OPCODES[code.decode("latin-1")]
        argument = opcode.arg
        if opcode.name == "GLOBAL":
            yield opcode.name, " ".join(file.readline().decode("ascii").rstrip("\n") for _ in range(2))
        elif argument is not None and argument.name.startswith("stringnl"):
            raise ValueError(f"has the opcode {opcode.name}, which none of these files needs")
        else:
            yield opcode.name, None if argument is None else argument.reader(file)


def _tree(file: IO[bytes]) -> Any:  # noqa: PLR0912 - a branch for each opcode
    """Return what a pickle describes, made of numbers, strings, tuples, lists, dictionaries and records alone.

    Raise `ValueError`, `LookupError` or `TypeError` for anything else.
    """
    stack: list[Any] = []
    memo: dict[Any, Any] = {}
    for name, argument in _opcodes(file):
        match name:
            case "PROTO":
                pass
            case "BININT" | "BININT1" | "BININT2" | "SHORT_BINSTRING" | "BINSTRING":
                stack.append(argument)
            case "NONE" | "NEWTRUE" | "NEWFALSE":
                stack.append({"NONE": None, "NEWTRUE": True, "NEWFALSE": False}[name])
            case "EMPTY_TUPLE" | "EMPTY_LIST" | "EMPTY_DICT":
                stack.append({"EMPTY_TUPLE": tuple, "EMPTY_LIST": list, "EMPTY_DICT": dict}[name]())
            case "TUPLE1" | "TUPLE2" | "TUPLE3":
                stack[-int(name[-1]) :] = [tuple(stack[-int(name[-1]) :])]
            case "MARK":
                stack.append(_MARK)
            case "TUPLE":
                stack.append(tuple(_since_mark(stack)))
            case "BINPUT" | "LONG_BINPUT":
                memo[argument] = stack[-1]
            case "BINGET" | "LONG_BINGET":
                stack.append(memo[argument])
            case "GLOBAL":
                stack.append(_named(argument))
            case "REDUCE" | "NEWOBJ":
                arguments, called = stack.pop(), _expect(stack.pop(), _Name)
                stack.append({} if called.name == _LISTS else _Record(called.name, arguments))
            case "BUILD":
                state = stack.pop()
                _expect(stack[-1], _Record).state = state
            case "APPEND" | "APPENDS":
                values = [stack.pop()] if name == "APPEND" else _since_mark(stack)
                _expect(stack[-1], list).extend(values)
            case "SETITEM" | "SETITEMS":
                values = [stack.pop(-2), stack.pop()] if name == "SETITEM" else _since_mark(stack)
                if not all(type(key) in (int, str) for key in values[::2]):  # others may take for ever to hash
                    raise ValueError("has a key that is neither a number nor a name")
                _expect(stack[-1], dict).update(zip(values[::2], values[1::2], strict=True))
            case "STOP":
                return stack.pop()
            case other:
                raise ValueError(f"has the opcode {other}, which none of these files needs")
    raise ValueError("has no end")


def _named(name: Any) -> _Name:
    if name not in _NAMES:
        raise ValueError(f"names {name.replace(' ', '.'):.100}, which is not part of an array")
    return _Name(name)


def _since_mark(stack: list[Any]) -> list[Any]:
    """Remove and return the values after the last mark, and the mark."""
    mark = len(stack) - 1
    while stack[mark] is not _MARK:
        mark -= 1
    values = stack[mark + 1 :]
    del stack[mark:]
    return values


def _expect(value: Any, kind: type[Any]) -> Any:
    if type(value) is not kind:
        raise TypeError(f"expected {kind.__name__}, got {type(value).__name__}")
    return value


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
