"""Every packaged experiment gives the model, the bits and the simulated time that were written down for it."""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from command_line import narrowcast
from narrowcast.experiment import load_experiment, packaged_experiments
from narrowcast.platform.data.sets import SETS
from processor import processor

pytestmark = pytest.mark.filterwarnings(
    "ignore:The ``noload`` loader strategy:DeprecationWarning"
)  # MLflow's SQL store
EXPECTED = Path(__file__).with_name("packaged_results.csv")
ROUNDS = {"colr-ckks-ml1m": 2, "scolr-masked-ml1m": 5, "scolr-mnist": 3, "scolr-channel-ml1m": 10}
FIELDS = ("model_sha256", "uplink_bits", "downlink_bits", "simulated_seconds")


def rows() -> list[dict[str, str]]:
    with EXPECTED.open(newline="") as file:
        return list(csv.DictReader(file))


def result_of(name: str, backend: str, rounds: int, output: Path, *settings: str) -> Mapping[str, Any]:
    """The result of a packaged experiment, shortened to so many rounds."""
    actors = ["backend.actors=2"] if backend == "ray" else []
    words = [f"rounds={rounds}", f"evaluate_every={rounds}", "tracking.system_metrics=false", *actors, *settings]
    said = narrowcast("run", name, "--backend", backend, "--output", output, *words)
    assert said.status == 0, said.err
    result: Mapping[str, Any] = json.loads((output / name / "result.json").read_text())
    return result


def assert_as_written_down(row: Mapping[str, str], backend: str, output: Path) -> None:
    result = result_of(row["experiment"], backend, int(row["rounds"]), output)
    if row["processor"] == processor():
        assert {field: str(result[field]) for field in FIELDS} == {field: row[field] for field in FIELDS}
    else:  # entropy-coded uploads, and with them the time, follow the last bit of every value
        for field in FIELDS[1:]:
            assert result[field] == pytest.approx(float(row[field]), rel=1e-3), field


def needing(name: str) -> list[pytest.MarkDecorator]:
    """The mark of a packaged experiment whose data set does not come with a package."""
    data = load_experiment(name).data
    named = {data.kind, getattr(data, "set", "")} & SETS.keys()
    return [pytest.mark.data(*named)] if named else []


ROWS = [pytest.param(row, id=row["experiment"], marks=needing(row["experiment"])) for row in rows()]


@pytest.mark.parametrize("row", ROWS)
def test_in_this_process(row: dict[str, str], tmp_path: Path) -> None:
    assert_as_written_down(row, "local", tmp_path)


ON_RAY = {"fedavg-digits": (), "scolr-channel-ml1m": (pytest.mark.thorough,)}
"""One of each kind of local training, of which one has a radio, as joining Ray takes a quarter of a minute.

Those with `secure` are compared in test_killed_actors.py, factorisation on more actors in test_ray_backend.py.
"""


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.usefixtures("shared_ray")
@pytest.mark.parametrize(
    "row",
    [pytest.param(*row.values, id=row.id, marks=[*row.marks, *ON_RAY[row.id]]) for row in ROWS if row.id in ON_RAY],
)
def test_on_two_actors(row: dict[str, str], tmp_path: Path) -> None:
    assert_as_written_down(row, "ray", tmp_path)


def test_every_packaged_experiment_is_written_down() -> None:
    assert sorted(row["experiment"] for row in rows()) == sorted(packaged_experiments())
