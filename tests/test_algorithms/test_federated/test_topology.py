"""Topologies: the eigenvalues of their weights, how fast models agree, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from narrowcast.algorithms.federated.topology import Topology, lambda_2, mixed, mixing
from narrowcast.platform.config.catalog import TOPOLOGIES
from narrowcast.platform.errors import UserError


def topology(kind: str, **fields: Any) -> Topology:
    value: Topology = TOPOLOGIES[kind].model_validate({"kind": kind, **fields})
    return value


GRAPHS = [
    ("ring", 16, (1 + 2 * np.cos(2 * np.pi / 16)) / 3),
    ("ring", 32, 0.9872),
    ("torus", 16, 3 / 5),
    ("star", 16, 15 / 16),
    ("path", 16, 0.9872),
    ("exponential", 16, 1 / 2),
    ("complete", 16, 0.0),
]
"""Kind, clients and lambda_2, computed by hand or by another program."""


@pytest.mark.parametrize(("kind", "clients", "wanted"), GRAPHS)
def test_differences_between_models_shrink_by_lambda_2_a_step(kind: str, clients: int, wanted: float) -> None:
    weights = mixing(topology(kind), clients, 1, 0).weights
    assert lambda_2(weights) == pytest.approx(wanted, abs=5e-5)
    values = np.random.default_rng(0).standard_normal((clients, 3, 2))
    for _ in range(900 if wanted else 1):
        values -= values.mean(axis=0)
        values /= np.linalg.norm(values)
        values = mixed(weights, values)
    assert np.linalg.norm(values) == pytest.approx(wanted, abs=5e-5)


def test_weights_of_absent_clients_go_to_the_other_ends() -> None:
    whole, clients = mixing(topology("ring"), 6, 1, 0), np.array([0, 1, 2, 4])
    third = 1 / 3
    wanted = [[2 * third, third, 0, 0], [third, third, third, 0], [0, third, 2 * third, 0], [0, 0, 0, 1]]
    assert np.allclose(whole.among(clients).toarray(), wanted)
    assert whole.among(np.arange(6)) is whole.weights
    assert whole.degrees.tolist() == [2] * 6


def test_links_are_those_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "links.csv"
    path.write_text("client,neighbour,metres\n2,0,5\n0,1,7\n1,0,7\n0,9,1\n")
    given = topology("edge_list", path=path)
    assert given.links(3, 1, 0).tolist() == [[0, 1], [0, 2]]
    given.check(3, 0)
    # a star of three: 1 / (1 + 2) on each link
    assert np.allclose(mixing(given, 3, 1, 0).weights.toarray(), [[1 / 3] * 3, [1 / 3, 2 / 3, 0], [1 / 3, 0, 2 / 3]])
    path.write_text("client,neighbour\n2,0\n2,1\n1,0\n")  # as in a notebook between two runs
    again = topology("intermittent", topology={"kind": "edge_list", "path": path}, outage=0.0)
    for changed in (given, again):
        assert np.allclose(mixing(changed, 3, 1, 0).weights.toarray(), 1 / 3)


def test_matchings_differ_from_round_to_round() -> None:
    pairs = [topology("random_matching").links(9, index, 0) for index in (1, 2)]
    assert all(len(np.unique(links)) == 8 for links in pairs)
    assert not np.array_equal(*pairs)


def test_links_that_are_down_are_drawn_anew_in_each_round() -> None:
    given, ring = topology("intermittent", outage=0.3), {tuple(link) for link in topology("ring").links(40, 1, 0)}
    up = [{tuple(link) for link in given.links(40, index, 0)} for index in range(1, 51)]
    assert all(links <= ring for links in up)
    assert sum(map(len, up)) / (50 * 40) == pytest.approx(0.7, abs=4 * (0.7 * 0.3 / 2000) ** 0.5)
    assert up[0] != up[1]


@pytest.mark.parametrize(
    ("kind", "fields", "lines", "said"),
    [
        (
            "erdos_renyi",
            {"probability": 0.05},
            None,
            r"algorithm.topology = erdos_renyi \(probability = 0.05\) has \d+ parts without a link between them, of 16 "
            "clients: lambda_2 = 1, so that their models never agree; raise algorithm.topology.probability, or set",
        ),
        ("intermittent", {"outage": 0.99}, None, "lower algorithm.topology.outage, or add links, or use another"),
        ("torus", {"rows": 3}, None, "algorithm.topology.rows = 3 does not divide 16 clients"),
        ("edge_list", {}, "client,neighbour\n0,1\n", "has 15 parts .*; add links, or use another topology"),
        ("edge_list", {}, "client,other\n0,1\n", "has no column neighbour; needed: client, neighbour"),
        ("edge_list", {}, "client,neighbour\n0,1\n0,x\n", "line 3: .*; give the numbers of two clients"),
        ("edge_list", {}, "client,neighbour\n4,4\n", "line 2: got 4 and 4; give two clients, which count from 0"),
    ],
)
def test_what_connects_no_clients_is_refused(
    kind: str, fields: dict[str, Any], lines: str | None, said: str, tmp_path: Path
) -> None:
    if lines is not None:
        (tmp_path / "links.csv").write_text(lines)
        fields = {"path": tmp_path / "links.csv"}
    with pytest.raises(UserError, match=said):
        topology(kind, **fields).check(16, 0)
