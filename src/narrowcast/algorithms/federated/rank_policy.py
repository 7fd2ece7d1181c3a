"""Rank policies: how each client chooses its rank in a round, and the sizes by which it may choose.

Letters: r_g is the rank of the global update, r_u that of client u's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
from pydantic import Field

from narrowcast.platform.config.files import Section
from narrowcast.platform.seeds import stream_keys, uniform_below
from narrowcast.platform.types import FloatArray, IntArray, Profiles


@dataclass(frozen=True)
class UpdateSizes:
    """The sizes of the updates of a chunk's clients at each rank, by which they choose theirs.

    Shapes: float_bits [C, r + 1], without a codec at rank 0..r; values [C, r], the number of values at rank 1..r;
    head_bits [C], sent beside them; rows [C], the length of a column if all columns of a client have the same,
    otherwise None.
    """

    float_bits: IntArray
    values: FloatArray
    head_bits: FloatArray
    rows: FloatArray | None = None


class RankPolicy(Protocol):
    """A frozen model of how clients choose their rank."""

    @property
    def kind(self) -> str:
        """Its name in the catalog."""
        ...

    def ranks(
        self, profiles: Profiles, global_rank: int, bits_at_rank: IntArray, seed: int, round_index: int
    ) -> IntArray:
        """Return the rank of each client, 0..r_g [C]; a client of rank 0 sends nothing.

        `bits_at_rank` [C, r_g + 1] is the size of uncoded updates of rank 0..r_g.
        """
        ...


class UniformRank(Section):
    """Each client draws its rank from 1..r_g, independently in each round.

    Reference: Nguyen et al., WWW 2024 (arXiv:2401.03748), section 5.3 and Table 4.
    """

    kind: Literal["uniform"] = "uniform"

    def ranks(
        self, profiles: Profiles, global_rank: int, bits_at_rank: IntArray, seed: int, round_index: int
    ) -> IntArray:
        """Return a rank of 1..r_g for each client, [C]."""
        del bits_at_rank
        return self.draw(profiles.client, global_rank, seed, round_index)

    def draw(self, clients: IntArray, global_rank: int, seed: int, round_index: int) -> IntArray:
        """Draw the rank of each client, [C]; public, every party regenerates it from the seed."""
        keys = stream_keys(seed, "rank", round_index, clients)
        return 1 + uniform_below(keys, np.zeros(len(clients), dtype=np.int64), np.full(len(clients), global_rank))


class BandwidthRank(Section):
    """Each client takes the highest rank whose uncoded payload its uplink carries within `upload_seconds`.

    A client that cannot afford rank 1 sends nothing in this round; the ledger records rank 0.
    """

    kind: Literal["bandwidth"] = "bandwidth"
    upload_seconds: float = Field(1.0, gt=0, description="time that an upload may take")

    def ranks(
        self, profiles: Profiles, global_rank: int, bits_at_rank: IntArray, seed: int, round_index: int
    ) -> IntArray:
        """Return the highest rank of each client, [C], whose `bits_at_rank` [C, r_g + 1] its uplink carries in time."""
        del global_rank, seed, round_index
        budget = profiles.uplink_bits_per_second * self.upload_seconds
        return (bits_at_rank[:, 1:] <= budget[:, None]).sum(axis=1)


class ChannelRank(Section):
    """Each client takes the rank that serves best within the bits that the radio gives it in this round.

    With a quantiser in the codec rank and levels are chosen together (`channel.joint`); otherwise the rank is the
    highest that fits uncoded, or with all that `secure` adds. A client that cannot afford rank 1 sends nothing, and
    the ledger records rank 0. If the radio limits no client, all clients take r_g.
    """

    kind: Literal["channel"] = "channel"

    def ranks(
        self, profiles: Profiles, global_rank: int, bits_at_rank: IntArray, seed: int, round_index: int
    ) -> IntArray:
        """Return r_g for each client, [C]: the rank where nothing limits uploads."""
        del bits_at_rank, seed, round_index
        return np.full(len(profiles), global_rank)
