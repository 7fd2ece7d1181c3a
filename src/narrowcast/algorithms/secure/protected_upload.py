"""A client's update on its way to the server: rounded, protected, signed, paid for, and checked where it arrives."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from narrowcast.algorithms.secure.bit_packing import Words
from narrowcast.algorithms.secure.inbox import Inbox
from narrowcast.algorithms.secure.messages import Messages
from narrowcast.algorithms.secure.unmasking import RoundKeys
from narrowcast.platform.contracts import SECRET, Task
from narrowcast.platform.types import Arrays, BoolArray, Chunk, ChunkResult, ClientLedger, PayloadError

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Sending:
    """What the clients of a chunk need to send; `groups` [G] says which each client of the participation sends."""

    chunk: Chunk
    task: Task
    messages: Messages
    keys: RoundKeys
    groups: Mapping[int, BoolArray]
    held: Arrays
    inbox: Inbox

    def send(self, result: ChunkResult, place: int) -> ClientLedger:
        """Send what the client at this place of the chunk learnt; what is lost or refused has been paid for.

        Who takes no part in the sum sends nothing. Whose training left the finite numbers has agreed on masks already,
        and is counted as if its update was lost.
        """
        client, ledger = int(self.chunk.clients[place]), result.ledger
        if client not in self.groups:
            nothing, rank = np.zeros(1, dtype=np.int64), np.minimum(ledger.rank, 0)
            return replace(ledger, rank=rank, uplink_bits=nothing, delivered=nothing.astype(bool))
        seat = np.searchsorted(self.keys.participation.clients, client)
        delivered = bool(ledger.delivered[0])
        if delivered:
            data = self.envelope(result.partial, place, client)
            delivered = bool(self.chunk.arrives()[place]) and self._accepted(data)
        bits = self.keys.participation.uplink_bits[[seat]]
        return replace(ledger, uplink_bits=bits, delivered=np.array([delivered]))

    def envelope(self, partial: Arrays, place: int, client: int) -> bytes:
        """The client's contribution, protected and signed."""
        messages, round_index, groups = self.messages, self.chunk.round_index, self.groups[client]
        key = (round_index, client)
        integers = messages.numbers.of_client(partial, messages.layout, groups, self.task.seed, key)
        masks = self._masks(place, client)
        bodies = [
            None if each is None else messages.scheme.write(group, each, messages.numbers, self.keys.public, mask)
            for group, each, mask in zip(messages.layout.groups, integers, masks, strict=True)
        ]
        signing = self.held[SECRET + "signing"][place].tobytes()
        return messages.update(round_index, self.keys.public).seal(client, bodies, signing)

    def _masks(self, place: int, client: int) -> Sequence[Words | None]:
        """A client's masks of each group, with the others that send it; none where the scheme has none."""
        if SECRET + "own" not in self.held:
            return [None] * len(self.messages.layout.groups)
        own, pairs = self.held[SECRET + "own"][place].tobytes(), self.held[SECRET + "pairs"][place]
        seeds = {peer: seed.tobytes() for peer, seed in zip(self.groups, pairs, strict=True) if peer != client}
        return self.messages.masked_groups().of_client(client, own, seeds, self.groups)

    def _accepted(self, data: bytes) -> bool:
        """Whether the server takes an envelope; a round goes on without those that it does not."""
        try:
            self.inbox.receive(data)
        except PayloadError as error:
            logger.warning("round %d: an update was refused: %s", self.chunk.round_index, error)
            return False
        return True
