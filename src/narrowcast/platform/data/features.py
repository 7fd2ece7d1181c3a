"""Inputs of samples: one array, or several by name, which a module takes as keyword arguments."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

Features = NDArray[Any] | Mapping[str, NDArray[Any]]
"""One array [n, ...], or arrays [n, ...] by the name of the module's argument, in ascending order of names."""

Each = TypeVar("Each")
Result = TypeVar("Result")


def each_input(function: Callable[[Each], Result], inputs: Each | Mapping[str, Each]) -> Result | dict[str, Result]:
    """Return the function of the one input, or of each input by its name."""
    if isinstance(inputs, Mapping):
        return {name: function(values) for name, values in inputs.items()}
    return function(inputs)


def by_name(features: Features) -> Mapping[str, NDArray[Any]]:
    """Return the arrays by name; that of one array alone is empty."""
    return features if isinstance(features, Mapping) else {"": features}


def rows_of_inputs(features: Features, rows: Any) -> Features:
    """Return the samples at these rows of each array."""
    return each_input(lambda values: values[rows], features)


def joined(parts: Sequence[Features]) -> Features:
    """Return the samples of all parts, which have the same names, one after the other."""
    if not isinstance(first := parts[0], Mapping):
        return np.concatenate([values for part in parts for values in by_name(part).values()])
    return {name: np.concatenate([by_name(part)[name] for part in parts]) for name in first}


def one_array(features: Features) -> NDArray[Any]:
    """Return the one array of data sets that have no names; raise `TypeError` for others."""
    if isinstance(features, Mapping):
        raise TypeError(f"the inputs {', '.join(features)} are several arrays")
    return features


def signature(features: Features) -> tuple[tuple[str, tuple[int, ...], str], ...]:
    """Return the name, the shape of a sample and the type of each array, which data of one kind have in common."""
    return tuple((name, values.shape[1:], values.dtype.str) for name, values in by_name(features).items())


def described(features: Features) -> str:
    """Return the shapes and types in words: `[n, 1, 28, 28] uint8`, or `input_ids [n, 16] int64, ...`."""
    return ", ".join(
        f"{name} [{', '.join(['n', *map(str, values.shape[1:])])}] {values.dtype}".lstrip()
        for name, values in by_name(features).items()
    )
