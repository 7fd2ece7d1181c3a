"""Test for values that are not finite."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray


def all_finite(values: NDArray[Any]) -> bool:
    """Return whether all values are finite.

    The sum of squares is, unless it overflows or a value is not: one pass over the values, without a temporary array.
    """
    flat = values.ravel()
    with np.errstate(over="ignore", invalid="ignore"):
        return math.isfinite(flat.dot(flat)) or bool(np.isfinite(values).all())
