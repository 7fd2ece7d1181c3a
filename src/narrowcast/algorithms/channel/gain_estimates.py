"""Imperfect knowledge of the uplink's gains: rates are planned on estimates, and lost where they are too high."""

from __future__ import annotations

from pydantic import Field

from narrowcast.algorithms.channel.channel_random import normals
from narrowcast.platform.section import Section
from narrowcast.platform.types import FloatArray, IntArray


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
