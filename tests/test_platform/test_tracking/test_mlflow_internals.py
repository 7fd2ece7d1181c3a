"""The undocumented parts of MLflow that narrowcast uses are there, in the version that they were checked against."""

from __future__ import annotations

import re
import threading
from pathlib import Path
from typing import Any

import mlflow
import pytest
from mlflow import MlflowClient
from packaging.version import Version

import narrowcast
from narrowcast.platform.tracking import store
from narrowcast.platform.tracking.store import MLFLOW_SETTINGS, SystemMonitor

# MLflow's SQL store uses what SQLAlchemy 2.1 deprecates.
pytestmark = pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy:DeprecationWarning")


def test_no_later_version_is_installed() -> None:
    installed, checked = mlflow.__version__, store.CHECKED_VERSION
    assert Version(installed) <= Version(checked), (
        f"MLflow {installed} is installed, and platform/tracking/store.py was checked against {checked}: "
        "check that module against the new version, run the tests of tests/test_platform/test_tracking, then raise "
        "CHECKED_VERSION"
    )


def test_no_other_module_names_an_undocumented_part_of_mlflow() -> None:
    package = Path(narrowcast.__file__).parent
    private = re.compile(r"mlflow\.(system_metrics|store|server|_\w+)\b")
    found = {path.name for path in package.rglob("*.py") if private.search(path.read_text())}
    assert found == {"store.py"}


@pytest.mark.slow
def test_sampling_continues_after_a_failed_call_and_a_resume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_SYSTEM_METRICS_SAMPLING_INTERVAL", "0.02")
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    client = MlflowClient(uri)
    run_id = client.create_run(client.create_experiment("load")).info.run_id
    failed, logged = threading.Event(), threading.Event()
    original = MlflowClient.log_batch

    def fail_once(self: MlflowClient, *positional: Any, **named: Any) -> Any:
        if not failed.is_set():
            failed.set()
            raise OSError("the store is down")
        answer = original(self, *positional, **named)
        logged.set()
        return answer

    monkeypatch.setattr(MlflowClient, "log_batch", fail_once)
    monitor = SystemMonitor(uri, run_id, MLFLOW_SETTINGS.in_force, resume=False)
    assert logged.wait(60)
    monitor.finish()
    assert failed.is_set()
    first = client.get_metric_history(run_id, "system/cpu_utilization_percentage")
    assert first[0].step == 0

    logged.clear()
    monitor = SystemMonitor(uri, run_id, MLFLOW_SETTINGS.in_force, resume=True)
    assert logged.wait(60)
    monitor.finish()
    steps = [each.step for each in client.get_metric_history(run_id, "system/cpu_utilization_percentage")]
    assert max(steps) > max(each.step for each in first)
