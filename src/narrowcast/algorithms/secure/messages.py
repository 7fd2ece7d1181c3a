"""Messages of a round besides the broadcast, and their sizes: updates, keys, shares, the sum to open."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace

import numpy as np

from narrowcast.algorithms.federated.sum_layout import SumLayout
from narrowcast.algorithms.secure.bit_packing import packed_bytes
from narrowcast.algorithms.secure.envelope import CONTEXT_BYTES, EnvelopeFormat
from narrowcast.algorithms.secure.fixed_point import FixedPoint
from narrowcast.algorithms.secure.masks import MaskLayout
from narrowcast.algorithms.secure.protection import Encryption, Masked, Protection, PublicKey
from narrowcast.algorithms.secure.ring_encoding import ring_bytes
from narrowcast.algorithms.secure.shamir import SECRET_BYTES, SHARE_BYTES
from narrowcast.platform.types import BoolArray, IntArray

ADVERTISED_BYTES = 3 * 32
RECIPIENT_BYTES, RUN_BYTES, TAG_BYTES = 4, 16, 16
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

    @property
    def active(self) -> bool:
        """Return whether survivors sign the list of survivors before they reveal anything."""
        return isinstance(self.scheme, Masked) and self.scheme.adversary == "active"

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

    def shares(self, round_index: int, recipients: int, at_risk: int) -> EnvelopeFormat:
        """The sealed shares of a client that sends `at_risk` groups at risk, each after its recipient."""
        return self._format(round_index, "shares", recipients * int(sealed_bytes(np.array(at_risk))))

    def survivors_seen(self, round_index: int, told: bytes) -> EnvelopeFormat:
        """The list of survivors as a client was sent it, under its signature; `told` is a hash of what it was told."""
        message = self._format(round_index, "survivors seen", self._list_bytes)
        return replace(message, context=hashlib.sha256(message.context + told).digest()[:CONTEXT_BYTES])

    def unmasking_shares(self, round_index: int, at_risk: int) -> EnvelopeFormat:
        """The shares that a survivor reveals, one for each client of the cohort, and its own seeds of groups at risk.

        A share or a seed that the client does not reveal is zeros.
        """
        return self._format(round_index, "revealed", self.cohort * SHARE_BYTES + at_risk * SECRET_BYTES)

    def ranks(self, round_index: int) -> EnvelopeFormat:
        """The cohort's ranks, which determine the clients that share the mask of a group."""
        return self._format(round_index, "ranks", packed_bytes(self.cohort, self.layout.max_rank.bit_length()))

    def survivors(self, round_index: int) -> EnvelopeFormat:
        """The clients that arrived, one bit for each client of the cohort."""
        return self._format(round_index, "survivors", self._list_bytes)

    @property
    def _list_bytes(self) -> int:
        return -(-self.cohort // 8)

    def opened_sum(self, round_index: int) -> EnvelopeFormat:
        """The decrypted sum, as integers."""
        plain = sum(ring_bytes(group, self.fixed_point) for group in self.layout.groups)
        return self._format(round_index, "opened", plain)

    def most_bits_at_rank(self) -> IntArray:
        """Return the bits of an update at rank 0, 1, ..., [max_rank + 1], for any components of that number.

        Under masks, with the seeds that the client reveals if all components are at risk.
        """
        ranks = np.arange(self.layout.max_rank + 1)
        groups = self.layout.sent_groups(ranks, np.zeros_like(ranks), 0, 0)
        seeds = groups.sum(axis=1) * SECRET_BYTES if self._may_be_at_risk else 0
        return self.update_bits(groups) + 8 * seeds

    def update_bits(self, groups: BoolArray) -> IntArray:
        """Return the bits of updates with these groups [C, groups], [C]."""
        message = self.update(0, PublicKey())
        return 8 * (message.size_bytes(np.zeros(groups.shape[1], dtype=bool)) + groups @ np.array(message.sizes))

    def most_protocol_bits(self, cohort: int) -> int:
        """Return the most uplink bits of keys and shares that a client of a cohort of this size sends.

        The seeds of groups at risk are counted by `most_bits_at_rank`.
        """
        if not isinstance(self.scheme, Masked):
            return 0
        messages = replace(self, cohort=cohort)
        recipients = max(0, cohort - self.scheme.survivors_needed(cohort)) + 1
        return 8 * (messages._same_bytes + recipients * int(sealed_bytes(np.array(int(self._may_be_at_risk)))))

    def protocol_bits(self, at_risk: IntArray) -> IntArray:
        """Return the uplink bits of keys and shares of a round's clients, which send so many groups at risk, [C]."""
        if not isinstance(self.scheme, Masked):
            return np.zeros(len(at_risk), dtype=np.int64)
        sealed = self._recipients * sealed_bytes(at_risk)
        return np.asarray(8 * (self._same_bytes + sealed + at_risk * SECRET_BYTES))

    @property
    def _same_bytes(self) -> int:
        """The bytes of keys and shares that do not depend on the client."""
        sent = [self.advertised_keys(0), self.shares(0, 0, 0), self.unmasking_shares(0, 0)]
        if self.active:
            sent.append(self.survivors_seen(0, b""))
        return sum(each.size_bytes(_ONE_GROUP) for each in sent)

    @property
    def _deriving(self) -> BoolArray:
        """The clients of the cohort whose shares are derived and not sent, [C]: the first ones."""
        return np.arange(self.cohort) < self.scheme.survivors_needed(self.cohort) - 1

    @property
    def _recipients(self) -> IntArray:
        """The number of clients that each client of the cohort sends shares to, [C]."""
        return np.asarray((~self._deriving).sum() - ~self._deriving)

    @property
    def _may_be_at_risk(self) -> bool:
        """Return whether clients may send different groups, so that dropouts may leave one with too few senders."""
        return isinstance(self.scheme, Masked) and self.layout.max_rank > 0

    def opened_sum_bits(self) -> int:
        """Return the uplink bits of the client that opens a sum, besides its own update."""
        return 8 * self.opened_sum(0).size_bytes(_ONE_GROUP)

    def downlink_bits(self, at_risk: IntArray, *, sends_ranks: bool) -> tuple[IntArray, int]:
        """Return the downlink bits of each client besides the broadcast, [C], and those of the opener besides that.

        The clients send `at_risk` [C] groups at risk. Ranks that follow from links are sent to the cohort; ranks that
        are drawn are regenerated from the seed.
        """
        if isinstance(self.scheme, Masked):
            lists = self.survivors(0), *(self.ranks(0),) * sends_ranks
            same = RUN_BYTES + self.cohort * self.advertised_keys(0).size_bytes(_ONE_GROUP)
            same += sum(each.size_bytes(_ONE_GROUP) for each in lists)
            if self.active:
                signatures = self.scheme.survivors_needed(self.cohort)
                same += signatures * self.survivors_seen(0, b"").size_bytes(_ONE_GROUP)
            same += self.shares(0, 0, 0).size_bytes(_ONE_GROUP) + self._list_bytes  # the clients that shared keys
            of_each = sealed_bytes(at_risk)
            return np.asarray(8 * (same + (of_each.sum() - of_each) * ~self._deriving)), 0
        if isinstance(self.scheme, Encryption):
            every_group = np.ones(len(self.layout.groups), dtype=bool)
            return np.full(len(at_risk), 8 * RUN_BYTES), 8 * self.update(0, PublicKey()).size_bytes(every_group)
        return np.zeros(len(at_risk), dtype=np.int64), 0

    def public_key_bits(self) -> int:
        """Return the downlink bits of the run's public key, which every client receives once."""
        return 8 * self.scheme.public_key_bytes() if isinstance(self.scheme, Encryption) else 0

    def _format(self, round_index: int, purpose: str, size: int) -> EnvelopeFormat:
        return EnvelopeFormat(round_index, self._context(purpose), (size,))

    def _context(self, purpose: str, public: PublicKey | None = None) -> bytes:
        """Return a hash that differs between runs and between purposes."""
        hasher = hashlib.sha256(f"{purpose} {self.scheme.model_dump_json()} {self.cohort}".encode() + self.run)
        if public is not None:
            hasher.update(repr(self.layout.groups).encode() + public.key)
        return hasher.digest()[:CONTEXT_BYTES]


def sealed_bytes(at_risk: IntArray) -> IntArray:
    """Return the length of clients' sealed shares for one recipient: of two secrets, of three if groups are at risk.

    See `masking_client`.
    """
    return np.asarray(RECIPIENT_BYTES + np.where(at_risk, 3, 2) * SHARE_BYTES + TAG_BYTES)
