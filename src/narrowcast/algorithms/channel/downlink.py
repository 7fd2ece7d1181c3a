"""How a broadcast reaches the cohort: one by one, to all at the weakest client's rate, or in groups."""

from __future__ import annotations

from typing import Literal, Protocol

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from narrowcast.platform.errors import UserError
from narrowcast.platform.types import BoolArray, FloatArray, IntArray


class Downlink(Protocol):
    """A frozen model of who hears which transmission of the server."""

    @property
    def kind(self) -> str:
        """Its name in the catalog."""
        ...

    def seconds(self, bits: IntArray, rates: FloatArray, waited_for: BoolArray) -> FloatArray:
        """Seconds until each client has its `bits`, [C]; raises `UserError` for an empty cohort or a rate of 0.

        Shapes: rates [C], bits per second that a client can hear; waited_for [C], infinity for the others.
        """
        ...


class Unicast(BaseModel):
    """Every client downloads over its own link, as the virtual clock has it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: Literal["unicast"] = "unicast"

    def seconds(self, bits: IntArray, rates: FloatArray, waited_for: BoolArray) -> FloatArray:
        """The time of its own download, [C]; raises `UserError` as `Downlink` says."""
        _check(rates)
        return np.where(waited_for, bits / rates, np.inf)


class BroadcastLink(BaseModel):
    """One transmission for a whole group, at the rate of its weakest client that is waited for.

    With several groups, clients of like rates stand together, in groups of like size, and the server speaks to the
    fastest group first. The last group ends later than a broadcast to all would, the first earlier. What is sent to a
    group is the longest of its clients' downloads.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: Literal["broadcast"] = "broadcast"
    groups: int = Field(1, ge=1, description="as many as there are clients where they are fewer")

    def seconds(self, bits: IntArray, rates: FloatArray, waited_for: BoolArray) -> FloatArray:
        """The time of all groups up to a client's own, [C]; raises `UserError` as `Downlink` says."""
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
