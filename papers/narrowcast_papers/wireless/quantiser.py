"""The quantiser and the noisy channel of the wireless report, eqs. (4) to (6): vectors sent at so many levels."""

from __future__ import annotations

import math

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


def clipping_bias(values: FloatArray, budget: float) -> FloatArray:
    """Return the bias of the channel above the budget K for values in [0, 1], in closed form.

    At the edges it is sigma / sqrt(2 pi) = 1 / (2 K sqrt(2 pi)), inwards; it vanishes a few sigma away from them.
    """
    sigma = 1 / (2 * budget)
    return sigma * (_below(values / sigma) - _below((1 - values) / sigma))


def _below(edge: FloatArray) -> FloatArray:
    """Return E max(0, -edge - Z), Z standard normal: what clipping `edge` sigmas below the mean adds, in sigmas."""
    tail = 0.5 * np.vectorize(math.erfc, otypes=[np.float64])(edge / math.sqrt(2))
    return np.exp(-(edge**2) / 2) / math.sqrt(2 * math.pi) - edge * tail
