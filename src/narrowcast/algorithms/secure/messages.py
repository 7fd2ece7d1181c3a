"""Messages of a round besides the broadcast, and their sizes: updates, keys, shares, the sum to open."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace

import numpy as np

from narrowcast.algorithms.federated.sum_layout import SumLayout
from narrowcast.algorithms.secure.bit_packing import packed_bytes
from narrowcast.algorithms.secure.ckks_scheme import CKKS
from narrowcast.algorithms.secure.envelope import CONTEXT_BYTES, EnvelopeFormat
from narrowcast.algorithms.secure.fixed_point import FixedPoint
from narrowcast.algorithms.secure.masking_client import ADVERTISED_BYTES, SEALED_BYTES
from narrowcast.algorithms.secure.masks import MaskLayout
from narrowcast.algorithms.secure.protection import Masked, Protection, PublicKey
from narrowcast.algorithms.secure.ring_encoding import ring_bytes
from narrowcast.algorithms.secure.shamir import SHARE_BYTES
from narrowcast.platform.types import IntArray

RECIPIENT_BYTES, RUN_BYTES = 4, 16
_ONE_GROUP = np.ones(1, dtype=bool)


@dataclass(frozen=True)
class Messages:
    """The messages of a round in which `cohort` clients take part, each signed by its sender.

    `run` is the number that tells the run from others with the same keys, [RUN_BYTES].
    """

    scheme: Protection
    layout: SumLayout
    cohort: int
    run: bytes = b""

    @property
    def fixed_point(self) -> FixedPoint:
        """The integers of this layout's sums."""
        return self.scheme.fixed_point(self.layout.max_weight, self.layout.max_clients)

    def mask_layout(self) -> MaskLayout:
        """Return the entries that masks are drawn for."""
        sizes = [group.n_values + group.n_counts for group in self.layout.groups]
        narrow = max(self.fixed_point.value_bits, self.fixed_point.count_bits) <= 32
        return MaskLayout(sizes, 32 if narrow else 64)

    def update(self, round_index: int, public: PublicKey) -> EnvelopeFormat:
        """A client's protected update, with the groups that it sends."""
        sizes = tuple(self.scheme.group_bytes(group, self.fixed_point) for group in self.layout.groups)
        return EnvelopeFormat(round_index, self._context("update", public), sizes)

    def advertised_keys(self, round_index: int) -> EnvelopeFormat:
        """A client's public keys of the round."""
        return self._format(round_index, "keys", ADVERTISED_BYTES)

    def shares(self, round_index: int) -> EnvelopeFormat:
        """A client's sealed shares, each after its recipient."""
        return self._format(round_index, "shares", (self.cohort - 1) * (RECIPIENT_BYTES + SEALED_BYTES))

    def unmasking_shares(self, round_index: int) -> EnvelopeFormat:
        """The shares that a survivor reveals, one for each client of the cohort."""
        return self._format(round_index, "revealed", self.cohort * SHARE_BYTES)

    def ranks(self, round_index: int) -> EnvelopeFormat:
        """The cohort's ranks, which determine the clients that share the mask of a group."""
        return self._format(round_index, "ranks", packed_bytes(self.cohort, self.layout.max_rank.bit_length()))

    def survivors(self, round_index: int) -> EnvelopeFormat:
        """The clients that arrived, one bit for each client of the cohort."""
        return self._format(round_index, "survivors", -(-self.cohort // 8))

    def opened_sum(self, round_index: int) -> EnvelopeFormat:
        """The decrypted sum, as integers."""
        plain = sum(ring_bytes(group, self.fixed_point) for group in self.layout.groups)
        return self._format(round_index, "opened", plain)

    def update_bits_at_rank(self) -> IntArray:
        """Return the bits of an update at rank 0, 1, ..., [max_rank + 1], for any components of that number."""
        ranks = np.arange(self.layout.max_rank + 1)
        groups = self.layout.sent_groups(ranks, np.zeros_like(ranks), 0, 0)
        return np.array([8 * self.update(0, PublicKey()).size_bytes(each) for each in groups])

    def protocol_bits(self, cohort: int) -> int:
        """Return the uplink bits of keys and shares that each client of a cohort of this size sends."""
        if not isinstance(self.scheme, Masked):
            return 0
        messages = replace(self, cohort=cohort)
        sent = messages.advertised_keys(0), messages.shares(0), messages.unmasking_shares(0)
        return 8 * sum(each.size_bytes(_ONE_GROUP) for each in sent)

    def opened_sum_bits(self) -> int:
        """Return the uplink bits of the client that opens a sum, besides its own update."""
        return 8 * self.opened_sum(0).size_bytes(_ONE_GROUP)

    def downlink_bits(self, *, sends_ranks: bool) -> tuple[int, int]:
        """Return the downlink bits of each client besides the broadcast, and those of the opener besides that.

        Ranks that follow from links are sent to the cohort; ranks that are drawn are regenerated from the seed.
        """
        if isinstance(self.scheme, Masked):
            ranks = (self.ranks(0),) * sends_ranks
            received = sum(each.size_bytes(_ONE_GROUP) for each in (self.shares(0), self.survivors(0), *ranks))
            return 8 * (RUN_BYTES + self.cohort * self.advertised_keys(0).size_bytes(_ONE_GROUP) + received), 0
        if isinstance(self.scheme, CKKS):
            every_group = np.ones(len(self.layout.groups), dtype=bool)
            return 8 * RUN_BYTES, 8 * self.update(0, PublicKey()).size_bytes(every_group)
        return 0, 0

    def public_key_bits(self) -> int:
        """Return the downlink bits of the run's public key, which every client receives once."""
        return 8 * self.scheme.public_key_bytes() if isinstance(self.scheme, CKKS) else 0

    def _format(self, round_index: int, purpose: str, size: int) -> EnvelopeFormat:
        return EnvelopeFormat(round_index, self._context(purpose), (size,))

    def _context(self, purpose: str, public: PublicKey | None = None) -> bytes:
        """Return a hash that differs between runs and between purposes."""
        hasher = hashlib.sha256(f"{purpose} {self.scheme.model_dump_json()} {self.cohort}".encode() + self.run)
        if public is not None:
            hasher.update(repr(self.layout.groups).encode() + public.key)
        return hasher.digest()[:CONTEXT_BYTES]
