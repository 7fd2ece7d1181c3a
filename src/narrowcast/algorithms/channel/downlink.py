"""Downlinks: unicast, or broadcast to all clients or to groups at the rate of the weakest."""

from __future__ import annotations

from typing import Literal, Protocol

import numpy as np
from pydantic import Field

from narrowcast.platform.errors import UserError
from narrowcast.platform.section import Section
from narrowcast.platform.types import BoolArray, FloatArray, IntArray


class Downlink(Protocol):
    """The transmissions by which a cohort receives the broadcast; a frozen model."""

    @property
    def kind(self) -> str:
        """The name in the catalog."""
        ...

    def seconds(self, bits: IntArray, rates: FloatArray, waited_for: BoolArray) -> FloatArray:
        """Return the seconds until each client has its `bits`, [C]; infinity for clients not in `waited_for` [C].

        `rates` [C] are the bits per second that each client can receive. Raise `UserError` for an empty cohort or a
        rate that is not above 0.
        """
        ...


class Unicast(Section):
    """Every client downloads over its own link."""

    kind: Literal["unicast"] = "unicast"

    def seconds(self, bits: IntArray, rates: FloatArray, waited_for: BoolArray) -> FloatArray:
        """Return the time of each client's own download, [C]; raise `UserError` as `Downlink.seconds` does."""
        _check(rates)
        return np.where(waited_for, bits / rates, np.inf)


class BroadcastLink(Section):
    """One transmission for a whole group, at the rate of its weakest client that is waited for.

    With several groups, clients are sorted by rate into groups of similar size, and the server serves the fastest group
    first: compared with one broadcast to all, the first group ends earlier and the last one later. A group is sent the
    longest of its clients' downloads.
    """

    kind: Literal["broadcast"] = "broadcast"
    groups: int = Field(1, ge=1, description="number of transmissions; at most one per client")

    def seconds(self, bits: IntArray, rates: FloatArray, waited_for: BoolArray) -> FloatArray:
        """Return the time of all groups up to a client's own, [C]; raise `UserError` as `Downlink.seconds` does."""
        _check(rates)
        done = np.full(len(rates), np.inf)
        listening = np.flatnonzero(waited_for)
        fastest_first = listening[np.argsort(-rates[listening], kind="stable")]
        now = 0.0
        for group in np.array_split(fastest_first, min(self.groups, max(len(listening), 1))):
            if len(group):
                now += bits[group].max() / rates[group].min()
                done[group] = now
        return done


def _check(rates: FloatArray) -> None:
    if not len(rates):
        raise UserError("the cohort is empty; a downlink needs at least one client")
    if (bad := np.flatnonzero(~(np.isfinite(rates) & (rates > 0)))).size:
        raise UserError(
            f"place {bad[0]} of the cohort: downlink of {rates[bad[0]]} bits per second; it must be above 0"
        )
