"""Studies of classes from outside the package: of the experiment, and samplers and pruners."""

from __future__ import annotations

from pathlib import Path

import pytest

from command_line import assert_refused, narrowcast
from studies import result, trials

pytestmark = pytest.mark.filterwarnings("ignore::sqlalchemy.exc.SADeprecationWarning")

# A module can be imported once in a process, so its name is this test file's own.
METHOD = """
from typing import Literal

from narrowcast.algorithms.federated.fedavg import FedAvg


class Halved(FedAvg):
    kind: Literal["halved"] = "halved"
"""
SEARCH = """
from typing import Literal

from optuna.pruners import BasePruner, ThresholdPruner
from optuna.samplers import BaseSampler, RandomSampler
from pydantic import BaseModel, ConfigDict

from narrowcast.extend import Pruner, Sampler


class Draws(Sampler, BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")
    kind: Literal["draws"] = "draws"

    def make(self, seed, space, objectives) -> BaseSampler:
        return RandomSampler(seed=seed)


class Stops(Pruner, BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")
    kind: Literal["stops"] = "stops"
    at_least: float = 0.0

    def make(self) -> BasePruner:
        return ThresholdPruner(lower=self.at_least, n_warmup_steps=2)
"""
STUDY = """
experiment: {base: %s, rounds: 4, evaluate_every: 2}
study:
  objectives: {validation.accuracy: maximize}
  trials: 2
  backend: %s
  holdout: {trials: 0}
  sampler: tune_search_plugin:Draws
  pruner: {kind: tune_search_plugin:Stops, at_least: %s}
space: {training.learning_rate: {kind: float, low: 0.01, high: 0.1}}
"""


def write_files(folder: Path, backend: str = "local", at_least: float = 0.0) -> Path:
    """The study with its search in one folder, and the experiment with its method in another."""
    (folder / "base").mkdir()
    (folder / "base" / "tune_method_plugin.py").write_text(METHOD)
    base = folder / "base" / "base.yaml"
    base.write_text(
        "data: {kind: digits, clients: 40}\nmodel: mlp\nclients_per_round: 10\nalgorithm: tune_method_plugin:Halved\n"
    )
    (folder / "tune_search_plugin.py").write_text(SEARCH)
    (folder / "mine.yaml").write_text(STUDY % (base, backend, at_least))
    return folder / "mine.yaml"


ON_RAY = pytest.param("ray", marks=[pytest.mark.ray, pytest.mark.slow, pytest.mark.thorough])
"""For `make thorough`, as test_plugins_on_ray.py has a study of one's own classes."""


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["local", ON_RAY])
def test_a_study_of_plugins_and_its_best_configuration(tmp_path: Path, backend: str) -> None:
    said = narrowcast("tune", write_files(tmp_path, backend), "--output", tmp_path / "runs")
    assert (said.status, said.err) == (0, "")
    folder = tmp_path / "runs" / "mine"
    assert [row["state"] for row in trials(folder)] == ["complete"] * 2
    again = narrowcast("run", folder / "best.yaml", "--output", tmp_path / "runs", "--backend", "local", "name=again")
    assert (again.status, again.err) == (0, "")
    best = result(folder / "trials" / f"{result(folder)['chosen']:05d}")
    assert best["model_sha256"] == [result(tmp_path / "runs" / "again")["model_sha256"]]


def test_a_pruner_of_ones_own_prunes(tmp_path: Path) -> None:
    said = narrowcast("tune", write_files(tmp_path, at_least=0.999), "--output", tmp_path / "runs")
    assert_refused(said, "no trial is complete (2 pruned)", status=1)


def test_a_sampler_that_is_none_is_refused_in_one_line(tmp_path: Path) -> None:
    study = write_files(tmp_path)
    said = narrowcast("tune", study, "--output", tmp_path / "runs", "study.sampler=tune_search_plugin:Nothing")
    assert_refused(said, "study.sampler.kind = tune_search_plugin:Nothing", "has no Nothing")
