"""Small studies of scikit-learn's digits, written to files as a user would."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

from mlflow import MlflowClient
from mlflow.entities import Run

EXPERIMENT = """
experiment:
  base: fedavg-digits
  rounds: 10
  evaluate_every: 2
  data: {clients: 40}
  tracking: {system_metrics: false}
"""
ONE_OBJECTIVE = (
    "study: {objectives: {validation.accuracy: maximize}, trials: 6, executor: local, retest: {trials: 0}}\n"
)
RATES = """
space:
  training.learning_rate: {kind: float, low: 0.001, high: 1, log: true}
  training.batch_size: [5, 10, 20]
"""


def write_study(folder: Path, text: str = EXPERIMENT + ONE_OBJECTIVE + RATES) -> Path:
    path = folder / "digits.yaml"
    path.write_text(text)
    return path


def trials(folder: Path) -> list[dict[str, str]]:
    """The rows of a study's table."""
    with (folder / "trials.csv").open(newline="") as lines:
        return list(csv.DictReader(lines))


def result(folder: Path) -> dict[str, Any]:
    read: dict[str, Any] = json.loads((folder / "result.json").read_text())
    return read


def nested_runs(output: Path) -> tuple[Run, dict[str, Run]]:
    """The one study of an SQLite store: its parent run, and the nested ones by trial; no trial has two."""
    client = MlflowClient(f"sqlite:///{output}/mlflow.db")
    experiment = client.get_experiment_by_name("narrowcast")
    assert experiment is not None
    runs = list(client.search_runs([experiment.experiment_id], max_results=1000))
    (parent,) = [run for run in runs if run.data.tags.get("kind") == "study"]
    nested = [run for run in runs if run.data.tags.get("mlflow.parentRunId") == parent.info.run_id]
    by_trial = {run.data.tags["trial"]: run for run in nested}
    assert len(nested) == len(by_trial) == len(runs) - 1
    return parent, by_trial
