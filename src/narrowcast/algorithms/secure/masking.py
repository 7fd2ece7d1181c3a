"""Masks that cancel in the sum, and what the clients share so that dropouts do not spoil it.

Reference: Bonawitz et al., Practical Secure Aggregation for Privacy-Preserving Machine Learning, CCS 2017, Figure 4
without consistency check: 1. every client advertises two public keys; 2. shares the secret behind its pair masks and
the seed of its own mask among all, sealed for each; 3. sends its integers plus both masks, modulo 2^bits; 4. of each
client that arrived, reveals its share of the own mask, of each that did not, of the pair masks, and never of both.

Differs from the paper: 1. keys are advertised under the clients' signatures, as its protection from an active server
has it. 2. masks are drawn by group of entries, so that only the clients that send a component mask it.
Primitives are those of `cryptography`: X25519, HKDF-SHA256, ChaCha20-Poly1305, and AES-256 in counter mode.
"""

from __future__ import annotations

import hashlib
import secrets
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.ciphers.algorithms import AES
from cryptography.hazmat.primitives.ciphers.modes import CTR
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from narrowcast.algorithms.secure.shamir import SECRET_BYTES, SHARE_BYTES, combine, split
from narrowcast.algorithms.secure.words import Words
from narrowcast.platform.types import PayloadError

KEY_BYTES = 3 * 32
SEALED_BYTES = 2 * SHARE_BYTES + 16
_ADDRESS = struct.Struct("<III")
_NONCE = bytes(12)  # a key seals one message: it belongs to a pair, a direction and a round


def mask(seed: bytes, group: int, count: int, bits: int) -> Words:
    """The mask of a group of entries, [count], uniform modulo 2^bits."""
    kind = np.dtype("<u4" if bits <= 32 else "<u8")
    stream = Cipher(AES(seed), CTR(group.to_bytes(8, "big") + bytes(8))).encryptor()
    words = np.frombuffer(stream.update(bytes(count * kind.itemsize)), dtype=kind)
    return words & kind.type(2**bits - 1)


def derived(secret: bytes, purpose: bytes, *numbers: int) -> bytes:
    """32 bytes for one purpose, from a secret."""
    info = b"narrowcast " + purpose + b"".join(number.to_bytes(8, "big") for number in numbers)
    return HKDF(SHA256(), SECRET_BYTES, None, info).derive(secret)


def pair_seed(private: X25519PrivateKey, peer: bytes, round_index: int) -> bytes:
    """The seed of the mask that two clients have in common."""
    return derived(private.exchange(X25519PublicKey.from_public_bytes(peer)), b"mask", round_index)


