"""The matrix of robust rules and attackers: how rates are chosen, what is judged, and cells on real images."""

from __future__ import annotations

from dataclasses import replace
from math import log2
from pathlib import Path

import pytest

from narrowcast.experiment import load_experiment
from narrowcast_papers.robust import edge
from narrowcast_papers.robust.matrix import MNIST, NONE, SPLITS, TEST_SEEDS, TUNING_SEEDS, Matrix, Setting, Settings
from narrowcast_papers.robust.tables import (
    ATTACKS,
    BACKDOORS,
    CODECS,
    DEFENCES,
    ELECTED,
    RULES,
    SERVERS,
    THROUGH_CODECS,
    TRUSTED,
)

Row = dict[str, str]
MEAN = "mean"
MATRIX = Matrix("title", "file.csv", tuple(SPLITS), RULES, ATTACKS, MEAN)


def line(seed: int, split: str, rule: str, attack: str, rate: float, reached: float) -> Row:
    values = {"seed": seed, "split": split, "method": rule, "attack": attack, "rate": rate}
    return {name: str(value) for name, value in {**values, "validation": reached, "test": reached + 1}.items()}


@pytest.mark.slow
def test_rates_are_tried_until_the_best_is_not_at_an_edge() -> None:
    best = {rule: 0.2 * 2.0 ** (index % 7 - 3) for index, rule in enumerate(RULES)}
    lines: list[Row] = []
    for seed, split, rule, attack, rate in MATRIX.planned(lines):
        lines.append(line(seed, split, rule, attack, rate, 80 - abs(log2(rate / best[rule]))))
    for split in SPLITS:
        for rule in RULES:
            of_rule = [row for row in lines if (row["split"], row["method"]) == (split, rule)]
            tried = {float(row["rate"]) for row in of_rule if int(row["seed"]) in TUNING_SEEDS}
            assert min(tried) < best[rule] < max(tried)
            tested = [row for row in of_rule if int(row["seed"]) in TEST_SEEDS]
            assert {float(row["rate"]) for row in tested} == {best[rule]}
            assert sorted(row["attack"] for row in tested) == sorted([*ATTACKS] * len(TEST_SEEDS))


def test_rules_are_compared_with_the_mean_under_the_same_attack() -> None:
    split, spread = next(iter(SPLITS)), (0.0, 0.1, -0.1, 0.2, -0.2)
    reached = {(MEAN, NONE): 80, (MEAN, "mimic"): 70, ("Krum", NONE): 60, ("Krum", "mimic"): 75, ("median", NONE): 80}
    lines = [
        line(seed, split, rule, attack, 0.2, value + spread[seed] * (1 if rule == MEAN else -1))
        for (rule, attack), value in reached.items()
        for seed in TEST_SEEDS
    ]
    verdicts = {verdict.what: verdict for verdict in MATRIX.judge(lines)}
    assert len(verdicts) == len(reached)
    assert verdicts[f"{split}: Krum, none"].verdict.startswith("below mean")
    assert verdicts[f"{split}: Krum, none"].difference.startswith("-20.0 (")
    assert verdicts[f"{split}: Krum, mimic"].verdict.startswith("above mean")
    assert verdicts[f"{split}: median, none"].verdict.startswith("not told from mean")
    assert verdicts[f"{split}: mean, none"].verdict == ""
    assert MATRIX.judge(lines[:3]) == []


def test_the_matrix_is_drawn(tmp_path: Path) -> None:
    split = next(iter(SPLITS))
    MATRIX.plot([line(seed, split, MEAN, NONE, 0.2, 80) for seed in TEST_SEEDS], tmp_path / "matrix.png")
    assert (tmp_path / "matrix.png").read_bytes().startswith(b"\x89PNG")


def test_cells_by_round_are_judged_after_the_last_and_drawn_in_all(tmp_path: Path) -> None:
    split, last = next(iter(SPLITS)), edge.ROUNDS
    lines = [
        {
            **line(seed, split, MEAN, attack, 0.2, 40),
            "round": str(index),
            "success": str(success + seed if index == last else 99),
        }
        for attack, success in ((NONE, 5), ("black box", 60))
        for seed in edge.BY_ROUND.test_seeds
        for index in range(edge.EVERY, last + 1, edge.EVERY)
    ]
    assert [verdict.by_seed for verdict in edge.BY_ROUND.judge(lines)] == [(5, 6, 7), (60, 61, 62)]
    edge.BY_ROUND.plot(lines, tmp_path / "edge.png")
    assert (tmp_path / "edge.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("methods", "attacks", "setting"),
    [
        (RULES, ATTACKS, MNIST),
        (CODECS, THROUGH_CODECS, MNIST),
        (DEFENCES, BACKDOORS, MNIST),
        (TRUSTED, ATTACKS, replace(MNIST, server=100)),
        (ELECTED, SERVERS, MNIST),
        (edge.RULES, edge.PLANES, edge.CIFAR),
    ],
    ids=["rules", "codecs", "backdoors", "trust", "elected", "edge"],
)
def test_every_cell_is_an_experiment(methods: Settings, attacks: Settings, setting: Setting) -> None:
    for method in methods.values():
        for attack in attacks.values():
            of = setting.experiment("iid", method, attack, 0.2, 3)
            assert load_experiment(of.plain()).identity() == of.identity()
            assert (of.attack is None) == (not attack)


@pytest.mark.data("mnist")
def test_the_omniscient_attack_breaks_the_mean_and_not_the_geometric_median() -> None:
    short = replace(MATRIX, setting=replace(MNIST, rounds=10, every=10))
    reached = {
        (rule, attack): next(iter(short.measure(0, "iid", rule, attack, 0.2)))["test"]
        for rule in (MEAN, "geometric median")
        for attack in (NONE, "omniscient")
    }
    assert float(str(reached[MEAN, NONE])) > 80
    assert float(str(reached[MEAN, "omniscient"])) < 30
    assert float(str(reached["geometric median", "omniscient"])) > 75


@pytest.mark.data("mnist")
def test_a_codec_is_measured_by_success_and_bits() -> None:
    columns, short = ("success", "megabytes"), replace(MNIST, rounds=2, every=2)
    codecs = Matrix("title", "file.csv", tuple(SPLITS), CODECS, THROUGH_CODECS, "float32", columns, setting=short)
    (line,) = codecs.measure(0, "iid", "float32", "trigger", 0.2)
    # 20 clients send 7,850 values of 4 bytes in each of two rounds, with a header
    assert float(str(line["megabytes"])) == pytest.approx(2 * 20 * 4 * 7_850 / 1e6, rel=1e-3)
    assert 0 < float(str(line["success"])) <= 100
