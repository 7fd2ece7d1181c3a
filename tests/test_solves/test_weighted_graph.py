"""Graphs: files, generators, and input that is none."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from narrowcast.platform.errors import UserError
from narrowcast.solves.weighted_graph import WeightedGraph, random_graph, read_graph, torus

TRIANGLE = "4 3\n1 2 1\n2 3 -2.5\n1 3 1\n"


def dense(graph: WeightedGraph) -> np.ndarray[tuple[int, int], np.dtype[np.float64]]:
    whole = np.zeros((graph.vertices, graph.vertices))
    for i in range(graph.vertices):
        edges = slice(graph.indptr[i], graph.indptr[i + 1])
        whole[i, graph.indices[edges]] = graph.weights[edges]
    return whole


def test_a_file_is_read_with_isolated_vertices(tmp_path: Path) -> None:
    (tmp_path / "g").write_text(TRIANGLE)
    graph = read_graph(tmp_path / "g")
    wanted = [[0, 1, 1, 0], [1, 0, -2.5, 0], [1, -2.5, 0, 0], [0, 0, 0, 0]]
    assert dense(graph).tolist() == wanted
    assert (graph.vertices, graph.edges, graph.total) == (4, 3, -0.5)


def test_weights_that_no_line_has_are_one(tmp_path: Path) -> None:
    (tmp_path / "g").write_text("3 2\n1 2\n3 2\n")
    assert dense(read_graph(tmp_path / "g")).tolist() == [[0, 1, 0], [1, 0, 1], [0, 1, 0]]


def test_the_order_of_edges_does_not_matter(tmp_path: Path) -> None:
    (tmp_path / "one").write_text(TRIANGLE)
    (tmp_path / "other").write_text("4 3\n3 1 1\n1 2 1\n3 2 -2.5\n")
    assert read_graph(tmp_path / "one").digest == read_graph(tmp_path / "other").digest


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "begins with ''"),
        ("3\n1 2 1\n", "begins with '3'"),
        ("3 2\n1 2 1\n", "has 1 edges, but its first line says 2; is the file cut off"),
        ("3 1\n1 2 1\n2 3 1\n", "has 2 edges, but its first line says 1"),
        ("3 0\n", "no edges"),
        ("3 2\n1 2 0\n2 3 0\n", "no edges of a weight other than 0"),
        ("3 2\n1 2 -1\n2 3", "edge 2 is '2 3'; is the file cut off?"),
        ("3 2\n1 2\n2 3 5\n", "edge 2 is '2 3 5'"),
        ("0 0\n", "has 0 vertices"),
        ("3 1\n1 4 1\n", "vertices are numbered from 1 to 3"),
        ("3 1\n0 2 1\n", "edge 1 has the first vertex 0"),
        ("3 1\n2 2 1\n", "joins vertex 2 with itself"),
        ("3 1\n1 2 nan\n", "weight nan"),
        ("3 1\n1 2 inf\n", "weight inf"),
        ("3 2\n1 2 1\n2 1 1\n", "edges 1 and 2 both join vertices 1 and 2; give each edge once"),
        ("3 2\n1 2 1\n2 1 3\n", "the graph is not symmetric"),
        ("3 1\n1 2 1e300\n", "weight 1e+300; give finite weights of at most 1e+100"),
        ("3 1\n1 x 1\n", "edge 1 has the vertex x"),
        ("3 1\n1.5 2 1\n", "edge 1 has the vertex 1.5"),
        (
            "3 1\n1 99999999999999999999 1\n",
            "edge 1 has the vertex 99999999999999999999; vert",
        ),
        ("3 1\n1 -99999999999999999999 1\n", "edge 1 has the vertex -99999999999999999999"),
        ("3 1\n1 0_2 1\n", "edge 1 has the vertex 0_2"),
        ("99999999999999999999 1\n1 2 1\n", "has 99999999999999999999 vertices"),
        ("3 1\n1 2 3 4\n", "edge 1 is '1 2 3 4'"),
    ],
)
def test_a_file_that_is_no_graph_is_refused_in_one_line(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "g").write_text(text)
    with pytest.raises(UserError, match="g: ") as raised:
        read_graph(tmp_path / "g")
    assert said in str(raised.value)
    assert "\n" not in str(raised.value)


def test_a_byte_order_mark_is_no_part_of_a_graph(tmp_path: Path) -> None:
    (tmp_path / "g").write_text("2 1\n1 2 3\n", encoding="utf-8-sig")
    assert read_graph(tmp_path / "g").total == 3


def test_bytes_that_are_no_text_are_refused(tmp_path: Path) -> None:
    (tmp_path / "g").write_bytes(bytes(range(128, 256)))
    with pytest.raises(UserError, match="give a line"):
        read_graph(tmp_path / "g")


def test_a_torus_has_four_neighbours_a_vertex() -> None:
    graph = torus(5, seed=3)
    assert (graph.vertices, graph.edges) == (25, 50)
    assert set(np.diff(graph.indptr)) == {4}
    assert set(graph.weights) == {-1.0, 1.0}
    whole = dense(graph)
    assert (whole == whole.T).all()


@pytest.mark.parametrize(("vertices", "edges"), [(2, 1), (7, 21), (50, 100)])
def test_a_random_graph_has_its_edges(vertices: int, edges: int) -> None:
    graph = random_graph(vertices, edges, seed=1)
    whole = dense(graph)
    assert graph.edges == edges == np.count_nonzero(whole) / 2
    assert (whole == whole.T).all()
    assert not whole.diagonal().any()
    assert graph.digest == random_graph(vertices, edges, seed=1).digest
