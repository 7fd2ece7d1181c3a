"""The studies of FedMA: of its controls the runs in the repository, and the plans and tables of all."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from narrowcast.studies.execution import Planned, light_run
from narrowcast.studies.results import append, read_rows
from narrowcast_papers.fedma import networks as fedma_networks
from narrowcast_papers.fedma.digits import EXPECTED, METHODS
from narrowcast_papers.fedma.ensemble import ensemble_of_clients
from narrowcast_papers.fedma.grey_images import GreyImages
from narrowcast_papers.fedma.networks import ENSEMBLE, FEWER, MORE, NetworkCell, Setting
from papers import declared, queue_of, study
from planned_runs import ended


def test_no_run_of_the_table_is_missing_and_a_row_is_what_its_run_gives() -> None:
    queue = queue_of("fedma-digits")
    assert not list(queue.missing())
    for method in ("FedMA", "FedAvg, one round"):
        spec = declared("fedma-digits")["different", method].test([])
        found, row = light_run(spec, 2), queue.rows[spec, 2]
        assert found["final"]["test.accuracy"] == pytest.approx(row["final"]["test.accuracy"], abs=3e-3)
        assert found["downlink_bits"] == pytest.approx(row["downlink_bits"], rel=0.05)


def test_the_table_has_every_cell_and_the_differences_with_their_intervals(tmp_path: Path) -> None:
    rows = queue_of("fedma-digits").rows
    verdicts = {each.what: each for each in study("fedma-digits").judge(rows)}
    cells = declared("fedma-digits")
    assert len(verdicts) == len(cells) + 8
    for (initial, method), cell in cells.items():
        assert len(verdicts[cell.name].by_seed) == 5
        assert verdicts[cell.name].paper == f"{EXPECTED[initial][METHODS.index(method)]:.1f}"
    less = verdicts["matched, last layer by class less by index, last layer by class, different starts"]
    assert float(less.difference) > 0
    _, files = study("fedma-digits").finish(rows, tmp_path / "fedma-digits")
    assert [path.name for path in files] == ["fedma-digits.png"]
    assert files[0].stat().st_size > 10_000


def test_methods_differ_in_one_part_each() -> None:
    runs = {method: declared("fedma-digits")["same", method].test([]) for method in METHODS}
    assert len({run.label for run in runs.values()}) == len(METHODS)
    passes = {method: run.configured(0, "one").rounds for method, run in runs.items()}
    assert [method for method, rounds in passes.items() if rounds == 4] == ["FedAvg, two rounds"]


SETS = {"fedma-cifar": "cifar10-jpeg-12k", "fedma-shakespeare": "mit-shakespeare"}


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.data(SETS.get(name, "mnist"))) for name in fedma_networks.STUDIES],
)
def test_methods_of_a_network_have_equal_tries_and_rounds(name: str, tmp_path: Path) -> None:
    queue, settings = queue_of(name, folder=tmp_path), fedma_networks.STUDIES[name]
    best = {f"{setting.rates[1]:g}" for setting in settings}

    def result(planned: Planned) -> dict[str, Any]:
        fields = dict(each.split("=", 1) for each in planned.spec.overrides)
        rounds, every = int(fields["rounds"]), int(fields["evaluate_every"])
        accuracy = 0.5 + 0.1 * ("kind: fedma" in fields["algorithm"]) + 1e-4 * planned.seed
        accuracy += 0.01 * (planned.spec.label.rpartition("-")[2] in best)
        curve = [
            {
                **{"rounds": at, "uplink_bits": 8_000_000 * at, "downlink_bits": 8_000_000},
                "final": {f"{split}.accuracy": accuracy + 0.001 * at for split in ("validation", "test")},
                "model_values": 100 + 10 * ("gamma: 7" in fields["algorithm"]),
            }
            for at in range(every, rounds + 1, every)
        ]
        return {**curve[-1], "curve": curve}

    each = [planned for job in ended(queue, result) for planned in job]
    tries = 4 if name == "fedma-cifar" else 3
    assert sum(not planned.test for planned in each) == tries * sum(len(setting.methods) for setting in settings)
    assert {planned.spec.label.rpartition("-")[2] for planned in each if planned.test} == best
    for setting in settings:
        rounds = {cell.method: cell.test([{"final": {}}]).configured(0, "run").rounds for cell in setting.cells}
        assert {count for method, count in rounds.items() if method != ENSEMBLE} == {setting.passes * setting.layers}
    experiment = settings[0].cells[0].tuning(0.03).configured(0, "run")
    layers = experiment.model.matched_units(experiment.data_source.load()).counts
    assert {setting.layers for setting in settings} == {len(layers) + 1}
    verdicts, files = study(name).finish(queue.rows, tmp_path / name)
    rows = [(len(setting.methods) - (ENSEMBLE in setting.methods)) * setting.passes for setting in settings]
    assert len(verdicts) == sum(rows) + sum(ENSEMBLE in setting.methods for setting in settings)
    matched = next(verdict for verdict in verdicts if f", {MORE}, " in verdict.what)
    assert float(matched.difference) == pytest.approx(10)
    assert f"{settings[0].layers} rounds, {settings[0].layers + 1} MB" in matched.what
    assert ("model x1.10" in matched.what) == (settings[0].gammas[0] == 7)
    assert files[0].stat().st_size > 10_000


SMALL = Setting(
    "small",
    "digits",
    "kind: digits, partition: {kind: dirichlet, alpha: 0.5, min_examples: 10}",
    "kind: mlp, hidden: [12, 8]",
    clients=3,
    layers=3,
    passes=2,
    epochs=1,
)


def test_a_run_has_the_results_of_shorter_ones(tmp_path: Path) -> None:
    whole = NetworkCell(SMALL, MORE).test([{"final": {}}])
    found = light_run(whole, 3)
    append(tmp_path / "small.csv", whole, 3, found)
    first, second = read_rows([tmp_path])[whole, 3]["curve"]
    short = light_run(whole, 3, rounds=3)
    assert short["curve"] == [first]
    assert (first["rounds"], second["rounds"]) == (3, 6)
    assert first["uplink_bits"] == short["uplink_bits"]
    assert first["final"]["test.accuracy"] == short["final"]["test.accuracy"]
    assert second["final"]["test.accuracy"] == found["final"]["test.accuracy"]
    own = light_run(NetworkCell(SMALL, "FedAvg").tuning(0.01), 3)["curve"][0]["model_values"]
    fewer = light_run(NetworkCell(SMALL, FEWER).tuning(0.01), 3)["curve"][0]["model_values"]
    assert own <= fewer <= first["model_values"]


def test_an_ensemble_of_one_client_is_its_model_after_a_round_of_fedavg() -> None:
    alone = replace(SMALL, clients=1)
    ensemble = NetworkCell(alone, ENSEMBLE).tuning(0.03)
    same = tuple(each.replace("fedma", "fedma, initial: same") for each in ensemble.overrides)
    fedavg = tuple("algorithm=fedavg" if each.startswith("algorithm=") else each for each in ensemble.overrides)
    wanted = light_run(replace(ensemble, overrides=fedavg, measure="accuracy"), 3)
    found = ensemble_of_clients(replace(ensemble, overrides=same), 3)
    assert found["final"]["test.accuracy"] == pytest.approx(wanted["final"]["test.accuracy"])
    assert found["uplink_bits"] == wanted["uplink_bits"]
    three = light_run(NetworkCell(SMALL, ENSEMBLE).tuning(0.03), 3, test=False)
    assert set(three["final"]) == {"validation.accuracy"}


def test_grey_images_are_one_clients_and_half_of_the_test_images(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    for part, count in (("train", 40), ("test", 10)):
        for label in "abcd":
            (folder := tmp_path / part / label).mkdir(parents=True)
            for image in range(count):
                Image.fromarray(random.integers(0, 256, (4, 4, 3), dtype=np.uint8)).save(folder / f"{image:02}.png")
    data = GreyImages(path=tmp_path, samples=120, grey=0.9, seed=1).load()
    grey = [_is_grey(part.features) for part in (data.train, data.validation, data.test)]
    shares = [grey[0][data.train.labels == label].mean() for label in range(4)]
    assert sorted(round(share, 1) for share in shares) == [0.1, 0.1, 0.9, 0.9]
    assert [each.mean() for each in grey[1:]] == pytest.approx([0.5, 0.5], abs=0.1)
    assert len(data.train) == 120
    assert grey[0][data.order[: data.indptr[1]]].all()
    assert not grey[0][data.order[data.indptr[1] :]].any()
    together = GreyImages(path=tmp_path, samples=120, grey=0.9, seed=1, clients=1).load()
    assert np.array_equal(together.train.features, data.train.features)
    assert together.indptr.tolist() == [0, 120]


def _is_grey(images: np.ndarray) -> np.ndarray:
    grey: np.ndarray = (images == images[:, :1]).all(axis=(1, 2, 3))
    return grey


METHODS_OF_BIAS = [
    *("FedAvg", "FedProx", "FedMA", "one model of all images"),
    "one model, half of each class in grey",
]


def test_methods_of_the_bias_experiment_have_equal_tries_and_rounds(tmp_path: Path) -> None:
    queue = queue_of("fedma-bias", folder=tmp_path)

    def result(planned: Planned) -> dict[str, Any]:
        accuracy = 0.3 + 0.1 * ("kind: fedma" in planned.spec.overrides[2]) + 1e-3 * planned.seed
        final = {f"{split}.accuracy": accuracy for split in ("validation", "test")}
        return {"final": final, "rounds": 8, "downlink_bits": 8}

    each = [planned for job in ended(queue, result) for planned in job]
    assert len(each) == len(METHODS_OF_BIAS) * (3 + 5)
    verdicts, files = study("fedma-bias").finish(queue.rows, tmp_path / "bias")
    assert [verdict.what for verdict in verdicts] == METHODS_OF_BIAS
    assert verdicts[2].difference == "+10.00"
    assert files[0].stat().st_size > 10_000
