"""A short run on MovieLens-100K, and what a store must hold of it in the end."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlflow import MlflowClient
from mlflow.entities import Run

from narrowcast.experiment import Experiment, load_experiment
from narrowcast.platform.tracking.journal import Journal
from narrowcast.runs import session

ROUNDS = 8
SETTINGS = (f"rounds={ROUNDS}", "evaluate_every=2", "checkpoint_every=3", "backend=local")


@dataclass(frozen=True)
class Played:
    """A run that came to its end, and what its store holds of it."""

    experiment: Experiment
    folder: Path
    result: dict[str, Any]
    client: MlflowClient

    @property
    def run(self) -> Run:
        return self.client.get_run(self.result["mlflow_run_id"])

    @property
    def rounds(self) -> list[dict[str, Any]]:
        return Journal.open(self.folder).rounds

    def history(self, name: str) -> list[tuple[int, float, int]]:
        entries = self.client.get_metric_history(self.run.info.run_id, name)
        return sorted((entry.step, entry.value, entry.timestamp) for entry in entries)


def load(*settings: str) -> Experiment:
    return load_experiment("scolr-ml100k", (*SETTINGS, *settings))


def nothing(_: Mapping[str, Any]) -> None:
    pass


def play(output: Path, experiment: Experiment) -> Played:
    prepared = session.prepare(experiment, output)
    result = session.run(prepared, nothing)
    return Played(experiment, prepared.folder, result, MlflowClient(prepared.uri))


def assert_each_round_is_there_once(played: Played) -> None:
    """Every number of the journal stands in the store once, at its round and with the journal's time."""
    expected: dict[str, list[tuple[int, float, int]]] = {}
    for row in played.rounds:
        for name, value in row.items():
            if name not in ("round", "logged_at_ms"):
                place = expected.setdefault(name.replace("@", "_at_"), [])
                place.append((row["round"], float(value), row["logged_at_ms"]))
    sent = {name for name in played.run.data.metrics if not name.startswith("system/")}
    assert sent == set(expected)
    assert {name: played.history(name) for name in sent} == expected
    assert [step for step, *_ in played.history("loss")] == list(range(1, ROUNDS + 1))
