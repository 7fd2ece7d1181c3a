"""Studies whose runs go in lockstep and end at a target: FedProx on synthetic data, SCAFFOLD by similarity."""

from __future__ import annotations

import csv
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from narrowcast.studies.execution import Planned, light_run, light_runs
from narrowcast.studies.results import append, read_rows
from narrowcast.studies.spec import RunSpec
from narrowcast.studies.tuning import mean_result
from narrowcast_papers.fedprox.table import BEST_MU, FEDAVG, PARTIAL, TUNED_FEDAVG, TUNED_PARTIAL
from papers import declared, queue_of, study
from planned_runs import ended

DIGITS = RunSpec("digits", "fedavg-digits", ("data.clients=8", "clients_per_round=4", "rounds=6", "evaluate_every=1"))


def _without(path: Path, column: str) -> list[list[str]]:
    rows = list(csv.reader(path.read_text().splitlines()))
    place = rows[0].index(column)
    quoted = [[f'"{each}"' if "," in each else each for each in row] for row in rows]
    return [[*row[:place], *row[place + 1 :]] for row in quoted]


def test_runs_in_lockstep_have_the_results_that_they_have_alone() -> None:
    slower = replace(DIGITS, label="slower", overrides=(*DIGITS.overrides, "training.learning_rate=0.02"))
    scaffold = replace(DIGITS, label="scaffold", overrides=(*DIGITS.overrides, "algorithm=scaffold"))
    runs = [(DIGITS, 0, True), (slower, 1, False), (scaffold, 0, True)]
    for (spec, seed, test), together in zip(runs, light_runs(runs), strict=True):
        alone = light_run(spec, seed, test=test)
        assert {**together, "wall_seconds": 0} == {**alone, "wall_seconds": 0}
        assert ("test.accuracy" in alone["final"]) == test


def test_a_run_ends_at_its_target_and_the_others_go_on() -> None:
    whole = light_run(DIGITS, 0)
    target = replace(DIGITS, target=("validation.accuracy", 0.2))
    never = replace(DIGITS, target=("validation.accuracy", 1.1))
    reached, not_reached = light_runs([(target, 0, True), (never, 0, True)])
    assert reached["rounds"] < whole["rounds"]
    assert reached["final"]["validation.accuracy"] >= 0.2
    assert reached["uplink_bits"] * whole["rounds"] == whole["uplink_bits"] * reached["rounds"]
    assert (not_reached["rounds"], not_reached["model_sha256"]) == (6, whole["model_sha256"])


