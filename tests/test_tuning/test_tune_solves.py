"""Studies whose trials are solves: choice, pruning, resume, hold-out evaluation, and what they refuse."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
from mlflow import MlflowClient

import narrowcast as nc
from narrowcast.platform.config.yaml import read_yaml
from narrowcast.platform.data.rating_matrix import ExplicitRatings
from narrowcast.solves.completion_problems import RatingCompletion
from narrowcast.tuning.result import is_logarithmic, knee
from narrowcast.tuning.study import check_study
from narrowcast.tuning.study_file import build_study, load_study
from narrowcast.tuning.trials import TrialRecord
from studies import result, trials

pytestmark = pytest.mark.filterwarnings("ignore::sqlalchemy.exc.SADeprecationWarning")
STUDY = """
name: ranks
solve:
  problem: {kind: synthetic_completion, rows: 60, rank: 3, fraction: 0.6}
  solver: {kind: scaled_asd}
  iterations: 150
study:
  objectives: {test.relative_error: minimize}
  sampler: grid
  backend: local
  seeds: 2
  holdout: {trials: 1, seeds: 2}
space:
  solver.rank: [1, 3, 5]
  tolerance: [1e-2, 1e-9]
"""


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a finished study, cut after two trials."""
    folder = tmp_path_factory.mktemp("study")
    (folder / "ranks.yaml").write_text(STUDY)
    for overrides in ({"study.trials": 2}, {}):
        nc.tune(folder / "ranks.yaml", overrides, output=folder)
    return folder


@pytest.mark.slow
def test_a_study_chooses_the_rank_and_tolerance_of_the_least_error(study: Path) -> None:
    rows = trials(study / "ranks")
    assert [row["state"] for row in rows] == ["complete"] * 6
    best = min(rows, key=lambda row: float(row["test.relative_error"]))
    assert result(study / "ranks")["chosen"] == int(best["trial"])
    assert (best["solver.rank"], float(best["tolerance"])) == ("3", 1e-9)
    assert 0 < float(best["iterations"]) < 150


def test_the_chosen_trial_is_an_ordinary_solve(study: Path) -> None:
    chosen = result(study / "ranks")["chosen"]
    solve = nc.solve(study / "ranks" / "best.yaml", {"name": "again"}, output=study, progress=False)
    trial = result(study / "ranks" / "trials" / f"{chosen:05d}")
    assert trial["model_sha256"][0] == solve.file.answer_sha256
    other = nc.solve(
        study / "ranks" / "best.yaml", {"seed": 1, "iterations": 150, "name": "other"}, output=study, progress=False
    )
    assert trial["model_sha256"][1] == other.file.answer_sha256
    mean = (solve.final["test.relative_error"] + other.final["test.relative_error"]) / 2
    assert trial["amounts"]["test.relative_error"] == pytest.approx(mean, rel=1e-12)
    assert trial["amounts"]["iterations"] == (solve.file.iterations + other.file.iterations) / 2


def test_hold_out_evaluation_draws_other_problems(study: Path) -> None:
    (held,) = result(study / "ranks")["holdout"]
    assert held["seeds"] == [2, 3]
    alone = nc.solve(
        study / "ranks" / "best.yaml", {"seed": 3, "iterations": 150, "name": "third"}, output=study, progress=False
    )
    assert held["runs"][1]["test.relative_error"] == alone.final["test.relative_error"]


def test_mlflow_has_the_trials_by_iteration_under_the_study(study: Path) -> None:
    client = MlflowClient(f"sqlite:///{study}/mlflow.db")
    experiment = client.get_experiment_by_name("narrowcast-solves")
    assert experiment is not None
    runs = client.search_runs([experiment.experiment_id])
    (parent,) = [run for run in runs if run.data.tags.get("kind") == "study"]
    nested = {
        run.data.tags["trial"]: run for run in runs if run.data.tags.get("mlflow.parentRunId") == parent.info.run_id
    }
    assert parent.info.status == "FINISHED"
    for row in trials(study / "ranks"):
        run = nested[row["trial"]]
        assert run.data.params["solver.rank"] == row["solver.rank"]
        assert run.data.metrics["iterations_run"] == float(row["rounds"])
        assert run.data.metrics["test.relative_error"] == float(row["test.relative_error"])
        assert client.get_metric_history(run.info.run_id, "residual")[-1].step == int(row["rounds"])
    assert {path.name for path in (study / "ranks" / "plots").iterdir()} >= {"history.png", "parallel.png"}


def test_a_pruned_trial_stops_between_iterations(tmp_path: Path) -> None:
    (tmp_path / "ranks.yaml").write_text(STUDY.partition("space:")[0] + "space: {solver.rank: [1, 3]}\n")
    pruner = {"kind": "threshold", "at_most": 0.5, "warmup_steps": 20, "axis": "iterations"}
    settings = {"study.pruner": pruner, "study.seeds": 1, "study.holdout.trials": 0}
    found = nc.tune(tmp_path / "ranks.yaml", settings, output=tmp_path)
    assert [each.state for each in found.records] == ["pruned", "complete"]
    assert found.records[0].rounds == 20


