"""Experiments: the packaged ones, their way through YAML and pickle, and what identifies a run."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest

from narrowcast.experiment import Experiment, build_experiment, load_experiment, packaged_experiments
from narrowcast.platform.config.catalog import DATA, MODEL_DEFAULTS
from narrowcast.platform.config.files import flatten
from narrowcast.platform.config.yaml import read_yaml, write_yaml
from narrowcast.platform.errors import UserError

NAMES = [
    "colr-ckks-ml1m",
    "colr-ml1m",
    "ditto-digits",
    "fedavg-digits",
    "fedmavg-ml-latest-small",
    "fedmf-ml1m",
    "scolr-channel-ml1m",
    "scolr-masked-ml1m",
    "scolr-ml100k",
    "scolr-ml1m",
    "scolr-mnist",
]
LOCAL = ("ditto-digits", "fedavg-digits", "fedmavg-ml-latest-small")
packaged = pytest.mark.parametrize("name", NAMES)

# Nguyen et al., WWW 2024, with what their released code fixes; every default is written out.
PAPER: dict[str, Any] = {
    "seed": 0,
    "rounds": 1000,
    "clients_per_round": 60,
    "sampling": "round_robin",
    "downlink": "every_round",
    "data.kind": "ml-1m",
    "data.layout": "ncf",
    "data.validation": "none",
    "data.min_interactions": 20,
    "data.seed": None,  # that of the run
    "model.kind": "matrix_factorisation",
    "model.embedding_dim": 64,
    "algorithm.aggregation": "per_item_mean",
    "algorithm.rows": "all",
    "training.kind": "factorisation_sgd",
    "training.learning_rate": 0.5,
    "training.batch_size": 256,
    "training.epochs": 2,
    "training.weight_decay": 5e-4,
    "training.negatives": 4,
    "training.train_negatives": "clean",  # the paper's are leaky, which `narrowcast reproduce` sets
    "clock.compute_slowdown": 7.0,
    "clock.compute_overhead_seconds": 10.0,
    "clock.server_seconds": 0.0,
    "fleet.kind": "tiers",
    "fleet.tiers.0.uplink_mbit_per_second": 0.25 * 2**23 / 1e6,
    "fleet.tiers.0.downlink_mbit_per_second": 0.75 * 2**23 / 1e6,
}
ALGORITHMS: dict[str, dict[str, Any]] = {
    "fedmf-ml1m": {
        "kind": "fedmf",
        "aggregation": "per_item_mean",
        "rows": "all",
        "codec": [],
        "downlink_codec": [],
        "download": None,
    },
    "colr-ml1m": {
        "kind": "colr",
        "rank": 4,
        "aggregation": "per_item_mean",
        "basis": "orthonormal",
        "rows": "all",
        "codec": [],
        "downlink_codec": [],
        "download": None,
    },
    "scolr-ml1m": {
        "kind": "scolr",
        "rank": 8,
        "rank_policy": {"kind": "uniform"},
        "aggregation": "per_item_mean",
        "basis": "orthonormal",
        "rows": "all",
        "codec": [],
        "downlink_codec": [],
        "download": None,
    },
}


def test_the_packaged_experiments_are_these_and_say_what_they_are() -> None:
    summaries = packaged_experiments()
    assert list(summaries) == NAMES
    assert all(len(summary) > 20 and not summary.startswith("#") for summary in summaries.values())
    assert len(set(summaries.values())) == len(NAMES)


def test_packaged_experiments_name_two_ray_actors_but_those_whose_rounds_are_short() -> None:
    backends = {name: load_experiment(name).backend for name in NAMES}
    assert {backends.pop(name).kind for name in LOCAL} == {"local"}
    assert {(each.kind, getattr(each, "actors", None)) for each in backends.values()} == {("ray", 2)}


@packaged
def test_a_packaged_experiment_goes_through_yaml_and_pickle(name: str, tmp_path: Path) -> None:
    experiment = load_experiment(name)
    assert experiment.name == name
    path = tmp_path / "copy.yaml"
    write_yaml(experiment.plain(), path)
    for copy in (
        load_experiment(str(path)),
        build_experiment(read_yaml(path.read_text(), "copy"), "copy"),
        pickle.loads(pickle.dumps(experiment)),
    ):
        assert copy == experiment
        assert copy.plain() == experiment.plain()
        assert copy.digest() == experiment.digest()


@packaged
def test_every_field_is_printed(name: str) -> None:
    experiment = load_experiment(name)
    assert set(experiment.plain()) == set(Experiment.model_fields)
    printed = flatten(experiment.plain())
    backend = "local" if name in LOCAL else "ray"
    for key, value in {"name": name, "backend.kind": backend, "tracking.uri": None}.items():
        assert printed[key] == value


@pytest.mark.parametrize("name", ALGORITHMS)
def test_the_settings_of_the_paper(name: str) -> None:
    experiment = load_experiment(name)
    got = flatten(experiment.plain())
    assert {key: got.get(key) for key in PAPER} == PAPER
    sends_whole = {"codec": [], "server_learning_rate": 1.0}
    assert experiment.plain()["algorithm"] == ALGORITHMS[name] | sends_whole
    assert len(experiment.plain()["fleet"]["tiers"]) == 1


def test_a_file_of_ones_own_gives_the_run_its_name(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("data: ml-100k\nalgorithm: colr\n")
    experiment = load_experiment(str(path), ["algorithm.rank=2", "rounds=3"])
    assert (experiment.name, experiment.rounds) == ("mine", 3)
    assert experiment.plain()["algorithm"]["rank"] == 2
    assert load_experiment(str(path), ["name=other"]).name == "other"


@pytest.mark.parametrize(
    ("data", "batch_size"), [("ml-100k", 64), ("ml-latest-small", 64), ("ml-1m", 256), ("{kind: ncf, path: x}", 256)]
)
@pytest.mark.parametrize("training", ["", "training: {}\n", "training: {epochs: 7}\n"])
def test_each_data_set_has_its_training_defaults(tmp_path: Path, data: str, batch_size: int, training: str) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(f"data: {data}\nalgorithm: fedmf\n{training}")
    got = load_experiment(str(path)).training
    assert (got.learning_rate, got.batch_size, got.weight_decay) == (0.5, batch_size, 5e-4)
    assert got.epochs == (7 if "epochs" in training else 2)
    assert load_experiment(str(path), ["training.batch_size=9"]).training.batch_size == 9
    assert load_experiment(str(path), ["data=ml-100k"]).training.batch_size == 64


@pytest.mark.parametrize(
    "override",
    [
        "name=other",
        "backend=local",
        "backend.actors=7",
        "tracking.experiment=other",
        "tracking.uri=http://127.0.0.1:1",
        "rounds=7",
        "evaluate_every=7",
        "checkpoint_every=7",
    ],
)
def test_identity_ignores_what_results_do_not_depend_on(override: str) -> None:
    one, other = load_experiment("scolr-ml100k"), load_experiment("scolr-ml100k", [override])
    assert one != other
    assert one.identity() == other.identity()
    assert one.digest() == other.digest()


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("seed=1", "seed"),
        ("clients_per_round=59", "clients_per_round"),
        ("chunk_size=29", "chunk_size"),
        ("sampling=uniform", "sampling"),
        ("downlink=every_round", "downlink"),
        ("clock.server_seconds=1", "clock.server_seconds"),
        ("data.seed=1", "data.seed"),
        ("model.embedding_dim=32", "model.embedding_dim"),
        ("algorithm.rank=15", "algorithm.rank"),
        ("algorithm.rank_policy.upload_seconds=0.06", "algorithm.rank_policy.upload_seconds"),
        ("training.learning_rate=0.4", "training.learning_rate"),
        ("fleet.tiers.3.share=2", "fleet.tiers.3.share"),
    ],
)
def test_identity_sees_what_results_depend_on(override: str, key: str) -> None:
    one, other = load_experiment("scolr-ml100k"), load_experiment("scolr-ml100k", [override])
    before, after = one.identity(), other.identity()
    assert [name for name in before if before[name] != after[name]] == [key]
    assert list(before) == list(after)
    assert one.digest() != other.digest()


def test_the_data_follow_the_seed_of_the_run_unless_their_own_is_set(tmp_path: Path) -> None:
    def seeds(*overrides: str, source: str | Experiment = "fedavg-digits") -> tuple[int, Any]:
        experiment = load_experiment(source, overrides)
        return experiment.seed, experiment.data_source.seed  # type: ignore[attr-defined]

    assert seeds() == (0, 0)
    assert seeds("seed=3") == (3, 3)
    assert seeds("seed=3", "data.seed=1") == (3, 1)
    assert seeds("data={kind: digits, clients: 20}", "seed=3") == (3, 3)
    # A written or built experiment still follows another seed.
    assert seeds("seed=4", source=load_experiment("fedavg-digits", ["seed=3"])) == (4, 4)
    assert seeds("seed=4", source=str(load_experiment("fedavg-digits").save(tmp_path / "saved.yaml"))) == (4, 4)
    zero, one = (load_experiment("fedavg-digits", [f"seed={seed}"]).data_source.load() for seed in (0, 1))
    assert zero.digest != one.digest
    assert load_experiment("fedavg-digits", ["seed=1", "data.seed=0"]).data_source.load().digest == zero.digest
    for kind, source in DATA.items():
        if "seed" in source.model_fields:
            assert source.model_fields["seed"].default is None, kind


@pytest.mark.parametrize("kind", ["digits", "diabetes", "synthetic", "python-docs", "mnist", "ml-100k"])
def test_the_default_model_fits_the_data(kind: str) -> None:
    experiment = build_experiment({"name": "x", "data": kind, "algorithm": "fedavg"}, "x")
    assert experiment.model.kind == MODEL_DEFAULTS.get(kind, "mlp")
    experiment.task(experiment.data_source.load())
    hidden = build_experiment({"name": "x", "data": "digits", "algorithm": "fedavg", "model": {"hidden": [8]}}, "x")
    assert hidden.model.kind == "mlp"


def test_a_password_is_not_printed() -> None:
    uri = "https://me:secret@mlflow.example:5000/x"
    experiment = load_experiment("scolr-ml100k", [f'tracking.uri="{uri}"'])
    assert experiment.tracking.uri == uri
    assert experiment.plain()["tracking"]["uri"] == "https://***@mlflow.example:5000/x"


@pytest.mark.parametrize("name", ["run 1", "../run", "a/b", "", ".hidden", "-x", "a\\b"])
def test_a_name_that_is_no_folder_name_is_refused(name: str) -> None:
    with pytest.raises(UserError, match=r"name = '.*': .*should begin with a letter or digit"):
        load_experiment("scolr-ml100k", [f"name='{name}'"])


def test_an_experiment_cannot_be_changed() -> None:
    experiment = load_experiment("scolr-ml100k")
    with pytest.raises(ValueError, match="frozen"):
        experiment.seed = 1  # type: ignore[misc]


CODED = 'algorithm.codec=[{kind: quantise, norms: column}, "entropy"]'


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ([], "this run sends none"),
        (["algorithm={kind: fedmf, rows: all, codec: [quantise]}"], "this run sends none"),
        (["algorithm={kind: fedavg, codec: [quantise]}"], "this run sends none"),
        (["secure=plain"], "this run sends none"),
        ([CODED, "training.negatives=0"], r"training\.negatives = 0 draws none"),
    ],
)
def test_negatives_are_shared_only_where_that_shortens_an_upload(settings: list[str], why: str) -> None:
    refused = load_experiment("scolr-ml100k", [*settings, "training.shared_negatives=true"])
    data = refused.data.load()
    with pytest.raises(UserError, match=rf"^training\.shared_negatives = true: .*{why}.*; leave it out$"):
        refused.task(data)
    accepted = load_experiment("scolr-ml100k", [CODED, "training.shared_negatives=true"])
    assert accepted.task(data).training.shared_negatives
