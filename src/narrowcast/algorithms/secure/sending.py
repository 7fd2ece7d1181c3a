"""A client's update on its way to the server: rounded, protected, signed, paid for, and checked where it arrives."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace

import numpy as np

from narrowcast.algorithms.secure.inbox import Inbox
from narrowcast.algorithms.secure.messages import Messages
from narrowcast.algorithms.secure.opening import RoundKeys
from narrowcast.algorithms.secure.schemes import Masks
from narrowcast.platform.contracts import SECRET, Task
from narrowcast.platform.types import Arrays, BoolArray, Chunk, ChunkResult, ClientLedger, PayloadError

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Sending:
    """What the clients of a chunk need to send; `groups` [n, groups] says which each client of the cohort sends."""

    chunk: Chunk
    task: Task
    messages: Messages
    keys: RoundKeys
    groups: BoolArray
    held: Arrays
    inbox: Inbox

    def send(self, result: ChunkResult, place: int) -> ClientLedger:
        """Send what the client at this place of the chunk learnt; what is lost or refused has been paid for."""
        client = int(self.chunk.clients[place])
        seat = int(np.searchsorted(self.keys.cohort, client))
        sends = self.groups[seat]
        bits = self.messages.uplink_bits(sends, first=seat == 0)
        affords = self.chunk.budget_bits is None or bits <= self.chunk.budget_bits[place]
        if not (result.ledger.delivered[0] and sends.any() and affords):
            nothing = np.zeros(1, dtype=np.int64)
            return replace(result.ledger, uplink_bits=nothing, delivered=np.zeros(1, dtype=bool))
        data = self.envelope(result.partial, place, client, seat)
        delivered = bool(self.chunk.arrives()[place]) and self._accepted(data)
        return replace(result.ledger, uplink_bits=np.array([bits]), delivered=np.array([delivered]))

    def envelope(self, partial: Arrays, place: int, client: int, seat: int) -> bytes:
        """The client's contribution, protected and signed."""
        messages, round_index = self.messages, self.chunk.round_index
        key = (round_index, client)
        integers = messages.numbers.of_client(partial, messages.layout, self.groups[seat], self.task.seed, key)
        bodies = [
            None
            if each is None
            else messages.scheme.write(
                at,
                messages.layout.groups[at],
                each,
                messages.numbers,
                client,
                self._masks(place, seat, self.groups[:, at]),
                self.keys.public,
            )
            for at, each in enumerate(integers)
        ]
        signing = self.held[SECRET + "signing"][place].tobytes()
        return messages.update(round_index, self.keys.public).seal(client, bodies, signing)

    def _masks(self, place: int, seat: int, sending: BoolArray) -> Masks:
        """A client's masks for a group: with the others that send it; none where the scheme has none."""
        if SECRET + "own" not in self.held:
            return Masks(b"", {})
        pairs, cohort = self.held[SECRET + "pairs"][place], self.keys.cohort
        peers = [peer for peer in np.flatnonzero(sending) if peer != seat]
        own = self.held[SECRET + "own"][place].tobytes()
        return Masks(own, {int(cohort[peer]): pairs[peer].tobytes() for peer in peers})

    def _accepted(self, data: bytes) -> bool:
        """Whether the server takes an envelope; a round goes on without those that it does not."""
        try:
            self.inbox.receive(data)
        except PayloadError as error:
            logger.warning("round %d: an update was refused: %s", self.chunk.round_index, error)
            return False
        return True
