"""Gossip and FedCS: what clients are measured on, how values are searched, and the kept results."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
import pytest

from command_line import narrowcast
from narrowcast.studies.results import as_text
from narrowcast.studies.tables import MeasuredTable, Measurements
from narrowcast_papers.gossip import links, selection, thresholds
from narrowcast_papers.gossip.choco import NETWORKS, OF_16
from narrowcast_papers.gossip.consensus import CLIENTS, Vectors, measure_mixing
from narrowcast_papers.gossip.digits import TEST_SEEDS, TUNING_SEEDS, AllImages, measured, outcomes
from narrowcast_papers.gossip.methods import Method, planned
from papers import PAPERS, targets

Row = dict[str, str]


def row(**values: object) -> Row:
    return {name: as_text(value) for name, value in values.items()}


def test_every_client_learns_from_two_classes_and_is_measured_on_all_images() -> None:
    data = AllImages(clients=16, seed=3).load()
    own = np.split(data.train.labels[data.order], data.indptr[1:-1])
    assert max(len(set(each.tolist())) for each in own) == 2
    assert set(data.examples_of("test").tolist()) == {360}
    *_, end = outcomes(3, 16, {"kind": "fedavg"}, 1.0, 3, 3)
    line = measured(end, 3, 16)
    assert line["loss"] == pytest.approx(line["mean_loss"], rel=1e-6), "all clients of FedAvg have its model"
    assert line["accuracy"] == pytest.approx(line["mean_accuracy"])


def test_exact_mixing_is_the_power_of_the_metropolis_weights_of_a_ring() -> None:
    weights = sum(np.roll(np.eye(CLIENTS), shift, axis=0) for shift in (-1, 0, 1)) / 3
    vectors = Vectors(seed=2).draw()
    after = np.linalg.matrix_power(weights, 50) @ vectors
    line = next(iter(measure_mixing("exact", 2)))
    assert line["error"] == pytest.approx(np.square(after - vectors.mean(axis=0)).mean(), rel=1e-9)
    assert line["kilobits"] == pytest.approx(50 * 200 * 64 / 1e3, rel=0.01)


def test_a_method_is_tested_where_three_other_seeds_have_the_least_loss() -> None:
    methods = {"a": Method({}, (0.1, 0.25)), "b": Method({}, (3.2,))}
    lines: list[Row] = []
    runs = Measurements("", ("seed", "method", "rate", "gamma"), ("loss",), partial(planned, methods=methods), Method)
    for seed, name, rate, gamma in runs.missing(lines):
        loss = abs(np.log2(rate / 0.8)) + (abs(np.log2(gamma)) if gamma else 0)
        lines.append(row(seed=seed, method=name, rate=rate, gamma=gamma, loss=float(loss)))
    tested = [line for line in lines if int(line["seed"]) in TEST_SEEDS]
    assert {(line["method"], line["rate"], line["gamma"]) for line in tested} == {("a", "0.8", "1"), ("b", "0.8", "0")}
    assert {int(line["seed"]) for line in lines} == {*TEST_SEEDS, *TUNING_SEEDS}
    choices = methods["a"].choices(lines, "a")
    assert [choice.at_edge for choice in choices] == [False, False], "there is no gamma above 1"
    assert [choice.at_edge for choice in methods["b"].choices(lines, "b")] == [False]


def test_the_break_even_of_links_is_the_ratio_of_the_seconds_to_the_target() -> None:
    def curve(method: str, gamma: float, late: int) -> list[Row]:
        return [
            row(seed=seed, method=method, rate=6.4, gamma=gamma, loss=1.0, accuracy=accuracy, seconds=seconds)
            | row(megabits=1.0, megabits_down=seconds)
            for seed in TEST_SEEDS
            for accuracy, seconds in ((0.5, 1.0), (0.86, (seed + 2.0) * late), (0.9, 99.0))
        ]

    served = curve(links.FEDAVG, 0, 1) + curve(links.CODED, 0, 1)
    verdicts = {each.what: each for each in links.judge_links(served, curve("D-PSGD", 0, 3))}
    assert verdicts["D-PSGD, ring"].difference == "3 (3 to 3)"
    assert verdicts[links.FEDAVG].by_seed == (2.0, 3.0, 4.0, 5.0, 6.0)


def test_gossip_is_beside_a_server_of_as_many_clients_and_has_a_label_by_topology() -> None:
    assert {network.clients for network in OF_16} == {links.CLIENTS}
    assert len({network.topology for network in OF_16}) == len(OF_16)
    assert len({network.name for network in NETWORKS}) == len({each.measurements.file for each in NETWORKS}) == 4


def test_fedcs_fills_rounds_of_unequal_clients_with_more_uploads_than_a_deadline(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(selection, "SECONDS", 4.0)
    ends = {
        method: list(selection.measure_choice(100, "unequal", method, 0.8, 0.4))[-1] for method in ("FedCS", "deadline")
    }
    assert ends["FedCS"]["clients"] > 1.5 * ends["deadline"]["clients"]
    assert max(float(end["seconds"]) for end in ends.values()) <= 4.0


def test_a_threshold_that_nobody_passes_is_training_alone_but_for_a_bit_a_round(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(thresholds, "STEPS", 4)
    silent, alone, often = (
        next(thresholds.Dealt("two-classes", 2).measure(0, name, 0.1, 0))
        for name in ("threshold 256", thresholds.LOCAL, "FedAvg, 1 step")
    )
    assert [silent[name] for name in ("loss", "accuracy")] == [alone[name] for name in ("loss", "accuracy")]
    assert [silent["megabits"], alone["megabits"]] == [pytest.approx(4e-6), 0]
    model = thresholds.MODEL_BITS / 1e6
    assert [silent["megabits_last"], often["megabits_last"]] == [pytest.approx(model), 0]
    assert [silent["megabits_down"], often["megabits_down"]] == [pytest.approx(model), pytest.approx(4 * model)]


def test_a_threshold_is_compared_with_the_averages_of_the_next_fewer_and_more_bits() -> None:
    spent = {"FedAvg, 5 steps": 1.0, "FedAvg, 20 steps": 0.3, "FedAvg, 50 steps": 0.1, "threshold 4": 0.5}
    lines = [
        row(seed=seed, method=name, megabits=megabits, megabits_down=0.0, megabits_last=0.0, loss=1.0, rate=1, gamma=0)
        for name, megabits in spent.items()
        for seed in TEST_SEEDS
    ]
    assert thresholds.rivals(lines, "threshold 4") == ["FedAvg, 20 steps", "FedAvg, 5 steps"]


@pytest.mark.parametrize("name", ["choco", "choco-consensus", "gossip-links", "dynamic-averaging", "fedcs"])
def test_the_published_table_has_every_run(name: str, tmp_path: Path) -> None:
    table = targets()[name].table()
    assert isinstance(table, MeasuredTable)
    for part in table.parts:
        assert next(part.missing(part.read([targets()[name].results])), None) is None
    words = ("reproduce", name, "--papers", PAPERS, "--time-limit", 0, "--output", tmp_path)
    assert narrowcast(*words).status == 0
    assert (tmp_path / f"{name}.png").stat().st_size > 10_000
