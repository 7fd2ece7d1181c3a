"""The nested runs of a study in MLflow, sent by more than one process."""

from __future__ import annotations

from pathlib import Path

import pytest
from mlflow import MlflowClient

from narrowcast.platform.tracking.study_run import StudyStore, TrialRun
from studies import nested_runs

pytestmark = pytest.mark.filterwarnings("ignore::sqlalchemy.exc.SADeprecationWarning")


@pytest.mark.parametrize("second_reads", ["before the first sends", "after it"])
def test_a_process_that_sends_the_trial_of_another_uses_its_run(tmp_path: Path, second_reads: str) -> None:
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    client = MlflowClient(uri)
    experiment = client.create_experiment("narrowcast")
    parent = client.create_run(experiment, tags={"kind": "study"}).info.run_id
    first, second = StudyStore(uri, parent), StudyStore(uri, parent)
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
