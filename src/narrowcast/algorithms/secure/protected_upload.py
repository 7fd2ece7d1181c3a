"""A client's upload under secure aggregation: rounded to integers, protected, signed, counted, checked on arrival."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from narrowcast.algorithms.secure.bit_packing import RingElements
from narrowcast.algorithms.secure.fixed_point import Integers
from narrowcast.algorithms.secure.inbox import Inbox
from narrowcast.algorithms.secure.messages import Messages
from narrowcast.algorithms.secure.round_keys import ClientSecrets, RoundKeys
from narrowcast.platform.seeds import PrivateSeed
from narrowcast.platform.types import Arrays, Chunk, ChunkResult, ClientLedger, PayloadError

logger = logging.getLogger(__name__)


def masked(integers: Integers, mask: RingElements | None) -> Integers:
    """Return the integers plus a client's mask, modulo 2^64, if it has one."""
    return integers if mask is None else (integers.view(np.uint64) + mask).view(np.int64)


@dataclass(frozen=True)
class UploadProtector:
    """Sends the uploads of a chunk's clients to an inbox."""

    chunk: Chunk
    private_seed: PrivateSeed
    messages: Messages
    keys: RoundKeys
    secrets: ClientSecrets
    inbox: Inbox

    def send(self, result: ChunkResult, place: int) -> ClientLedger:
        """Send the result of the client at this place of the chunk; lost and refused uploads count their bits.

        A client that does not take part sends nothing. A client that stopped answering before its upload, or whose
        training did not stay finite, is counted like one whose upload was lost.
        """
        client, ledger, participation = int(self.chunk.clients[place]), result.ledger, self.keys.participation
        if client not in participation.rule.sent:
            nothing, rank = np.zeros(1, dtype=np.int64), np.minimum(ledger.rank, 0)
            return replace(ledger, rank=rank, uplink_bits=nothing, delivered=nothing.astype(bool))
        delivered = bool(ledger.delivered[0]) and client in self.keys.present
        if delivered:
            data = self.envelope(result.partial, place, client)
            delivered = bool(self.chunk.arrives()[place]) and self._accepted(data)
        bits = participation.uplink_bits[[np.searchsorted(participation.clients, client)]]
        return replace(ledger, uplink_bits=bits, delivered=np.array([delivered]))

    def values_cut(self, result: ChunkResult, place: int) -> tuple[int, int]:
        """Return how many values of the client at this place are cut at the clip, and how many it sends.

        The server does not see this: it is for the simulation's record.
        """
        sent = self.keys.participation.rule.sent.get(int(self.chunk.clients[place]))
        if sent is None or not result.ledger.delivered[0]:
            return 0, 0
        return self.messages.fixed_point.values_cut(result.partial, self.messages.layout, sent)

    def envelope(self, partial: Arrays, place: int, client: int) -> bytes:
        """Return the client's partial sum, protected and signed."""
        messages, round_index, groups = self.messages, self.chunk.round_index, self.keys.participation.rule.sent[client]
        numbers, public = messages.fixed_point, self.keys.public
        integers = numbers.of_client(partial, messages.layout, groups, self.private_seed, (round_index, client))
        bodies = [
            None if each is None else messages.scheme.encode(group, masked(each, mask), numbers, public)
            for group, each, mask in zip(messages.layout.groups, integers, self._masks(place, client), strict=True)
        ]
        return messages.update(round_index, public).seal(client, bodies, self.secrets.signing[place].tobytes())

    def _masks(self, place: int, client: int) -> Sequence[RingElements | None]:
        """Return a client's mask of each group; None for schemes without masks."""
        if self.secrets.own_secrets is None or self.secrets.pair_seeds is None:
            return [None] * len(self.messages.layout.groups)
        own_secret, pairs = self.secrets.own_secrets[place].tobytes(), self.secrets.pair_seeds[place]
        seeds = {peer: seed.tobytes() for peer, seed in zip(self.keys.present, pairs, strict=True) if peer != client}
        return self.messages.mask_layout().of_client(client, own_secret, seeds, self.keys.participation.rule)

    def _accepted(self, data: bytes) -> bool:
        """Return whether the server accepts an envelope; a round continues without the refused ones."""
        try:
            self.inbox.receive(data)
        except PayloadError as error:
            logger.warning("round %d: an update was refused: %s", self.chunk.round_index, error)
            return False
        return True
