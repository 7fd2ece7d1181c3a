"""Masks: pseudorandom ring elements that seeds expand to (AES-256 in counter mode)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import AES
from cryptography.hazmat.primitives.ciphers.modes import CTR
from numpy.typing import NDArray

from narrowcast.algorithms.secure.bit_packing import RingElements
from narrowcast.platform.types import BoolArray

_COUNTER = CTR(bytes(16))  # a seed masks one client, or pair, in one round


@dataclass(frozen=True)
class MaskLayout:
    """The groups of entries that a cohort masks: `sizes` [groups], and the width of an element, 32 or 64 bits.

    Elements are uniform modulo 2^bits, and therefore modulo every smaller power of two.
    """

    sizes: Sequence[int]
    bits: int

    def zeros(self) -> list[NDArray[Any]]:
        """Return a zero for each entry of each group."""
        return [np.zeros(size, dtype=f"<u{self.bits // 8}") for size in self.sizes]

    def add(self, totals: list[NDArray[Any]], seed: bytes, groups: BoolArray, *, negative: bool = False) -> None:
        """Add the mask of a seed to the totals of the chosen groups [groups], or subtract it, in place.

        One stream is drawn for the chosen groups, one after the other.
        """
        places, start = np.flatnonzero(groups).tolist(), 0
        kind = np.dtype(f"<u{self.bits // 8}")
        count = sum(self.sizes[place] for place in places)
        stream = np.frombuffer(Cipher(AES(seed), _COUNTER).encryptor().update(bytes(count * kind.itemsize)), dtype=kind)
        for place in places:
            part = stream[start : start + self.sizes[place]]
            (np.subtract if negative else np.add)(totals[place], part, out=totals[place])
            start += self.sizes[place]

    def of_client(
        self, client: int, own_seed: bytes, pair_seeds: Mapping[int, bytes], groups: Mapping[int, BoolArray]
    ) -> list[RingElements]:
        """Return what a client adds to each group: its own mask, and the masks that it shares with its peers.

        `pair_seeds` has a seed for each peer; `groups` [groups] each says what every client sends.
        """
        totals = self.zeros()
        self.add(totals, own_seed, groups[client])
        for peer, seed in pair_seeds.items():
            self.add(totals, seed, groups[client] & groups[peer], negative=client > peer)
        return [elements.astype(np.uint64) for elements in totals]
