"""What crosses the links of a round beside the broadcast: updates, keys, shares, and the sum to be opened."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np

from narrowcast.algorithms.secure.envelope import CONTEXT_BYTES, Addressed
from narrowcast.algorithms.secure.fixed_point import FixedPoint
from narrowcast.algorithms.secure.layout import Layout
from narrowcast.algorithms.secure.masking import KEY_BYTES, SEALED_BYTES
from narrowcast.algorithms.secure.schemes import CKKS, Masked, Protection, Public
from narrowcast.algorithms.secure.shamir import SHARE_BYTES
from narrowcast.platform.types import BoolArray, IntArray

RECIPIENT_BYTES = 4
_ALL = np.ones(1, dtype=bool)


@dataclass(frozen=True)
class Messages:
    """The messages of a cohort of `cohort` clients, each signed by who sends it.

    A client receives what concerns the whole cohort; the first client of a CKKS cohort opens the sum.
    """

    scheme: Protection
    layout: Layout
    cohort: int

    @property
    def numbers(self) -> FixedPoint:
        """The integers of this layout's sums."""
        return self.scheme.numbers(self.layout.most_weight, self.cohort)

    def update(self, round_index: int, public: Public) -> Addressed:
        """The envelope of an update."""
        sizes = tuple(self.scheme.body_bytes(group, self.numbers) for group in self.layout.groups)
        return Addressed(round_index, self._context("update", public), sizes)

    def keys(self, round_index: int) -> Addressed:
        """A client's two public keys of a round."""
        return Addressed(round_index, self._context("keys"), (KEY_BYTES,))

    def shares(self, round_index: int) -> Addressed:
        """A client's sealed shares, with the recipient before each."""
        body = (self.cohort - 1) * (RECIPIENT_BYTES + SEALED_BYTES)
        return Addressed(round_index, self._context("shares"), (body,))

    def revealed(self, round_index: int) -> Addressed:
        """The shares that a client reveals at the end."""
        return Addressed(round_index, self._context("revealed"), (self.cohort * SHARE_BYTES,))

    def survivors(self, round_index: int) -> Addressed:
        """Who arrived, a bit for each client of the cohort."""
        return Addressed(round_index, self._context("survivors"), (-(-self.cohort // 8),))

    def opened(self, round_index: int) -> Addressed:
        """The decrypted sum, as integers."""
        plain = sum(Protection.body_bytes(self.scheme, group, self.numbers) for group in self.layout.groups)
        return Addressed(round_index, self._context("opened"), (plain,))

    def uplink_bits(self, groups: BoolArray, *, first: bool) -> int:
        """What a client that sends these groups sends in all."""
        total = self.update(0, Public()).bytes_of(groups)
        if isinstance(self.scheme, Masked):
            total += sum(each.bytes_of(_ALL) for each in (self.keys(0), self.shares(0), self.revealed(0)))
        if isinstance(self.scheme, CKKS) and first:
            total += self.opened(0).bytes_of(_ALL)
        return 8 * total

    def downlink_bits(self, newcomers: BoolArray) -> IntArray:
        """What each client of the cohort receives beside the broadcast, [C]."""
        total = np.zeros(len(newcomers), dtype=np.int64)
        if isinstance(self.scheme, Masked):
            total += self.cohort * self.keys(0).bytes_of(_ALL) + self.shares(0).bytes_of(_ALL)
            total += self.survivors(0).bytes_of(_ALL)
        if isinstance(self.scheme, CKKS):
            total += self.scheme.public_bytes() * newcomers
            total[:1] += self.update(0, Public()).bytes_of(np.ones(len(self.layout.groups), dtype=bool))
        return 8 * total

    def _context(self, purpose: str, public: Public | None = None) -> bytes:
        """What tells the messages of one run, and of one purpose, from all others."""
        hasher = hashlib.sha256(f"{purpose} {self.scheme.model_dump_json()} {self.cohort}".encode())
        if public is not None:
            hasher.update(repr(self.layout.groups).encode() + public.key)
        return hasher.digest()[:CONTEXT_BYTES]
