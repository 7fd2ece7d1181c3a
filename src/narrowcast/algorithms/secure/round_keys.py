"""The keys of a round as records: `RoundKeys` are public, `ClientSecrets` belong to the hosts of some clients."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from narrowcast.algorithms.secure.messages import Messages
from narrowcast.algorithms.secure.participation import Participation
from narrowcast.algorithms.secure.protection import PublicKey
from narrowcast.platform.types import Arrays


@dataclass(frozen=True)
class RoundKeys:
    """Public data of a round: participants, their verification and advertised keys, the run's public key and number.

    `verify` has the Ed25519 key of each participant; `advertised` what each sent in the protocol's first step, empty
    without masks. `present` are the participants that may send updates: with masks, those that shared their keys.
    """

    participation: Participation
    verify: Mapping[int, bytes]
    advertised: Mapping[int, bytes]
    present: tuple[int, ...]
    public: PublicKey
    run: bytes

    @classmethod
    def of(cls, participation: Participation, of_run: Arrays, of_round: Arrays) -> RoundKeys:
        """Read the key store's answers to `public` and to `begin`."""
        clients = participation.clients.tolist()
        present = of_round["present"].tolist() if "present" in of_round else clients
        verify = dict(zip(clients, map(bytes, of_round["verify"]), strict=True))
        advertised = dict(zip(present, map(bytes, of_round.get("keys", ())), strict=False))
        return cls(participation, verify, advertised, tuple(present), PublicKey.of(of_run), of_run["run"].tobytes())

    def messages(self, messages: Messages) -> Messages:
        """Return the messages of this round, from those of a whole cohort of any run."""
        return replace(messages, cohort=len(self.participation.clients), run=self.run)


@dataclass(frozen=True)
class ClientSecrets:
    """Private keys of the c clients of a chunk. Shapes: signing [c, 32]; own_secrets [c, 32]; pair_seeds [c, m, 32].

    An own secret gives the seeds of a client's own masks; pair seeds are by the m clients that are present. None
    without masks. `repr` shows none of them.
    """

    signing: NDArray[Any]
    own_secrets: NDArray[Any] | None
    pair_seeds: NDArray[Any] | None

    @classmethod
    def of(cls, arrays: Arrays) -> ClientSecrets:
        """Read the key store's answer to `secrets`."""
        own, pairs = (np.asarray(arrays[name]) if name in arrays else None for name in ("own", "pairs"))
        return cls(np.asarray(arrays["signing"]), own, pairs)

    def __repr__(self) -> str:
        return "ClientSecrets(...)"
