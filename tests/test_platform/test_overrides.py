"""Overrides that reach into lists and into the defaults of sections that a file leaves out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from narrowcast.experiment import Experiment, load_experiment, load_replicas
from narrowcast.platform.errors import UserError
from narrowcast.platform.overrides import Defaults, apply_overrides
from narrowcast.tuning.study_file import load_study

OWN = Path(__file__).parents[2] / "docs" / "examples" / "own_everything.yaml"


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
