"""Overrides that reach into lists and into the defaults of sections that a file leaves out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from narrowcast.experiment import Experiment, defaults_for, load_experiment, load_replicas
from narrowcast.platform.config.files import Defaults, apply_overrides
from narrowcast.platform.errors import UserError
from narrowcast.tuning.study_file import load_study

OWN = Path(__file__).parents[3] / "docs" / "examples" / "own_everything.yaml"


@pytest.mark.parametrize(
    ("overrides", "wanted"),
    [
        (["stages=quantise", "stages.0.levels=3"], {"stages": [{"kind": "quantise", "levels": 3}]}),
        (["stages={kind: svd}", "stages.0.rank=3"], {"stages": [{"kind": "svd", "rank": 3}]}),
        (["stages=[svd, entropy]", "stages.0.rank=3"], {"stages": [{"kind": "svd", "rank": 3}, "entropy"]}),
        (["stages=[svd]", "stages.1=entropy"], {"stages": ["svd", "entropy"]}),
        (["stages=[svd]", "stages.1.kind=entropy"], {"stages": ["svd", {"kind": "entropy"}]}),
        (["stages.0.kind=svd"], {"stages": {"0": {"kind": "svd"}}}),  # without a schema, nobody knows of a list
    ],
)
def test_a_kind_or_section_is_a_list_of_one(overrides: list[str], wanted: dict[str, Any]) -> None:
    assert apply_overrides({}, overrides) == wanted


@pytest.mark.parametrize(
    ("overrides", "wanted"),
    [
        (["fleet.tiers.0.share=2"], {"fleet": {"tiers": [{"share": 2}]}}),
        (
            ["fleet=lognormal", "fleet.uplink_mbit_per_second.median=0.05"],
            {"fleet": {"kind": "lognormal", "uplink_mbit_per_second": {"median": 0.05, "sigma": 1.0}}},
        ),
        (["clock.server_seconds=1"], {"clock": {"server_seconds": 1}}),
        (["training.learning_rate=1"], {"training": {"learning_rate": 1}}),
        (["algorithm=fedavg", "algorithm.codec.0=cast"], {"algorithm": {"kind": "fedavg", "codec": ["cast"]}}),
        (
            ["algorithm={kind: fedavg, codec: quantise}", "algorithm.codec.0.levels=3"],
            {"algorithm": {"kind": "fedavg", "codec": [{"kind": "quantise", "levels": 3}]}},
        ),
        (["availability.x=1"], {"availability": {"kind": "always", "x": 1}}),
        (["nonsense.x.y=1"], {"nonsense": {"x": {"y": 1}}}),
    ],
)
def test_a_section_left_out_starts_from_its_default(overrides: list[str], wanted: dict[str, Any]) -> None:
    values = apply_overrides({}, overrides, Defaults(Experiment))
    if "tiers" in values.get("fleet", {}):  # the other fields of the default tier are there too
        assert len(values["fleet"]["tiers"][0]) > 3
        values["fleet"]["tiers"] = [{"share": values["fleet"]["tiers"][0]["share"]}]
    assert values == wanted


@pytest.mark.parametrize(
    ("file", "overrides", "wanted"),
    [
        (  # a section of the same kind, or of the kind that a name stands for, keeps its other fields
            {"algorithm": {"kind": "fedavg", "weights": "equal"}},
            ["algorithm={codec: [quantise]}", "algorithm={kind: fedavg, server_learning_rate: 0.5}"],
            {"algorithm": {"kind": "fedavg", "weights": "equal", "codec": ["quantise"], "server_learning_rate": 0.5}},
        ),
        ({"data": "digits"}, ["data={clients: 20}"], {"data": {"kind": "digits", "clients": 20}}),
        (  # a section of another kind replaces it
            {"algorithm": {"kind": "fedavg", "weights": "equal"}},
            ["algorithm={kind: scolr, rank: 4}"],
            {"algorithm": {"kind": "scolr", "rank": 4}},
        ),
        ({"training": {"epochs": 3}}, ["training={batch_size: 5}"], {"training": {"epochs": 3, "batch_size": 5}}),
        (  # sgd is what a section of digits that names no kind is of
            {"data": "digits", "training": {"epochs": 3}},
            ["training={kind: sgd, batch_size: 5}"],
            {"data": "digits", "training": {"epochs": 3, "batch_size": 5, "kind": "sgd"}},
        ),
        (
            {"data": "digits", "training": {"epochs": 3}},
            ["training={kind: factorisation_sgd, batch_size: 5}"],
            {"data": "digits", "training": {"kind": "factorisation_sgd", "batch_size": 5}},
        ),
        (  # deeper sections, and dotted keys in a mapping
            {"radio": {"upload_seconds": 3, "channel": {"kind": "rayleigh", "access": "shared"}}},
            ["radio={channel: {farthest_metres: 100}, downlink: broadcast}", "radio={channel.access: separate}"],
            {
                "radio": {
                    "upload_seconds": 3,
                    "channel": {"kind": "rayleigh", "access": "separate", "farthest_metres": 100},
                    "downlink": "broadcast",
                }
            },
        ),
        (  # the keys of targets are the user's, not fields
            {"targets": {"test.loss": [1]}},
            ["targets={test.accuracy: [0.9]}"],
            {"targets": {"test.accuracy": [0.9]}},
        ),
        ({"algorithm": {"kind": "fedavg", "codec": ["svd"]}}, ["algorithm={}"], {"algorithm": {}}),
        (
            {"algorithm": {"kind": "fedavg", "codec": ["svd", "entropy"]}},
            ["algorithm.codec={kind: quantise, levels: 3}"],
            {"algorithm": {"kind": "fedavg", "codec": {"kind": "quantise", "levels": 3}}},
        ),
    ],
)
def test_a_mapping_sets_the_fields_that_it_has(
    file: dict[str, Any], overrides: list[str], wanted: dict[str, Any]
) -> None:
    assert apply_overrides(file, overrides, defaults_for("own.yaml")) == wanted


def test_nested_overrides_of_a_study_reach_its_experiment_and_its_settings(tmp_path: Path) -> None:
    path = tmp_path / "study.yaml"
    path.write_text(
        "experiment: {base: fedavg-digits, targets: {test.accuracy: [0.5]}}\n"
        "study: {objectives: {validation.accuracy: maximize}, trials: 4, holdout: {trials: 2}}\n"
        "space: {training.learning_rate: {kind: float, low: 0.1, high: 1}}\n"
    )
    study = load_study(
        str(path),
        [
            "experiment={algorithm: {codec: [quantise]}, rounds: 7}",
            "study={trials: 5, holdout: {seeds: 2}, objectives: {validation.loss: minimize}}",
        ],
    )
    run = study.build({})
    assert [stage.kind for stage in run.algorithm.codec] == ["quantise"]
    assert (run.rounds, run.data.kind, run.clients_per_round) == (7, "digits", 20)
    assert (study.settings.trials, study.settings.holdout.trials, study.settings.holdout.seeds) == (5, 2, 2)
    assert study.settings.objectives == {"validation.loss": "minimize"}  # names of metrics, not fields


def test_only_the_named_part_of_a_default_changes() -> None:
    base = load_experiment("fedavg-digits", ["fleet=lognormal"])
    fleet = load_experiment("fedavg-digits", ["fleet=lognormal", "fleet.uplink_mbit_per_second.median=0.05"]).fleet
    assert fleet.uplink_mbit_per_second.median == 0.05
    assert fleet.uplink_mbit_per_second.sigma == base.fleet.uplink_mbit_per_second.sigma
    assert fleet.compute_speed == base.fleet.compute_speed
    codec = load_experiment("fedavg-digits", ["algorithm.codec=quantise", "algorithm.codec.0.levels=3"]).algorithm.codec
    assert [(stage.kind, stage.levels) for stage in codec] == [("quantise", 3)]
    tier = load_experiment("fedavg-digits", ["fleet.tiers.0.share=3"]).fleet.tiers[0]
    assert tier == base.model_validate(load_experiment("fedavg-digits").plain()).fleet.tiers[0].model_copy(
        update={"share": 3}
    )


def test_a_model_that_is_not_named_is_the_default_of_the_data(tmp_path: Path) -> None:
    path = tmp_path / "toy.yaml"
    path.write_text("data: digits\nalgorithm: fedavg\n")
    assert load_experiment(str(path), ["model.hidden.0=8"]).model.hidden == (8,)
    assert load_experiment(str(path), ["model.hidden.1=8"]).model.hidden == (64, 8)
    path.write_text("data: digits\nalgorithm: fedavg\nreplicas: {model.hidden.1: [8, 16]}\n")
    assert [each.model.hidden for each in load_replicas(str(path))] == [(64, 8), (64, 16)]


def test_replicas_and_studies_reach_as_far(tmp_path: Any) -> None:
    path = tmp_path / "study.yaml"
    path.write_text(
        "experiment: {base: fedavg-digits, fleet: lognormal}\n"
        "study: {objectives: {validation.accuracy: maximize}, trials: 2}\n"
        "space: {fleet.uplink_mbit_per_second.median: {kind: float, low: 0.1, high: 1}}\n"
    )
    study = load_study(str(path), ["experiment.fleet.compute_speed.sigma=0.1"])
    fleet = study.run_with({"fleet.uplink_mbit_per_second.median": 0.5}).fleet
    assert (fleet.uplink_mbit_per_second.median, fleet.uplink_mbit_per_second.sigma) == (0.5, 1.0)
    assert (fleet.compute_speed.median, fleet.compute_speed.sigma) == (1.0, 0.1)


def test_a_place_beyond_the_end_is_refused() -> None:
    with pytest.raises(UserError, match='"1" is not an element of a list of 0; use 0 to append the first'):
        apply_overrides({"algorithm": "fedavg"}, ["algorithm.codec.1.levels=3"], Defaults(Experiment))


def test_a_field_of_a_backend_says_that_it_is_ray() -> None:
    """The default, which this process is, has no fields."""
    assert load_experiment(str(OWN), ["backend.actors=2"]).backend.kind == "ray"


def test_a_named_kind_in_place_of_one_for_other_data_starts_the_section_over() -> None:
    data = "data={kind: explicit_ratings, set: ml-latest-small}"
    training = "training={kind: alternating_gradient, h_steps: 50}"
    experiment = load_experiment("fedavg-digits", [data, "model=masked_factorisation", training, "algorithm=fedmavg"])
    assert experiment.training.kind == "alternating_gradient"
    assert load_experiment("fedavg-digits", ["training={kind: sgd, learning_rate: 1}"]).training.batch_size == 10
