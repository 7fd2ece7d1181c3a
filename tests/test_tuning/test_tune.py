"""`narrowcast tune` from its file to its best configuration, on real runs and a real MLflow store."""

from __future__ import annotations

from pathlib import Path

import pytest

from command_line import assert_refused, narrowcast, run_folders, terminated_when
from narrowcast.platform.tracking.units import format_seconds
from studies import EXPERIMENT, ONE_OBJECTIVE, RATES, nested_runs, result, trials, write_study

pytestmark = pytest.mark.filterwarnings("ignore::sqlalchemy.exc.SADeprecationWarning")


def test_a_study_from_its_file_to_its_best_configuration(tmp_path: Path) -> None:
    study = write_study(tmp_path, EXPERIMENT + ONE_OBJECTIVE + RATES + "  attack.factor: [1.0, 6.0]\n")
    attack = "experiment.attack={kind: trigger, size: 2, attackers: 8}"
    said = narrowcast("tune", study, "--output", tmp_path, "study.holdout.trials=2", "study.seeds=2", attack)
    assert (said.status, said.err) == (0, "")
    folder = tmp_path / "digits"
    rows = trials(folder)
    assert {row["attack.factor"] for row in rows} == {"1.0", "6.0"}
    assert [row["state"] for row in rows] == ["complete"] * 6
    best = max(rows, key=lambda row: float(row["validation.accuracy"]))
    assert result(folder)["chosen"] == int(best["trial"])

    parent, nested = nested_runs(tmp_path)
    assert parent.info.status == "FINISHED"
    assert parent.data.metrics["best.trial"] == int(best["trial"])
    for row in rows:
        run = nested[row["trial"]]
        assert run.info.status == "FINISHED"
        assert run.data.params["training.learning_rate"] == row["training.learning_rate"]
        assert run.data.metrics["validation.accuracy"] == float(row["validation.accuracy"])
        assert not any(name.startswith("test.") for name in run.data.metrics)
    tested = result(folder)["holdout"]
    assert tested[0]["trial"] == int(best["trial"])
    assert all(each["seeds"] == [2, 3, 4] for each in tested)  # the trials themselves had 0 and 1
    assert parent.data.metrics["best.test.accuracy"] == pytest.approx(
        sum(run["test.accuracy"] for run in tested[0]["runs"]) / 3
    )
    assert {path.name for path in (folder / "plots").iterdir()} == {
        "history.png", "parallel.png", "importance.png", "study.html",
    }  # fmt: skip

    again = narrowcast("run", folder / "best.yaml", "--output", tmp_path, "name=again")
    assert (again.status, again.err) == (0, "")
    trial = result(folder / "trials" / f"{int(best['trial']):05d}")
    assert result(tmp_path / "again")["model_sha256"] == trial["model_sha256"][0]


@pytest.mark.slow
def test_a_study_of_an_attack_alone_finds_the_strongest(tmp_path: Path) -> None:
    study = write_study(tmp_path, EXPERIMENT + ONE_OBJECTIVE + "space: {attack.scale: [0.1, 5.0]}")
    words = ("study.sampler=grid", "study.objectives={validation.accuracy: minimize}")
    said = narrowcast("tune", study, "--output", tmp_path, *words, "experiment.attack={kind: sign_flip, attackers: 12}")
    assert (said.status, said.err) == (0, "")
    reached = {row["trial"]: float(row["validation.accuracy"]) for row in trials(tmp_path / "digits")}
    assert len(set(reached.values())) == 2
    assert result(tmp_path / "digits")["chosen"] == int(min(reached, key=reached.__getitem__))


@pytest.mark.slow
def test_a_study_is_the_same_twice_and_however_it_is_cut(tmp_path: Path) -> None:
    study = write_study(tmp_path)
    assert narrowcast("tune", study, "--output", tmp_path / "whole").status == 0
    assert narrowcast("tune", study, "--output", tmp_path / "cut", "study.trials=2").status == 0
    assert narrowcast("tune", study, "--output", tmp_path / "cut").status == 0
    whole, cut = (trials(tmp_path / name / "digits") for name in ("whole", "cut"))
    for row in (*whole, *cut):
        del row["wall_seconds"]
    assert whole == cut
    assert len({row["training.learning_rate"] for row in whole}) == 6


