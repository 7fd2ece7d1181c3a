"""Tuning with equal trials, the frontier of what it chose, and the decay ablation."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from command_line import narrowcast
from narrowcast.studies.reproduction import in_short
from narrowcast.studies.results import Rows, append, merge, read_rows, rekey, unpacked_hits
from narrowcast.studies.spec import RunSpec
from narrowcast.studies.tuning import finished
from narrowcast_papers.frontier.decay import RATES, cells, judge_decay, plot_decay
from narrowcast_papers.frontier.table import judge_frontier, judge_tuning, plot_frontier
from narrowcast_papers.frontier.tuning_study import Range, Study, point, read_tuning_study
from papers import PAPERS, plan, queue_of

NAMES = ("ml1m", "mnist")


def result(accuracy: float, *, share: float = 0.01, test: bool = True, **others: Any) -> dict[str, Any]:
    """Return a result on MovieLens-1M; `share`: its uplink as a fraction of updates in float32."""
    dense = 60 * 3706 * 64 * 32 * 1000
    metrics = {"test.hr@10": accuracy} if test else {"validation.hr@10": accuracy}
    return {"rounds": 1000, "uplink_bits": int(dense * share), "downlink_bits": dense, "final": metrics, **others}


def tuned(study: Study, **best: int) -> Rows:
    """Return rows of a whole study in which trial `best[method]`, 0 otherwise, has the best validation metric."""
    rows = Rows()
    for method in study.methods:
        for number in range(study.tuning.trials):
            accuracy = 0.8 if number == best.get(method, 0) else 0.7 - number / 1000
            rows[study.trial(method, number), study.tuning.seed] = result(accuracy, test=False, wall_seconds=1.0)
    return rows


def add_test_runs(study: Study, rows: Rows, method: str, number: int, *accuracies: float) -> Rows:
    for seed, accuracy in enumerate(accuracies):
        rows[study.test(method, number), seed] = result(accuracy / 100)
    return rows


@pytest.mark.parametrize("name", NAMES)
def test_every_method_has_the_same_number_of_trials_on_another_seed(name: str) -> None:
    study = read_tuning_study(name)
    assert len(study.trials) == len({each.label for each in study.trials}) == study.tuning.trials * len(study.methods)
    assert study.tuning.seed not in range(5)
    planned = list(plan(f"tuning-{name}")(Rows()))
    assert {each.seed for each in planned} == {study.tuning.seed}
    assert not any(each.test for each in planned)
    for spec in study.trials[: 2 * len(study.methods)]:
        experiment = spec.configured(study.tuning.seed, spec.label)
        assert name == "mnist" or experiment.plain()["data"]["validation"] == "random"
        assert experiment.training.weight_decay >= 0  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", NAMES)
def test_common_dimensions_take_the_same_values_in_every_study(name: str) -> None:
    study = read_tuning_study(name)
    for number in range(study.tuning.trials):
        rates = {
            tuple(part for part in study.trial(method, number).overrides if part.startswith("training."))
            for method in study.methods
        }
        assert len(rates) == 1


def test_points_fill_every_dimension() -> None:
    places = np.array([point(number) for number in range(7)])
    assert (np.sort(places, axis=0) == (np.arange(7) + 0.5)[:, None] / 7).all()
    assert (places[0] == 0.5).all()
    assert (np.abs(np.corrcoef(places.T)) - np.eye(places.shape[1]) < 0.22).all()


def test_ranges_hold_both_ends() -> None:
    levels = Range(low=1, high=16, log=True, integer=True)
    assert {levels.at(place) for place in np.linspace(0, 0.999, 400)} == {f"{level}" for level in range(1, 17)}
    assert Range(low=0.25, high=2, log=True).at(0) == "0.25"


def test_a_trial_may_win_a_band_above_its_own_bits_and_none_below() -> None:
    study = read_tuning_study("ml1m")
    rows = tuned(study, svd=1)
    rows[study.trial("svd", 1), 100]["uplink_bits"] = int(study.dense_bits * 1000 / 100)
    rows[study.trial("svd", 2), 100]["uplink_bits"] = int(study.dense_bits * 1000 / 2000)
    for number in (0, *range(3, study.tuning.trials)):
        rows[study.trial("svd", number), 100]["uplink_bits"] = study.dense_bits * 1000
    results = {spec.label: found for spec in study.trials if (found := finished(rows, spec))}
    assert study.winners(results)["svd"] == {8: 1, 64: 1, 256: 2, 1024: 2}
    results.pop(study.trial("svd", 0).label)
    assert "svd" not in study.winners(results)  # before all of its trials are finished


def test_test_seeds_are_planned_once_a_method_is_tuned() -> None:
    study = read_tuning_study("ml1m")
    rows = tuned(study, svd=1)
    planned = [each for each in plan("frontier-ml1m")(rows) if "-svd-" in each.spec.label]
    assert {each.spec.label for each in planned if "adaptive" not in each.spec.label} == {study.test("svd", 1).label}
    assert {each.seed for each in planned} == set(range(5))
    assert all("data.validation=random" not in each.spec.overrides for each in planned)
    assert not list(plan("frontier-ml1m")(Rows()))


def test_methods_are_compared_seed_by_seed_with_float32_and_with_the_best_of_the_band(tmp_path: Path) -> None:
    study = read_tuning_study("ml1m")
    rows = tuned(study)
    rows = add_test_runs(study, rows, "float32", 0, 64.0, 65.0, 66.0, 65.5, 64.5)
    rows = add_test_runs(study, rows, "svd", 0, 64.05, 64.96, 66.04, 65.45, 64.52)
    rows = add_test_runs(study, rows, "top_k", 0, 58.0, 59.1, 60.0, 59.4, 58.6)
    said = {verdict.what: verdict for verdict in judge_frontier(study, rows)}
    assert said["FedMF, float32"].verdict.startswith("reference")
    assert said["at most 1/64: SVD"].verdict.startswith("best mean; to float32: level (p = ")
    assert said["at most 1/64: Top-K, no error feedback"].verdict.startswith("behind the best (-5.98")
    assert "off by -5.98" in said["at most 1/64: Top-K, no error feedback"].verdict
    assert "at most 1/256: SVD" not in said  # it took 1/100
    plot_frontier(study, rows, tmp_path / "t.png")
    assert (tmp_path / "t.png").stat().st_size > 10_000
    assert any(
        verdict.what == "SVD: 1/8, 1/64" and "trial 0, 1/100" in verdict.verdict
        for verdict in judge_tuning(study, rows)
    )


def test_cells_of_the_ablation_are_compared_with_the_float32_that_validation_chose(tmp_path: Path) -> None:
    rows = Rows()
    for place, cell in enumerate(cells(1000)):
        for rate in RATES[1000]:
            better = 0.01 * (cell.item_decay == "0") + 0.02 * (rate == (1.0, 2.0))
            rows[cell.tuning(rate), 100] = result(0.75 + better, test=False)
        spec = cell.test([rows[cell.tuning(rate), 100] for rate in RATES[1000]])
        assert "training.learning_rate=1" in spec.overrides
        for seed in range(5):
            rows[spec, seed] = result(0.65 + 0.001 * ((seed * 7 + place) % 5))
    verdicts = judge_decay(rows)
    assert len(verdicts) == 12
    assert verdicts[0].what == "1000 rounds, decay of Q 0: FedMF, float32"
    assert "best float32 on validation users; rates 1 and 2" in verdicts[0].verdict
    plot_decay(rows, tmp_path / "t.png")
    assert (tmp_path / "t.png").stat().st_size > 10_000


def test_rows_are_found_again_and_a_cut_one_is_repeated(tmp_path: Path) -> None:
    spec, hits = RunSpec("a", "fedmf-ml1m", ("algorithm.codec=[{kind: eden}, entropy]",)), np.arange(70) % 3 == 0
    for seed in (0, 1):
        append(tmp_path / "s.csv", spec, seed, result(0.5 + seed / 10, hits=hits, wall_seconds=1.5))
    rows = read_rows([tmp_path])
    assert rows[spec, 1]["final"] == {"test.hr@10": 0.6}
    assert (unpacked_hits(rows[spec, 0], 70) == hits).all()
    whole = (tmp_path / "s.csv").read_bytes()
    (tmp_path / "s.csv").write_bytes(whole[: whole.rindex(b",")])
    assert list(read_rows([tmp_path]).by_label) == [("a", 0)]
    append(tmp_path / "s.csv", spec, 1, result(0.7, hits=hits))
    assert read_rows([tmp_path])[spec, 1]["final"] == {"test.hr@10": 0.7}
    (tmp_path / "there").mkdir()
    merge(tmp_path / "s.csv", tmp_path / "there")
    merge(tmp_path / "s.csv", tmp_path / "there")
    assert read_rows([tmp_path / "there"]) == read_rows([tmp_path])


def test_a_row_is_found_by_its_digest_when_the_same_experiment_is_written_otherwise(tmp_path: Path) -> None:
    spec = RunSpec("a", "fedmf-ml1m", ("rounds=3", "training={learning_rate: 1e-1, batch_size: 10}"))
    append(tmp_path / "s.csv", spec, 0, result(0.5))
    same = replace(spec, overrides=("training={batch_size: 10, learning_rate: 0.1}", "rounds=3"))
    other = replace(spec, overrides=("rounds=3", "training={learning_rate: 0.2, batch_size: 10}"))
    rows = read_rows([tmp_path])
    assert rows[same, 0]["final"] == {"test.hr@10": 0.5}
    assert (other, 0) not in rows and (spec, 1) not in rows
    assert (replace(spec, label="b"), 0) not in rows


def test_rows_whose_experiment_is_no_longer_valid_keep_their_text_and_are_named(tmp_path: Path) -> None:
    spec, path = RunSpec("a", "fedmf-ml1m", ("rounds=3",)), tmp_path / "s.csv"
    append(path, spec, 0, result(0.5))
    head, line = path.read_text().splitlines()
    gone = line.replace("rounds=3", "algorithm.of_yore=1").replace("a,0,", "b,0,")
    path.write_text(f"{head}\n{line.replace(spec.digest, 'f' * 64)}\n{gone}\n")
    assert rekey(path) == ["b"]
    assert path.read_text().splitlines()[1] == line
    rows = read_rows([tmp_path])
    same, old = replace(spec, overrides=("rounds=3.0",)), RunSpec("b", "fedmf-ml1m", ("algorithm.of_yore=1",))
    assert len(rows) == 2 and (same, 0) in rows and (old, 0) in rows


def test_merged_rows_go_on_in_another_file_for_other_columns_or_a_large_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec, there = RunSpec("a", "fedmf-ml1m", ("rounds=3",)), tmp_path / "there"
    there.mkdir()
    header = "label,seed,rounds,experiment,overrides,test.hr@10,uplink_bits,downlink_bits,simulated_seconds,"
    header += "wall_seconds,model_sha256,error,hits"
    (there / "s.csv").write_text(f"{header}\na,7,,fedmf-ml1m,rounds=3,0.25,,,,,,,\n")
    for seed in range(4):
        append(tmp_path / "s.csv", spec, seed, result(0.5 + seed / 10))
    monkeypatch.setattr("narrowcast.studies.results._LARGEST_FILE_BYTES", 730)
    for _ in range(2):
        merge(tmp_path / "s.csv", there)
    assert sorted(each.name for each in there.iterdir()) == ["s-2.csv", "s-3.csv", "s.csv"]
    assert all(each.stat().st_size < 830 for each in there.iterdir())
    rows = read_rows([there])
    assert rows[spec, 7]["final"] == {"test.hr@10": 0.25}
    assert all(rows[spec, seed] == read_rows([tmp_path])[spec, seed] for seed in range(4))


def test_the_queue_gives_each_missing_run_once(tmp_path: Path) -> None:
    queue = queue_of("decay-ml1m", folder=tmp_path)
    planned = list(queue.missing())
    assert len(planned) == len(cells(1000)) * len(RATES[1000])
    queue.ended(planned[0], result(0.5, test=False, wall_seconds=7.0))
    assert [each.spec for each in queue.missing()] == [each.spec for each in planned[1:]]


@pytest.mark.data("ml-1m")
@pytest.mark.slow
@pytest.mark.parametrize(
    "kill",
    [
        pytest.param(lambda pid: os.killpg(pid, signal.SIGKILL), id="all of it", marks=pytest.mark.thorough),
        pytest.param(lambda pid: os.kill(pid, signal.SIGTERM), id="its first process"),
    ],
)
def test_a_killed_queue_keeps_what_ended(tmp_path: Path, kill: Callable[[int], None]) -> None:
    words = [sys.executable, "-m", "narrowcast", "reproduce", "decay-ml1m", "--papers", str(PAPERS), "--jobs", "1"]
    words += ["--results", str(tmp_path), "--output", str(tmp_path)]
    queue = subprocess.Popen(words, start_new_session=True, stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + 300
    while not read_rows([tmp_path]):
        assert queue.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.1)
    kill(queue.pid)
    queue.wait()
    soon = time.monotonic() + 20  # a run takes longer, after which an orphan ends by itself
    with pytest.raises(ProcessLookupError):
        while time.monotonic() < soon:
            os.killpg(queue.pid, 0)
            time.sleep(0.1)
    kept = set(read_rows([tmp_path]).by_label)
    left = list(queue_of("decay-ml1m", folder=tmp_path).missing())
    assert len(left) == len(cells(1000)) * len(RATES[1000]) - len(kept)
    assert not any((each.spec.label, each.seed) in kept for each in left)


def test_a_study_is_drawn_from_the_results_of_another_machine(tmp_path: Path) -> None:
    study = read_tuning_study("ml1m")
    words = (
        "reproduce",
        "tuning-ml1m",
        "--papers",
        PAPERS,
        "--results",
        tmp_path,
        "--time-limit",
        0,
        "--output",
        tmp_path / "o",
    )
    assert narrowcast(*words).status == 1
    for number in range(study.tuning.trials):
        append(tmp_path / "t.csv", study.trial("svd", number), 100, result(0.7, test=False, wall_seconds=1.0))
    assert narrowcast(*words).status == 0
    assert "SVD: 1/8, 1/64" in (tmp_path / "o" / "tuning-ml1m.md").read_text()


def test_a_run_is_shown_by_the_metric_that_it_measured() -> None:
    """Networks have no HR@10, which the line of a finished run once required."""
    assert in_short({"final": {"test.accuracy": 0.9123}, "wall_seconds": 12.3}) == "accuracy 91.23 %, 12.3 s"
    ranked = {"final": {"test.ndcg@10": 0.3, "test.hr@10": 0.5}, "wall_seconds": 1.0}
    assert in_short(ranked) == "HR@10 50.00 %, 1.0 s"
    assert in_short({"final": {"test.loss": 1.5}, "wall_seconds": 1.0}) == "1.0 s"
    assert in_short({"client_seconds": 0.1}) == "measured"
    assert in_short(ValueError("no space")) == "failed: no space"


def test_float32_fits_in_its_band_of_the_network() -> None:
    study = read_tuning_study("mnist")
    experiment = study.trial("float32", 0).configured(100, "run")
    task, clients = experiment.task(experiment.data_source.load()), np.arange(10)
    sent = experiment.algorithm.broadcast(experiment.algorithm.init(task), task, 1).arrays
    bits = experiment.algorithm.upload_bits(sent, task, clients)
    assert bits is not None
    assert bits.sum() == study.dense_bits
