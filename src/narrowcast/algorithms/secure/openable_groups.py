"""The groups of a round whose sum may be opened: one public rule, which the server and every client evaluate."""

from __future__ import annotations

import hashlib
from collections.abc import Collection
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from narrowcast.platform.types import BoolArray


@dataclass(frozen=True)
class OpenableGroups:
    """The groups that the participants, n clients, were told to send, `rows` [n, groups], and the senders a sum needs.

    The sum of a group is opened if at least `least_senders` of the survivors sent the group. A round has at least
    `threshold` survivors; a group is at risk if fewer than `least_senders` of its senders may be among them.
    """

    clients: tuple[int, ...]
    rows: BoolArray = field(repr=False)
    threshold: int
    least_senders: int

    @cached_property
    def sent(self) -> dict[int, BoolArray]:
        """The groups that each participant sends, [groups] each."""
        return dict(zip(self.clients, self.rows, strict=True))

    @cached_property
    def at_risk(self) -> BoolArray:
        """The groups that dropouts could leave with too few senders, [groups]."""
        planned, most_dropouts = self.rows.sum(axis=0), len(self.clients) - self.threshold
        return np.asarray(planned - most_dropouts < self.least_senders)

    def opened(self, survivors: Collection[int]) -> BoolArray:
        """Return the groups whose sum over these survivors may be opened, [groups]."""
        arrived = np.array([client in survivors for client in self.clients], dtype=bool)
        return np.asarray(self.rows[arrived].sum(axis=0) >= self.least_senders)

    def risky(self, client: int) -> list[int]:
        """Return the places of the groups at risk that a client sends."""
        return self._risky[client]

    def fully_opened(self, opened: BoolArray) -> set[int]:
        """Return the clients that sent none but `opened` groups [groups]."""
        hidden = np.asarray((self.rows & ~opened).any(axis=1)).tolist()
        return {client for client, hides in zip(self.clients, hidden, strict=True) if not hides}

    @cached_property
    def _risky(self) -> dict[int, list[int]]:
        return {client: np.flatnonzero(sent & self.at_risk).tolist() for client, sent in self.sent.items()}

    @cached_property
    def digest(self) -> bytes:
        """A hash of what the client was told, [32]: equal at two clients only if all of it is."""
        told = f"{self.threshold} {self.least_senders} {self.rows.shape} {self.clients}"
        return hashlib.sha256(told.encode() + np.packbits(self.rows).tobytes()).digest()


def with_enough_senders(sent: BoolArray, least_senders: int) -> BoolArray:
    """Return the groups [n, groups] without those that fewer than `least_senders` of the n clients would send."""
    return sent & (sent.sum(axis=0) >= least_senders)