@pytest.mark.slow
def test_trials_played_together_are_what_they_are_alone(tmp_path: Path) -> None:
    study = write_study(tmp_path)
    for name, together in (("alone", 1), ("together", 4)):
        settings = ("study.sampler=random", f"study.trials_together={together}")
        assert narrowcast("tune", study, "--output", tmp_path / name, *settings).status == 0
    alone, together = (trials(tmp_path / name / "digits") for name in ("alone", "together"))
    for one, other in zip(alone, together, strict=True):
        assert one["training.learning_rate"] == other["training.learning_rate"]
        assert float(one["validation.accuracy"]) == pytest.approx(float(other["validation.accuracy"]), abs=0.011)
        assert one["uplink_bits"] == other["uplink_bits"]


def test_trials_that_learn_nothing_before_their_only_evaluation_fail_with_the_reason(tmp_path: Path) -> None:
    settings = ("experiment.evaluate_every=10", "experiment.deadline_seconds=1e-9", "study.trials=2")
    said = narrowcast("tune", write_study(tmp_path), "--output", tmp_path, *settings)
    assert_refused(said, "all 2 trials of digits failed", "all were later than deadline_seconds", status=1)
    assert {(row["state"], row["rounds"]) for row in trials(tmp_path / "digits")} == {("failed", "0")}
    parent, nested = nested_runs(tmp_path)
    assert {parent.info.status, *(each.info.status for each in nested.values())} == {"FAILED"}


def test_a_pruned_trial_stops_between_rounds_and_says_so_everywhere(tmp_path: Path) -> None:
    settings = ("study.pruner={kind: threshold, at_least: 0.999, warmup_steps: 5}", "study.trials=3")
    said = narrowcast("tune", write_study(tmp_path), "--output", tmp_path, *settings)
    assert_refused(said, "digits: no trial is complete (3 pruned)", "a milder pruner", status=1)
    folder = tmp_path / "digits"
    _, nested = nested_runs(tmp_path)
    for number in range(3):
        trial = result(folder / "trials" / f"{number:05d}")
        assert (trial["state"], trial["rounds"], trial["model_sha256"]) == ("pruned", 6, [])
        run = nested[str(number)]
        assert (run.info.status, run.data.tags["state"], run.data.tags["pruned_at_round"]) == ("KILLED", "pruned", "6")
        assert run.data.metrics["rounds_run"] == 6


@pytest.mark.slow
def test_the_hold_out_table_has_every_cost_that_trials_are_judged_by(tmp_path: Path) -> None:
    study = (
        "study:\n  objectives: {validation.accuracy: maximize, simulated_seconds: minimize}\n  trials: 2\n"
        "  backend: local\n  holdout: {trials: 1, seeds: 1}\n"
        "space:\n  training.learning_rate: {kind: float, low: 0.1, high: 1, log: true}\n"
    )
    said = narrowcast("tune", write_study(tmp_path, EXPERIMENT + study), "--output", tmp_path)
    assert (said.status, said.err) == (0, "")
    assert "hold-out evaluation of the best trial with 1 new seed" in said.out
    lines = [line.rstrip() for line in said.out.splitlines()]
    table = lines[lines.index("Hold-out evaluation, 1 new seed") :]
    (place,) = (number for number, line in enumerate(table) if line.endswith("simulated time"))
    row = table[place + 2]
    (written,) = result(tmp_path / "digits")["holdout"]
    assert row.endswith(format_seconds(written["runs"][0]["simulated_seconds"]))


