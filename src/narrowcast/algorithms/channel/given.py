"""Channels whose rates are given, by a file of measurements or by the fleet: `trace`, `fixed`, `lognormal`."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
from pydantic import Field

from narrowcast.algorithms.channel.links import Links, block_of, check_cohort, no_losses, normals
from narrowcast.algorithms.channel.regions import Independent
from narrowcast.platform.config.csv_file import Columns, CSVFile
from narrowcast.platform.config.fields import ROUNDS
from narrowcast.platform.config.files import Section
from narrowcast.platform.errors import UserError
from narrowcast.platform.types import FloatArray, Profiles

_RATES = ("uplink_mbit_per_second", "downlink_mbit_per_second")
_MEGABIT = 1e6


class Trace(CSVFile):
    """Rates from a CSV file: columns client, uplink_mbit_per_second, downlink_mbit_per_second, and round or time.

    `round` counts 1, 2, ... for each client without gaps. `time` is in seconds from 0; a row is valid until the
    client's next, and a round uses the row that is valid at its start. A client's rows are in ascending order. A trace
    repeats after its end; one with times ends `round_seconds` after its last row.
    """

    kind: Literal["trace"] = "trace"
    path: Path = Field(description="CSV file of rates")
    round_seconds: float = Field(60.0, gt=0, allow_inf_nan=False, description="duration of a round on the file's clock")

    columns: ClassVar[Columns] = {"client": int, **dict.fromkeys(_RATES, float)}
    clocks: ClassVar[Columns] = {"round": int, "time": float}
    number_advice: ClassVar[str] = "every column must hold a number, a trace has no gaps"

    def draw(self, profiles: Profiles, seed: int, round_index: int) -> Links:
        """Return the rates of this round; raise `UserError` for an empty cohort, a bad file, or a missing client."""
        del seed
        if not len(profiles):
            raise UserError("the cohort is empty; a channel needs at least one client")
        clients = _read(self.path, self.stamp)
        rows = np.stack([self._row(clients, int(client), round_index) for client in profiles.client])
        uplink, downlink = _MEGABIT * rows[:, 0], _MEGABIT * rows[:, 1]
        return Links(uplink, downlink, no_losses(profiles), Independent(uplink))

    def _row(self, clients: dict[int, _Client], client: int, round_index: int) -> FloatArray:
        if client not in clients:
            raise UserError(f"{self.path} has no row of client {client}; it has {len(clients)} clients, add this one")
        trace = clients[client]
        if not trace.timed:
            return np.array(trace.rates[(round_index - 1) % len(trace.rates)])
        now = (round_index - 1) * self.round_seconds % (trace.when[-1] + self.round_seconds)
        return np.array(trace.rates[int(np.searchsorted(trace.when, now, side="right")) - 1])


@dataclass
class _Client:
    timed: bool
    when: list[float] = field(default_factory=list)
    rates: list[list[float]] = field(default_factory=list)


@lru_cache(maxsize=4)
def _read(path: Path, stamp: tuple[int, ...]) -> dict[int, _Client]:
    """Return all clients of a file; `stamp` is the cache key of its content."""
    del stamp
    clients: dict[int, _Client] = {}
    for where, row in Trace.rows(path):
        _add(clients, row, where)
    return clients


def _add(clients: dict[int, _Client], row: dict[str, Any], where: str) -> None:
    client, rates = row["client"], [row[name] for name in _RATES]
    clock = "time" if "time" in row else "round"
    when = row[clock]
    if client < 0 or not all(np.isfinite(rate) and rate > 0 for rate in rates):
        raise UserError(f"{where}: client {client} with rates {rates}; clients count from 0 and rates are above 0")
    known = clients.setdefault(client, _Client(timed=clock == "time"))
    last = known.when[-1] if known.when else None
    if clock == "round" and when != (1 if last is None else last + 1):
        due = 1 if last is None else f"{last + 1:g}"
        raise UserError(
            f"{where}: client {client} has round {when} where round {due} is due; give every round in order"
        )
    if clock == "time" and not (when == 0 if last is None else np.isfinite(when) and when > last):
        due = "0, where a trace begins" if last is None else f"above {last:g}, the time of the row before"
        raise UserError(f"{where}: client {client} has time {when:g}; it must be {due}")
    known.when.append(when)
    known.rates.append(rates)


class Fixed(Section):
    """Constant links: every client has the rates of its profile, independently of the others."""

    kind: Literal["fixed"] = "fixed"

    def draw(self, profiles: Profiles, seed: int, round_index: int) -> Links:
        """Return the profiles' rates; raise `UserError` for an empty cohort."""
        del seed, round_index
        check_cohort(profiles)
        uplink = profiles.uplink_bits_per_second
        return Links(uplink, profiles.downlink_bits_per_second, no_losses(profiles), Independent(uplink))


class LogNormalRates(Section):
    """The rates of a client's profile times exp(sigma Z), with a standard normal Z per client and block of rounds."""

    kind: Literal["lognormal"] = "lognormal"
    uplink_sigma: float = Field(
        0.5,
        ge=0,
        le=10,
        description="standard deviation of the natural log of the uplink rate; the profile's is the median",
    )
    downlink_sigma: float = Field(0.5, ge=0, le=10, description="the same of the downlink rate")
    coherence: int = Field(1, ge=1, description="length of a block of constant rates", json_schema_extra=ROUNDS)

    def draw(self, profiles: Profiles, seed: int, round_index: int) -> Links:
        """Return the rates of this round's block; raise `UserError` for an empty cohort."""
        check_cohort(profiles)
        block = block_of(round_index, self.coherence)
        up, down = (normals(seed, f"channel {way}", block, profiles.client) for way in ("uplink", "downlink"))
        uplink = profiles.uplink_bits_per_second * np.exp(self.uplink_sigma * up)
        downlink = profiles.downlink_bits_per_second * np.exp(self.downlink_sigma * down)
        return Links(uplink, downlink, no_losses(profiles), Independent(uplink))
