"""Runs that learn nothing end with an error that names the cause, and runs that learn little do not."""

from __future__ import annotations

import errno
import json
from pathlib import Path

import pytest
from mlflow import MlflowClient

import narrowcast as nc
from narrowcast.experiment import load_experiment
from narrowcast.platform.errors import NoLearningError
from narrowcast.platform.rounds import loop
from narrowcast.platform.storage.journal import Journal
from narrowcast.runs import learning
from narrowcast.tuning.trials import TrialBatch, TrialSpec
from narrowcast.tuning.workers import SharedData, run_trials

# MLflow's queries make SQLAlchemy warn.
pytestmark = pytest.mark.filterwarnings("ignore::sqlalchemy.exc.SADeprecationWarning")
SMALL = {"rounds": 2, "data.clients": 40, "clients_per_round": 4, "backend.kind": "local", "tracking.flush_seconds": 20}
NEVER = {"availability": {"kind": "bernoulli", "probability": 0.0}}


@pytest.fixture(scope="module")
def output(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ({"deadline_seconds": 1e-6}, "all were later than deadline_seconds = 1e-06, since the fastest client needs"),
        (
            NEVER,
            "no client was available in any round with availability.kind = bernoulli, availability.probability",
        ),
        ({"training.learning_rate": 1e38}, "the clients' training diverged; lower training.learning_rate (now 1e+38)"),
        ({"training.learning_rate": 1e-30}, "the global model is the one before round 1; raise training.learning_rate"),
        (
            {"data.clients": 100_000},
            "the clients have no training samples; use fewer of them (data.clients), or another",
        ),
        (
            {"algorithm": {"kind": "scolr"}, "radio": {"upload_seconds": 1e-9}},
            "no link carries the least payload of its client within radio.upload_seconds = 1e-09; raise that",
        ),
    ],
)
def test_the_error_names_the_cause_and_what_to_change(output: Path, overrides: dict[str, object], said: str) -> None:
    with pytest.raises(NoLearningError) as raised:
        nc.run("fedavg-digits", {**SMALL, "name": "vain", **overrides}, output=output, progress=False)
    assert said in str(raised.value)
    assert not hasattr(raised.value, "__notes__"), "a resume would end in the same way"
    assert not list(output.glob("vain*/result.json"))


def test_a_run_that_is_refused_before_its_first_round_leaves_nothing(tmp_path: Path) -> None:
    radio = {"upload_seconds": 0.01, "allocation": {"kind": "min_error"}}
    settings = {
        **SMALL,
        "name": "refused",
        "checkpoint_path": str(tmp_path / "states"),
        "tracking.system_metrics": False,
    }
    with pytest.raises(nc.UserError, match=r"allocation\.kind = min_error needs the clients' errors") as refused:
        nc.run(
            "fedavg-digits",
            {**settings, "algorithm": {"kind": "scolr"}, "radio": radio},
            output=tmp_path / "runs",
            progress=False,
        )
    assert not hasattr(refused.value, "__notes__")
    assert not list(tmp_path.glob("runs/refused*"))
    assert not list(tmp_path.glob("states/*"))
    client = MlflowClient(f"sqlite:///{tmp_path}/runs/mlflow.db")
    (run,) = client.search_runs([client.get_experiment_by_name("narrowcast").experiment_id])
    assert run.info.status == "FAILED"
    done = nc.run("fedavg-digits", settings, output=tmp_path / "runs", progress=False)
    assert done.folder == tmp_path / "runs" / "refused"


def test_a_run_that_fails_before_its_first_round_and_may_go_on_keeps_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    settings = {**SMALL, "name": "full", "tracking.system_metrics": False}
    with monkeypatch.context() as patch, pytest.raises(nc.RunFailed, match="make room, then resume the run"):
        patch.setattr(Journal, "append", full)
        nc.run("fedavg-digits", settings, output=tmp_path, progress=False)
    assert nc.run(resume="full", output=tmp_path, progress=False).folder == tmp_path / "full"


