"""Reproduction of the low-rank paper: verdicts, the minutes of Table 2, the components of Figure 2."""

from __future__ import annotations

import csv
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sklearn.decomposition import PCA

from narrowcast.algorithms.codecs.chain import Codec
from narrowcast.experiment import load_experiment
from narrowcast.studies.results import read_lines
from narrowcast.studies.verdicts import PaperVerdict, PublishedMean, as_csv, as_markdown, judge_family, judge_mean
from narrowcast_papers.colr import components as colr_components
from narrowcast_papers.colr import encryption as colr_encryption
from narrowcast_papers.colr import times as colr_times
from narrowcast_papers.colr.accuracy import (
    COLR,
    FIGURE_3,
    FIGURE_4,
    SVD,
    TABLE_4,
    judge_order,
    judge_points,
    plot_points,
)
from papers import recorded, targets


@pytest.mark.parametrize(
    ("name", "points"), [("colr-table4", TABLE_4), ("colr-fig3", FIGURE_3), ("colr-fig4", FIGURE_4)]
)
def test_the_kept_tables_are_those_of_their_values_by_seed(name: str, points: Any, tmp_path: Path) -> None:
    """Runs of these targets have folders, which are not kept; the files have the metrics of each seed."""
    lines = read_lines(targets()[name].results / f"{name}.csv")
    by_seed = {line["what"]: [float(value) / 100 for value in line["by_seed"].split()] for line in lines}
    results = {
        point.run.label: [
            {"final": {"test.hr@10": hr, "test.ndcg@10": ndcg}}
            for hr, ndcg in zip(by_seed[f"HR@10, {point.name}"], by_seed[f"NDCG@10, {point.name}"], strict=True)
        ]
        for point in points
    }
    verdicts, _ = recorded(name).finish(results, tmp_path / name)
    shown = [(row.what, row.paper, row.ours, row.difference, row.verdict) for row in verdicts]
    assert shown == [tuple(line[column] for column in list(line)[:5]) for line in lines]


def exact(points: Any, shift: float = 0.0, spread: float = 0.1) -> dict[str, list[dict[str, Any]]]:
    """Return results of three seeds with the paper's mean plus `shift` points."""
    return {
        point.run.label: [
            {
                "final": {
                    "test.hr@10": (point.hr + shift + noise) / 100,
                    "test.ndcg@10": (point.ndcg + shift + noise) / 100,
                }
            }
            for noise in (-spread, 0.0, spread)
        ]
        for point in points
    }


@pytest.mark.parametrize(
    ("ours", "verdict", "difference"),
    [
        ([61.0], "reproduced, within 1", "+1.00"),
        ([59.0], "reproduced, within 1", "-1.00"),
        ([61.01], "differs by more than 1", "+1.01"),
        ([58.9, 59.1], "reproduced, within 1", "-1.00"),
    ],
)
def test_a_mean_within_the_tolerance_is_reproduced(ours: list[float], verdict: str, difference: str) -> None:
    judged = judge_mean("HR@10", 60.0, ours, 1.0)
    assert (judged.verdict, judged.difference, judged.by_seed) == (verdict, difference, tuple(ours))


def test_the_spread_is_that_of_a_sample_and_one_seed_has_none() -> None:
    assert judge_mean("", 60.0, [59.0, 61.0], 1.0).ours == "60.00 ± 1.41"
    assert judge_mean("", 60.0, [59.0], 1.0).ours == "59.00"