@pytest.mark.slow
def test_several_objectives_are_pruned_on_one_of_them(tmp_path: Path) -> None:
    study = (
        "study:\n  objectives: {validation.accuracy: maximize, uplink_bits: minimize}\n  trials: 12\n"
        "  backend: local\n  holdout: {trials: 0}\n  constraints: {validation.accuracy: {at_least: 0.2}}\n"
        "  pruner: {kind: median, on: validation.accuracy, axis: uplink_bits, every: 2e6, startup_trials: 3}\n"
        "space:\n  training.learning_rate: {kind: float, low: 0.001, high: 1, log: true}\n"
        "  algorithm:\n    kind: choice\n    values:\n      all: fedavg\n      few: {kind: scolr, rank: 4}\n"
    )
    said = narrowcast("tune", write_study(tmp_path, EXPERIMENT + study), "--output", tmp_path)
    assert (said.status, said.err) == (0, "")
    rows = trials(tmp_path / "digits")
    assert {row["state"] for row in rows} == {"complete", "pruned"}
    usable = [row for row in rows if row["state"] == "complete" and float(row["validation.accuracy"]) >= 0.2]
    front = {
        int(row["trial"])
        for row in usable
        if not any(
            float(other["validation.accuracy"]) > float(row["validation.accuracy"])
            and float(other["uplink_bits"]) <= float(row["uplink_bits"])
            for other in usable
        )
    }
    assert {each["trial"] for each in result(tmp_path / "digits")["pareto_front"]} == front
    assert (tmp_path / "digits" / "plots" / "pareto.png").is_file()


@pytest.mark.slow
def test_trials_under_secure_aggregation_cost_what_the_run_costs(tmp_path: Path) -> None:
    settings = ("experiment.secure=masked", "experiment.rounds=4", "study.trials=1")
    said = narrowcast("tune", write_study(tmp_path), "--output", tmp_path, *settings)
    assert (said.status, said.err) == (0, "")
    assert narrowcast("run", tmp_path / "digits" / "best.yaml", "--output", tmp_path, "name=again").status == 0
    assert (
        narrowcast("run", tmp_path / "digits" / "best.yaml", "--output", tmp_path, "name=plain", "secure=none").status
        == 0
    )
    (row,) = trials(tmp_path / "digits")
    again, plain = result(tmp_path / "again"), result(tmp_path / "plain")
    assert float(row["uplink_bits"]) == again["uplink_bits"] != plain["uplink_bits"]
    assert float(row["downlink_bits"]) == again["downlink_bits"] != plain["downlink_bits"]
    assert result(tmp_path / "digits" / "trials" / "00000")["model_sha256"] == [again["model_sha256"]]


@pytest.mark.slow
@pytest.mark.thorough
def test_seeds_under_secure_aggregation_are_averaged(tmp_path: Path) -> None:
    said = narrowcast(
        "tune", write_study(tmp_path), "--output", tmp_path, "experiment.secure=masked", "experiment.rounds=4",
        "study.trials=1", "study.seeds=2", "study.objectives={validation.loss: minimize}",
    )  # fmt: skip
    assert (said.status, said.err) == (0, "")
    assert len(set(result(tmp_path / "digits" / "trials" / "00000")["model_sha256"])) == 2
    assert "%" not in said.out.partition("Best trials")[2]  # a loss is no share


@pytest.mark.slow
def test_a_budget_ends_a_trial_and_its_configuration(tmp_path: Path) -> None:
    whole = narrowcast("tune", write_study(tmp_path), "--output", tmp_path, "--name", "whole", "study.trials=1")
    assert whole.status == 0
    bits = float(trials(tmp_path / "whole")[0]["uplink_bits"])
    settings = ("study.trials=1", f"study.budget={{uplink_bits: {bits / 2}}}")
    said = narrowcast("tune", write_study(tmp_path), "--output", tmp_path, *settings)
    assert (said.status, said.err) == (0, "")
    assert trials(tmp_path / "digits")[0]["rounds"] == "6"  # half of 10 rounds, then the next evaluation
    assert "rounds: 6\n" in (tmp_path / "digits" / "best.yaml").read_text()


def _has_reported(number: int, folder: Path) -> bool:
    """Whether the trial has reported to the journal."""
    journal = folder / "study.journal"
    lines = journal.read_text().splitlines() if journal.exists() else []
    return any(f'"trial_id":{number},' in line and "intermediate_value" in line for line in lines)


