"""Clients at positions of a localisation or of a table: distances by hand, files, and a run over such links."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

import narrowcast as nc
from narrowcast.algorithms.channel.fading import LocatedRayleigh
from narrowcast.platform.errors import UserError
from narrowcast.platform.types import Profiles
from narrowcast.solves.localisation import LiftedStress, SensorLocalisation


def profiles(clients: list[int]) -> Profiles:
    ones = np.ones(len(clients))
    return Profiles(np.array(clients), ones.astype(np.int64), ones, ones, ones)


def test_the_mean_snr_is_that_of_the_distances(tmp_path: Path) -> None:
    path = tmp_path / "places.csv"
    path.write_text("x,y\n0.5,0.9\n0.5,0.5\n3.5,4.5\n")
    channel = LocatedRayleigh(path=path, unit=100, nearest=10, exponent=3, reference_snr_decibel=60)
    found = channel.mean_snr(profiles([2, 0, 1]), 0)
    np.testing.assert_allclose(found, 1e6 * np.array([500.0, 40.0, 10.0]) ** -3, rtol=1e-12)


def test_an_experiment_runs_with_clients_at_localised_places(tmp_path: Path) -> None:
    problem, solver = SensorLocalisation(sensors=20, anchors=6, radio_range=0.55, noise=0.02).load(), LiftedStress()
    state = solver.init(problem, 0)
    for _ in range(60):
        state, _ = solver.step(problem, state)
    path = tmp_path / "answer.safetensors"
    save_file(dict(solver.answer(state)), path)
    truth = tmp_path / "truth.csv"
    assert problem.network.truth is not None
    truth.write_text("x,y\n" + "".join(f"{x!r},{y!r}\n" for x, y in problem.network.truth.tolist()))
    seconds = {}
    for place in (path, truth):
        channel = {"kind": "located_rayleigh", "path": str(place), "bandwidth_hertz": 1e4}
        changed = {"rounds": 2, "radio": {"channel": channel}, "data.clients": 20, "clients_per_round": 10}
        *_, last = nc.rounds("fedavg-digits", {**changed, "clock.compute_overhead_seconds": 0})
        seconds[place.stem] = last.record.simulated_seconds
    assert seconds["answer"] == pytest.approx(seconds["truth"], rel=0.1)
    assert seconds["answer"] != seconds["truth"]


@pytest.mark.parametrize(
    ("content", "fields", "said"),
    [
        ("x,y\n0,0\n", {}, "has 1 positions and none of client 4; add it"),
        ("x,y\n" + "0,0\n" * 5, {"base": (0, 0, 0)}, r"positions of 2 coordinates, but radio\.channel\.base has 3"),
        ("x,z\n0,a\n", {}, "cannot be read"),
        ("a,b\n0,1\n", {}, "give the answer.safetensors of a localisation"),
        ("x,y\n0,nan\n", {}, "some that are not numbers"),
    ],
)
def test_bad_files_are_one_line(tmp_path: Path, content: str, fields: dict[str, object], said: str) -> None:
    path = tmp_path / "places.csv"
    path.write_text(content)
    with pytest.raises(UserError, match=said):
        LocatedRayleigh.model_validate({"path": path, **fields}).mean_snr(profiles([4]), 0)


def test_other_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "answer.safetensors"
    save_file({"left": np.ones((2, 2))}, path)
    with pytest.raises(UserError, match="has no positions; give"):
        LocatedRayleigh(path=path).mean_snr(profiles([0]), 0)
    path.write_bytes(b"nothing")
    with pytest.raises(UserError, match="cannot be read"):
        LocatedRayleigh(path=path).mean_snr(profiles([0]), 0)
    with pytest.raises(ValueError, match="no file"):
        LocatedRayleigh(path=tmp_path / "none.csv")
