"""The radio of an experiment: a channel, an allocation of the upload time, and a downlink."""

from __future__ import annotations

from typing import Annotated, Literal, Protocol, Self

import numpy as np
from pydantic import ConfigDict, Field, model_validator

from narrowcast.algorithms.channel.allocation import Allocation, MaxMin
from narrowcast.algorithms.channel.given import Fixed
from narrowcast.algorithms.channel.links import Channel
from narrowcast.algorithms.channel.regions import Independent
from narrowcast.platform.config.catalog import ALLOCATIONS, CHANNELS, DOWNLINKS
from narrowcast.platform.config.files import Section
from narrowcast.platform.contracts import LinkAllocation, Radio, RateDistortion
from narrowcast.platform.errors import UserError
from narrowcast.platform.types import BoolArray, FloatArray, IntArray, Profiles


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


class CellRadio(Radio, Section):
    """The links of a cell. Without `upload_seconds` uploads have no budget; with it, a round's uploads share that time.

    Then `allocation` gives each client the bits that it may send within the channel's rate region in `upload_seconds`,
    and it sends at that rate. A client that cannot send its least payload sends nothing in the round. The allocation
    sees the channel's estimates alone; the gains themselves decide which uploads are lost.
    """

    model_config = ConfigDict(arbitrary_types_allowed=True)

    channel: Annotated[Channel, CHANNELS] = Field(Fixed(), description="rates of the links in a round")
    allocation: Annotated[Allocation, ALLOCATIONS] = Field(
        MaxMin(), description="division of a round's uplink bits among its clients"
    )
    downlink: Annotated[Downlink, DOWNLINKS] = Field(Unicast(), description="transmission of the broadcast")
    upload_seconds: float | None = Field(
        None,
        gt=0,
        allow_inf_nan=False,
        description="simulated time for all uploads of a round; null: uploads have no budget",
    )

    @model_validator(mode="after")
    def _has_a_use(self) -> Self:
        if self.upload_seconds is None and self.allocation != MaxMin():
            raise ValueError("allocation divides the upload time; give upload_seconds too")
        return self

    def share(
        self, profiles: Profiles, rate_distortion: RateDistortion | None, seed: int, round_index: int
    ) -> LinkAllocation:
        """Return the rates and budgets of a cohort; raise `UserError` if the channel cannot serve it."""
        links = self.channel.draw(profiles, seed, round_index)
        rates = links.uplink_bits_per_second
        if self.upload_seconds is None:
            if not isinstance(links.region, Independent):
                raise UserError(
                    f"radio.channel.kind = {self.channel.kind} is one band for all; set its time per round with "
                    "radio.upload_seconds"
                )
            return LinkAllocation(None, _or_none(links.lost_at(rates)), rates, links.downlink_bits_per_second)
        least = np.zeros(len(profiles), dtype=np.int64) if rate_distortion is None else rate_distortion.least_bits
        budget = self.allocation.bits(
            links.region, self.upload_seconds, least, errors=None if rate_distortion is None else rate_distortion.errors
        )
        allocated = np.where(budget > 0, budget / self.upload_seconds, rates)
        lost = _or_none(links.lost_at(budget / self.upload_seconds))
        return LinkAllocation(budget, lost, allocated, links.downlink_bits_per_second)

    def download_seconds(self, bits: IntArray, rates: FloatArray) -> FloatArray:
        """Return the seconds until each client has its download of `bits` [C], [C]."""
        return self.downlink.seconds(bits, rates, np.ones(len(bits), dtype=bool))


def _or_none(lost: BoolArray) -> BoolArray | None:
    return lost if lost.any() else None