@pytest.mark.slow
def test_an_interrupted_study_goes_on(tmp_path: Path) -> None:
    words = ("tune", write_study(tmp_path), "--output", tmp_path, "experiment.rounds=400", "study.trials=3")
    with terminated_when(lambda: _has_reported(1, tmp_path / "digits")):
        said = narrowcast(*words)
    assert_refused(said, "interrupted; continue with: narrowcast tune", status=1)
    said = narrowcast(*words)
    assert (said.status, said.err) == (0, "")
    rows = trials(tmp_path / "digits")
    assert sum(row["state"] == "complete" for row in rows) == 3
    (lost,) = [row for row in rows if row["state"] == "lost"]
    (retry,) = [row for row in rows if row["retry_of"] == lost["trial"]]
    assert retry["training.learning_rate"] == lost["training.learning_rate"]
    _, nested = nested_runs(tmp_path)
    assert {number: run.data.tags["state"] for number, run in nested.items()} == {
        row["trial"]: row["state"] for row in rows
    }
    done = narrowcast(*words)
    assert done.status == 0
    assert trials(tmp_path / "digits") == rows


def test_the_dry_run_says_what_it_would_do_and_does_nothing(tmp_path: Path) -> None:
    said = narrowcast("tune", write_study(tmp_path), "--output", tmp_path / "runs", "--dry-run")
    assert (said.status, said.err) == (0, "")
    assert "training.learning_rate  low 0.001, high 1, log  always" in " ".join(said.out.split("\n"))
    assert "6 trials x 10 rounds x 1 seed, 1 at a time" in said.out
    assert not (tmp_path / "runs").exists()
    drawn = said.out.partition("# a sampled configuration\n")[2]
    (tmp_path / "drawn.yaml").write_text(drawn)
    assert narrowcast("run", tmp_path / "drawn.yaml", "--output", tmp_path / "runs", "rounds=2").status == 0


def test_all_trials_failing_is_one_line(tmp_path: Path) -> None:
    diverging = "  training: {learning_rate: 50}\n"
    text = EXPERIMENT + diverging + ONE_OBJECTIVE + "space: {algorithm.server_learning_rate: [1e38, 3e38]}\n"
    said = narrowcast("tune", write_study(tmp_path, text), "--output", tmp_path, "study.trials=3")
    assert_refused(said, "all 3 trials of digits failed", "no longer finite", status=1)
    parent, nested = nested_runs(tmp_path)
    assert parent.info.status == "FAILED"
    assert [run.info.status for run in nested.values()] == ["FAILED"] * 3


@pytest.mark.parametrize(
    ("text", "words", "phrases"),
    [
        ("space: {training.learning_rat: [0.1, 0.2]}", (), ["training.learning_rat is unknown", '"learning_rate"?']),
        (
            "space: {training.momentum: {kind: float, low: 0, high: 2}}", (),
            ["space.training.momentum.high = 2.0", "training.momentum = 2.0", "less than"],
        ),
        ("space: {training.batch_size: {kind: float, low: 1, high: 9}}", (), ["batch_size", "valid integer"]),
        ("space: {training.batch_size: {kind: int, low: 9, high: 1}}", (), ["low = 9 has to be below high = 1"]),
        ("space: {seed: [1, 2]}", (), ["space.seed cannot be tuned", "study.seeds"]),
        (
            "space: {training.epochs: {kind: choice, values: [1, 2], when: {algorithm.kind: scolr}}}", (),
            ["algorithm.kind is not a choice of this space"],
        ),
        (RATES, ("study.objectives={validation.hr@10: maximize}",), ["no run of this experiment reports", "accuracy"]),
        (RATES, ("study.objectives={test.accuracy: maximize}",), ["trials are chosen on validation"]),
        (RATES, ("study.objectives={validation.loss: maximize}",), ["it is better when lower; write minimize"]),
        (
            RATES + "  attack.factor: [1.0, 6.0]\n",
            ("study.objectives={validation.loss: maximize}", "experiment.attack={kind: trigger, size: 2}"),
            ["it is better when lower; write minimize"],
        ),
        (
            RATES, ("study.objectives={validation.accuracy: maximise}",),
            ["study.objectives.validation.accuracy = 'maximise'", "'maximize' or 'minimize'"],
        ),
        (RATES, ("study.sampler=grid",), ["space.training.learning_rate is a range without steps"]),
        (RATES, ("study.sampler=tpf",), ['study.sampler.kind = "tpf" is unknown', '"tpe"?']),
        (RATES, ("study.pruner={kind: median, axis: uplink_bits}",), ["needs every, the size of a step"]),
        (RATES, ("study.storage=postgresql://me:secret@127.0.0.1:1/x",), ["no storage answers", "127.0.0.1"]),
        (RATES, ("study.storage=potgresql://host/x",), ["is not a database URL"]),
        (RATES, ("study.budget={rounds: 3}",), ["study.budget.rounds", "uplink_bits"]),
        (RATES, ("experiment.algorithm.rank=3",), ["algorithm.rank is unknown"]),
    ],
)  # fmt: skip
def test_bad_input_is_one_line(tmp_path: Path, text: str, words: tuple[str, ...], phrases: list[str]) -> None:
    study = write_study(tmp_path, EXPERIMENT + ONE_OBJECTIVE + text)
    said = narrowcast("tune", study, "--output", tmp_path / "runs", *words)
    assert_refused(said, *phrases)
    assert "secret" not in said.err
    assert run_folders(tmp_path / "runs") == []


