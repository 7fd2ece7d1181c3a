"""The keys of a round as records: `RoundKeys` are public, `ClientSecrets` belong to the hosts of some clients."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from narrowcast.algorithms.federated.sum_layout import SumLayout
from narrowcast.algorithms.secure.messages import Messages
from narrowcast.algorithms.secure.participation import Participation
from narrowcast.algorithms.secure.protection import PublicKey
from narrowcast.platform.types import Arrays, BoolArray


@dataclass(frozen=True)
class RoundKeys:
    """Public data of a round: participants, their verification and advertised keys, the run's public key and number.

    `verify` has the Ed25519 key of each participant; `advertised` what each sent in the protocol's first step, empty
    without masks.
    """

    participation: Participation
    verify: Mapping[int, bytes]
    advertised: Mapping[int, bytes]
    public: PublicKey
    run: bytes

    @classmethod
    def of(cls, participation: Participation, of_run: Arrays, of_round: Arrays) -> RoundKeys:
        """Read the key store's answers to `public` and to `begin`."""
        clients = participation.clients.tolist()
        verify, advertised = (
            dict(zip(clients, map(bytes, of_round.get(name, ())), strict=False)) for name in ("verify", "keys")
        )
        return cls(participation, verify, advertised, PublicKey.of(of_run), of_run["run"].tobytes())

    def messages(self, messages: Messages) -> Messages:
        """Return the messages of this round, from those of a whole cohort of any run."""
        return replace(messages, cohort=len(self.participation.clients), run=self.run)

    def sent_groups(self, layout: SumLayout, seed: int, round_index: int) -> dict[int, BoolArray]:
        """Return the groups that each participant sends, [groups] each."""
        clients, ranks = self.participation.clients, self.participation.ranks
        return dict(zip(clients.tolist(), layout.sent_groups(ranks, clients, seed, round_index), strict=True))


@dataclass(frozen=True)
class ClientSecrets:
    """Private keys of the c clients of a chunk. Shapes: signing [c, 32]; own_seeds [c, 32]; pair_seeds [c, n, 32].

    Seeds are those of the clients' masks, by the round's n participants; None without masks. `repr` shows none of them.
    """

    signing: NDArray[Any]
    own_seeds: NDArray[Any] | None
    pair_seeds: NDArray[Any] | None

    @classmethod
    def of(cls, arrays: Arrays) -> ClientSecrets:
        """Read the key store's answer to `secrets`."""
        own, pairs = (np.asarray(arrays[name]) if name in arrays else None for name in ("own", "pairs"))
        return cls(np.asarray(arrays["signing"]), own, pairs)

    def __repr__(self) -> str:
        return "ClientSecrets(...)"
