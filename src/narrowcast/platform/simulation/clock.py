"""The virtual clock: duration of a round on the clients' own links and devices."""

from __future__ import annotations

from pydantic import Field

from narrowcast.platform.section import Section
from narrowcast.platform.types import FloatArray, IntArray, Profiles

_MOST = 1e9
"""Bound of each constant; their products and sums over a run stay finite."""


class Clock(Section):
    """T = S_down / B_down + R_comp T_sim + C_comp + S_up / B_up per client; a round takes the T of its slowest client.

    Reference: Nguyen et al., WWW 2024 (arXiv:2401.03748), section 5.2 (2), with R_comp = 7 of Wang et al., A Field
    Guide to Federated Optimization, 2021. Their C_comp is 10 s, next to which the links of small models hardly count.

    Differs from the paper: 1. T_sim is modelled as examples x epochs x `seconds_per_example` / compute_speed, where the
    paper measures it, so that simulated time is the same on every machine. 2. every client has its own links and
    compute speed.
    """

    seconds_per_example: float = Field(
        1e-6, ge=0, le=_MOST, description="training time of one example on the reference device"
    )
    compute_slowdown: float = Field(7.0, ge=0, le=_MOST, description="R_comp, device time over modelled training time")
    compute_overhead_seconds: float = Field(0.0, ge=0, le=_MOST, description="C_comp, fixed time per participation")
    server_seconds: float = Field(0.0, ge=0, le=_MOST, description="T_server, added to the time of each round")
    idle_seconds: float = Field(60.0, ge=0, le=_MOST, description="duration of a round in which no client is available")

    def client_seconds(
        self,
        profiles: Profiles,
        examples: IntArray | FloatArray,
        download_seconds: FloatArray,
        upload_seconds: FloatArray,
    ) -> FloatArray:
        """Return the seconds from the start of the round until each client's upload has arrived, [C].

        `examples` [C] are those trained in all epochs, times the work on each, relative to that on the whole model.
        """
        simulated = examples * self.seconds_per_example / profiles.compute_speed
        return download_seconds + self.compute_slowdown * simulated + self.compute_overhead_seconds + upload_seconds

    def round_seconds(self, client_seconds: FloatArray) -> float:
        """Return the duration of the round in seconds: the slowest client waited for, plus `server_seconds`."""
        return float(client_seconds.max(initial=0.0)) + self.server_seconds
