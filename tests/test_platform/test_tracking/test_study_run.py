"""The nested runs of a study in MLflow, sent by more than one process, and past trials that cannot be sent."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from mlflow import MlflowClient

from narrowcast.platform.config.run_fields import StoreAddress
from narrowcast.platform.tracking.study_sender import StudyStore, TrialRun
from studies import nested_runs

pytestmark = pytest.mark.filterwarnings("ignore::sqlalchemy.exc.SADeprecationWarning")


@pytest.mark.parametrize("second_reads", ["before the first sends", "after it"])
def test_a_process_that_sends_the_trial_of_another_uses_its_run(tmp_path: Path, second_reads: str) -> None:
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    client = MlflowClient(uri)
    experiment = client.create_experiment("narrowcast")
    parent = client.create_run(experiment, tags={"kind": "study"}).info.run_id
    first, second = (StudyStore(StoreAddress(uri), parent) for _ in range(2))
    first.open()
    if second_reads == "before the first sends":
        assert second.open() == {}
    first.put(TrialRun("3", "003-digits", "complete", {"rate": 0.1}))
    assert first.close(60)
    if second_reads == "after it":
        assert second.open() == {"3": "complete"}
    second.put(TrialRun("3", "003-digits", "complete", {"rate": 0.1}, {"feasible": "true"}))
    second.put(TrialRun("4", "004-digits", "failed", {"rate": 0.2}))
    assert second.close(60)
    _, nested = nested_runs(tmp_path)
    assert {key: run.info.status for key, run in nested.items()} == {"3": "FINISHED", "4": "FAILED"}
    assert nested["3"].data.tags["feasible"] == "true"


def trial(key: str, accuracy: object) -> TrialRun:
    row = {"round": 1, "logged_at_ms": 1_000, "validation.accuracy": accuracy}
    return TrialRun(key, f"trial {key}", "complete", {"rate": 0.1}, rows=(row,))


def test_a_trial_that_cannot_be_sent_is_said_and_the_others_are_sent(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    client = MlflowClient(uri)
    parent = client.create_run(client.create_experiment("study")).info
    store = StudyStore(StoreAddress(uri), parent.run_id)
    assert store.open() == {}
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
