"""Masks that cancel in the sum, and what the clients share so that dropouts do not spoil it.

Reference: Bonawitz et al., Practical Secure Aggregation for Privacy-Preserving Machine Learning, CCS 2017, Figure 4
without consistency check: 1. every client advertises two public keys; 2. shares the secret behind its pair masks and
the seed of its own mask among all, sealed for each; 3. sends its integers plus both masks, modulo 2^bits; 4. of each
client that arrived, reveals its share of the own mask, of each that did not, of the pair masks, and never of both.

Differs from the paper: 1. keys are advertised under the clients' signatures, as its protection from an active server
has it. 2. a pair masks the groups of entries that both of them send, so that unequal ranks cost what they are.
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
from numpy.typing import NDArray

from narrowcast.algorithms.secure.bit_packing import Words
from narrowcast.algorithms.secure.shamir import SECRET_BYTES, SHARE_BYTES, combine, split
from narrowcast.platform.types import BoolArray, PayloadError

KEY_BYTES = 3 * 32
SEALED_BYTES = 2 * SHARE_BYTES + 16
_ADDRESS = struct.Struct("<III")
_COUNTER = CTR(bytes(16))  # a seed masks one client, or pair, in one round
_NONCE = bytes(12)  # a key seals one message: it belongs to a pair, a direction and a round


@dataclass(frozen=True)
class MaskedGroups:
    """The groups of entries that a cohort masks: their `sizes` [G], and the width of a word, 32 or 64 bits.

    Words are uniform modulo 2^bits, and so modulo every smaller power of two.
    """

    sizes: Sequence[int]
    bits: int

    def nothing(self) -> list[NDArray[Any]]:
        """A word 0 for each entry of each group."""
        return [np.zeros(size, dtype=f"<u{self.bits // 8}") for size in self.sizes]

    def add(self, totals: list[NDArray[Any]], seed: bytes, groups: BoolArray, *, negative: bool = False) -> None:
        """Add the mask of a seed, drawn for the chosen groups [G] one after the other, to their totals."""
        places, start = np.flatnonzero(groups).tolist(), 0
        kind = np.dtype(f"<u{self.bits // 8}")
        count = sum(self.sizes[place] for place in places)
        stream = np.frombuffer(Cipher(AES(seed), _COUNTER).encryptor().update(bytes(count * kind.itemsize)), dtype=kind)
        for place in places:
            part = stream[start : start + self.sizes[place]]
            (np.subtract if negative else np.add)(totals[place], part, out=totals[place])
            start += self.sizes[place]

    def of_client(
        self, client: int, own: bytes, pairs: Mapping[int, bytes], groups: Mapping[int, BoolArray]
    ) -> list[Words]:
        """All that a client adds to each group: its own mask, and those it has in common with `pairs`.

        `groups` says what each client sends, [G] each.
        """
        totals = self.nothing()
        self.add(totals, own, groups[client])
        for peer, seed in pairs.items():
            self.add(totals, seed, groups[client] & groups[peer], negative=client > peer)
        return [words.astype(np.uint64) for words in totals]


def derived(secret: bytes, purpose: bytes, *numbers: int) -> bytes:
    """32 bytes for one purpose, from a secret."""
    info = b"narrowcast " + purpose + b"".join(number.to_bytes(8, "big") for number in numbers)
    return HKDF(SHA256(), SECRET_BYTES, None, info).derive(secret)


@dataclass
class Agreements:
    """What pairs of keys agree on, the same at both ends, so that who stands for both ends works it out once."""

    _known: dict[tuple[Any, ...], bytes] = field(default_factory=dict, repr=False)

    def key(self, private: X25519PrivateKey, public: bytes, peer: bytes, purpose: bytes, *numbers: int) -> bytes:
        """32 bytes for one purpose, of a private key, whose public half is given, and a peer's public one."""
        pair = frozenset((public, peer))
        if (pair,) not in self._known:
            self._known[(pair,)] = private.exchange(X25519PublicKey.from_public_bytes(peer))
        if (pair, purpose, *numbers) not in self._known:
            self._known[(pair, purpose, *numbers)] = derived(self._known[(pair,)], purpose, *numbers)
        return self._known[(pair, purpose, *numbers)]


@dataclass
class MaskingClient:
    """One client's side of one round; everything in it but what its methods return is the client's alone."""

    round_index: int
    client: int
    agreements: Agreements = field(default_factory=Agreements, repr=False)
    _mask_key: X25519PrivateKey = field(default_factory=X25519PrivateKey.generate, repr=False)
    _seal_key: X25519PrivateKey = field(default_factory=X25519PrivateKey.generate, repr=False)
    _own_seed: bytes = field(default_factory=lambda: secrets.token_bytes(SECRET_BYTES), repr=False)
    _peers: dict[int, bytes] = field(default_factory=dict, repr=False)
    _shares: dict[int, bytes] = field(default_factory=dict, repr=False)
    _threshold: int = 0
    _revealed: frozenset[int] | None = None

    def __post_init__(self) -> None:
        self._mask_public = self._mask_key.public_key().public_bytes_raw()
        self._seal_public = self._seal_key.public_key().public_bytes_raw()

    def advertise(self) -> bytes:
        """The public keys for masks and for sealing, and the hash of the own mask's seed, [KEY_BYTES]."""
        return self._mask_public + self._seal_public + hashlib.sha256(self._own_seed).digest()

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
            peer: self.agreements.key(self._mask_key, self._mask_public, keys[:32], b"mask", self.round_index)
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
        key, public = self._peers[peer][32:64], self._seal_public
        numbers = (self.round_index, recipient)
        return ChaCha20Poly1305(self.agreements.key(self._seal_key, public, key, b"shares", *numbers))

    def _label(self, sender: int, recipient: int) -> bytes:
        return _ADDRESS.pack(self.round_index, sender, recipient)


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

    def masks(self, masked: MaskedGroups, groups: Mapping[int, BoolArray], keys: Mapping[int, bytes]) -> list[Words]:
        """The masks that are left in the sum of each group; `groups` says what each client sends, [G] each."""
        totals, agreements = masked.nothing(), Agreements()
        for client, seed in self.own.items():
            masked.add(totals, seed, groups[client])
        for gone, key in self.left.items():
            for client in self.own:
                ends = keys[gone][:32], keys[client][:32]
                seed = agreements.key(key, *ends, b"mask", self.round_index)
                masked.add(totals, seed, groups[gone] & groups[client], negative=client > gone)
        return [words.astype(np.uint64) for words in totals]
