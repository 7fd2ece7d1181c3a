"""Bad input, one row each: the exit status, one line on stderr that names it, and nothing left in the folder."""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from importlib.metadata import Distribution, PackageNotFoundError
from pathlib import Path

import numpy as np
import pytest
from click.shell_completion import BashComplete

from command_line import assert_refused, narrowcast, run_folders
from narrowcast.cli.main import cli
from narrowcast.platform.config import plugins
from narrowcast.platform.config.catalog import CODECS

pytestmark = pytest.mark.filterwarnings("ignore::sqlalchemy.exc.SADeprecationWarning")
DIGITS = ("fedavg-digits", "--backend", "local", "rounds=1", "tracking.system_metrics=false")


@pytest.mark.parametrize(
    ("override", "phrase"),
    [
        # Values of the wrong type or range, in the words of YAML.
        ("rounds=true", "rounds = true: should be a number"),
        ("rounds=1.5", "rounds = 1.5: should be a valid integer"),
        ("rounds=", "rounds = null: should be a valid integer"),
        ("rounds=[1]", "rounds = [1]: should be a valid integer"),
        ("model.hidden=[true]", "model.hidden.0 = true: should be a number"),
        ("model.hidden=[-3]", "model.hidden.0 = -3: should be greater than or equal to 1"),
        ("model.hidden=[65536,65536]", "this model has 4,299,948,042 parameters, 17 GB"),
        ("algorithm={kind: fine_tune, fine_tune_rate: 0}", "algorithm.fine_tune_rate = 0: should be greater than 0"),
        ("model=5", "model = 5: should be a kind, or a section with a kind"),
        ("clock=3", "clock = 3: should be a mapping"),
        ("fleet.tiers=3", "fleet.tiers = 3: should be a list"),
        ("targets=3", "targets = 3: should be a mapping"),
        ("targets={test.accuracy: high}", "targets.test.accuracy.0 = 'high': should be a valid number"),
        ("targets.test.accuracy=80", "targets.test.accuracy = 80: the metric lies between 0 and 1"),
        ("name=a/b", "name = 'a/b': should begin with a letter or digit, and have only letters"),
        ("seed=1e400", "seed = inf: should be a finite number"),
        ("seed=99999999999999999999", "seed = 99999999999999999999: should be less than 9223372036854775808"),
        ("sampling=random", 'sampling.kind = "random" is unknown; known: round_robin, uniform, by_examples, poisson'),
        ("checkpoint_path=3", "checkpoint_path = 3: should be a valid string"),
        ("backend={kind: ray, actors: 0}", "backend.actors = 0: should be greater than or equal to 1, or 'auto'"),
        # Numbers beyond any meaning.
        ("over_selection=1e308", "over_selection = 1e+308: should be less than or equal to 1000000"),
        ("clock.seconds_per_example=1e308", "clock.seconds_per_example = 1e+308: should be less than or equal to"),
        ("training.learning_rate=1e300", "training.learning_rate = 1e+300: should be at most 3.4e+38"),
        ("fleet.tiers.0.uplink_mbit_per_second=1e-300", "uplink of 200 of 200 clients is not between 0.001 and 1e+18"),
        (
            "fleet={kind: lognormal, uplink_mbit_per_second: {median: 1, sigma: 1000}}",
            "fleet.kind = lognormal: uplink of 199 of 200 clients is not between",
        ),
        ("data.partition={kind: dirichlet, alpha: 1e-300}", "data.partition.alpha = 1e-300: should be greater than"),
        ("data.clients=0", "data.clients = 0: should be greater than or equal to 1"),
        # Paths into lists and sections.
        ("algorithm.codec.5.levels=3", '"5" is not an element of a list of 0; use 0 to append the first'),
        ("algorithm.codec.0.levels=3", "algorithm.codec.0.kind is missing; add kind: ..."),
        ("fleet.tiers.x.share=1", '"x" is not an element of a list of 1; use 0 to 0, or 1 to append'),
        (
            "fleet.uplink_mbit_per_second.median=1",
            "fleet.uplink_mbit_per_second is unknown; known here: kind, tiers",
        ),
        ("backend.actors=2", "backend.actors is unknown; known here: kind; a field of the kind ray"),
        ("availability.probability=0.5", "availability.probability is unknown; known here: kind"),
        ("nonsense.a.b=1", "nonsense is unknown"),
        # Parts that do not fit together.
        ("algorithm.codec=[entropy, quantise]", '"entropy" takes symbols; put a quantiser before it'),
        ("algorithm.codec=[quantise, quantise]", '"quantise" gives symbols, but "quantise" after it takes values'),
        ("model=cnn", "digits has features of shape [64], but a convolution needs [channels, height, width]"),
        ("data=ml-100k", "model.kind = mlp needs samples with targets, but ml-100k has none"),
        ("model={kind: torch, factory: 'os:getcwd'}", "model.factory = os:getcwd returned str; it must return"),
        ("model={kind: torch, factory: os}", "model.factory = 'os': should be package.module:name"),
        ("replicas.seed=[0,0]", "replicas.seed = [0, 0]: give a list of different values by dotted path"),
        ("replicas.data.clients=[10,20]", "replicas share data; start runs of their own"),
        # Places.
        ("checkpoint_path=/proc/nowhere", "checkpoint_path: cannot write to /proc/nowhere"),
        ("tracking.uri=nosuch://x", "no MLflow store answers at nosuch://x (none has the scheme nosuch)"),
        ("rounds=!!python/object:os.system x", "override rounds, line 1, column 1: not valid YAML"),
        (f"rounds={'[' * 5000}", "override rounds: more than 50 levels of nesting; shorten the file"),
        ("=3", '"=3" is not an override; write a.b=value'),
        ("", '"" is not an override; write a.b=value'),
    ],
)
def test_a_bad_override(tmp_path: Path, override: str, phrase: str) -> None:
    assert_refused(narrowcast("run", *DIGITS, "--output", tmp_path / "runs", override), phrase)
    assert not list(tmp_path.iterdir())