@dataclass
class MaskingClient:
    """One client's side of one round; everything in it but what its methods return is the client's alone."""

    round_index: int
    client: int
    _mask_key: X25519PrivateKey = field(default_factory=X25519PrivateKey.generate, repr=False)
    _seal_key: X25519PrivateKey = field(default_factory=X25519PrivateKey.generate, repr=False)
    _own_seed: bytes = field(default_factory=lambda: secrets.token_bytes(SECRET_BYTES), repr=False)
    _peers: dict[int, bytes] = field(default_factory=dict, repr=False)
    _shares: dict[int, bytes] = field(default_factory=dict, repr=False)
    _agreed: dict[int, bytes] = field(default_factory=dict, repr=False)
    _threshold: int = 0
    _revealed: frozenset[int] | None = None

    def advertise(self) -> bytes:
        """The public keys for masks and for sealing, and the hash of the own mask's seed, [KEY_BYTES]."""
        keys = (key.public_key().public_bytes_raw() for key in (self._mask_key, self._seal_key))
        return b"".join(keys) + hashlib.sha256(self._own_seed).digest()

    def share(self, keys: Mapping[int, bytes], threshold: int) -> dict[int, bytes]:
        """For every other client the sealed shares of both secrets, [SEALED_BYTES]."""
        self._peers, self._threshold = dict(keys), threshold
        points = range(1, len(keys) + 1)
        mine = zip(
            split(self._mask_key.private_bytes_raw(), points, threshold),
            split(self._own_seed, points, threshold),
            strict=True,
        )
        sealed = {}
        for peer, (of_key, of_seed) in zip(keys, mine, strict=True):
            if peer == self.client:
                self._shares[peer] = of_key + of_seed
            else:
                sealed[peer] = self._cipher(peer, peer).encrypt(
                    _NONCE, of_key + of_seed, self._label(self.client, peer)
                )
        return sealed

    def receive(self, sealed: Mapping[int, bytes]) -> None:
        """Keep the shares of the others; raises `PayloadError` where one was changed or is for somebody else."""
        for peer, data in sealed.items():
            try:
                cipher = self._cipher(peer, self.client)
                self._shares[peer] = cipher.decrypt(_NONCE, data, self._label(peer, self.client))
            except InvalidTag:
                raise PayloadError(f"the shares of client {peer} for client {self.client} do not open") from None

    def seeds(self) -> tuple[bytes, dict[int, bytes]]:
        """The seed of the own mask, and of the one with each other client."""
        pairs = {
            peer: pair_seed(self._mask_key, keys[:32], self.round_index)
            for peer, keys in self._peers.items()
            if peer != self.client
        }
        return self._own_seed, pairs

    def reveal(self, survivors: Sequence[int]) -> list[bytes]:
        """A share of each client's secret, in the order of the cohort: of the own mask of who arrived, else of the key.

        Raises `PayloadError` for too few survivors, and for another list than the round's first.
        """
        arrived = frozenset(survivors)
        if len(arrived) < self._threshold or self._revealed not in (None, arrived):
            raise PayloadError(f"client {self.client} reveals nothing: too few arrived, or it has revealed before")
        self._revealed = arrived
        return [
            self._shares[peer][SHARE_BYTES:] if peer in arrived else self._shares[peer][:SHARE_BYTES]
            for peer in self._peers
        ]

    def _cipher(self, peer: int, recipient: int) -> ChaCha20Poly1305:
        if peer not in self._agreed:
            self._agreed[peer] = self._seal_key.exchange(X25519PublicKey.from_public_bytes(self._peers[peer][32:64]))
        shared = self._agreed[peer]
        return ChaCha20Poly1305(derived(shared, b"shares", self.round_index, recipient))

    def _label(self, sender: int, recipient: int) -> bytes:
        return _ADDRESS.pack(self.round_index, sender, recipient)


def masked(words: Words, bits: Any, group: int, client: int, own: bytes, pairs: Mapping[int, bytes]) -> Words:
    """A client's words [n] plus its own mask and those it has in common with `pairs`; `bits` is at most 64."""
    total = words + mask(own, group, len(words), bits)
    for peer, seed in pairs.items():
        common = mask(seed, group, len(words), bits)
        total = total + common if client < peer else total - common
    return total & np.uint64(2**bits - 1)


@dataclass(frozen=True)
class Recovery:
    """The server's side of the last step: what the survivors revealed, put together.

    `own` are the seeds of the survivors' own masks, `left` the secret keys of those who did not arrive.
    """

    round_index: int
    own: Mapping[int, bytes]
    left: Mapping[int, X25519PrivateKey]

    @classmethod
    def of(
        cls, round_index: int, keys: Mapping[int, bytes], revealed: Mapping[int, Sequence[bytes]], threshold: int
    ) -> Recovery:
        """From the shares that each survivor revealed, in the order of `keys`, what the cohort advertised.

        Any `threshold` of them do; `PayloadError` where a secret is not the one behind what was advertised.
        """
        points = {client: place + 1 for place, client in enumerate(keys)}
        asked, own, left = list(revealed)[:threshold], {}, {}
        for place, (client, advertised) in enumerate(keys.items()):
            try:
                secret = combine({points[each]: revealed[each][place] for each in asked})
            except ValueError:
                secret = bytes(SECRET_BYTES)
            key = X25519PrivateKey.from_private_bytes(secret)
            if client in revealed:
                own[client], known = secret, hashlib.sha256(secret).digest() == advertised[64:]
            else:
                left[client], known = key, key.public_key().public_bytes_raw() == advertised[:32]
            if not known:
                raise PayloadError(f"the shares of what client {client} holds do not give it")
        return cls(round_index, own, left)

    def unmask(
        self,
        total: Words,
        bits: int,
        group: int,
        arrived: Sequence[int],
        left: Sequence[int],
        keys: Mapping[int, bytes],
    ) -> Words:
        """A group's sum without its masks; of its clients, `arrived` are in the sum and `left` are not."""
        for client in arrived:
            total = total - mask(self.own[client], group, len(total), bits)
        for gone in left:
            for client in arrived:
                common = mask(pair_seed(self.left[gone], keys[client][:32], self.round_index), group, len(total), bits)
                total = total - common if client < gone else total + common
        return total & np.uint64(2**bits - 1)