@pytest.mark.parametrize("points", [TABLE_4, FIGURE_3, FIGURE_4], ids=["table 4", "figure 3", "figure 4"])
@pytest.mark.parametrize(
    ("shift", "noise", "verdict"),
    [(0.0, 0.001, "level"), (-0.2, 0.001, "level"), (-0.4, 0.001, "off by"), (0.0, 1.0, "not settled with 3 seeds")],
)
def test_every_cell_is_judged_by_an_equivalence_test(points: Any, shift: float, noise: float, verdict: str) -> None:
    judged = judge_points(points, exact(points, shift, noise))
    cells = judged[: 2 * len(points)]
    assert all(cell.verdict.startswith(verdict) for cell in cells)
    assert {cell.difference for cell in cells} == {f"{shift:+.2f}"}
    n_series = len({point.series for point in points})
    assert [row.what.split(", ")[2] for row in judged[len(cells) : -1]][:1] == [
        f"mean difference over {len([each for each in points if each.series == points[0].series])} sizes"
    ]
    assert len(judged) == len(cells) + 2 * n_series + 1
    assert judged[-1].ours == f"{len(cells) if shift else 0} of {len(cells)}", "a level cell may be off too"


def test_p_values_are_corrected_over_the_table() -> None:
    """A difference that one cell alone would settle is not settled as one of twelve."""
    ours = (59.1, 59.5, 59.3, 59.8, 59.4)
    alone, family = PublishedMean("one", 59.95, ours), [PublishedMean(f"{n}", 59.95, ours) for n in range(12)]
    (verdict,) = judge_family([alone])
    assert verdict.verdict == "off by -0.53 (-0.85 to -0.21)"
    assert {each.verdict for each in judge_family(family)} == {"not settled with 5 seeds (-0.85 to -0.21)"}


def test_one_seed_settles_no_cell() -> None:
    results = {label: seeds[:1] for label, seeds in exact(TABLE_4).items()}
    cells = judge_points(TABLE_4, results)[:12]
    assert {cell.verdict for cell in cells} == {"not settled with 1 seed"}


TABLES = [recorded(name) for name in targets() if name.startswith("colr-")]


def test_the_order_is_that_of_the_means() -> None:
    judged = judge_order(COLR, SVD, exact(FIGURE_4))
    assert (judged.paper, judged.ours, judged.verdict) == ("-0.60 to +4.80", "-0.60 to +4.80", "same order")
    assert judged.what == "HR@10, CoLR minus SVD at 32, 16, 8, 4, 2, 1"
    better = {**exact(FIGURE_4), **exact(COLR, shift=0.5)}
    assert judge_order(COLR, SVD, better).verdict == "different order at 32, 16, 8"


def test_every_run_is_an_experiment_of_its_own() -> None:
    wanted = {each.label: each for target in TABLES for each in target.runs}
    identities = {}
    for label, each in wanted.items():
        experiment = load_experiment(each.experiment, [*each.overrides, f"name={label}", "backend.kind=local"])
        identities[label] = (experiment.digest(), each.measure)
        data = {"scolr-mnist": "mnist"}.get(each.experiment, "pinterest" if "pinterest" in label else "ml-1m")
        assert experiment.data.kind == data
    assert len(set(identities.values())) == len(identities)
    assert all(len({each.label for each in target.runs}) == len(target.runs) for target in TABLES)


def test_points_of_equal_size_cost_the_same() -> None:
    """All cost 4 N r bytes, except for the vectors V of the SVD."""
    n_items, dimension = 3706, 64
    for point in FIGURE_4:
        experiment = load_experiment(point.run.experiment, [*point.run.overrides, "backend.kind=local"])
        sent = experiment.plain()["algorithm"]
        if point.series == "CoLR":
            assert sent["rank"] == point.size
            continue
        assert (sent["rows"], sent["downlink_codec"]) == ("all", sent["codec"])
        shapes = {"matrix": (n_items, dimension)}
        bits = Codec(experiment.algorithm.codec).max_bits(shapes)  # type: ignore[attr-defined]
        beside = 32 * point.size * (dimension + 1) if point.series == "SVD" else 64
        assert 0 <= bits - 32 * n_items * point.size <= beside, point


def test_the_formula_gives_every_communication_cell() -> None:
    for method, (paper, _) in colr_times.PAPER.items():
        assert round(colr_times.communication_minutes(method), 2) == pytest.approx(paper, abs=0.0051), method


