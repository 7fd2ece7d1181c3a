"""All values of an update as one vector, and back."""

from __future__ import annotations

from math import ceil, prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from narrowcast.algorithms.codecs.stage import Shapes, Tensors


def n_values(shapes: Shapes) -> int:
    """Return the number of values of tensors of these shapes."""
    return sum(map(prod, shapes.values()))


def share_of(fraction: float, count: int) -> int:
    """Return ceil(fraction count), at most `count`; 7 for 0.07 of 100, of which the product in float64 is above 7."""
    return min(count, max(ceil(fraction * count - 1e-9), int(count > 0)))


def flatten(tensors: Tensors) -> NDArray[Any]:
    """Return the values of all tensors [n], in the order of the tensors."""
    return np.concatenate([values.ravel() for values in tensors.values()] or [np.empty(0, np.float32)])


def unflatten(values: NDArray[Any], shapes: Shapes) -> Tensors:
    """Return tensors of these shapes from the values [n, or more]."""
    parts, place = Tensors(), 0
    for name, shape in shapes.items():
        parts[name] = values[place : place + prod(shape)].reshape(shape)
        place += prod(shape)
    return parts
