"""The linear rate of the Mixing method against derivatives of a plain sweep, and its table."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from narrowcast.cli.many_runs import reproduce
from narrowcast.platform.types import FloatArray
from narrowcast.solves.max_cut import RandomMaxCut, TorusMaxCut
from narrowcast.solves.mixing import Mixing
from narrowcast.studies.results import as_text
from narrowcast_papers.sdp import mixing as mixing_rates
from narrowcast_papers.sdp.mixing import linear_rate, observed_rate
from papers import PAPERS

SMALL = RandomMaxCut(vertices=14, edges=40, seed=2, roundings=0)


def plain_sweep(weights: FloatArray, vectors: FloatArray, momentum: float) -> FloatArray:
    vectors = vectors.copy()
    for i in range(len(weights)):
        gradient = weights[i] @ vectors
        turned = -(gradient / np.linalg.norm(gradient) + momentum * vectors[i])
        vectors[i] = turned / np.linalg.norm(turned)
    return vectors


@pytest.mark.parametrize("momentum", [0.0, 0.3])
def test_the_rate_is_the_largest_eigenvalue_below_one_of_a_sweeps_derivative(momentum: float) -> None:
    problem = SMALL.load()
    graph, weights = problem.graph, np.zeros((14, 14))
    weights[np.repeat(np.arange(14), np.diff(graph.indptr)), graph.indices] = graph.weights
    _, vectors = observed_rate(Mixing(momentum=momentum), problem, 0, 20_000)
    size, step = vectors.size, 1e-6
    derivative = np.empty((size, size))
    for place in range(size):
        change = np.zeros(size)
        change[place] = step
        ends = [plain_sweep(weights, vectors + sign * change.reshape(vectors.shape), momentum) for sign in (1, -1)]
        derivative[:, place] = (ends[0] - ends[1]).ravel() / (2 * step)
    sizes = np.abs(np.linalg.eigvals(derivative))
    found = linear_rate(problem, vectors, momentum)
    assert found.rate == pytest.approx(sizes[sizes < 1 - 1e-5].max(), abs=1e-5)
    rotations = found.rank * (found.rank - 1) // 2 + found.rank * (vectors.shape[1] - found.rank)
    assert np.count_nonzero(np.abs(sizes - 1) < 1e-5) == rotations


@pytest.mark.parametrize("momentum", [0.0, 0.45])
def test_the_rate_is_that_of_a_solve(momentum: float) -> None:
    problem = RandomMaxCut(vertices=40, edges=120, seed=3, roundings=0).load()
    observed, vectors = observed_rate(Mixing(momentum=momentum), problem, 0, 20_000)
    assert linear_rate(problem, vectors, momentum).rate == pytest.approx(observed, abs=2e-4)


def test_the_rate_is_that_of_the_largest_component() -> None:
    problem = RandomMaxCut(vertices=60, edges=70, seed=1, roundings=0).load()
    assert (np.diff(problem.graph.indptr) == 0).any()
    observed, vectors = observed_rate(Mixing(), problem, 0, 20_000)
    assert linear_rate(problem, vectors, 0.0).rate == pytest.approx(observed, abs=2e-4)


@pytest.mark.slow
def test_rates_and_curves_are_measured_once_and_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mixing_rates, "load_case", lambda *_: TorusMaxCut(side=6, proof="factorisation").load())

    keys = ([("G1", momentum) for momentum in mixing_rates.MOMENTUM], [("G1", name) for name in mixing_rates.MOMENTA])
    for part, wanted in zip(mixing_rates.MIXING_RATES.parts, keys, strict=False):
        some = replace(part, planned=lambda _, wanted=wanted: wanted)
        made = [tuple(line[name] for name in part.key) for line in some.made([], tmp_path)]
        assert made == [tuple(map(as_text, key)) for key in wanted]
        lines = some.read([tmp_path])
        assert not list(some.missing(lines))
    gaps = [float(line["gap"]) for line in lines if line["solver"] == "adaptive"]
    assert gaps[-1] <= 1e-8 < gaps[0]
    command = [
        "sdp-mixing-rates",
        "--papers",
        str(PAPERS),
        "--results",
        str(tmp_path),
        "--output",
        str(tmp_path / "out"),
        "--time-limit",
        "0",
    ]
    CliRunner().invoke(reproduce, command, catch_exceptions=False)
    table = (tmp_path / "out" / "sdp-mixing-rates.md").read_text()
    assert "G1, momentum 0.45, factor of the residual by a sweep" in table and "agrees" in table
    assert (tmp_path / "out" / "sdp-mixing-rates.png").read_bytes().startswith(b"\x89PNG")
