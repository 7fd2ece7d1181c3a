"""Clients of several access points in two bands: a cohort is split so that little interference is left."""

from __future__ import annotations

import math
from typing import Literal

import numpy as np
from pydantic import Field

from narrowcast.algorithms.channel.channel_random import FOR_THE_WHOLE_RUN, block_of, exponentials, uniforms
from narrowcast.algorithms.channel.cohort_split import Split, lost_rates, split_cohort
from narrowcast.algorithms.channel.interference_region import InterferenceRegion
from narrowcast.algorithms.channel.links import Links, check_cohort, nobody_lost
from narrowcast.platform.section import Section
from narrowcast.platform.types import FloatArray, Profiles
from narrowcast.platform.units import METRES, ROUNDS

_NEAREST = 1.0
"""Least distance in metres, at which the reference SNR holds."""


class TwoBands(Section):
    """All clients of a round upload at once, each in one of two bands, and disturb the others of their band.

    A client is uniform in a square with a grid of access points and is served by the one with the best mean gain, over
    path loss and Rayleigh block fading. Its rate is B / 2 log2(1 + S / (1 + I)), with the power I that its access point
    hears from the others of its band. `split` divides the cohort: the weight of two clients is the rate that they lose
    to each other, and the largest cut of this graph leaves the least within the bands. Downlinks are those of the
    profiles.

    Source: Goemans and Williamson, Journal of the ACM 42(6), 1995, for `max_cut`.
    """

    kind: Literal["two_bands"] = "two_bands"
    bandwidth_hertz: float = Field(1e6, gt=0, allow_inf_nan=False, description="bandwidth B of both bands together")
    access_points: int = Field(25, ge=1, le=10_000, description="access points, on a grid")
    side: float = Field(
        250.0, gt=0, allow_inf_nan=False, description="side of the square of clients", json_schema_extra=METRES
    )
    reference_snr_decibel: float = Field(90.0, ge=-200, le=300, description="mean uplink SNR at one metre")
    exponent: float = Field(3.5, ge=0, le=10, description="path-loss exponent")
    coherence: int = Field(1, ge=1, description="length of a fading block", json_schema_extra=ROUNDS)
    split: Split = Field(
        "max_cut",
        description="division of the cohort: semidefinite relaxation and hyperplanes, one client after the other, "
        "moves of single clients from random splits, or a coin for each",
    )
    tries: int = Field(100, ge=1, le=10**6, description="hyperplanes of max_cut, or random splits of local_search")

    def draw(self, profiles: Profiles, seed: int, round_index: int) -> Links:
        """Return the rates of this round's block; raise `UserError` for an empty cohort."""
        check_cohort(profiles)
        gains = self.gains(profiles, seed, round_index)
        block = block_of(round_index, self.coherence)
        bands = split_cohort(lost_rates(gains), self.split, seed, self.tries, block)
        region = InterferenceRegion(gains, bands, self.bandwidth_hertz / 2)
        alone = self.bandwidth_hertz / 2 * np.log1p(np.diag(gains)) / np.log(2)
        return Links(alone, profiles.downlink_bits_per_second, nobody_lost(profiles), region)

    def gains(self, profiles: Profiles, seed: int, round_index: int) -> FloatArray:
        """Return the power over noise of client j at the access point of client i, [C, C]."""
        block = block_of(round_index, self.coherence)
        mean, faded = [], []
        across = math.ceil(math.sqrt(self.access_points))
        places = [
            self.side * uniforms(seed, f"place in the square {axis}", FOR_THE_WHOLE_RUN, profiles.client)
            for axis in ("x", "y")
        ]
        for point in range(self.access_points):
            centre = [(each + 0.5) * self.side / across for each in divmod(point, across)]
            distance = np.hypot(places[0] - centre[0], places[1] - centre[1])
            loss = 10 * self.exponent * np.log10(np.maximum(distance, _NEAREST))
            mean.append(10 ** ((self.reference_snr_decibel - loss) / 10))
            faded.append(mean[-1] * exponentials(seed, f"fading at access point {point}", block, profiles.client))
        serving = np.argmax(mean, axis=0)
        return np.asarray(np.array(faded)[serving])
