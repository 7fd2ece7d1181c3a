"""The quantiser and the noisy channel of the wireless report, eqs. (4) to (6): vectors sent at so many levels."""

from __future__ import annotations

import numpy as np

from narrowcast.platform.types import FloatArray


def quantise(values: FloatArray, levels: int, random: np.random.Generator) -> FloatArray:
    """Round values in [0, 1] stochastically, without bias, to multiples of 1 / levels; eq. (5)."""
    scaled = values * levels
    below = np.floor(scaled)
    return (below + (random.random(values.shape) < scaled - below)) / levels


def quantise_vectors(x: FloatArray, levels: int, random: np.random.Generator) -> FloatArray:
    """Quantise vectors along the last axis by eq. (4): exact norm and signs, magnitudes by `quantise`."""
    return receive_vectors(x, levels, float(levels), random)


def receive_vectors(x: FloatArray, levels: int, budget: float, random: np.random.Generator) -> FloatArray:
    """Return vectors of `quantise_vectors` after a channel with this budget of levels; norm and signs stay exact."""
    norm = np.linalg.norm(x, axis=-1, keepdims=True)
    share = np.minimum(np.abs(x) / np.where(norm > 0, norm, 1.0), 1.0)
    return norm * np.sign(x) * receive(quantise(share, levels, random), levels, budget, random)


def receive(values: FloatArray, levels: int, budget: float, random: np.random.Generator) -> FloatArray:
    """Return values in [0, 1] that were quantised to `levels` after the channel of eq. (6); any shape."""
    if levels <= budget:
        return values
    noise = random.normal(0.0, 1 / (2 * budget), values.shape)
    return quantise(np.clip(values + noise, 0.0, 1.0), levels, random)