def test_a_resume_ends_in_the_same_way(output: Path) -> None:
    for resume in (False, True):
        with pytest.raises(NoLearningError, match="no client was available"):
            nc.run("fedavg-digits", {**SMALL, "name": "again", **NEVER}, output=output, progress=False, resume=resume)


def test_replicas_that_learn_have_their_results(output: Path) -> None:
    with pytest.raises(nc.RunFailed, match=r"^both-learning_rate-1e-30: the uploads changed nothing"):
        nc.run(
            "fedavg-digits",
            {**SMALL, "name": "both", "replicas.training.learning_rate": [0.1, 1e-30]},
            output=output,
            progress=False,
        )
    assert [path.parent.name for path in output.glob("both*/result.json")] == ["both-learning_rate-0.1"]


def test_a_replica_that_learns_nothing_ends_early_and_the_others_do_not(
    output: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("narrowcast.runs.learning.MAX_ROUNDS_WITHOUT_UPDATES", 3)
    trained: list[tuple[int, ...]] = []
    train = loop.train_together
    monkeypatch.setattr(
        loop,
        "train_together",
        lambda work: trained.append(tuple(len(calls) for _, calls in work)) or train(work),  # type: ignore[func-returns-value]
    )
    with pytest.raises(nc.RunFailed, match=r"^early-deadline_seconds-1e-06: no upload of any round was used"):
        nc.run(
            "fedavg-digits",
            {**SMALL, "rounds": 6, "name": "early", "replicas.deadline_seconds": [1e-6, 1e6]},
            output=output,
            progress=False,
        )
    assert [len(each) for each in trained[::2]] == [2, 2, 2, 1, 1, 1]
    assert Journal.read(output / "early-deadline_seconds-1e-06").last_step == 3
    assert Journal.read(output / "early-deadline_seconds-1000000.0").last_step == 6


def test_a_long_run_ends_early_and_one_upload_is_enough(output: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("narrowcast.runs.learning.MAX_ROUNDS_WITHOUT_UPDATES", 3)
    long = {**SMALL, "rounds": 9, "name": "long", "deadline_seconds": 1e-6}
    with pytest.raises(NoLearningError):
        nc.run("fedavg-digits", long, output=output, progress=False)
    assert Journal.read(output / "long").last_step == 3
    rare = {**SMALL, "rounds": 9, "name": "rare", "availability": {"kind": "bernoulli", "probability": 0.01}}
    result = nc.run("fedavg-digits", rare, output=output, progress=False)
    assert 0 < (result.rounds["delivered"] > 0).sum() < 9


def test_causes_are_counted_and_the_most_common_is_explained() -> None:
    experiment = load_experiment("fedavg-digits", ["deadline_seconds=5"])
    ledger: learning.Ledger = {
        "client": [1, 2, 3, 4],
        "delivered": [False] * 4,
        "late": [True, True, True, False],
        "uplink_bits": [8, 8, 8, 8],
        "loss": [1.0, 1.0, 1.0, float("nan")],
        "examples": [9, 9, 9, 9],
        "seconds": [60.0, 30.0, 45.0, 3.0],
    }
    said = str(learning.nothing_used(experiment, [ledger]))
    assert said.startswith("no upload of any round was used (3 late, 1 diverged): all were later than")
    assert "the clients' training diverged" in learning.why_in_vain(experiment, {**ledger, "late": [False] * 4})


def test_a_trial_that_learns_nothing_fails() -> None:
    overrides = [f"{path}={json.dumps(value)}" for path, value in {**SMALL, **NEVER}.items()]
    vain, fine = (load_experiment("fedavg-digits", each) for each in (overrides, overrides[:-1]))
    shared = SharedData(vain.data, vain.data.load())
    batch = TrialBatch((TrialSpec(0, (vain,)), TrialSpec(1, (fine,))), {})
    ended = {each.key: each.failed for each in next(run_trials(batch, shared)) if each.is_last or each.failed}
    assert ended[0].startswith("no client was available")
    assert ended[1] == ""
