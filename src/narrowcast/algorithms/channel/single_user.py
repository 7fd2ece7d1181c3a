"""The single-user channel of the wireless report: exact up to a budget of levels, noisy above it."""

from __future__ import annotations

import math
from typing import Literal

import numpy as np
from pydantic import Field

from narrowcast.algorithms.channel.links import Links, check_cohort, nobody_lost
from narrowcast.algorithms.channel.regions import Independent
from narrowcast.platform.section import Section
from narrowcast.platform.types import FloatArray, Profiles
from narrowcast.platform.units import SECONDS


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


class SingleUser(Section):
    """Each client alone with a budget of K levels a coordinate, d log2 K bits a round (eq. (6) of the wireless report).

    Values quantised to k <= K levels arrive unchanged. Above the budget they arrive with N(0, 1 / (4 K^2)) added,
    clipped to [0, 1] and quantised again to k levels. The report calls this unbiased; `clipping_bias` gives its bias.

    Differs from the paper: 1. drawn as `Links`, k levels count log2 k bits, as in the wireless report, although
    0..k are k + 1 symbols, and norm and signs count nothing.
    """

    kind: Literal["single_user"] = "single_user"
    dimension: int = Field(ge=1, description="d, the number of a model's coordinates")
    uplink_levels: float = Field(
        2.0**8, gt=1, allow_inf_nan=False, description="K_U, uplink levels for each coordinate"
    )
    downlink_levels: float = Field(
        2.0**8, gt=1, allow_inf_nan=False, description="K_D, downlink levels for each coordinate"
    )
    seconds: float = Field(
        1.0,
        gt=0,
        allow_inf_nan=False,
        description="time in which a client can send its budget",
        json_schema_extra=SECONDS,
    )

    def draw(self, profiles: Profiles, seed: int, round_index: int) -> Links:
        """Return the same budget for every client and round; raise `UserError` for an empty cohort."""
        del seed, round_index
        check_cohort(profiles)
        uplink, downlink = (
            np.full(len(profiles), self.dimension * np.log2(levels) / self.seconds)
            for levels in (self.uplink_levels, self.downlink_levels)
        )
        return Links(uplink, downlink, nobody_lost(profiles), Independent(uplink))


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
