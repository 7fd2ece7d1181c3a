"""Fleets, the uplink, downlink and compute speed of every client, and the virtual clock that times a round."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import ClassVar, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from narrowcast.platform.config.csv_file import Columns, CSVFile
from narrowcast.platform.config.files import Section
from narrowcast.platform.config.quantities import RATE_LIMITS, LogNormal
from narrowcast.platform.errors import UserError
from narrowcast.platform.seeds import generator
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
    uploads: Literal["parallel", "sequential"] = Field(
        "parallel",
        description="uploads of a round at the same time, or in turns, in the order in which clients are ready, over a "
        "band that each has to itself",
    )
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
        ready = download_seconds + self.compute_slowdown * simulated + self.compute_overhead_seconds
        return self.seconds_with_uploads(ready, upload_seconds)

    def seconds_with_uploads(self, ready: FloatArray, upload_seconds: FloatArray) -> FloatArray:
        """Return the seconds until the uploads of clients that are ready at these seconds have arrived, [C].

        Of clients that are ready at one instant, that with the lower place uploads first. Those that upload nothing
        wait for nobody.
        """
        if self.uploads == "parallel":
            return ready + upload_seconds
        done, free_at = ready.astype(np.float64), 0.0
        for place in np.argsort(ready, kind="stable"):
            if upload_seconds[place] > 0:
                free_at = done[place] = max(float(ready[place]), free_at) + upload_seconds[place]
        return done

    def round_seconds(self, client_seconds: FloatArray) -> float:
        """Return the duration of the round in seconds: the slowest client waited for, plus `server_seconds`."""
        return float(client_seconds.max(initial=0.0)) + self.server_seconds


_LIMITS = {
    "uplink_bits_per_second": RATE_LIMITS,
    "downlink_bits_per_second": RATE_LIMITS,
    "compute_speed": (1e-9, 1e9, "times the reference device"),
}


def check_profiles(profiles: Profiles, fleet: str, n_clients: int) -> Profiles:
    """Return the profiles; raise `UserError` unless each client has one, with rates and a speed within the limits."""
    if not isinstance(profiles, Profiles):
        raise UserError(f"fleet.kind = {fleet}: profiles returned {type(profiles).__name__}, not Profiles")
    for column in fields(Profiles):
        if (shape := np.shape(getattr(profiles, column.name))) != (n_clients,):
            raise UserError(
                f"fleet.kind = {fleet}: profiles returned {column.name} of the shape {list(shape)}, and there are "
                f"{n_clients} clients; return one profile for each"
            )
    for name, (least, most, unit) in _LIMITS.items():
        values = getattr(profiles, name)
        if (beyond := np.flatnonzero(~((values >= least) & (values <= most)))).size:
            raise UserError(
                f"fleet.kind = {fleet}: {name.partition('_bits')[0]} of {beyond.size} of {values.size} clients is not "
                f"between {least:g} and {most:g} {unit}, such as {values[beyond[0]]:g} of client {beyond[0]}; "
                "change the fleet"
            )
    return profiles


_MEGABIT = 1e6


class Tier(Section):
    """A class of devices and links, and the share of the clients that belong to it."""

    name: str = Field(description="name of the tier")
    share: float = Field(gt=0, description="share of the clients, relative to the other tiers' shares")
    uplink_mbit_per_second: float = Field(gt=0, description="uplink rate")
    downlink_mbit_per_second: float = Field(gt=0, description="downlink rate")
    compute_speed: float = Field(1.0, gt=0, description="speed relative to the clock's reference device")


_MEBIBYTE = 8 * 2**20 / _MEGABIT
WANG_2021 = Tier(
    name="wang-2021",
    share=1,
    uplink_mbit_per_second=0.25 * _MEBIBYTE,
    downlink_mbit_per_second=0.75 * _MEBIBYTE,
)
"""The link of Table 2 of Nguyen et al., WWW 2024: 0.75 MB/s down, 0.25 MB/s up (its figures imply MB = 2**20 bytes)."""


class Tiers(Section):
    """A few classes of clients, assigned at random in the stated shares."""

    kind: Literal["tiers"] = "tiers"
    tiers: tuple[Tier, ...] = Field((WANG_2021,), min_length=1, description="classes of clients")

    def profiles(self, examples: IntArray, seed: int) -> Profiles:
        """Return one profile for each entry of `examples` [U]."""
        n_clients = len(examples)
        shares = np.array([tier.share for tier in self.tiers])
        bounds = np.rint(np.cumsum(shares) / shares.sum() * n_clients).astype(np.int64)
        tier_of_place = np.searchsorted(bounds, np.arange(n_clients), side="right")
        tier = np.empty(n_clients, dtype=np.int64)
        tier[generator(seed, "fleet").permutation(n_clients)] = tier_of_place

        def column(name: str) -> NDArray[np.float64]:
            return np.array([float(getattr(tier_profile, name)) for tier_profile in self.tiers])[tier]

        return Profiles(
            np.arange(n_clients),
            examples,
            column("uplink_mbit_per_second") * _MEGABIT,
            column("downlink_mbit_per_second") * _MEGABIT,
            column("compute_speed"),
        )


class LogNormalFleet(Section):
    """Uplink, downlink and compute speed drawn independently for each client, once per run."""

    kind: Literal["lognormal"] = "lognormal"
    uplink_mbit_per_second: LogNormal = Field(LogNormal(median=2.0, sigma=1.0), description="uplink rate")
    downlink_mbit_per_second: LogNormal = Field(LogNormal(median=6.0, sigma=1.0), description="downlink rate")
    compute_speed: LogNormal = Field(
        LogNormal(median=1.0, sigma=0.5), description="speed relative to the clock's reference device"
    )

    def profiles(self, examples: IntArray, seed: int) -> Profiles:
        """Return one profile for each entry of `examples` [U]."""
        draw = generator(seed, "fleet").standard_normal((3, len(examples)))
        quantities = (self.uplink_mbit_per_second, self.downlink_mbit_per_second, self.compute_speed)
        with np.errstate(over="ignore"):  # rates that are not finite are refused with the setting's name
            uplink, downlink, speed = (
                quantity.median * np.exp(quantity.sigma * row) for quantity, row in zip(quantities, draw, strict=True)
            )
        return Profiles(np.arange(len(examples)), examples, uplink * _MEGABIT, downlink * _MEGABIT, speed)


class TraceFleet(CSVFile):
    """Profiles from a CSV file with one line for every client of the data set.

    Its columns are client (0, 1, ...), uplink_mbit_per_second, downlink_mbit_per_second and compute_speed.
    """

    kind: Literal["trace"] = "trace"
    path: Path = Field(description="CSV file with one line per client")

    columns: ClassVar[Columns] = {
        "client": int,
        "uplink_mbit_per_second": float,
        "downlink_mbit_per_second": float,
        "compute_speed": float,
    }
    number_advice: ClassVar[str] = "every column must be a number"

    def profiles(self, examples: IntArray, seed: int) -> Profiles:
        """Return one profile for each entry of `examples` [U].

        Raise `UserError` if the file lacks or repeats a client.
        """
        del seed
        table = np.full((len(examples), len(self.columns) - 1), np.nan)
        for where, row in self.rows(self.path):
            client, *values = row.values()
            if client < 0 or not all(np.isfinite(value) and value > 0 for value in values):
                raise UserError(f"{where}: got {row}; clients count from 0 and rates are above 0")
            if client < len(table):  # a trace may list more clients than the data set has
                if not np.isnan(table[client, 0]):
                    raise UserError(f"{where}: client {client} is listed twice; keep one line per client")
                table[client] = values
        if (absent := np.flatnonzero(np.isnan(table[:, 0]))).size:
            raise UserError(f"{self.path} lacks {absent.size} of {len(examples)} clients, first {absent[0]}; add them")
        return Profiles(np.arange(len(examples)), examples, table[:, 0] * _MEGABIT, table[:, 1] * _MEGABIT, table[:, 2])