def test_the_formula_gives_the_computation_of_the_published_timings() -> None:
    """500 rounds took 2.597 s on the server and 9.945 s on the slowest clients."""
    assert colr_times.computation_minutes(9.945 / 500, 2.597 / 500) == pytest.approx(169.07, abs=0.005)


def test_times_are_judged_without_the_constant(tmp_path: Path) -> None:
    results = {each.label: [{"client_seconds": 0.02, "server_seconds": 0.002}] for each in colr_times.timed_runs()}
    verdicts = {verdict.what: verdict for verdict in colr_times.judge_times(results)}
    assert verdicts["communication, Top-K@16"].verdict == "reproduced, within 0.1"
    assert verdicts["computation, MF-64"].ours == "169.03"
    assert verdicts["total, MF-64"].paper == "249.50"
    colr_times.plot_times(results, tmp_path / "times.png")
    assert (tmp_path / "times.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("rank", [1, 3, 8])
def test_components_are_those_of_a_principal_component_analysis(rank: int) -> None:
    random = np.random.default_rng(rank)
    change = (random.standard_normal((40, rank)) @ random.standard_normal((rank, 8)) + 0.3).astype(np.float32)
    change += 0.05 * random.standard_normal(change.shape).astype(np.float32)
    whole = np.zeros((100, 8), dtype=np.float32)
    whole[random.permutation(100)[:40]] = change
    explained = np.cumsum(PCA().fit(whole.astype(np.float64)).explained_variance_ratio_)
    for share in (0.5, 0.95, 0.99):
        expected = int(np.argmax(explained >= share)) + 1
        assert colr_components.count_components(change, 100, share) == [expected]


def test_no_change_has_one_component_and_noise_has_all() -> None:
    assert colr_components.count_components(np.zeros((5, 8), dtype=np.float32), 9, 0.99) == [1]
    noise = np.random.default_rng(0).standard_normal((5000, 8)).astype(np.float32)
    assert colr_components.count_components(noise, 5000, [0.95, 0.99]) == [8, 8]


def test_a_table_is_written_as_markdown_and_csv() -> None:
    verdicts = [PaperVerdict("a | b", "1", "2", "agrees"), judge_mean("c", 60.0, [59.0, 61.0], 1.0)]
    lines = as_markdown("A title", verdicts, ["A note."]).splitlines()
    assert lines[:3] == ["# A title", "", "A note."]
    assert lines[6:] == [
        "| a \\| b | 1 | 2 |  | agrees |",
        "| c | 60.00 | 60.00 ± 1.41 | +0.00 | reproduced, within 1 |",
    ]
    rows = list(csv.DictReader(StringIO(as_csv(verdicts))))
    assert [row["what"] for row in rows] == ["a | b", "c"]
    assert rows[1]["by_seed"] == "59 61"


def test_the_figure_is_drawn_with_one_seed_and_with_three(tmp_path: Path) -> None:
    results = exact(FIGURE_4)
    for name, seeds in (("one", 1), ("three", 3)):
        some = {label: values[:seeds] for label, values in results.items()}
        plot_points(FIGURE_4, some, "Figure 4", tmp_path / f"{name}.png")
        assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_table_3_has_ciphertexts_of_a_fifteenth_and_every_cell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(colr_encryption, "PAILLIER_VALUES", 2)
    measured = colr_encryption._ckks(1)
    assert measured.ciphertext_kb < colr_encryption.PAPER["CoLR@1"].ciphertext_kb / 15
    unit = colr_encryption._paillier_unit()
    assert unit.ciphertext_kb == 0.75
    costs = {method: measured if "CoLR" in method or method == "FedMF" else unit for method in colr_encryption.PAPER}
    verdicts = colr_encryption.judge_costs(costs)
    assert len(verdicts) == 4 * len(colr_encryption.PAPER)
    assert next(each for each in verdicts if each.what == "ciphertext (KB), CoLR@1").verdict == "1/25.6 of the paper's"
    colr_encryption.plot_costs(costs, tmp_path / "table3.png")
    assert (tmp_path / "table3.png").stat().st_size > 10_000
