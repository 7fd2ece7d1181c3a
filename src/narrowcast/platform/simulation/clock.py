"""The virtual clock: how long a round would take on the clients' own links and devices."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

from narrowcast.platform.types import FloatArray, IntArray, Profiles


class Clock(BaseModel):
    """T = S_down / B_down + R_comp T_sim + C_comp + S_up / B_up per client; a round is its slowest client's T.

    Reference: Nguyen et al., WWW 2024 (arXiv:2401.03748), section 5.2 (2), with the constants of Wang et al., A Field
    Guide to Federated Optimization, 2021: R_comp = 7, C_comp = 10 s.

    Differs from the paper: 1. T_sim is modelled as examples x epochs x `seconds_per_example` / compute_speed, where the
    paper measures it, so that simulated time is the same on every machine. 2. every client has its own links and speed.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    seconds_per_example: float = Field(1e-6, ge=0, description="one SGD example on the simulating machine")
    compute_slowdown: float = Field(7.0, ge=0, description="R_comp, device seconds per simulated second")
    compute_overhead_seconds: float = Field(10.0, ge=0, description="C_comp, fixed per participation")
    server_seconds: float = Field(0.0, ge=0, description="T_server, added to each round")
    idle_seconds: float = Field(60.0, ge=0, description="until the server looks again where no client is available")

    def client_seconds(
        self, profiles: Profiles, examples: IntArray, download_seconds: FloatArray, upload_seconds: FloatArray
    ) -> FloatArray:
        """Seconds from the start of the round until each client's upload is in, [C]."""
        simulated = examples * self.seconds_per_example / profiles.compute_speed
        return download_seconds + self.compute_slowdown * simulated + self.compute_overhead_seconds + upload_seconds

    def round_seconds(self, client_seconds: FloatArray) -> float:
        """Seconds until the round is done: the slowest client waited for, and the server."""
        return float(client_seconds.max(initial=0.0)) + self.server_seconds