def test_more_epochs_than_memory_has_room_for_are_named(tmp_path: Path) -> None:
    said = narrowcast("run", *DIGITS, "--output", tmp_path, "training.epochs=1000000000000")
    advice = "lower chunk_size, training.batch_size or training.epochs, and start the run again"
    assert_refused(said, "round 1: not enough memory for 20 clients at once", advice, status=1)


def test_missing_data_and_libraries_are_named_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(library: str) -> Distribution:
        raise PackageNotFoundError(library)

    monkeypatch.setattr(plugins, "distribution", absent)
    monkeypatch.setenv("NARROWCAST_DATA", str(tmp_path / "data"))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    said = narrowcast("run", "scolr-ml100k", "--backend", "ray", "--output", tmp_path / "runs")
    assert_refused(said, "narrowcast data fetch ml-100k", "--backend local", "pip install 'narrowcast[ray]'")


@pytest.mark.parametrize(
    ("words", "phrase"),
    [
        (["run", "fedmf-ml1m-rates"], "is a study, not an experiment; tune it with: narrowcast tune fedmf-ml1m-rates"),
        (["show", "fedmf-ml1m-rates"], "is a study, not an experiment"),
        (["doctor", "fedmf-ml1m-rates"], "is a study, not an experiment"),
        (["run", "my-study.yaml"], "my-study.yaml is a study, not an experiment; tune it with: narrowcast tune my-s"),
        (["tune", "fedavg-digits"], "is an experiment, not a study; run it with: narrowcast run fedavg-digits"),
        (["tune", "my-experiment.yaml"], "my-experiment.yaml is an experiment, not a study; run it with: narrowcast r"),
        (
            ["tune", "fedmf-ml1m-rates", "rounds=3"],
            '"rounds=3" is a setting of the experiment; write experiment.',
        ),
        (["run", "rounds=3"], '"rounds=3" is an override; name the experiment before it'),
        (["tune", "study.trials=3"], '"study.trials=3" is an override; name the study before it'),
        (
            ["run", "a-run"],
            "a-run is the folder of a run; to run its experiment again give a-run/config.yaml",
        ),
        (["compare", "empty"], "empty: has no result.json, so it is not a finished run; give the folder of a run"),
        (["list", "codex"], 'nothing is listed under "codex"; known: '),
        (
            ["submit", "fedavg-digits", "--address", "nope"],
            '--address "nope" is not the address of a dashboard; give http://HEAD',
        ),
        (["manifest", "raycluster", "name=A_B"], "name = 'A_B': should have at most 50 lower-case letters, digits and"),
        (["check", "nosuch:Thing"], "no module nosuch: neither installed nor in "),
    ],
)
def test_the_wrong_thing_for_a_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], phrase: str
) -> None:
    (tmp_path / "my-study.yaml").write_text("experiment: fedavg-digits\nstudy: {trials: 2}\n")
    (tmp_path / "my-experiment.yaml").write_text("data: digits\nalgorithm: fedavg\n")
    (tmp_path / "empty").mkdir()
    (tmp_path / "a-run").mkdir()
    (tmp_path / "a-run" / "config.yaml").write_text("data: digits\n")
    before = sorted(tmp_path.rglob("*"))
    monkeypatch.chdir(tmp_path)
    assert_refused(narrowcast(*words), phrase)
    assert sorted(tmp_path.rglob("*")) == before


