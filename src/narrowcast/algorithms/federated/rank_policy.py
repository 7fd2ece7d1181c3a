"""How SCoLR's clients choose their rank in a round."""

from __future__ import annotations

from typing import Literal, Protocol

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from narrowcast.platform.kinds import Registry
from narrowcast.platform.seeds import stream_keys, uniform_below
from narrowcast.platform.types import IntArray, Profiles


class RankPolicy(Protocol):
    """A frozen model of how clients choose their rank."""

    @property
    def kind(self) -> str:
        """Its name in the catalog."""
        ...

    def ranks(self, profiles: Profiles, bits_at_rank: IntArray, seed: int, round_index: int) -> IntArray:
        """Return the rank of each client, [C]; `bits_at_rank` [C, r_g + 1] holds the bits of rank 0, 1, ..."""
        ...


class UniformRank(BaseModel):
    """Each client draws its rank from 1..r_g, independently in each round.

    Reference: Nguyen et al., WWW 2024 (arXiv:2401.03748), section 5.3 and Table 4.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: Literal["uniform"] = "uniform"

    def ranks(self, profiles: Profiles, bits_at_rank: IntArray, seed: int, round_index: int) -> IntArray:
        """The rank of each client, [C]; `bits_at_rank` [C, r_g + 1] is what rank 0, 1, ... would weigh."""
        keys = stream_keys(seed, "rank", round_index, profiles.client)
        highest = np.full(len(profiles), bits_at_rank.shape[1] - 1)
        return 1 + uniform_below(keys, np.zeros(len(profiles), dtype=np.int64), highest)


class BandwidthRank(BaseModel):
    """Each client takes the highest rank whose payload its uplink carries within `upload_seconds`.

    A client that cannot afford rank 1 sends nothing in this round; it is recorded with rank 0.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: Literal["bandwidth"] = "bandwidth"
    upload_seconds: float = Field(1.0, gt=0, description="time that an upload may take")

    def ranks(self, profiles: Profiles, bits_at_rank: IntArray, seed: int, round_index: int) -> IntArray:
        """The rank of each client, [C]; `bits_at_rank` [C, r_g + 1] is what rank 0, 1, ... would weigh."""
        del seed, round_index
        budget = profiles.uplink_bits_per_second * self.upload_seconds
        return (bits_at_rank[:, 1:] <= budget[:, None]).sum(axis=1)


class ChannelRank(BaseModel):
    """Each client takes the rank that serves best within the bits that the radio gives it in this round.

    With a quantiser in the codec it is the joint choice of rank and levels (`channel.joint`), otherwise the highest
    rank that fits, in float32 or with all that `secure` adds. A client that cannot afford rank 1 sends nothing, and is
    recorded with rank 0; where the radio limits nobody, all take r_g.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: Literal["channel"] = "channel"

    def ranks(self, profiles: Profiles, bits_at_rank: IntArray, seed: int, round_index: int) -> IntArray:
        """The highest rank, which the budget has yet to cut, [C]; `bits_at_rank` [C, r_g + 1]."""
        del seed, round_index
        return np.full(len(profiles), bits_at_rank.shape[1] - 1)


RANK_POLICIES = Registry(
    "rank_policy", RankPolicy, {"uniform": UniformRank, "bandwidth": BandwidthRank, "channel": ChannelRank}, "uniform"
)
