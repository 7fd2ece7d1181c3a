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
ONE_OBJECTIVE = "study: {objectives: {validation.accuracy: maximize}, trials: 6, backend: local, retest: {trials: 0}}\n"
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


def nested_runs(store: Path | str, name: str = "narrowcast") -> tuple[Run, dict[str, Run]]:
    """The one study of a folder's SQLite store, or of a URI: its parent run, and the nested ones; no trial has two."""
    client = MlflowClient(f"sqlite:///{store}/mlflow.db" if isinstance(store, Path) else store)
    experiment = client.get_experiment_by_name(name)
    assert experiment is not None
    runs = list(client.search_runs([experiment.experiment_id], max_results=1000))
    (parent,) = [run for run in runs if run.data.tags.get("kind") == "study"]
    nested = [run for run in runs if run.data.tags.get("mlflow.parentRunId") == parent.info.run_id]
    by_trial = {run.data.tags["trial"]: run for run in nested}
    assert len(nested) == len(by_trial) == len(runs) - 1
    return parent, by_trial


def ended(folder: Path) -> int:
    """How many trials a study's folder has the results of."""
    return len(list((folder / "trials").glob("*/result.json")))


def check_whole(folder: Path, store: Path | str, n_trials: int, name: str = "narrowcast") -> list[dict[str, str]]:
    """So many trials count, each lost one was tried again with its values, and MLflow says the same; the lost ones."""
    rows = trials(folder)
    lost = [row for row in rows if row["state"] == "lost"]
    assert [row["state"] for row in rows].count("complete") == n_trials == len(rows) - len(lost)
    by_number = {row["trial"]: row for row in rows}
    retries = [row for row in rows if row["retry_of"]]
    assert sorted(row["retry_of"] for row in retries) == sorted(row["trial"] for row in lost)
    for row in retries:
        for path in ("training.learning_rate", "training.batch_size"):
            assert row[path] == by_number[row["retry_of"]][path] != ""
    _, nested = nested_runs(store, name)
    assert {number: run.data.tags["state"] for number, run in nested.items() if "-test-" not in number} == {
        row["trial"]: row["state"] for row in rows
    }
    for number, run in nested.items():
        if number in by_number and run.data.tags["state"] == "complete":
            assert run.data.metrics["validation.accuracy"] == float(by_number[number]["validation.accuracy"])
    return lost
