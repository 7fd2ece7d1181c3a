"""Masks: the groups of a round whose sum may be opened, and the ring elements that seeds expand to (AES-256-CTR)."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import AES
from cryptography.hazmat.primitives.ciphers.modes import CTR
from numpy.typing import NDArray

from narrowcast.algorithms.secure.keys import derive_key
from narrowcast.algorithms.secure.schemes import RingElements
from narrowcast.platform.types import BoolArray


@dataclass(frozen=True)
class OpenableGroups:
    """The groups that the participants, n clients, were told to send, `sends` [n, groups], and the senders a sum needs.

    It is one public rule, which the server and every client evaluate.

    The sum of a group is opened if at least `least_senders` of the survivors sent the group. A round has at least
    `threshold` survivors; a group is at risk if fewer than `least_senders` of its senders may be among them.
    """

    clients: tuple[int, ...]
    sends: BoolArray = field(repr=False)
    threshold: int
    least_senders: int

    @cached_property
    def sent(self) -> dict[int, BoolArray]:
        """The groups that each participant sends, [groups] each."""
        return dict(zip(self.clients, self.sends, strict=True))

    @cached_property
    def at_risk(self) -> BoolArray:
        """The groups that dropouts could leave with too few senders, [groups]."""
        planned, most_dropouts = self.sends.sum(axis=0), len(self.clients) - self.threshold
        return np.asarray(planned - most_dropouts < self.least_senders)

    def opened(self, survivors: Collection[int]) -> BoolArray:
        """Return the groups whose sum over these survivors may be opened, [groups]."""
        arrived = np.array([client in survivors for client in self.clients], dtype=bool)
        return np.asarray(self.sends[arrived].sum(axis=0) >= self.least_senders)

    def risky(self, client: int) -> list[int]:
        """Return the indices of the groups at risk that a client sends."""
        return self._risky[client]

    def fully_opened(self, opened: BoolArray) -> set[int]:
        """Return the clients that sent none but `opened` groups [groups]."""
        hidden = np.asarray((self.sends & ~opened).any(axis=1)).tolist()
        return {client for client, hides in zip(self.clients, hidden, strict=True) if not hides}

    @cached_property
    def _risky(self) -> dict[int, list[int]]:
        return {client: np.flatnonzero(sent & self.at_risk).tolist() for client, sent in self.sent.items()}

    @cached_property
    def digest(self) -> bytes:
        """A hash of what the client was told, [32]: equal at two clients only if all of it is."""
        told = f"{self.threshold} {self.least_senders} {self.sends.shape} {self.clients}"
        return hashlib.sha256(told.encode() + np.packbits(self.sends).tobytes()).digest()


def with_enough_senders(sent: BoolArray, least_senders: int) -> BoolArray:
    """Return the groups [n, groups] without those that fewer than `least_senders` of the n clients would send."""
    return sent & (sent.sum(axis=0) >= least_senders)


_COUNTER = CTR(bytes(16))  # a seed masks one client, or pair, in one round


def shared_seed(root: bytes) -> bytes:
    """Return the seed of a client's own mask of the groups that are not at risk."""
    return derive_key(root, b"own mask")


@dataclass(frozen=True)
class OwnSeeds:
    """The seeds of a client's own masks: one for all groups that are not at risk, one for each group that is."""

    shared: bytes = field(repr=False)
    of_group: Mapping[int, bytes] = field(repr=False)

    @classmethod
    def of(cls, root: bytes, risky: Sequence[int]) -> OwnSeeds:
        """Derive the seeds from the client's secret; `risky` are the indices of the groups at risk that it sends."""
        return cls(shared_seed(root), {group: derive_key(root, b"own mask of a group", group) for group in risky})


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
        sent, start = np.flatnonzero(groups).tolist(), 0
        kind = np.dtype(f"<u{self.bits // 8}")
        count = sum(self.sizes[group] for group in sent)
        stream = np.frombuffer(Cipher(AES(seed), _COUNTER).encryptor().update(bytes(count * kind.itemsize)), dtype=kind)
        for group in sent:
            part = stream[start : start + self.sizes[group]]
            (np.subtract if negative else np.add)(totals[group], part, out=totals[group])
            start += self.sizes[group]

    def add_own(self, totals: list[NDArray[Any]], seeds: OwnSeeds, sent: BoolArray, at_risk: BoolArray) -> None:
        """Add a client's own masks of the groups that it sends to the totals, in place; [groups] both.

        A group at risk whose seed is not known is left out.
        """
        self.add(totals, seeds.shared, sent & ~at_risk)
        for group, seed in seeds.of_group.items():
            self.add(totals, seed, np.arange(len(self.sizes)) == group)

    def of_client(
        self, client: int, own_secret: bytes, pair_seeds: Mapping[int, bytes], rule: OpenableGroups
    ) -> list[RingElements]:
        """Return what a client adds to each group: its own masks, and the masks that it shares with its peers.

        `pair_seeds` has a seed for each peer.
        """
        totals, sent = self.zeros(), rule.sent
        self.add_own(totals, OwnSeeds.of(own_secret, rule.risky(client)), sent[client], rule.at_risk)
        for peer, seed in pair_seeds.items():
            self.add(totals, seed, sent[client] & sent[peer], negative=client > peer)
        return [elements.astype(np.uint64) for elements in totals]
