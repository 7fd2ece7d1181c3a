"""One client's side of a round of secure aggregation with pairwise masks.

Reference: Bonawitz et al., Practical Secure Aggregation for Privacy-Preserving Machine Learning, CCS 2017, Figure 4
without the consistency check (round 3): 0. *advertise keys*: every client sends two public keys. 1. *share keys*: it
secret-shares the private key of its pairwise masks and the seed of its own mask among the cohort, sealed for each
recipient. 2. *masked input*: it sends its integers plus both masks modulo 2^bits. 4. *unmasking*: it reveals its share
of the own-mask seed of each survivor and of the private key of each dropout, and never both of one client.

Differs from the paper: 1. keys are advertised under the clients' signatures, as in its variant for an active server.
2. the hash of the own-mask seed is advertised too, so that wrong shares are noticed. 3. a pair masks the groups of
entries that both of them send, so that unequal ranks cost what they send. Primitives are those of `cryptography`:
X25519, HKDF-SHA256, ChaCha20-Poly1305, and AES-256 in counter mode.
"""

from __future__ import annotations

import hashlib
import secrets
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

from narrowcast.algorithms.secure.key_agreement import KeyAgreements
from narrowcast.algorithms.secure.shamir import SECRET_BYTES, SHARE_BYTES, split
from narrowcast.platform.types import PayloadError

ADVERTISED_BYTES = 3 * 32
SEALED_BYTES = 2 * SHARE_BYTES + 16
_ADDRESS = struct.Struct("<III")
_NONCE = bytes(12)  # a key seals one message: it belongs to a pair, a direction and a round


@dataclass
class MaskingClient:
    """The state of one client in one round; private except for what its methods return."""

    round_index: int
    client: int
    agreements: KeyAgreements = field(default_factory=KeyAgreements, repr=False)
    _mask_key: X25519PrivateKey = field(default_factory=X25519PrivateKey.generate, repr=False)
    _seal_key: X25519PrivateKey = field(default_factory=X25519PrivateKey.generate, repr=False)
    _own_seed: bytes = field(default_factory=lambda: secrets.token_bytes(SECRET_BYTES), repr=False)
    _peers: dict[int, bytes] = field(default_factory=dict, repr=False)
    _shares: dict[int, bytes] = field(default_factory=dict, repr=False)
    _threshold: int = 0
    _survivors: frozenset[int] | None = None

    def __post_init__(self) -> None:
        self._mask_public = self._mask_key.public_key().public_bytes_raw()
        self._seal_public = self._seal_key.public_key().public_bytes_raw()

    def advertise_keys(self) -> bytes:
        """Return the public keys for masks and for sealing, and the hash of the own-mask seed, [ADVERTISED_BYTES]."""
        return self._mask_public + self._seal_public + hashlib.sha256(self._own_seed).digest()

    def share_keys(self, advertised: Mapping[int, bytes], threshold: int) -> dict[int, bytes]:
        """Return, for every other client, the sealed shares of both secrets, [SEALED_BYTES] each.

        `advertised` is what each client of the cohort sent, its own included.
        """
        self._peers, self._threshold = dict(advertised), threshold
        points = range(1, len(advertised) + 1)
        shares = zip(
            split(self._mask_key.private_bytes_raw(), points, threshold),
            split(self._own_seed, points, threshold),
            strict=True,
        )
        sealed = {}
        for peer, (of_key, of_seed) in zip(advertised, shares, strict=True):
            if peer == self.client:
                self._shares[peer] = of_key + of_seed
            else:
                label = self._label(self.client, peer)
                sealed[peer] = self._cipher(peer, peer).encrypt(_NONCE, of_key + of_seed, label)
        return sealed

    def receive_shares(self, sealed: Mapping[int, bytes]) -> None:
        """Keep the shares of the others; raise `PayloadError` for one that was changed or is for another client."""
        for peer, data in sealed.items():
            try:
                cipher = self._cipher(peer, self.client)
                self._shares[peer] = cipher.decrypt(_NONCE, data, self._label(peer, self.client))
            except InvalidTag:
                raise PayloadError(f"the shares of client {peer} for client {self.client} do not open") from None

    def mask_seeds(self) -> tuple[bytes, dict[int, bytes]]:
        """Return the seed of the own mask, and of the mask shared with each other client."""
        pairs = {
            peer: self.agreements.key(self._mask_key, self._mask_public, keys[:32], b"mask", self.round_index)
            for peer, keys in self._peers.items()
            if peer != self.client
        }
        return self._own_seed, pairs

    def unmask(self, survivors: Sequence[int]) -> list[bytes]:
        """Return a share for each client of the cohort, in order: of a survivor's seed, of a dropout's private key.

        Raise `PayloadError` for fewer survivors than the threshold, and for another list than the round's first.
        """
        listed = frozenset(survivors)
        if len(listed) < self._threshold or self._survivors not in (None, listed):
            raise PayloadError(f"client {self.client} reveals nothing: too few arrived, or it has revealed before")
        self._survivors = listed
        return [
            self._shares[peer][SHARE_BYTES:] if peer in listed else self._shares[peer][:SHARE_BYTES]
            for peer in self._peers
        ]

    def _cipher(self, peer: int, recipient: int) -> ChaCha20Poly1305:
        key, public = self._peers[peer][32:64], self._seal_public
        numbers = (self.round_index, recipient)
        return ChaCha20Poly1305(self.agreements.key(self._seal_key, public, key, b"shares", *numbers))

    def _label(self, sender: int, recipient: int) -> bytes:
        return _ADDRESS.pack(self.round_index, sender, recipient)
