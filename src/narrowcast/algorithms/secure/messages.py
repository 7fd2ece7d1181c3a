"""Messages of a round besides the broadcast, and their sizes: updates, keys, shares, the sum to open.

Every message of a client is a signed envelope, which its receiver checks before the content is used.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from narrowcast.algorithms.client.sums import SumLayout
from narrowcast.algorithms.secure.keys import SECRET_BYTES, SHARE_BYTES
from narrowcast.algorithms.secure.masks import MaskLayout
from narrowcast.algorithms.secure.schemes import (
    Encryption,
    FixedPoint,
    Masked,
    Protection,
    PublicKey,
    packed_bytes,
    ring_bytes,
)
from narrowcast.platform.types import BoolArray, IntArray, PayloadError

CONTEXT_BYTES, SIGNATURE_BYTES = 8, 64
_HEADER = struct.Struct("<2sBII8s")  # magic, version, round, client, context
_MAGIC, _VERSION = b"ns", 1


@dataclass(frozen=True)
class EnvelopeFormat:
    """The format of a message in a round: its context, and the length of each group's bytes, `sizes` [groups].

    `context` is a hash of the message's purpose, the scheme, the run, its public key and the layout: an envelope
    made under others is refused.
    """

    round_index: int
    context: bytes
    sizes: tuple[int, ...]

    def size_bytes(self, groups: BoolArray) -> int:
        """Return the length of an envelope with these groups [groups]."""
        body = sum(size for size, sent in zip(self.sizes, groups, strict=True) if sent)
        return _HEADER.size + self._mask_bytes + body + SIGNATURE_BYTES

    def seal(self, client: int, bodies: Sequence[bytes | None], key: bytes) -> bytes:
        """Return an envelope with the groups that the client sends, signed with its Ed25519 key."""
        sent = np.array([body is not None for body in bodies])
        head = _HEADER.pack(_MAGIC, _VERSION, self.round_index, client, self.context)
        data = b"".join([head, np.packbits(sent, bitorder="little").tobytes(), *filter(None, bodies)])
        return data + Ed25519PrivateKey.from_private_bytes(key).sign(hashlib.sha256(data).digest())

    @staticmethod
    def sender(data: bytes) -> int:
        """Return the client that an envelope names, unchecked; raise `PayloadError` for one without a header."""
        if len(data) < _HEADER.size:
            raise PayloadError(f"an envelope of {len(data)} bytes is shorter than its header ({_HEADER.size})")
        return int(_HEADER.unpack_from(data)[3])

    def open(self, data: bytes, keys: Mapping[int, bytes]) -> tuple[int, list[memoryview | None]]:
        """Return the client and its groups' bytes, None for a group that it did not send.

        `keys` are the verification keys by client. Raise `PayloadError` for an envelope of another round, context or
        client, of another length, or with a wrong signature.
        """
        shortest = _HEADER.size + self._mask_bytes + SIGNATURE_BYTES
        if len(data) < shortest:
            raise PayloadError(f"an envelope of {len(data)} bytes is shorter than an empty one ({shortest})")
        magic, version, round_index, client, context = _HEADER.unpack_from(data)
        if (magic, version) != (_MAGIC, _VERSION):
            raise PayloadError("these bytes do not start with the header of an envelope")
        if context != self.context:
            raise PayloadError(f"the envelope of client {client} was made under another context")
        if round_index != self.round_index:
            raise PayloadError(f"the envelope of client {client} is of round {round_index}, not {self.round_index}")
        if client not in keys:
            raise PayloadError(f"client {client} was not asked in round {round_index}")
        flags = np.frombuffer(data, dtype=np.uint8, count=self._mask_bytes, offset=_HEADER.size)
        bits = np.unpackbits(flags, bitorder="little").astype(bool)
        groups = bits[: len(self.sizes)]
        if bits[len(self.sizes) :].any() or len(data) != self.size_bytes(groups):
            raise PayloadError(
                f"the envelope of client {client} should have {self.size_bytes(groups)} bytes, has {len(data)}"
            )
        view = memoryview(data)
        try:
            signed = hashlib.sha256(view[:-SIGNATURE_BYTES]).digest()
            Ed25519PublicKey.from_public_bytes(keys[client]).verify(bytes(view[-SIGNATURE_BYTES:]), signed)
        except InvalidSignature:
            raise PayloadError(f"the envelope of client {client} was changed, or is not signed by it") from None
        bodies: list[memoryview | None] = []
        start = _HEADER.size + self._mask_bytes
        for size, sent in zip(self.sizes, groups, strict=True):
            bodies.append(view[start : start + size] if sent else None)
            start += size * int(sent)
        return client, bodies

    @property
    def _mask_bytes(self) -> int:
        return -(-len(self.sizes) // 8)


@dataclass
class EnrolledClients:
    """The verification keys of clients, as a recipient of their messages knows them from their enrolment.

    A message that was found valid once is not verified again, so that a process that simulates all recipients of a
    message verifies it once.
    """

    keys: Mapping[int, bytes]
    _opened: dict[bytes, tuple[EnvelopeFormat, int, bytes]] = field(default_factory=dict, repr=False)

    def open(self, message: EnvelopeFormat, data: bytes) -> tuple[int, bytes]:
        """Return the sender and the body of a message in one part; raise `PayloadError` as `EnvelopeFormat.open`."""
        if (known := self._opened.get(data)) is None or known[0] != message:
            client, (body,) = message.open(data, self.keys)
            if body is None:
                raise PayloadError(f"the envelope of client {client} is empty")
            known = self._opened[data] = message, client, bytes(body)
        return known[1], known[2]


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

        With masks this includes the seeds that are revealed when every group is at risk.
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
        return sum(message.size_bytes(_ONE_GROUP) for message in sent)

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
            common = RUN_BYTES + self.cohort * self.advertised_keys(0).size_bytes(_ONE_GROUP)
            common += sum(message.size_bytes(_ONE_GROUP) for message in lists)
            if self.active:
                signatures = self.scheme.survivors_needed(self.cohort)
                common += signatures * self.survivors_seen(0, b"").size_bytes(_ONE_GROUP)
            common += self.shares(0, 0, 0).size_bytes(_ONE_GROUP) + self._list_bytes  # the clients that shared keys
            of_each = sealed_bytes(at_risk)
            return np.asarray(8 * (common + (of_each.sum() - of_each) * ~self._deriving)), 0
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
