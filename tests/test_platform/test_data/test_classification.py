from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from narrowcast.platform.data.classification import Classification, hold_out
from narrowcast.platform.data.image_sets import CIFAR10, MNIST, FashionMNIST
from narrowcast.platform.data.scikit_learn import Digits
from narrowcast.platform.errors import UserError


@pytest.mark.usefixtures("root")
def test_missing_sets_name_the_command() -> None:
    sets: tuple[Classification, ...] = (MNIST(), FashionMNIST(), CIFAR10())
    for model in sets:
        name = model.model_dump()["kind"]
        with pytest.raises(UserError, match=f"^{name} was not found: .*; run: narrowcast data fetch {name}$"):
            model.load()  # type: ignore[attr-defined]


def test_holding_out() -> None:
    kept, held_out = hold_out(100, 0.25, 4)
    assert (len(kept), len(held_out)) == (75, 25)
    assert np.array_equal(np.sort(np.concatenate([kept, held_out])), np.arange(100))
    assert (np.diff(held_out) > 0).all()
    assert len(hold_out(100, 0, 4)[1]) == 0
    with pytest.raises(UserError, match=r"validation_share 0.9 leaves no training samples of 1; use a smaller"):
        hold_out(1, 0.9, 0)


@pytest.mark.parametrize(
    "wrong",
    [
        {"clients": 0},
        {"validation_share": 1},
        {"validation_share": -0.1},
        {"seed": -1},
        {"shards": 2},
        {"partition": "x"},
    ],
    ids=str,
)
def test_models_refuse_what_they_do_not_know(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        Digits.model_validate(wrong)
    with pytest.raises(UserError, match="the data set has no users"):
        Digits(partition="natural").load()
