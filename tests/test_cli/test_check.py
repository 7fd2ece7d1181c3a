"""`narrowcast check`: laws that hold, and each kind of law broken by a class made to break it."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from command_line import assert_refused, narrowcast

EXAMPLES = Path(__file__).resolve().parents[2] / "docs" / "examples"


@pytest.mark.parametrize(
    ("spec", "registry"),
    [
        ("sign_codec:Sign", "codec"),
        ("two_moons:TwoMoons", "data"),
        ("residual_mlp:ResidualMLP", "model"),
        ("focal_loss:FocalLoss", "loss"),
        ("focal_loss:Brier", "metric"),
        ("city_fleet:CityFleet", "fleet"),
    ],
)
def test_the_examples_keep_their_laws(spec: str, registry: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(EXAMPLES)
    said = narrowcast("check", spec)
    assert said.status == 0, said.err
    assert f"{spec}: {registry}" in said.out
    assert "failed" not in said.out


BROKEN_FLEETS = {
    "Forgetful": ("np.random.default_rng().random(n) + 1", "the same seed gives other profiles"),
    "Stalled": ("np.zeros(n)", "uplink_bits_per_second of client [0] is [0.]"),
    "Short": ("np.ones(n - 1)", "has the shape"),
}
FLEET = """
from typing import Literal
import numpy as np
from pydantic import BaseModel, ConfigDict
from narrowcast.platform.types import Profiles

class {name}(BaseModel):
    \"\"\"Breaks a law.\"\"\"
    model_config = ConfigDict(frozen=True, extra="forbid")
    kind: Literal["{name}"] = "{name}"

    def profiles(self, examples, seed):
        n = len(examples)
        return Profiles(np.arange(n), examples, {uplink}, np.ones(n), np.ones(n))
"""


@pytest.mark.parametrize("name", BROKEN_FLEETS)
def test_a_fleet_that_breaks_a_law_fails(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    uplink, reason = BROKEN_FLEETS[name]
    monkeypatch.chdir(tmp_path)
    (tmp_path / f"{name.lower()}_fleet.py").write_text(FLEET.format(name=name, uplink=uplink))
    said = narrowcast("check", f"{name.lower()}_fleet:{name}")
    assert_refused(said, "laws do not hold", status=1)
    assert "failed" in said.out
    assert reason.split()[0] in said.out


@pytest.mark.parametrize(
    ("kind", "registry"), [("random", "sampler"), ("none", "pruner"), ("iid", "partition"), ("uniform", "rank_policy")]
)
def test_a_kind_of_the_catalog_is_tried_in_silence(kind: str, registry: str) -> None:
    said = narrowcast("check", kind, "--kind", registry)
    assert said.status == 0
    assert said.err == ""
    assert f"{kind}: {registry}" in said.out
    assert "failed" not in said.out


def test_what_cannot_be_checked_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert_refused(narrowcast("check", "nowhere:X"), "no module nowhere")
    assert_refused(narrowcast("check", "fedavg"), "say of what kind it is with --kind")
    assert_refused(narrowcast("check", "fedavg", "--kind", "algoritm"), 'Did you mean "algorithm"')
    methods = "check = init = init_clients = broadcast = train = fold = step = final = lambda *_: None"
    (tmp_path / "bare_algorithm.py").write_text(f"from pydantic import BaseModel\nclass X(BaseModel):\n    {methods}\n")
    assert_refused(
        narrowcast("check", "bare_algorithm:X"), "is not an algorithm: it lacks download_bits", "AlgorithmDefaults"
    )
    shutil.copy(EXAMPLES / "city_fleet.py", tmp_path / "elsewhere_fleet.py")
    assert_refused(narrowcast("check", "elsewhere_fleet:CityFleet", "underground=2"), "underground = 2")
    assert_refused(narrowcast("check", "elsewhere_fleet:CityFleet", "--kind", "data"), "is not a data", "load")
