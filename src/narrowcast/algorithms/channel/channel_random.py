"""Random numbers of a channel: one per client, keyed by (seed, purpose, block of rounds, client)."""

from __future__ import annotations

import numpy as np

from narrowcast.platform.seeds import Words, stream_keys, uniform_bits
from narrowcast.platform.types import FloatArray, IntArray

FOR_THE_WHOLE_RUN = 0
"""The block of draws that hold for the whole run: distances, shadowing. Blocks of rounds count from 1."""


def block_of(round_index: int, coherence: int) -> int:
    """Return the block of a round, if the channel is constant for `coherence` rounds."""
    return 1 + (round_index - 1) // coherence


def uniforms(seed: int, purpose: str, block: int, clients: IntArray) -> FloatArray:
    """Return uniform numbers in the open interval (0, 1), [C]."""
    return _uniform(stream_keys(seed, purpose, block, clients), 0)


def exponentials(seed: int, purpose: str, block: int, clients: IntArray) -> FloatArray:
    """Return exponential numbers with mean 1, [C]: the power gain |h|^2 of Rayleigh fading."""
    return -np.log1p(-uniforms(seed, purpose, block, clients))


def normals(seed: int, purpose: str, block: int, clients: IntArray) -> FloatArray:
    """Return standard normal numbers, [C], by the Box-Muller transform."""
    keys = stream_keys(seed, purpose, block, clients)
    return np.sqrt(-2 * np.log(_uniform(keys, 0))) * np.cos(2 * np.pi * _uniform(keys, 1))


def _uniform(keys: Words, counter: int) -> FloatArray:
    words = uniform_bits(keys, np.full(len(keys), counter, dtype=np.int64))
    return ((words >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53
