"""Graphs: Planetoid's files and splits, drawn graphs, one's own, their partition, and what is refused."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.sparse import csr_matrix

from narrowcast.platform.data.download import find
from narrowcast.platform.data.graph import UNKNOWN, GraphNPZ, neighbours
from narrowcast.platform.data.planetoid import CiteSeer, Cora, PubMed, read_classes, read_edges, read_features
from narrowcast.platform.data.synthetic import BlockModel
from narrowcast.platform.errors import UserError
from planetoid_set import pickled, write_planetoid


@pytest.mark.data("planetoid")
def test_cora_has_the_published_sizes_and_splits() -> None:
    data = Cora().load()
    assert (data.n_nodes, data.n_edges, data.features.shape[1], data.n_classes) == (2708, 5278, 1433, 7)
    assert [len(part) for part in (data.train, data.validation, data.test)] == [140, 500, 1000]
    assert np.bincount(data.labels[data.train]).tolist() == [20] * 7
    assert data.test.min() == 1708
    np.testing.assert_allclose(data.features.sum(axis=1), 1, rtol=1e-5)
    words = Cora(row_normalised=False).load().features
    assert set(np.unique(words)) == {0, 1}
    older = Cora(split="dgl").load()
    assert [len(part) for part in (older.train, older.validation, older.test)] == [140, 300, 1000]
    assert (older.digest, older.test[0]) != (data.digest, data.test[0])


@pytest.mark.data("planetoid")
def test_neighbours_of_cora_agree_in_class() -> None:
    """Test papers are stored in another order than they are numbered: read in a wrong one, this share would be 0.3."""
    data = Cora().load()
    owners = np.repeat(np.arange(data.n_nodes), np.diff(data.indptr))
    tested = np.isin(owners, data.test)
    agree = (data.labels[owners] == data.labels[data.indices])[tested].mean()
    assert agree > 0.75


@pytest.mark.data("planetoid")
def test_isolated_papers_of_citeseer_are_kept() -> None:
    data = CiteSeer().load()
    assert (data.n_nodes, data.n_edges, data.sizes["isolated_nodes"]) == (3327, 4552, 48)
    unknown = np.flatnonzero(data.labels == UNKNOWN)
    assert len(unknown) == 15
    assert not data.features[unknown].any()
    assert not np.isin(unknown, np.concatenate([data.train, data.validation, data.test])).any()
    assert np.isfinite(data.features).all()


@pytest.mark.parametrize(("graph", "stem"), [(Cora, "cora"), (CiteSeer, "citeseer"), (PubMed, "pubmed")])
def test_planetoid_files_are_read_in_the_order_of_their_papers(graph: Any, stem: str, root: Path) -> None:
    known = write_planetoid(root / "planetoid", stem)
    data = graph(row_normalised=False).load()
    assert np.array_equal(data.features, known.words)
    assert np.array_equal(data.labels, known.labels)
    owners = np.repeat(np.arange(data.n_nodes), np.diff(data.indptr))
    pairs = set(zip(owners.tolist(), data.indices.tolist(), strict=True))
    assert pairs == known.edges | {(other, one) for one, other in known.edges}
    assert (data.train.tolist(), data.validation.tolist()) == ([*range(60)], [*range(60, 560)])
    assert data.test.tolist() == [paper for paper in range(580, 640) if paper not in (600, 611)]
    assert (data.n_classes, data.sizes["isolated_nodes"]) == (3, 2)
    sums = known.words.sum(axis=1, keepdims=True)
    np.testing.assert_allclose(graph().load().features * sums, known.words, rtol=1e-6)


def test_pubmed_without_its_features_is_refused_before_anything_is_read(tmp_path: Path, monkeypatch: Any) -> None:
    folder = tmp_path / "planetoid"
    folder.mkdir()
    (folder / "ind.pubmed.graph").touch()
    monkeypatch.setenv("NARROWCAST_DATA", str(tmp_path))
    with pytest.raises(UserError, match=r"has no ind\.pubmed\.allx; put that file of github\.com/kimiyoung/planetoid"):
        PubMed().load()


class Evil:
    """Makes a folder while it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("evil",)