OWN_METRICS = """
from typing import Literal

from narrowcast.platform.models.measures import Loss
from narrowcast.platform.models.measures import Accuracy


class Words(Accuracy):
    kind: Literal["words"] = "words"

    def of_means(self, means):
        return "good"


class Percent(Accuracy):
    kind: Literal["percent"] = "percent"

    @property
    def name(self):
        return "top.1 (%)"


class Lost(Loss):
    kind: Literal["lost"] = "lost"

    def per_sample(self, outputs, targets):
        raise KeyError("missing")
"""


@pytest.mark.parametrize(
    ("setting", "phrase"),
    [
        ("data={kind: npz, path: scalar.npz}", "scalar.npz: x_train: features are a single number; give an array"),
        ("data={kind: npz, path: one_class.npz}", "one_class.npz: x_train: all samples are of one class; there have"),
        (
            "model.metrics=[own:Words]",
            "model.metrics: of_means of words does not return a number for 1 means (ValueError: could not",
        ),
        ("model.metrics=[own:Percent]", 'model.metrics: "top.1 (%)" should have only letters, digits'),
        (
            "model.loss=own:Lost",
            "model.loss: lost does not take outputs [2, 10] and targets [2] of 2 samples (KeyError: 'missing",
        ),
    ],
)
def test_data_and_classes_of_ones_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, setting: str, phrase: str
) -> None:
    features, labels = np.zeros((9, 4), np.float32), np.zeros(9, np.int64)
    np.savez(tmp_path / "scalar.npz", x_train=np.float32(1), y_train=labels)
    np.savez(tmp_path / "one_class.npz", x_train=features, y_train=labels)
    (tmp_path / "own.py").write_text(OWN_METRICS)
    before = {path.name for path in tmp_path.iterdir()}
    monkeypatch.chdir(tmp_path)
    assert_refused(narrowcast("run", *DIGITS, "--output", "runs", setting), phrase)
    assert {path.name for path in tmp_path.iterdir()} - {"__pycache__"} == before


def test_a_figure_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert_refused(
        narrowcast("data", "show", "digits", "--output", tmp_path / "file"),
        f"cannot write to {tmp_path / 'file'} (File exists); give another folder with --output",
    )


def test_settings_without_effect_are_said(tmp_path: Path) -> None:
    codec = "algorithm.codec=[{kind: svd, rank: 100000}]"
    said = narrowcast("run", *DIGITS, "--output", tmp_path, "name=a", "clients_per_round=100000", codec)
    assert said.status == 0
    assert "clients_per_round = 100000: the data have 200 clients, so all of them take part in each round" in said.err
    assert "algorithm.codec.0: no matrix of the model is smaller as two factors of rank 100000" in said.err
    assert run_folders(tmp_path) == ["a"]


def test_a_failure_that_a_resume_would_repeat_offers_none(tmp_path: Path) -> None:
    said = narrowcast("run", *DIGITS, "--output", tmp_path, "training.learning_rate=3e38")
    assert_refused(said, "lower training.learning_rate", status=1)
    assert "--resume" not in said.err