def test_an_override_reaches_a_list_of_the_default_model() -> None:
    from narrowcast.tuning.study_file import build_study

    values = {
        "experiment": {"data": "digits", "algorithm": "fedavg", "rounds": 1},
        "study": {"objectives": {"validation.accuracy": "maximize"}},
        "space": {"training.learning_rate": {"kind": "float", "low": 0.1, "high": 1.0}},
    }
    file = build_study(values, "study.yaml", ["experiment.model.hidden.0=9", "study.trials=3"])
    assert file.build({}).model.hidden == (9,)  # type: ignore[attr-defined]
    assert file.settings.trials == 3


def test_an_experiment_is_not_a_study(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("data: digits\nmodel: mlp\nalgorithm: fedavg\n")
    assert_refused(narrowcast("tune", tmp_path / "mine.yaml", "--output", tmp_path), "mine.yaml is an experiment")


def test_a_study_is_not_mixed_with_another_of_its_name(tmp_path: Path) -> None:
    study = write_study(tmp_path)
    assert narrowcast("tune", study, "--output", tmp_path, "study.trials=1").status == 0
    said = narrowcast("tune", study, "--output", tmp_path, "study.trials=2", "experiment.rounds=12")
    assert_refused(said, "the study digits was begun with another experiment, space or objectives")
    assert len(trials(tmp_path / "digits")) == 1


def test_the_packaged_studies_are_listed_and_whole() -> None:
    from narrowcast.tuning.study_file import load_study, packaged_studies

    said = narrowcast("tune")
    assert (said.status, said.err) == (0, "")
    for name in packaged_studies():
        assert name in said.out
        fewest = 12 if name == "fedavg-digits-fractions" else 30  # that study is a page's, done in a minute
        assert load_study(name).settings.n_trials(load_study(name).space) >= fewest


def test_metrics_are_in_percent_if_the_model_declares_them_as_shares() -> None:
    from narrowcast.tuning.result import labelled
    from narrowcast.tuning.study_file import load_study

    assert labelled("validation.accuracy", 0.5, ()) == "validation accuracy 0.5"
    assert labelled("validation.purity", 0.5, ("purity",)) == "validation purity 50.00 %"
    file = load_study("fedmf-ml1m-rates")
    assert file.shares is not None
    assert labelled("validation.hr@10", 0.5, file.shares) == "validation HR@10 50.00 %"


def test_a_solve_in_place_of_an_experiment_is_refused_in_one_line() -> None:
    from narrowcast.platform.errors import UserError
    from narrowcast.tuning.study_file import build_study

    values = {"experiment": "completion-ill-conditioned", "study": {}, "space": {"solver.rank": [1, 2]}}
    with pytest.raises(UserError, match="experiment has a problem and a solver; write it as the section solve"):
        build_study(values, "study.yaml")
