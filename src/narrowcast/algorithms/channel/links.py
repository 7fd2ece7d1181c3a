"""The links of a cohort in a round: the contract of channels, their random numbers, and their estimates of gains.

A channel draws one random number for each client, keyed by (seed, purpose, block of rounds, client).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from pydantic import Field

from narrowcast.algorithms.channel.regions import Region, undecodable
from narrowcast.platform.config.files import Section
from narrowcast.platform.errors import UserError
from narrowcast.platform.seeds import Words, stream_keys, uniform_bits
from narrowcast.platform.types import BoolArray, FloatArray, IntArray, Profiles


@dataclass(frozen=True)
class Links:
    """The links of a round's cohort, all [C] in the order of its profiles.

    `uplink_bits_per_second` is a client's rate while the others are silent; `region` has the rates that are feasible
    together, its users are indices in the cohort. `lost` marks uploads lost to outage: their bits count, and they are
    not in the sum. Where gains are estimated, rates and `region` follow from the estimates, and `actual` is the region
    of the gains themselves, which only the loss of uploads depends on; None: `region` is exact.
    """

    uplink_bits_per_second: FloatArray
    downlink_bits_per_second: FloatArray
    lost: BoolArray
    region: Region
    actual: Region | None = None

    def __post_init__(self) -> None:
        sizes = {len(self.uplink_bits_per_second), len(self.downlink_bits_per_second), len(self.lost), len(self.region)}
        sizes |= {len(self.region if self.actual is None else self.actual)}
        assert len(sizes) == 1, f"links of different cohorts: {sizes}"

    def lost_at(self, bits_per_second: FloatArray) -> BoolArray:
        """Return the uploads [C] that are lost at these planned rates [C], as a mask; 0 stands for a silent client."""
        return self.lost if self.actual is None else self.lost | undecodable(self.actual, bits_per_second)


class Channel(Protocol):
    """The links between clients and server, round by round; a frozen model."""

    @property
    def kind(self) -> str:
        """The name in the catalog."""
        ...

    def draw(self, profiles: Profiles, seed: int, round_index: int) -> Links:
        """Return the links of this cohort in this round (counted from 1); raise `UserError` for an empty cohort.

        Pure: each client's rates depend on (seed, round, client) alone, never on the rest of the cohort.
        """
        ...


def check_cohort(profiles: Profiles) -> None:
    """Raise `UserError` for an empty cohort, and for rates that are not finite and above 0."""
    if not len(profiles):
        raise UserError("the cohort is empty; a channel needs at least one client")
    for direction in ("uplink", "downlink"):
        rates = getattr(profiles, f"{direction}_bits_per_second")
        if (bad := np.flatnonzero(~(np.isfinite(rates) & (rates > 0)))).size:
            client, rate = profiles.client[bad[0]], rates[bad[0]]
            raise UserError(f"client {client}: {direction} of {rate} bits per second; it must be finite and above 0")


def no_losses(profiles: Profiles) -> BoolArray:
    """Return a mask without outages, [C]."""
    return np.zeros(len(profiles), dtype=bool)


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


class GainEstimates(Section):
    """Base of the channels whose uplink gains are known with an error, to the server and to the clients alike.

    The estimate of a gain g is g 10^(sigma Z / 10), with sigma = `csi_error_decibel` and a standard normal Z for each
    client and block of rounds: the log-normal error of Viterbi and Viterbi, Erlang Capacity of a Power Controlled CDMA
    System, IEEE JSAC 11(6), 1993. Rates are planned for the estimate less `back_off_decibel`, and an upload is lost if
    the planned rates exceed what the gains themselves carry (`Links.lost_at`). With both at 0 nothing is lost.
    """

    csi_error_decibel: float = Field(
        0.0, ge=0, le=30, description="standard deviation of the estimate of an uplink gain; 0: known exactly"
    )
    back_off_decibel: float = Field(
        0.0, ge=-30, le=100, description="how far below the estimated gain uplink rates are planned"
    )

    @property
    def knows_gains(self) -> bool:
        """Return whether rates are planned for the gains themselves."""
        return self.csi_error_decibel == 0 and self.back_off_decibel == 0

    def planned(self, snr: FloatArray, seed: int, block: int, clients: IntArray) -> FloatArray:
        """Return the SNRs that rates are planned for, linear, [C]; `snr` [C] are those of the channel."""
        if self.knows_gains:
            return snr
        error = self.csi_error_decibel * normals(seed, "csi error", block, clients)
        return snr * 10 ** ((error - self.back_off_decibel) / 10)