def test_a_trial_that_diverges_fails_alone(tmp_path: Path) -> None:
    text = STUDY.replace("scaled_asd", "fgd").partition("space:")[0] + "space: {solver.step_size: [0.2, 1.0]}\n"
    (tmp_path / "steps.yaml").write_text(text)
    found = nc.tune(tmp_path / "steps.yaml", {"study.seeds": 1, "study.holdout.trials": 0}, output=tmp_path)
    assert [each.state for each in found.records] == ["complete", "failed"]
    assert found.records[1].reason.startswith("the solver diverged")


@pytest.mark.slow
@pytest.mark.thorough  # test_tune_plugins.py has workers on Ray
@pytest.mark.ray
def test_workers_on_ray_give_the_same_trials(study: Path, tmp_path: Path) -> None:
    overrides = {"study.backend": "ray", "study.parallel": 2, "study.cpus_per_worker": 0.5}
    nc.tune(study / "ranks.yaml", overrides, output=tmp_path)
    here, there = (
        {(row["solver.rank"], row["tolerance"]): row["test.relative_error"] for row in trials(folder / "ranks")}
        for folder in (study, tmp_path)
    )
    assert here == there


RATINGS = {
    "solve": {"problem": {"kind": "rating_completion"}, "solver": {"kind": "scaled_asd", "rank": 2}, "iterations": 5},
    "study": {"objectives": {"test.rmse": "minimize"}, "backend": "local"},
    "space": {"solver.rank": [1, 2]},
}


def test_metrics_of_test_choose_only_where_other_seeds_have_other_problems() -> None:
    with pytest.raises(nc.UserError, match=r"study\.objectives\.test\.rmse: trials are chosen on validation"):
        check_study(build_study(deepcopy(RATINGS), "study.yaml"))
    chosen = deepcopy(RATINGS)
    chosen["solve"]["problem"] = {"kind": "rating_completion", "ratings": {"set": "ml-100k", "validation_share": 0.1}}
    chosen["study"]["objectives"] = {"validation.rmse": "minimize"}
    check_study(build_study(chosen, "study.yaml"))
    fixed = load_study("scaled-asd-rank", ["solve.problem.seed=3", "solve.problem.rows=100", "study.backend=local"])
    with pytest.raises(nc.UserError, match=r"study\.objectives\.test\.relative_error: trials are chosen on validation"):
        check_study(fixed)


def test_the_validation_ratings_are_neither_observed_nor_tested() -> None:
    whole = RatingCompletion(ratings=ExplicitRatings(set="ml-100k")).load()
    split = RatingCompletion(ratings=ExplicitRatings(set="ml-100k", validation_share=0.1)).load()
    assert split.validation is not None and split.held_out is not None and whole.held_out is not None
    assert len(split.validation.value) == pytest.approx(10_000, rel=0.02)
    sizes = split.observed.count + len(split.validation.value) + len(split.held_out.value)
    assert sizes == whole.observed.count + len(whole.held_out.value) == 100_000
    held = (split.validation, split.held_out)
    one, other = (set(zip(each.row.tolist(), each.column.tolist(), strict=True)) for each in held)
    assert not one & other


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["study.objectives={uplink_bits: minimize}"], "no run of this solve reports it; it reports observed_error"),
        (["study.objectives={test.relative_error: maximize}"], "it is better when lower; write minimize"),
        (["study.trials_together=2"], "solves have no program in common; set study.parallel"),
        (["study.pruner={kind: median, axis: uplink_bits, every: 8}"], "study.pruner.axis = uplink_bits: no run of"),
        (["solver.rank=2"], '"solver.rank=2" is a setting of the solve; write solve.solver.rank=2'),
        (["solve.solver.rank=99"], "solver.rank"),
    ],
)
def test_bad_settings_are_refused_in_one_line(overrides: list[str], message: str) -> None:
    with pytest.raises(nc.UserError, match=message) as error:
        check_study(build_study(read_yaml(STUDY, "ranks.yaml"), "ranks.yaml", overrides))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"experiment": "fedavg-digits"}, "a study has an experiment or a solve, not both"),
        ({"solve": "fedavg-digits"}, "solve has the sections of an experiment; write it as the section experiment"),
        ({"space": {"record_every": [1, 2]}}, "space.record_every cannot be tuned: it does not affect a run"),
    ],
)
def test_bad_sections_are_refused_in_one_line(change: dict[str, Any], message: str) -> None:
    values = {"solve": "completion-ill-conditioned", "study": {"objectives": {"observed_error": "minimize"}}}
    with pytest.raises(nc.UserError, match=message):
        build_study({**values, "space": {"solver.rank": [1, 2]}, **change}, "study.yaml")


def test_the_knee_of_errors_over_decades_weighs_their_logarithms() -> None:
    points = [(1e-12, 400.0), (1e-9, 40.0), (1e-2, 20.0), (1e-1, 10.0)]
    front = [
        TrialRecord(number, "complete", {}, {"error": error, "iterations": iterations})
        for number, (error, iterations) in enumerate(points)
    ]
    assert is_logarithmic("error", front)
    assert knee(front, {"error": "minimize", "iterations": "minimize"}).number == 1
    of_experiments = [TrialRecord(each.number, "complete", {}, {"error": each.metrics["error"]}) for each in front]
    assert not is_logarithmic("error", of_experiments)
