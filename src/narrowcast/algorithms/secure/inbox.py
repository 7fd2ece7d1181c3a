"""The server's side of a sum: envelopes are checked and added as they come, and one sum is held."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from narrowcast.algorithms.secure.bit_packing import Words
from narrowcast.algorithms.secure.messages import Messages
from narrowcast.algorithms.secure.schemes import Public
from narrowcast.platform.types import PayloadError


@dataclass
class Inbox:
    """The sums of the groups that some clients of a round send; `keys` are what each signs with, by client."""

    messages: Messages
    round_index: int
    public: Public
    keys: Mapping[int, bytes]
    sums: list[Words | None] = field(init=False)
    senders: list[int] = field(init=False)
    received: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.sums = [None] * len(self.messages.layout.groups)
        self.senders = [0] * len(self.messages.layout.groups)
        self._addressed = self.messages.update(self.round_index, self.public)

    def receive(self, data: bytes) -> int:
        """Add a client's update and return who sent it; `PayloadError` leaves the sum as it was."""
        client, bodies = self._addressed.open(data, self.keys)
        if client in self.received:
            raise PayloadError(f"client {client} has sent its update of round {self.round_index} before")
        scheme, numbers = self.messages.scheme, self.messages.numbers
        words = [
            None if body is None else scheme.read(group, body, numbers, self.public)
            for group, body in zip(self.messages.layout.groups, bodies, strict=True)
        ]
        self.received.add(client)
        for place, each in enumerate(words):
            if each is not None:
                total = self.sums[place]
                self.sums[place] = each if total is None else scheme.add(total, each, self.public)
                self.senders[place] += 1
        return client


def merged(first: Words | None, second: Words | None, messages: Messages, public: Public) -> Words | None:
    """The sum of two partial sums of a group, in whatever order: both are exact."""
    if first is None or second is None:
        return second if first is None else first
    return messages.scheme.add(np.asarray(first), np.asarray(second), public)