@pytest.mark.slow
def test_fedprox_and_fedavg_have_equal_tries_and_the_same_stragglers(tmp_path: Path) -> None:
    queue = queue_of("fedprox-synthetic", folder=tmp_path)
    tries: dict[str, set[tuple[str, int]]] = {}

    def result(planned: Planned) -> dict[str, Any]:
        label = planned.spec.label
        kept, mu, rate = "kept" in label, "-mu-3-" in label or "-mu-0.1-" in label, "-rate-0.001" in label
        if not planned.test:
            tries.setdefault(label.partition("-mu")[0], set()).add((label, planned.seed))
        accuracy = 0.5 + 0.2 * kept + 0.1 * mu + 0.04 * rate + 0.001 * (planned.seed % 10)
        return {"rounds": 50, "final": {"validation.accuracy": accuracy, "test.accuracy": accuracy}}

    jobs, cells = ended(queue, result), declared("fedprox-synthetic")
    assert len(jobs) == 8, "tuning and test of each data set"
    tuned = (TUNED_FEDAVG, TUNED_PARTIAL, BEST_MU)
    assert len({len(cells[data, "90", method].grid) for data in ("iid", "1") for method in tuned}) == 1
    for share, methods in (("dropped", [TUNED_FEDAVG]), ("kept", [TUNED_PARTIAL, BEST_MU])):
        assert tries[f"fedprox-synthetic-1-90-{share}"] == {
            (cell.tuning(value).label, seed)
            for cell in (cells["1", "90", method] for method in methods)
            for value in cell.grid
            for seed in (100, 101, 102)
        }
    kept, dropped = (cell.tuning(cell.grid[0]) for cell in (cells["1", "90", BEST_MU], cells["1", "90", FEDAVG]))
    algorithms = [spec.configured(0, "x").algorithm.model_dump() for spec in (kept, dropped)]
    differ = {name for name in algorithms[0] if algorithms[0][name] != algorithms[1][name]}
    assert differ == {"mu", "drop_partial"}
    said = {verdict.what: verdict for verdict in study("fedprox-synthetic").judge(queue.rows)}
    assert said[f"(1, 1), 90 %: {BEST_MU} less {PARTIAL}"].ours == "+10.00"
    assert said[f"(1, 1), 90 %: {BEST_MU} less {TUNED_FEDAVG}"].ours == "+26.00"
    assert said[f"(1, 1), 90 %: {BEST_MU} less {TUNED_PARTIAL}"].ours == "+6.00"
    assert said[f"(1, 1), 90 %: {TUNED_PARTIAL} less {TUNED_FEDAVG}"].ours == "+20.00"
    assert said[f"(1, 1), 90 % stragglers: {TUNED_PARTIAL}"].verdict == "rate 0.001 of 0.0001 to 0.01, 3 tuning seeds"
    foot = study("fedprox-synthetic").judge(queue.rows)[-1]
    assert foot.verdict.startswith("3 seeds or more and no value at an edge: 27 of 32; at an edge: iid, 0 % stragglers")
    assert foot.verdict.endswith(f"iid, 90 % stragglers: {TUNED_PARTIAL} (rate 0.3); on fewer seeds: none")
    assert f"iid, 0 %: {PARTIAL} less {FEDAVG}" not in said
    _, (png,) = study("fedprox-synthetic").finish(queue.rows, tmp_path / "fedprox")
    assert png.stat().st_size > 10_000


def _reached(rounds: int, accuracy: float) -> dict[str, Any]:
    return {"rounds": rounds, "final": {"validation.accuracy": accuracy, "test.accuracy": accuracy}}


@pytest.mark.slow
def test_the_step_size_with_the_fewest_rounds_over_three_seeds_is_chosen(tmp_path: Path) -> None:
    cell = declared("scaffold-similarity")["5", "FedAvg", "10"]
    rest = len(cell.grid) - 5

    def tried(rounds: Sequence[float], accuracies: Sequence[float | None]) -> list[dict[str, Any]]:
        found = zip(rounds, accuracies, strict=True)
        return [
            {"rounds": each, "final": {} if accuracy is None else {"validation.accuracy": accuracy}}
            for each, accuracy in [*found, *[(300, 0.1)] * rest]
        ]

    assert cell.best(tried([300, 40, 30, 30, 300], [0.5, 0.91, 0.9, 0.92, 0.8])) == cell.grid[3]
    assert cell.best(tried([300] * 5, [0.5, 0.6, 0.7, 0.89, 0.8])) == cell.grid[3]
    assert cell.best(tried([20, 300, 300, 300, 300], [None, 0.6, 0.7, 0.5, 0.8])) == cell.grid[4], (
        "one of its runs failed"
    )
    missed = mean_result([_reached(300, 0.8), _reached(15, 0.96), _reached(15, 0.96)])
    found = tried([0, 40, 40, 300, 300], [0, 0.9, 0.91, 0.8, 0.8])
    assert cell.best([missed, *found[1:]]) == cell.grid[2], "fast with two seeds of three, 110 rounds on average"
    queue, tuning = queue_of("scaffold-similarity", folder=tmp_path), set[int]()

    def result(planned: Planned) -> dict[str, Any]:
        label, seed = planned.spec.label, planned.seed
        if planned.test:
            return _reached(20 if "SCAFFOLD" in label else 50 - seed % 3, 0.95)
        tuning.add(seed)
        lucky, best = seed == 100 and "-0.1-tuning" in label, "-0.01" if "-0-SGD" in label else "-1"
        return _reached(1 if lucky else 10 if label.endswith(f"{best}-tuning") else 30, 0.95)

    jobs = ended(queue, result)
    assert tuning == {100, 101, 102}
    assert len(jobs) == 2 * 3
    said = {verdict.what: verdict for verdict in study("scaffold-similarity").judge(queue.rows)}
    assert said["0 %: SCAFFOLD less FedAvg, E = 5"].verdict.startswith("fewer (-29")
    assert said["10 % similar: SCAFFOLD, E = 20"].ours == "20.0 ± 0.0"
    assert said["10 % similar: FedAvg, E = 5"].verdict.startswith("step size 1 of 0.01 to 3000, 3 tuning seeds, uplink")
    assert said["tuned values"].verdict == (
        "3 seeds or more and no value at an edge: 29 of 30; at an edge: 0 % similar: SGD (step size 0.01); "
        "on fewer seeds: none"
    )
    _, (png,) = study("scaffold-similarity").finish(queue.rows, tmp_path / "scaffold")
    assert png.stat().st_size > 10_000


