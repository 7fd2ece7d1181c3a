"""The sender of a study's trials to MLflow: a trial that cannot be sent keeps no other from the store."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from mlflow import MlflowClient

from narrowcast.platform.tracking.study_run import StudyStore, TrialRun

pytestmark = pytest.mark.filterwarnings("ignore::sqlalchemy.exc.SADeprecationWarning")  # of MLflow's queries


def trial(key: str, accuracy: object) -> TrialRun:
    row = {"round": 1, "logged_at_ms": 1_000, "validation.accuracy": accuracy}
    return TrialRun(key, f"trial {key}", "complete", {"rate": 0.1}, rows=(row,))


def test_a_trial_that_cannot_be_sent_is_said_and_the_others_are_sent(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    client = MlflowClient(uri)
    parent = client.create_run(client.create_experiment("study")).info
    store = StudyStore(uri, parent.run_id)
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
