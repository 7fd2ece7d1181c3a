"""The server's side of unmasking (Bonawitz et al., CCS 2017, round 4): from revealed shares to the masks in the sum."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from narrowcast.algorithms.secure.bit_packing import RingElements
from narrowcast.algorithms.secure.key_agreement import KeyAgreements
from narrowcast.algorithms.secure.masks import MaskLayout
from narrowcast.algorithms.secure.shamir import SECRET_BYTES, combine
from narrowcast.platform.types import BoolArray, PayloadError


@dataclass(frozen=True)
class MaskRecovery:
    """Secrets that the survivors' shares give: own-mask seeds of survivors, private mask keys of dropouts."""

    round_index: int
    survivor_seeds: Mapping[int, bytes]
    dropout_keys: Mapping[int, X25519PrivateKey]

    @classmethod
    def of(
        cls, round_index: int, advertised: Mapping[int, bytes], shares: Mapping[int, Sequence[bytes]], threshold: int
    ) -> MaskRecovery:
        """Combine the shares that each survivor revealed, in the order of the cohort's `advertised` keys.

        The first `threshold` survivors are used; raise `PayloadError` if a secret is not the advertised one.
        """
        points = {client: place + 1 for place, client in enumerate(advertised)}
        used, seeds, private = list(shares)[:threshold], {}, {}
        for place, (client, keys) in enumerate(advertised.items()):
            try:
                secret = combine({points[each]: shares[each][place] for each in used})
            except ValueError:
                secret = bytes(SECRET_BYTES)
            key = X25519PrivateKey.from_private_bytes(secret)
            if client in shares:
                seeds[client], matches = secret, hashlib.sha256(secret).digest() == keys[64:]
            else:
                private[client], matches = key, key.public_key().public_bytes_raw() == keys[:32]
            if not matches:
                raise PayloadError(f"the shares of client {client}'s secret do not give the one that it advertised")
        return cls(round_index, seeds, private)

    def masks(
        self, layout: MaskLayout, groups: Mapping[int, BoolArray], advertised: Mapping[int, bytes]
    ) -> list[RingElements]:
        """Return the masks that are left in the sum of each group; `groups` [groups] each says what clients send."""
        totals, agreements = layout.zeros(), KeyAgreements()
        for client, seed in self.survivor_seeds.items():
            layout.add(totals, seed, groups[client])
        for dropout, key in self.dropout_keys.items():
            for client in self.survivor_seeds:
                ends = advertised[dropout][:32], advertised[client][:32]
                seed = agreements.key(key, *ends, b"mask", self.round_index)
                layout.add(totals, seed, groups[dropout] & groups[client], negative=client > dropout)
        return [elements.astype(np.uint64) for elements in totals]
