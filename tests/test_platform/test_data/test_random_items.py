"""Torch Datasets and data classes that draw: from data.seed, or refused by one line."""

from __future__ import annotations

import logging
import random
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch

from narrowcast.platform.data.formats import TorchDataset
from narrowcast.platform.data.soundness import load_checked
from narrowcast.platform.data.synthetic import Synthetic
from narrowcast.platform.errors import UserError

MODULE = """
import numpy as np, random, torch

class Items:
    def __init__(self, how):
        self.how, self.own = how, np.random.default_rng(0 if how == "seeded" else None)
        self.rows = np.random.rand(40, 3) if how == "built" else np.arange(120.0).reshape(40, 3)

    def __len__(self):
        return 40

    def noise(self):
        return {"torch": lambda: torch.rand(3).numpy(), "numpy": lambda: np.random.rand(3),
                "random": lambda: random.random(), "seeded": lambda: self.own.random(3),
                "own": lambda: self.own.random(3)}.get(self.how, lambda: 0.0)()

    def __getitem__(self, index):
        return (self.rows[index] + self.noise()).astype("float32"), index % 2
"""


@pytest.fixture
def factory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "random_items.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    return "random_items:Items"


def disturb() -> None:
    torch.rand(5)
    np.random.rand(5)
    random.random()


@pytest.mark.parametrize("how", ["torch", "numpy", "random", "seeded", "built"])
def test_what_is_drawn_follows_from_the_seed_of_the_data(
    how: str, factory: str, caplog: pytest.LogCaptureFixture
) -> None:
    sets = []
    for seed in (0, 0, 1):
        disturb()
        fields = {"factory": factory, "arguments": {"how": how}, "clients": 4, "seed": seed, "validation_share": 0}
        with caplog.at_level(logging.WARNING):
            sets.append(TorchDataset.model_validate(fields).load())
    first, again, other = (np.sort(each.train.features, axis=0) for each in sets)
    assert np.array_equal(first, again)
    assert np.array_equal(first, other) == (how == "seeded")
    said = "items are random; each is read once, drawn from data.seed" in caplog.text
    assert said == (how != "built")


def test_items_of_a_generator_without_a_seed_are_refused(factory: str) -> None:
    with pytest.raises(UserError, match=r"\(train\): items are random, by a generator that nothing seeds"):
        TorchDataset(factory=factory, arguments={"how": "own"}, clients=4).load()


def test_items_that_are_the_same_each_time_are_said_nothing_of(factory: str, caplog: pytest.LogCaptureFixture) -> None:
    TorchDataset(factory=factory, arguments={"how": "plain"}, clients=4).load()
    assert not caplog.text


class Drawn(Synthetic):
    """Takes its seed from NumPy's global generator."""

    kind: Literal["drawn"] = "drawn"  # type: ignore[assignment]

    def load(self) -> Any:
        return Synthetic(clients=30, seed=int(np.random.randint(1000))).load()


def test_a_data_class_draws_from_the_seed_of_the_data() -> None:
    digests = []
    for seed in (0, 0, 1):
        disturb()
        digests.append(load_checked(Drawn(seed=seed)).digest)
    assert digests[0] == digests[1] != digests[2]
