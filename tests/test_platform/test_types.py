"""The test for values that are not finite."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from narrowcast.platform.types import all_finite


@pytest.mark.parametrize(
    ("values", "finite"),
    [
        ([[1.0, -2.0], [0.0, 3.0]], True),
        ([1e38, -3e38], True),  # the sum of their squares is not
        ([1.0, np.nan], False),
        ([np.inf, -np.inf], False),
        ([], True),
    ],
)
def test_values_are_finite_if_each_is(values: Any, finite: bool) -> None:
    assert all_finite(np.array(values, dtype=np.float32)) is finite
