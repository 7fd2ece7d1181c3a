"""What no client trains in a model: recorded with a run, saved with its model, the same in a resume and in verify."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import narrowcast as nc
from command_line import assert_refused, narrowcast
from narrowcast.algorithms.codecs.messages import dense_wire_bits
from narrowcast.runs.verification import verify

pytestmark = pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy:DeprecationWarning")  # MLflow's store
HERE = "test_frozen_parts"
CLIENTS, ROUNDS = 4, 2


class Adapted(nn.Module):
    """A frozen body, from a file if one is given, a tied pair on top of it, and a table."""

    def __init__(self, body: str | None) -> None:
        super().__init__()
        self.body, self.first, self.second = nn.Linear(64, 12), nn.Linear(12, 12), nn.Linear(12, 12)
        self.scores = nn.Linear(12, 10)
        self.second.weight = self.first.weight
        self.register_buffer("table", torch.linspace(-1, 1, 12))
        if body is not None:
            self.body.load_state_dict(torch.load(body, weights_only=True))
        self.body.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(torch.tanh(self.body(x)) + self.table))
        return self.scores(torch.tanh(self.second(hidden)))


def make(body: str | None = None) -> nn.Module:
    return Adapted(body)


def settings(**fields: Any) -> dict[str, Any]:
    values: dict[str, Any] = {
        "data": {"kind": "digits", "clients": CLIENTS},
        "model": {"kind": "torch", "factory": f"{HERE}:make"},
        "algorithm": "fedavg",
        "backend": "local",
        "rounds": ROUNDS,
        "clients_per_round": CLIENTS,
        "tracking": {"system_metrics": False},
    }
    return values | fields


def run(output: Path, **fields: Any) -> Any:
    return nc.run(settings(**fields), output=output)


def body_file(path: Path, value: float) -> str:
    torch.save({"weight": torch.full((12, 64), value), "bias": torch.zeros(12)}, path)
    return str(path)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return run(tmp_path_factory.mktemp("frozen"), name="frozen")


@pytest.mark.slow
def test_the_saved_model_is_the_whole_state_dict(finished: Any, tmp_path: Path) -> None:
    module = make()
    assert finished.arrays().keys() == module.state_dict().keys()
    module.load_state_dict(torch.load(finished.export(tmp_path / "model.pt", "torch"), weights_only=True))
    again = finished.model()
    assert all((each == again.state_dict()[name]).all() for name, each in module.state_dict().items())
    assert again.second.weight is again.first.weight
    assert not again.body.weight.requires_grad


def test_only_what_trains_is_sent(finished: Any) -> None:
    trained = sum(each.numel() for each in make().parameters() if each.requires_grad)
    assert trained == 12 * 12 + 2 * 12 + 130  # the tied weight once
    assert finished.uplink_bits == CLIENTS * ROUNDS * dense_wire_bits(trained)


def test_the_sha256_of_the_frozen_parts_is_recorded_and_verified(finished: Any, tmp_path: Path) -> None:
    recorded = json.loads((finished.folder / "result.json").read_text())["frozen_sha256"]
    assert recorded == finished.frozen_sha256 == (finished.folder / "frozen.sha256").read_text().strip()
    assert not [check for check in verify(finished.folder, 2, trust=True) if check.problem]
    plain = run(tmp_path, name="plain", model={"kind": "mlp"})
    assert "frozen_sha256" not in json.loads((plain.folder / "result.json").read_text())
    assert not (plain.folder / "frozen.sha256").exists()


def test_another_file_under_a_frozen_body_is_refused_by_resume_and_verify(tmp_path: Path) -> None:
    path = body_file(tmp_path / "body.pt", 0.1)
    model = {"kind": "torch", "factory": f"{HERE}:make", "arguments": {"body": path}}
    one = run(tmp_path, name="one", model=model, checkpoint_every=1)
    assert (one.arrays()["body.weight"] == np.float32(0.1)).all()
    body_file(tmp_path / "body.pt", 0.2)
    message = "has other frozen parameters or buffers than where the run began"
    assert_refused(narrowcast("run", "--resume", "one", "rounds=3", "--output", tmp_path), message)
    assert_refused(narrowcast("verify", tmp_path / "one", "--trust"), message)


def test_a_run_starts_from_another_with_the_same_frozen_parts(finished: Any, tmp_path: Path) -> None:
    second = run(tmp_path, name="second", start_from=str(finished.folder), rounds=1)
    assert (second.arrays()["body.weight"] == finished.arrays()["body.weight"]).all()
    assert (second.arrays()["first.weight"] != finished.arrays()["first.weight"]).any()
    path = body_file(tmp_path / "body.pt", 0.1)
    model = {"kind": "torch", "factory": f"{HERE}:make", "arguments": {"body": path}}
    with pytest.raises(nc.UserError, match=r"its body.* is not that of this experiment, which does not train it"):
        run(tmp_path, name="third", start_from=str(finished.folder), model=model)
