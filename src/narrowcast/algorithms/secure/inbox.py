"""The server's side of masked input: envelopes are checked and added on arrival; only the sums are kept."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from narrowcast.algorithms.secure.bit_packing import RingElements
from narrowcast.algorithms.secure.messages import Messages
from narrowcast.algorithms.secure.protection import PublicKey
from narrowcast.platform.types import PayloadError


@dataclass
class Inbox:
    """The protected sum of each group over the clients received so far.

    `keys` are the clients' verification keys; clients that have none are refused.
    """

    messages: Messages
    round_index: int
    public: PublicKey
    keys: Mapping[int, bytes]
    sums: list[RingElements | None] = field(init=False)
    received: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.sums = [None] * len(self.messages.layout.groups)
        self._format = self.messages.update(self.round_index, self.public)

    def receive(self, data: bytes) -> int:
        """Add a client's update and return the client; a `PayloadError` leaves the sums unchanged."""
        client, bodies = self._format.open(data, self.keys)
        if client in self.received:
            raise PayloadError(f"client {client} has sent its update of round {self.round_index} before")
        scheme, numbers = self.messages.scheme, self.messages.fixed_point
        elements = [
            None if body is None else scheme.decode(group, body, numbers, self.public)
            for group, body in zip(self.messages.layout.groups, bodies, strict=True)
        ]
        self.received.add(client)
        for place, each in enumerate(elements):
            if each is not None:
                self.sums[place] = merged(self.sums[place], each, self.messages, self.public)
        return client


def merged(
    first: RingElements | None, second: RingElements | None, messages: Messages, public: PublicKey
) -> RingElements | None:
    """Return the sum of two partial sums of a group; exact, and therefore independent of the order."""
    if first is None or second is None:
        return second if first is None else first
    return messages.scheme.add(np.asarray(first), np.asarray(second), public)
