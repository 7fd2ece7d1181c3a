"""What an exported model says of its inputs, and the metrics of clients that have their own models."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open

import narrowcast as nc
from command_line import assert_refused, narrowcast

# MLflow's SQL store uses what SQLAlchemy 2.1 deprecates.
pytestmark = pytest.mark.filterwarnings("ignore::sqlalchemy.exc.SADeprecationWarning")
QUICK = {"rounds": 2, "tracking.system_metrics": False}


@pytest.mark.parametrize(
    ("dtype", "text"),
    [
        ("uint8", "uint8 [4, 4] from 0 to 255, divided by 255 before the model: give it values from 0 to 1"),
        ("float32", "float32 [16], from 0 to 9 in the training samples"),
    ],
)
def test_an_export_says_how_inputs_are_scaled(
    dtype: str, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    draw = np.random.default_rng(0)
    shape = (60, 4, 4) if dtype == "uint8" else (60, 16)
    x = draw.integers(0, 10, shape).astype(dtype)
    x[:2] = 0
    x[2:4] = 9
    y = np.arange(60) % 2
    np.savez("own.npz", x_train=x, y_train=y, x_test=x[:20], y_test=y[:20])
    data = {"kind": "npz", "path": "own.npz", "clients": 2, "validation_share": 0.0}
    nc.run({"name": "own", "data": data, "model": "mlp", "algorithm": "fedavg"}, QUICK, progress=False)
    said = narrowcast("export", "own", "--runs", "runs")
    assert said.out.splitlines() == ["model   own.safetensors", f"inputs  features: {text}"]
    with safe_open("own.safetensors", "np") as file:
        assert file.metadata() == {"features": text}
    assert nc.load_run("own").inputs == {"features": text}


def test_a_pattern_exports_a_file_for_each_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    nc.run("fedavg-digits", {**QUICK, "replicas.seed": [0, 1], "name": "a"}, progress=False)
    assert_refused(narrowcast("export", "a-*", "--output", "one"), "--output names one file, and 2 runs are exported")
    assert narrowcast("export", "a-*").status == 0
    assert sorted(path.name for path in tmp_path.glob("*.safetensors")) == [
        "a-seed-0.safetensors",
        "a-seed-1.safetensors",
    ]
    assert narrowcast("verify", "a-*", "--rounds", "0").out.count("what was checked") == 2


def test_the_metric_of_clients_own_models_stands_beside_that_of_the_global_one(tmp_path: Path) -> None:
    settings = {"data": {"kind": "digits", "clients": 10}, "evaluate_clients": "test", "model": "softmax"}
    own, shared = (
        nc.run({**settings, "name": kind, "algorithm": kind}, QUICK, output=tmp_path, progress=False)
        for kind in ("apfl", "fedavg")
    )
    label = "test accuracy of clients' own models"
    assert dict(own.summary())[label].startswith(f"mean {100 * own.final['test.accuracy.mean']:.2f} %")
    assert label not in dict(shared.summary())
    table = nc.compare([own, shared]).results_table()
    column = list(table.heads).index("test\naccuracy of clients")
    assert [row[column] for row in table.rows] == [
        f"{100 * each.final['test.accuracy.mean']:.2f} %" for each in (own, shared)
    ]
    assert "test\naccuracy of clients" not in nc.compare([shared]).results_table().heads
