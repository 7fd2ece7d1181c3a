"""Clients in a cell: path loss, shadowing, Rayleigh block fading, and outage."""

from __future__ import annotations

from typing import Literal, Self

import numpy as np
from pydantic import Field, model_validator

from narrowcast.algorithms.channel.channel_random import FOR_THE_WHOLE_RUN, block_of, exponentials, normals, uniforms
from narrowcast.algorithms.channel.gain_estimates import GainEstimates
from narrowcast.algorithms.channel.links import Links, check_cohort, nobody_lost
from narrowcast.algorithms.channel.regions import GaussianRegion, Independent, Region
from narrowcast.platform.types import FloatArray, Profiles
from narrowcast.platform.units import METRES, ROUNDS


class Rayleigh(GainEstimates):
    """SNR = reference x (distance / reference distance)^-exponent x shadowing x |h|^2, and B log2(1 + SNR) from it.

    A client's position and shadowing are drawn once for the run, |h|^2 ~ Exp(1) for every block of `coherence` rounds,
    independently for uplink and downlink. The rates of the profile are not used.

    With neither `margin_decibel` nor `outage_probability` the client knows its fade, sends at capacity and is never
    lost. With one of them it sends at the rate of a gain t instead of |h|^2, and is lost if |h|^2 < t: t =
    10^(-margin / 10), or the quantile of |h|^2 at the chosen probability. With `csi_error_decibel` its rate is planned
    for an estimate of |h|^2. The server knows the downlink.

    Differs from a real cell: 1. with `access: shared`, and a margin or an outage probability, a lost upload does not
    disturb the others, which are decoded as if its sender were silent; uploads lost to an estimate are noise to them.
    """

    kind: Literal["rayleigh"] = "rayleigh"
    bandwidth_hertz: float = Field(
        1e6, gt=0, allow_inf_nan=False, description="bandwidth B of a client's band, or of the shared one"
    )
    access: Literal["orthogonal", "shared"] = Field(
        "orthogonal", description="a band for each client, or one for all: the Gaussian multiple-access channel"
    )
    reference_snr_decibel: float = Field(60.0, ge=-200, le=300, description="mean uplink SNR at reference_distance")
    reference_distance: float = Field(
        1.0, gt=0, allow_inf_nan=False, description="distance of reference_snr_decibel", json_schema_extra=METRES
    )
    downlink_gain_decibel: float = Field(
        10.0, ge=-200, le=200, description="downlink SNR over uplink SNR at the same distance"
    )
    exponent: float = Field(3.0, ge=0, le=10, description="path-loss exponent")
    shadowing_decibel: float = Field(0.0, ge=0, le=30, description="standard deviation of log-normal shadowing")
    nearest: float = Field(
        10.0, gt=0, allow_inf_nan=False, description="inner radius of the ring of clients", json_schema_extra=METRES
    )
    farthest: float = Field(
        100.0,
        gt=0,
        allow_inf_nan=False,
        description="outer radius; clients are uniform over the area of the ring",
        json_schema_extra=METRES,
    )
    coherence: int = Field(1, ge=1, description="length of a fading block", json_schema_extra=ROUNDS)
    margin_decibel: float | None = Field(
        None,
        ge=-30,
        le=100,
        description="a client sends at the rate of a gain so far below the mean, and is lost below that gain",
    )
    outage_probability: float | None = Field(
        None, gt=0, lt=1, description="probability of a lost upload; sets the gain, in place of margin_decibel"
    )

    @model_validator(mode="after")
    def _one_way_to_lose(self) -> Self:
        if self.margin_decibel is not None and self.outage_probability is not None:
            raise ValueError("margin_decibel and outage_probability set the same gain; give one of them")
        if self.nearest > self.farthest:
            raise ValueError(f"nearest = {self.nearest:g} m is beyond farthest = {self.farthest:g} m")
        if not self.knows_gains and self.planned_gain() is not None:
            raise ValueError(
                "margin_decibel and outage_probability plan rates without an estimate of the fade; leave out "
                "csi_error_decibel and back_off_decibel, or plan on the estimate alone"
            )
        return self

    def draw(self, profiles: Profiles, seed: int, round_index: int) -> Links:
        """Return the rates of this round's block of fades; raise `UserError` for an empty cohort."""
        check_cohort(profiles)
        block = block_of(round_index, self.coherence)
        mean = self.mean_snr(profiles, seed)
        gain = exponentials(seed, "fading uplink", block, profiles.client)
        planned = self.planned_gain()
        uplink_snr = mean * (gain if planned is None else planned)
        planned_snr = self.planned(uplink_snr, seed, block, profiles.client)
        lost = nobody_lost(profiles) if planned is None else gain < planned
        downlink_gain = exponentials(seed, "fading downlink", block, profiles.client)
        downlink_snr = mean * 10 ** (self.downlink_gain_decibel / 10) * downlink_gain
        downlink = self.bandwidth_hertz * np.log1p(downlink_snr) / np.log(2)
        region, actual = self._region(planned_snr), None if self.knows_gains else self._region(uplink_snr)
        return Links(region.single_rates(), downlink, lost, region, actual)

    def _region(self, snr: FloatArray) -> Region:
        shared = GaussianRegion(snr, self.bandwidth_hertz)
        return shared if self.access == "shared" else Independent(shared.single_rates())

    def planned_gain(self) -> float | None:
        """Return the gain t that replaces |h|^2; None if the client knows its fade."""
        if self.margin_decibel is not None:
            return 10 ** (-self.margin_decibel / 10)
        if self.outage_probability is not None:
            return float(-np.log1p(-self.outage_probability))
        return None

    def mean_snr(self, profiles: Profiles, seed: int) -> FloatArray:
        """Return the mean linear SNR of the uplink over fades, [C]."""
        place = uniforms(seed, "place", FOR_THE_WHOLE_RUN, profiles.client)
        distance = np.sqrt(self.nearest**2 + place * (self.farthest**2 - self.nearest**2))
        shadow = self.shadowing_decibel * normals(seed, "shadowing", FOR_THE_WHOLE_RUN, profiles.client)
        loss = 10 * self.exponent * np.log10(distance / self.reference_distance)
        return 10 ** ((self.reference_snr_decibel - loss + shadow) / 10)