@pytest.mark.parametrize("read", [read_features, read_classes, read_edges])
def test_a_pickle_that_names_a_function_is_not_run(
    read: Callable[[Path], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "ind.cora.x"
    path.write_bytes(pickle.dumps([Evil()], protocol=2))
    with pytest.raises(UserError, match=r"names posix\.mkdir, which is not part of an array; download"):
        read(path)
    assert not (tmp_path / "evil").exists()
    pickle.loads(path.read_bytes())
    assert (tmp_path / "evil").exists()  # an ordinary reader would have run it


@pytest.mark.data("planetoid")
@pytest.mark.parametrize("name", ["cora.x", "cora.allx", "cora.y", "cora.graph", "citeseer.tx", "citeseer.ally"])
def test_the_published_files_have_what_an_unpickler_makes_of_them(name: str) -> None:
    path = find("planetoid", (f"ind.{name}",)) / f"ind.{name}"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the former names of SciPy and NumPy
        expected = pickle.loads(path.read_bytes(), encoding="latin1")
    if name.endswith("x"):
        assert np.array_equal(read_features(path), expected.toarray())
    elif name.endswith("graph"):
        assert read_edges(path).tolist() == sorted([node, other] for node in expected for other in expected[node])
    else:
        assert np.array_equal(np.eye(read_classes(path)[1])[read_classes(path)[0]], expected)


def _an_object_from_a_pointer() -> bytes:
    """Return a matrix of which NumPy makes objects of its bytes: its type has fields without the flag of objects."""
    fields = {"a": (np.dtype("O"), 0)}

    class Type:
        def __reduce__(self) -> tuple[Any, ...]:
            return np.dtype, ("V8", 0, 1), (3, "|", None, ("a",), fields, 8, 1, 0)

    class Array:
        def __reduce__(self) -> tuple[Any, ...]:
            rebuild = np.empty(0).__reduce__()[0]
            return rebuild, (np.ndarray, (0,), b"b"), (1, (2,), Type(), False, b"\x41" * 16)

    matrix = csr_matrix(np.eye(2))
    matrix.data = Array()
    return pickled(matrix)


def test_a_pointer_in_a_pickle_is_refused_by_a_process_that_lives_on(tmp_path: Path) -> None:
    path = tmp_path / "ind.cora.x"
    path.write_bytes(_an_object_from_a_pointer())
    read = "from pathlib import Path; from narrowcast.platform.data.planetoid import read_features as read\n"
    read += f"try: read(Path({str(path)!r}))\nexcept Exception as error: print(type(error).__name__, error)"
    done = subprocess.run([sys.executable, "-c", read], capture_output=True, text=True, check=False, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == (
        f"UserError {path}: an array has a type that is not one of u1, i4, i8, f4, f8; download the file again\n"
    )


def _nested(first: bytes) -> bytes:
    """Return a pickle's tuple of tuples, of 2^40 values for who follows them all."""
    return first + b"".join(b"q\x01h\x01\x86" for _ in range(40))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"\x80\x02ccollections\ndefaultdict\nc__builtin__\nlist\n\x85R(" + _nested(b")") + b"]u.", "has a key that"),
        (b"\x80\x02]q\x00h\x00a.", "has no lists of neighbours"),
        (
            b"\x80\x02]q\x00(" + b"K\x01" * 200 + b"e}(" + b"".join(bytes((75, n, 104, 0)) for n in range(200)) + b"u.",
            "has more neighbours than bytes",
        ),
        (b"\x80\x02K\x01K\x02b.", "expected Record, got int"),
        (b"\x80\x02K\x01K\x02R.", "expected _Name, got int"),
        (b"\x80\x02}}" + b"\x93.", "has the opcode STACK_GLOBAL"),
        (b"\x80\x04\x95\x02\x00\x00\x00\x00\x00\x00\x00].", "has the opcode FRAME"),
        (b"\x80\x02e.", "list index out of range"),
    ],
)
def test_what_a_pickle_of_lists_may_not_say(content: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "ind.cora.graph"
    path.write_bytes(content)
    with pytest.raises(UserError, match=f"^{path}: {message}.*; download the file again$"):
        read_edges(path)


@pytest.mark.parametrize("name", ["ind.cora.allx", "ind.cora.ty", "ind.cora.graph", "ind.cora.test.index"])
def test_damaged_files_are_refused_in_one_line(name: str, root: Path) -> None:
    write_planetoid(root / "planetoid", "cora")
    path = root / "planetoid" / name
    content = path.read_bytes()
    for damaged in (content[: len(content) // 2], b"", b"\xff" + content[1:]):
        path.write_bytes(damaged)
        with pytest.raises(UserError, match=r"download (the|them)") as caught:
            Cora().load()
        assert "\n" not in str(caught.value)


def test_edges_count_once_and_not_from_a_node_to_itself() -> None:
    indptr, indices = neighbours(np.array([[0, 1], [1, 0], [2, 2], [1, 2], [1, 2]]), 4, "here")
    assert (indptr.tolist(), indices.tolist()) == ([0, 1, 3, 4, 4], [1, 0, 2, 1])


def test_a_projection_is_gaussian_of_the_kept_dimensions() -> None:
    drawn = BlockModel(nodes=3000, features=1400)
    whole, data = drawn.load(), drawn.model_copy(update={"projected_features": 400, "seed": 3}).load()
    assert data.features.shape == (3000, 400)
    lengths = [np.square(each.features).sum() for each in (whole, data)]
    assert lengths[1] == pytest.approx(lengths[0], rel=0.03)


def test_a_block_model_has_the_edges_that_it_was_asked_for() -> None:
    data = BlockModel(nodes=20_000, blocks=4, degree=12, within=0.7, seed=1).load()
    owners = np.repeat(np.arange(data.n_nodes), np.diff(data.indptr))
    assert data.n_edges == pytest.approx(120_000, rel=0.01)
    assert (data.labels[owners] == data.labels[data.indices]).mean() == pytest.approx(0.7, abs=0.01)
    assert np.bincount(data.labels).tolist() == [5000] * 4
    assert BlockModel(nodes=100, degree=0).load().sizes["isolated_nodes"] == 100


def test_metis_finds_parts_with_few_edges_between_them() -> None:
    drawn = BlockModel(nodes=3000, blocks=10, degree=8, within=0.9, clusters=10)
    data = drawn.load()
    owners = np.repeat(np.arange(data.n_nodes), np.diff(data.indptr))

    def cut(clusters: Any) -> float:
        return float((clusters[owners] != clusters[data.indices]).mean())

    sizes = np.bincount(data.clusters)
    assert len(sizes) == 10
    assert sizes.max() <= 1.1 * data.n_nodes / 10
    assert cut(data.clusters) < 0.15
    assert cut(np.random.default_rng(0).permutation(data.clusters)) > 0.8
    assert np.array_equal(drawn.load().clusters, data.clusters)


GRAPH: dict[str, Any] = {
    "features": np.eye(5, dtype=np.float32),
    "edges": np.array([[0, 1], [1, 2]]),
    "labels": np.array([0, 1, 0, 1, -1]),
    "train": np.array([0, 1]),
    "validation": np.array([2]),
    "test": np.array([3]),
}


def loaded(folder: Path, **changed: Any) -> Any:
    np.savez(folder / "g.npz", **{name: values for name, values in {**GRAPH, **changed}.items() if values is not None})
    return GraphNPZ(path=folder / "g.npz").load()


def test_a_graph_of_ones_own_may_have_isolated_nodes(tmp_path: Path) -> None:
    data = loaded(tmp_path)
    assert (data.n_nodes, data.n_edges, data.n_classes, data.sizes["isolated_nodes"]) == (5, 2, 2, 2)
    assert loaded(tmp_path, edges=np.empty((0, 2), dtype=int)).sizes["isolated_nodes"] == 5


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"edges": np.array([[0, 1], [1, 5]])}, r"edge 1 joins nodes 1 and 5, but nodes are 0 to 4; correct it"),
        ({"edges": np.array([[-1, 0]])}, "edge 0 joins nodes -1 and 0"),
        ({"edges": np.array([[0.5, 1]])}, "edges is float64"),
        ({"edges": np.array([[0, 1, 2]])}, "do not belong together"),
        ({"edges": None}, "has no array edges"),
        ({"labels": np.array([0, 1, 0, 1])}, "do not belong together"),
        ({"labels": np.array([0, 1, 0, 1, -2])}, "label -2 of node 4 is not one of 0 to 1"),
        ({"train": np.array([0, 4])}, "train has node 4, which has no class"),
        ({"train": np.array([0, 9])}, "train has node 9, but nodes are 0 to 4"),
        ({"train": np.array([0, 0])}, "also elsewhere or twice, such as 0"),
        ({"test": np.array([1])}, "test has a node that is also elsewhere or twice, such as 1"),
        ({"train": np.array([], dtype=int)}, "no node is trained on"),
        ({"features": np.full((5, 2), np.nan)}, "a feature is not finite"),
    ],
)
def test_wrong_graphs_are_refused_in_one_line(changed: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=message) as caught:
        loaded(tmp_path, **changed)
    assert "\n" not in str(caught.value)


def test_more_clusters_than_nodes_are_refused() -> None:
    with pytest.raises(UserError, match=r"data\.clusters = 200: block_model has 100 nodes"):
        BlockModel(nodes=100, clusters=200).load()
