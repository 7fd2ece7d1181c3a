"""Adapters as folders of peft: names, shapes and scale that its `LoraConfig` has, and what is not read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

from digits import digits
from narrowcast.platform.errors import UserError
from narrowcast.platform.models.adapters import Adapters
from narrowcast.platform.models.networks import MLP

DATA = digits([40, 33])
MODEL = Adapters(base=MLP(hidden=(16,)), rank=12, alpha=6.0).of_seed(0)
PREFIX = "base_model.model."


def learnt(model: Adapters, scale: float = 1.0) -> dict[str, np.ndarray]:
    random = np.random.default_rng(0)
    start = model.init_server(DATA, 0)
    return {name: scale * random.standard_normal(values.shape).astype(np.float32) for name, values in start.items()}


def reading(folder: Path, **fields: Any) -> Adapters:
    return Adapters(**{"base": MODEL.base, "rank": 12, "alpha": 6.0, "adapter": str(folder), **fields}).of_seed(0)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return MODEL.write_peft(learnt(MODEL), DATA, tmp_path / "adapter")


def test_a_written_adapter_has_the_names_and_the_scale_of_peft(folder: Path) -> None:
    tensors = load_file(folder / "adapter_model.safetensors")
    config = json.loads((folder / "adapter_config.json").read_text())
    shapes = {name.removeprefix(PREFIX).removesuffix(".weight"): values.shape for name, values in tensors.items()}
    assert shapes == {"1.lora_A": (12, 64), "1.lora_B": (16, 12), "3.lora_A": (10, 16), "3.lora_B": (10, 10)}
    assert (config["peft_type"], config["r"], config["lora_alpha"], config["lora_dropout"]) == ("LORA", 12, 6, 0)
    assert (config["target_modules"], config["modules_to_save"], config["bias"]) == (["1", "3"], None, "none")
    assert config["rank_pattern"] == {"^3": 10}  # peft scales by alpha over the rank of a layer, as here
    base, hidden = MODEL.base.init_server(DATA, 0), DATA.test.features.astype(np.float64)
    for layer, rank in (("1", 12), ("3", 10)):
        a, b = (tensors[f"{PREFIX}{layer}.lora_{factor}.weight"].astype(np.float64) for factor in "AB")
        hidden = hidden @ (base[f"{layer}.weight"] + 6 / rank * b @ a).T + base[f"{layer}.bias"]
        hidden = np.maximum(hidden, 0) if layer == "1" else hidden
    with torch.no_grad():
        outputs = MODEL.loaded(learnt(MODEL), DATA)(torch.from_numpy(DATA.test.features)).numpy()
    assert np.abs(outputs - hidden).max() <= 1e-6 * np.abs(hidden).max()


def test_training_begins_with_an_adapter_that_was_written(folder: Path, tmp_path: Path) -> None:
    for fields in ({}, {"factor": "b"}):
        model = reading(folder, **fields)
        model.check(DATA)
        start = model.init_server(DATA, 0)
        assert all(np.array_equal(values, learnt(MODEL)[name]) for name, values in start.items())
        whole = model.state(start, DATA)
        assert np.array_equal(whole["1.lora_A"], learnt(MODEL)["1.lora_A"])
    part = Adapters(base=MODEL.base, rank=12, targets=("1.weight",), also_trained=("3.bias",)).of_seed(0)
    values = learnt(part)
    saved = part.write_peft(values, DATA, tmp_path / "part")
    assert json.loads((saved / "adapter_config.json").read_text())["modules_to_save"] == ["3"]
    tensors = load_file(saved / "adapter_model.safetensors")
    assert np.array_equal(tensors[f"{PREFIX}3.weight"], MODEL.base.init_server(DATA, 0)["3.weight"])
    again = type(part)(**{**part.model_dump(), "adapter": str(saved)}).of_seed(0)
    assert all(np.array_equal(array, values[name]) for name, array in again.init_server(DATA, 0).items())
    with pytest.raises(UserError, match=r"and 3 has adapters and tensors of also_trained; export it with --merged"):
        both = Adapters(base=MODEL.base, also_trained=("3.bias",)).of_seed(0)
        both.write_peft(both.init_server(DATA, 0), DATA, tmp_path / "both")
    with pytest.raises(UserError, match=r"products have been added to 1.weight, and an adapter of peft"):
        MODEL.write_peft({**learnt(MODEL), "1.weight": np.zeros((16, 64), np.float32)}, DATA, tmp_path / "moved")


@pytest.mark.parametrize(
    ("fields", "setting", "reason"),
    [
        (
            {"rank": 4},
            {},
            "1.lora_A is [12, 64] there and [4, 64] here; set model.rank = 12, or give an adapter of this",
        ),
        ({"alpha": 12.0}, {}, "1 is scaled by 0.5 there, and by alpha / rank = 1 here; set model.alpha = 6"),
        ({}, {"use_rslora": True}, "1 is scaled by 1.73205 there, and by alpha / rank = 0.5 here"),
        ({}, {"alpha_pattern": {"3": 30}}, "3 is scaled by 3 there, and by alpha / rank = 0.6 here"),
        (
            {"targets": ["3.weight"]},
            {},
            "1 has adapters there and none here; set model.targets = [*.1.weight, *.3.weight]",
        ),
        ({"base": MLP(hidden=(8,))}, {"r": 12}, "1.lora_A is [12, 64] there and [8, 64] here"),
        ({}, {"peft_type": "IA3"}, "peft_type is IA3 there; only LORA"),
        ({}, {"use_dora": True}, "use_dora is True there, with which layers do not compute"),
        ({}, {"bias": "all"}, "bias is all there"),
    ],
    ids=str,
)
def test_another_adapter_is_refused_in_one_line(
    fields: dict[str, Any], setting: dict[str, Any], reason: str, folder: Path
) -> None:
    config = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps({**config, **setting}))
    with pytest.raises(UserError) as error:
        reading(folder, **fields).check(DATA)
    assert f"model.adapter = {folder}: {reason}" in str(error.value)
    assert "\n" not in str(error.value)


def test_pickles_and_tensors_of_others_are_not_read(folder: Path) -> None:
    save_file({"base_model.model.4.weight": np.zeros(2, np.float32)}, folder / "adapter_model.safetensors")
    with pytest.raises(UserError, match=r"1 has adapters here and none there"):
        reading(folder).check(DATA)
    (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin")
    with pytest.raises(UserError, match=r"adapter_model.safetensors, as save_pretrained of peft writes them"):
        reading(folder).check(DATA)
