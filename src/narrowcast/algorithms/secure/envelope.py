"""Signed envelopes: every message of a client, checked by its receiver before its content is used."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from narrowcast.platform.types import BoolArray, PayloadError

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
        place = _HEADER.size + self._mask_bytes
        for size, sent in zip(self.sizes, groups, strict=True):
            bodies.append(view[place : place + size] if sent else None)
            place += size * int(sent)
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
