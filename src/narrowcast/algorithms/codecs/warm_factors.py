"""The right factor of a client's last update, from which the next power iteration starts."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from narrowcast.algorithms.codecs.stage import Shapes
from narrowcast.platform.seeds import generator
from narrowcast.platform.types import Arrays, FloatArray


def zero_factors(prefix: str, matrices: Shapes, rank: int) -> Arrays:
    """Return the state before the first update: zeros [d, `rank`] under `prefix` + NAME for each matrix NAME [m, d]."""
    return {prefix + name: np.zeros((int(np.prod(shape[1:])), rank), np.float32) for name, shape in matrices.items()}


def start(name: str, columns: int, rank: int, key: int, state: Arrays) -> FloatArray:
    """Return [d, r] for the first iteration: the kept columns of `name`, and normal ones from the key for others."""
    drawn = generator(key, name).standard_normal((columns, rank))
    if name in state:
        kept = np.asarray(state[name])[:, :rank]
        warm = np.flatnonzero(kept.any(axis=0))
        drawn[:, warm] = kept[:, warm]
    return drawn


def kept_factors(name: str, right: NDArray[np.floating], state: Arrays) -> Arrays:
    """Return the state after an update with the right factor [d, r]; without a state, or of an update of zeros, as is.

    The kept columns are as many as the state has, whatever the rank of the update.
    """
    if name not in state or not right.any():
        return {}
    kept = np.array(state[name], dtype=np.float32)
    shared = min(kept.shape[1], right.shape[1])
    kept[:, :shared] = right[:, :shared]
    return {name: kept}