@pytest.mark.parametrize("data", ["fashion", "synthetic"])
def test_fair_methods_have_equal_tries_and_are_compared_with_the_first(tmp_path: Path, data: str) -> None:
    assert len({len(cell.grid) for cell in declared(f"qffl-{data}").values()}) == 1
    queue = queue_of(f"qffl-{data}", folder=tmp_path)

    def result(planned: Planned) -> dict[str, Any]:
        fair = any(each in planned.spec.label for each in ("q-FFL", "q1", "q5"))
        best = "-0.03-" in planned.spec.label
        worst, variance = 0.2 + 0.3 * fair + 0.01 * best + 0.001 * planned.seed, 700 - (400 + planned.seed % 2) * fair
        names = {"mean": 0.8 + 0.01 * best, "worst_10_percent": worst, "best_10_percent": 1.0, "variance": variance}
        return {"final": {f"{split}.accuracy.{k}": v for split in ("test", "validation") for k, v in names.items()}}

    assert len(ended(queue, result)) == 2
    said = {verdict.what: verdict for verdict in study(f"qffl-{data}").judge(queue.rows)}
    pair = "q-FFL less FedAvg" if data == "fashion" else "q = 5 less q = 0"
    assert said[f"{pair}: worst"].ours == "+30.0"
    assert said[f"{pair}: variance"].verdict.startswith("lower (-401.")
    assert said[f"{pair}: mean"].verdict.startswith("not settled"), "no difference at all"
    assert all("rate 0.03" in verdict.verdict for verdict in said.values() if "mean over" in verdict.what)
    _, (png,) = study(f"qffl-{data}").finish(queue.rows, tmp_path / "fair")
    assert png.stat().st_size > 10_000


@pytest.mark.slow
def test_slices_have_equal_tries_bits_and_work(tmp_path: Path) -> None:
    queue = queue_of("heterofl-mnist", folder=tmp_path)

    def result(planned: Planned) -> dict[str, Any]:
        slices, best = "-fedrolex-" in planned.spec.label, planned.spec.label.endswith("-0.3")
        accuracy = 0.8 + 0.05 * slices + 0.01 * best + 0.001 * (planned.seed % 3)
        final = {f"{split}.accuracy": accuracy for split in ("validation", "test")}
        return {"final": final, "rounds": 20, "downlink_bits": 8, "simulated_seconds": 400.0}

    jobs = ended(queue, result)
    assert sum(map(len, jobs)) == 8 * (6 + 5)
    target = study("heterofl-mnist")
    said = {verdict.what: verdict for verdict in target.finish(queue.rows, tmp_path / "table")[0]}
    assert list(said) == [method for (method,) in declared("heterofl-mnist")]
    assert said["FedRolex, a rolling window"].difference == "+5.00"
    assert said["FedRolex, a rolling window"].verdict.endswith("20 s a round")
    sizes = []
    for cell in list(declared("heterofl-mnist").values())[:3]:
        each = cell.tuning(cell.grid[0]).configured(0, "run")
        algorithm, everybody = each.algorithm, np.arange(20)
        task = each.task(each.data_source.load())
        broadcast = algorithm.broadcast(algorithm.init(task), task, 1).arrays
        work, bits = (each(broadcast, task, everybody) for each in (algorithm.relative_work, algorithm.upload_bits))
        assert np.array_equal(np.asarray(work), task.profiles.compute_speed)
        sizes.append(np.asarray(bits).tolist())
    assert sizes[0] == sizes[1] == sizes[2]
    assert len(set(sizes[0])) == 5