@pytest.mark.slow
def test_a_closed_pipe_ends_no_command(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "narrowcast", "show", "scolr-ml100k"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=tmp_path) as command:
        assert command.stdout is not None and command.stderr is not None
        command.stdout.close()
        assert command.stderr.read() == b""
        assert command.wait() == 0


def test_names_are_completed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "runs" / "mine"
    folder.mkdir(parents=True)
    (folder / "config.yaml").touch()
    monkeypatch.chdir(tmp_path)
    shell = BashComplete(cli, {}, "narrowcast", "_NARROWCAST_COMPLETE")
    for words, incomplete, wanted in (
        (["run"], "scolr-ml1", [("plain", "scolr-ml100k"), ("plain", "scolr-ml1m")]),
        (["tune"], "fed", [("plain", "fedavg-digits-fractions"), ("plain", "fedmf-ml1m-rates")]),
        (["compare"], "m", [("plain", "mine")]),
        (["run", "--resume"], "m", [("plain", "mine")]),
        (["run"], "my", [("file", "my")]),
        ([], "lis", [("plain", "list")]),
    ):
        assert [(each.type, each.value) for each in shell.get_completions(words, incomplete)] == wanted


def test_everything_there_is_has_a_line() -> None:
    said = narrowcast("list")
    assert said.status == 0
    for name in ("scolr-ml100k", "fedmf-ml1m-rates", "colr-table4", "ml-1m", "scolr", "quantise", "rayleigh", "tpe"):
        assert f"\n{name} " in said.out
    rows = [line for line in narrowcast("list", "codecs").out.splitlines() if line and line[0] not in " ─"]
    assert {row.split(maxsplit=1)[0] for row in rows[1:]} == set(CODECS)
    assert all(len(row.split(maxsplit=1)) == 2 for row in rows)


@pytest.mark.parametrize("words", [("run", "fedavg-digits"), ("tune", "fedavg-digits"), ("benchmark", "completion-65")])
def test_a_local_backend_with_the_address_of_a_cluster_is_refused(words: tuple[str, ...]) -> None:
    said = narrowcast(*words, "--backend", "local", "--address", "auto")
    assert_refused(said, "--backend local runs in this process, and --address auto on Ray; leave out one of them")


def test_auto_is_refused_at_once_where_no_cluster_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    began = time.monotonic()
    said = narrowcast("run", "fedavg-digits", "--address", "auto", "--output", tmp_path / "runs")
    assert_refused(said, "no Ray cluster")
    (tmp_path / "ray").mkdir()
    (tmp_path / "ray" / "ray_current_cluster").write_text("127.0.0.1:9")
    assert_refused(narrowcast("run", "fedavg-digits", "--address", "auto"), "no Ray cluster answers at 127.0.0.1:9")
    assert time.monotonic() - began < 60


def test_what_is_missing_of_a_run_is_said_when_it_is_resumed(tmp_path: Path) -> None:
    small = ("fedavg-digits", "rounds=1", "data.clients=20", "name=run", "tracking.system_metrics=false")
    assert narrowcast("run", *small, "--backend", "local", "--output", tmp_path).status == 0
    shutil.rmtree(tmp_path / "run" / "checkpoint")
    again = narrowcast("run", "--resume", "run", "--output", tmp_path)
    assert_refused(again, "run has finished round 1, but", "has no checkpoint any more; put one back")
    config = (tmp_path / "run" / "config.yaml").rename(tmp_path / "kept.yaml")
    again = narrowcast("run", "--resume", "run", "--output", tmp_path)
    assert_refused(again, f"{tmp_path}/run has no config.yaml any more; put it back")
    config.rename(tmp_path / "run" / "config.yaml")
    examples = Path(__file__).parents[2] / "docs" / "examples"
    other = narrowcast("run", examples / "own_everything.yaml", "--resume", "run", "--output", tmp_path)
    assert_refused(other, "run was run with another configuration: ", "was", "now")
    assert "plugins" not in other.err
