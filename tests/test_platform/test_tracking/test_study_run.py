"""The nested runs of a study in MLflow, sent by more than one process, and past trials that cannot be sent."""

from __future__ import annotations

import logging
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from mlflow import MlflowClient

from narrowcast.platform.config.run_fields import StoreAddress
from narrowcast.platform.storage.journal import working_on_study
from narrowcast.platform.tracking.store import end_abandoned
from narrowcast.platform.tracking.study_sender import StudyStore, TrialRun
from studies import nested_runs, write_study

pytestmark = pytest.mark.filterwarnings("ignore::sqlalchemy.exc.SADeprecationWarning")


@pytest.mark.slow
@pytest.mark.parametrize("second_reads", ["before the first sends", "after it"])
def test_a_process_that_sends_the_trial_of_another_uses_its_run(tmp_path: Path, second_reads: str) -> None:
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    client = MlflowClient(uri)
    experiment = client.create_experiment("narrowcast")
    parent = client.create_run(experiment, tags={"kind": "study"}).info.run_id
    first, second = (StudyStore(StoreAddress(uri), parent) for _ in range(2))
    first.open(tmp_path)
    if second_reads == "before the first sends":
        assert second.open(tmp_path) == {}
    first.put(TrialRun("3", "003-digits", "complete", {"rate": 0.1}))
    assert first.close(60)
    if second_reads == "after it":
        assert second.open(tmp_path) == {"3": "complete"}
    second.put(TrialRun("3", "003-digits", "complete", {"rate": 0.1}, {"feasible": "true"}))
    second.put(TrialRun("4", "004-digits", "failed", {"rate": 0.2}))
    assert second.close(60)
    _, nested = nested_runs(tmp_path)
    assert {key: run.info.status for key, run in nested.items()} == {"3": "FINISHED", "4": "FAILED"}
    assert nested["3"].data.tags["feasible"] == "true"


def trial(key: str, accuracy: object) -> TrialRun:
    row = {"round": 1, "logged_at_ms": 1_000, "validation.accuracy": accuracy}
    return TrialRun(key, f"trial {key}", "complete", {"rate": 0.1}, rows=(row,))


@pytest.mark.slow
def test_a_trial_that_cannot_be_sent_is_said_and_the_others_are_sent(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    client = MlflowClient(uri)
    parent = client.create_run(client.create_experiment("study")).info
    store = StudyStore(StoreAddress(uri), parent.run_id)
    assert store.open(tmp_path) == {}
    for each in (trial("0", 0.25), trial("1", "no number"), trial("2", 0.75)):
        store.put(each)
    with caplog.at_level(logging.WARNING):
        assert not store.close(60), "one is missing"
    (said,) = (each.getMessage() for each in caplog.records if each.name.startswith("narrowcast."))
    assert said.startswith("trial 1 is not in MLflow (")
    assert "no number" in said
    nested = {run.info.run_name: run for run in client.search_runs([parent.experiment_id], "tags.trial != ''")}
    sent = {name: run.data.metrics.get("validation.accuracy") for name, run in nested.items()}
    assert sent == {"trial 0": 0.25, "trial 1": None, "trial 2": 0.75}
    assert nested["trial 2"].info.status == "FINISHED"


TUNED = """
import os, signal, sys, time
from pathlib import Path
from mlflow import MlflowClient
from narrowcast.tuning.study import prepare_study, run_study
from narrowcast.tuning.study_file import load_study

def killed(event):
    if sys.argv[2:] and getattr(event, "number", 0) == 2 and event.rounds >= 4:
        client = MlflowClient(f"sqlite:///{sys.argv[1]}/mlflow.db")
        while len(client.search_runs(["1"])) < 1 + 3:
            time.sleep(0.1)
        os.kill(os.getpid(), signal.SIGKILL)

prepared = prepare_study(load_study(sys.argv[1] + "/digits.yaml", []), Path(sys.argv[1]))
run_study(prepared, killed)
"""


@pytest.mark.slow
def test_a_killed_study_that_nobody_continues_is_ended_with_its_trials_once_no_process_is_at_work(
    tmp_path: Path,
) -> None:
    write_study(tmp_path)
    store, command = StoreAddress(f"sqlite:///{tmp_path}/mlflow.db"), [sys.executable, "-W", "ignore", "-c", TUNED]
    done = subprocess.run([*command, tmp_path, "killed"], check=False, timeout=250)
    assert done.returncode == -signal.SIGKILL

    def states() -> tuple[str, dict[str, str]]:
        parent, nested = nested_runs(tmp_path)
        return parent.info.status, {trial: run.info.status for trial, run in nested.items()}

    left = ("RUNNING", {"0": "FINISHED", "1": "FINISHED", "2": "RUNNING"})
    assert states() == left
    with working_on_study(tmp_path / "digits"), working_on_study(tmp_path / "digits"):  # as its processes would
        end_abandoned(store, tmp_path)
        assert states() == left
    end_abandoned(store, tmp_path / "elsewhere")
    assert states() == left
    end_abandoned(store, tmp_path)
    assert states() == ("KILLED", {"0": "FINISHED", "1": "FINISHED", "2": "KILLED"})
    assert subprocess.run([*command, tmp_path], check=False, timeout=250).returncode == 0
    status, trials = states()
    assert (status, trials.pop("2")) == ("FINISHED", "KILLED")
    assert set(trials.values()) == {"FINISHED"}
    assert len(trials) == 6