def test_a_file_of_results_keeps_the_columns_that_it_began_with(tmp_path: Path) -> None:
    append(path := tmp_path / "study.csv", DIGITS, 0, {"rounds": 6, "final": {"test.accuracy": 0.5}})
    new = "test.accuracy.variance"
    assert new in path.read_text()
    path.write_text("\n".join(",".join(csv_row) for csv_row in _without(path, new)) + "\n")
    append(path, DIGITS, 1, {"rounds": 6, "final": {"test.accuracy": 0.75, new: 3.0}})
    rows = read_rows([tmp_path])
    assert [row["final"] for row in rows.of_stem("digits")] == [{"test.accuracy": 0.5}, {"test.accuracy": 0.75}]


def test_the_studies_in_the_repository_are_whole_and_in_the_order_of_the_papers() -> None:
    names = ["scaffold-similarity", "fedprox-synthetic", "qffl-fashion", "qffl-synthetic"]
    queue = queue_of(*names)
    assert next(queue.missing(), None) is None
    tables = [study("scaffold-similarity").judge(queue.rows), study("fedprox-synthetic").judge(queue.rows)]
    edges = [
        "at an edge: 0 % similar: FedAvg, E = 20 (step size 3000), 10 % similar: FedAvg, E = 20 (step size 3000)",
        "none",
    ]
    for table, edge in zip(tables, edges, strict=True):
        assert table[-1].verdict.endswith(f"{edge}; on fewer seeds: none")
    said = {verdict.what: verdict.verdict for table in tables for verdict in table}
    for rival in ("FedAvg, E = 1", "FedAvg, E = 5", "FedAvg, E = 20", "FedProx, E = 1"):
        assert said[f"0 %: SCAFFOLD less {rival}"].startswith("fewer")
    for pair in ((PARTIAL, FEDAVG), (BEST_MU, PARTIAL), (BEST_MU, TUNED_PARTIAL)):
        assert said[f"mean of the heterogeneous sets, 90 %: {' less '.join(pair)}"].startswith("above")
    fair = {verdict.what: verdict.verdict for verdict in study("qffl-fashion").judge(queue.rows)}
    assert fair["q-FFL less FedAvg: worst"].startswith("higher")
    assert fair["AFL less FedAvg: variance"].startswith("lower")


def test_cells_of_fedprox_are_those_of_the_paper() -> None:
    assert len(declared("fedprox-synthetic")) == 4 * (3 + 5 + 5)


_WITHOUT_LIMIT = """
from pathlib import Path
from narrowcast.studies.execution import Planned, Queue, work
from narrowcast.studies.results import Rows
from narrowcast.studies.spec import RunSpec

only = Planned("digits", RunSpec("digits", "fedavg-digits", ("data.clients=8", "rounds=2")), 0, per_user=False)
refused = Planned("digits", RunSpec("x" * 101, "fedavg-digits", ("rounds=2",)), 0, per_user=False)
queue = Queue([lambda rows: iter([refused] if rows else [refused, only])], Rows())
work(queue, Path(), workers=1)
"""


@pytest.mark.slow
def test_a_study_without_a_time_limit_ends_with_its_runs(tmp_path: Path) -> None:
    """Its wait once overflowed: threads cannot wait for infinity. A run that is refused fails it after the others."""
    command = [sys.executable, "-c", _WITHOUT_LIMIT]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert "RunFailed: 1 runs were refused; the first: xxx" in ended.stderr
    assert ended.stdout.splitlines()[1].startswith("[1] digits-seed-0: validation.accuracy ")
    (row,) = read_rows([tmp_path]).of_stem("digits")
    assert row["rounds"] == 2
