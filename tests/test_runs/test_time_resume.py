"""Stragglers, absences and buffers after kill -9 and --resume: the results of a run that was left alone."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from command import Command
from narrowcast.experiment import load_experiment
from narrowcast.platform.rounds.evaluation import model_sha256
from narrowcast.platform.rounds.loop import LocalBackend
from narrowcast.platform.rounds.state import Run, start
from narrowcast.platform.storage.journal import Journal

pytestmark = pytest.mark.slow

SETTINGS = (
    *("rounds=60", "chunk_size=5", "training.epochs=10", "checkpoint_every=7", "algorithm={kind: fedavg}"),
    "fleet={kind: lognormal, uplink_mbit_per_second: {median: 0.1, sigma: 1}}",
    "tracking.system_metrics=false",
)
KINDS = {
    "twice": ["over_selection=1.3", "deadline_seconds=25", "algorithm.codec=quantise", "training.epochs=2"],
    "absent": ["availability={kind: diurnal, day_seconds: 600, lowest: 0, highest: 0.1}", "clock.idle_seconds=20"],
    "buffered": ["schedule={kind: buffered, concurrency: 20, buffer_size: 10}"],
}


@pytest.mark.parametrize("kind", list(KINDS))
def test_kill_9_and_resume_give_the_uninterrupted_results(tmp_path: Path, kind: str) -> None:
    words, folder = [*SETTINGS, *KINDS[kind]], tmp_path / "fedavg-digits"
    first = Command("run", "fedavg-digits", *words, "--output", tmp_path, log=tmp_path / "first")
    try:
        first.wait_for_round(folder, 10)
        first.send(signal.SIGKILL)
        assert first.wait() == -signal.SIGKILL
    finally:
        first.clean_up()
    assert 10 <= Journal.open(folder).last_step < 60
    again = Command("run", "--resume", "fedavg-digits", "--output", tmp_path, log=tmp_path / "again")
    try:
        assert again.wait() == 0, again.err
    finally:
        again.clean_up()
    experiment = load_experiment("fedavg-digits", words)
    task = experiment.task(experiment.data.load())
    run = Run(experiment, experiment.algorithm, task)
    *_, last = LocalBackend().run(run, start(run))
    assert last.state is not None
    sha256 = model_sha256(experiment.algorithm, last.state)
    assert json.loads((folder / "result.json").read_text())["model_sha256"] == sha256
    rows = [{key: row[key] for key in last.record.row()} for row in Journal.open(folder).rounds]
    assert repr(rows[-1]) == repr(last.record.row())
