"""Timed solves of MAXCUT relaxations, and the table of Gset."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from narrowcast.cli.many_runs import reproduce
from narrowcast.solves.burer_monteiro import BurerMonteiro
from narrowcast.solves.max_cut import RandomMaxCut
from narrowcast.solves.mixing import Mixing
from narrowcast_papers.sdp import max_cut as max_cut_runs
from narrowcast_papers.sdp.max_cut import Rows, judge_gset, rows_of, solves, timed
from papers import PAPERS

SMALL = RandomMaxCut(vertices=60, edges=200, seed=4, roundings=0, proof="factorisation")


@pytest.mark.parametrize("solver", [Mixing(), Mixing(momentum=0.45), BurerMonteiro()], ids=("0", "0.45", "bm"))
def test_the_gap_is_proved_at_the_sweep_found_and_not_shortly_before(solver: Mixing | BurerMonteiro) -> None:
    problem = SMALL.load()
    row = timed(solver, problem, 3)
    state, gaps = solver.init(problem, 3), [math.inf]
    for _ in range(row["sweeps_1e-6"]):
        state, _ = solver.step(problem, state)
        gaps.append(problem.measure({"vectors": state["vectors"]})["gap"])
    for name, gap in (("sweeps_1e-4", 1e-4), ("sweeps_1e-6", 1e-6)):
        found = row[name]
        assert gaps[found] <= gap * (1 + 1e-3)
        assert max(gaps[found - max(1, int(0.02 * found)) : found]) > gap * (1 - 1e-3)
    assert 0 < row["cpu_seconds_1e-4"] < row["cpu_seconds_1e-6"]
    assert row["relaxation"] == pytest.approx(problem.measure({"vectors": state["vectors"]})["relaxation"], rel=1e-12)
    assert row["mean_cut"] <= row["cut"] <= row["relaxation"] * (1 + 1e-6)


def test_a_solve_without_a_proof_has_empty_cells(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(max_cut_runs, "MOST_SWEEPS", 12)
    row = timed(Mixing(), SMALL.load(), 0)
    assert "sweeps_1e-6" not in row and row["relaxation"] > 0


def row_of(sweeps: int, seconds: float, relaxation: float) -> dict[str, str]:
    found = {"sweeps_1e-6": sweeps, "cpu_seconds_1e-6": seconds, "relaxation": relaxation, "load": 2}
    return {name: str(value) for name, value in {**found, "cut": 11400, "mean_cut": 11267}.items()}


def test_medians_and_the_published_optimum_are_judged() -> None:
    rows: Rows = {("G1", "Mixing", seed): row_of(400 + seed, 0.4, 12083.197) for seed in range(3)}
    rows |= {("G1", "adaptive", seed): row_of(50, 0.1, 12083.197) for seed in range(3)}
    rows |= {("G1", "Burer-Monteiro", 0): row_of(5, 4.0, 12083.197)}
    found = {each.what: each for each in judge_gset(rows)}
    assert found["G1, relaxation"].verdict == "agrees; gap of 1e-6 proved in 7 of 7 solves"
    assert found["G1, Mixing, to 1e-6"].ours == "401 sweeps, 0.4 s"
    assert found["G1, adaptive, to 1e-6"].difference == "0.12 of the sweeps, 0.25 of the time"
    assert found["G1, Burer-Monteiro, to 1e-6"].ours == "5 iterations, 4 s"
    assert found["G1, Burer-Monteiro, to 1e-6"].difference == "10 times the time"
    assert found["G1, mean cut of 100 hyperplanes"].difference == "+0"
    off = {
        ("G1", "Mixing", 0): row_of(400, 0.4, 12083.0),
        ("G1", "greedy", 0): {**row_of(1, 1, 12083.0), "sweeps_1e-6": ""},
    }
    found = {each.what: each for each in judge_gset(off)}
    assert found["G1, relaxation"].verdict == "differs; gap of 1e-6 proved in 1 of 2 solves"
    assert found["G1, greedy, to 1e-6"].verdict == "not proved"
    assert judge_gset({}) == []


@pytest.mark.data("gset")
def test_the_file_is_gone_on_with_and_the_table_drawn(tmp_path: Path) -> None:
    path = tmp_path / "sdp-gset.csv"

    part = replace(solves(("G14",), ("adaptive",)), planned=lambda _: [("G14", "adaptive", 0)])
    assert [(line["case"], line["solver"]) for line in part.made([], tmp_path)] == [("G14", "adaptive")]
    before = path.read_bytes()
    assert not list(part.made(part.read([tmp_path]), tmp_path))
    assert path.read_bytes() == before
    ((key, row),) = rows_of(part.read([tmp_path])).items()
    assert key == ("G14", "adaptive", 0) and float(row["relaxation"]) == pytest.approx(3191.57, abs=0.005)
    command = [
        "sdp-gset",
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
    said = (tmp_path / "out" / "sdp-gset.md").read_text()
    assert "G14, relaxation" in said and "agrees; gap of 1e-6 proved in 1 of 1 solves" in said
    assert (tmp_path / "out" / "sdp-gset.png").read_bytes().startswith(b"\x89PNG")
    path.write_bytes(before[:-60])  # its last row is cut
    assert part.read([tmp_path]) == []


@pytest.mark.data("gset")
def test_the_torus_depends_on_the_seed_and_graphs_do_not() -> None:
    tori = [max_cut_runs.load_case("torus", seed).digest for seed in (0, 1)]
    graphs = [max_cut_runs.load_case("G14", seed) for seed in (0, 1)]
    assert tori[0] != tori[1] and graphs[0].digest == graphs[1].digest
    vectors = Mixing(rank=3).init(graphs[0], 0)["vectors"]
    assert not np.array_equal(graphs[0].rounded(vectors, 5).cuts, graphs[1].rounded(vectors, 5).cuts)
