"""What crosses the links of a round beside the broadcast: updates, keys, shares, and the sum to be opened."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace

import numpy as np

from narrowcast.algorithms.federated.sum_layout import SumLayout
from narrowcast.algorithms.secure.bit_packing import packed_bytes
from narrowcast.algorithms.secure.envelope import CONTEXT_BYTES, Addressed
from narrowcast.algorithms.secure.fixed_point import FixedPoint
from narrowcast.algorithms.secure.masking import KEY_BYTES, SEALED_BYTES, MaskedGroups
from narrowcast.algorithms.secure.schemes import CKKS, Masked, Protection, Public
from narrowcast.algorithms.secure.shamir import SHARE_BYTES
from narrowcast.platform.types import IntArray

RECIPIENT_BYTES, RUN_BYTES = 4, 16
_ALL = np.ones(1, dtype=bool)


@dataclass(frozen=True)
class Messages:
    """The messages of a round in which `cohort` clients take part, each signed by who sends it.

    A client receives what concerns the whole cohort; one client of a CKKS cohort opens the sum. `run` tells the run
    from others with the same keys.
    """

    scheme: Protection
    layout: SumLayout
    cohort: int
    run: bytes = b""

    @property
    def numbers(self) -> FixedPoint:
        """The integers of this layout's sums."""
        return self.scheme.numbers(self.layout.max_weight, self.layout.max_clients)

    def masked_groups(self) -> MaskedGroups:
        """What masks are drawn for."""
        sizes = [group.n_values + group.n_counts for group in self.layout.groups]
        narrow = max(self.numbers.value_bits, self.numbers.count_bits) <= 32
        return MaskedGroups(sizes, 32 if narrow else 64)

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

    def ranks(self, round_index: int) -> Addressed:
        """The cohort's ranks, which say with whom a client shares the mask of a group."""
        return Addressed(
            round_index, self._context("ranks"), (packed_bytes(self.cohort, self.layout.max_rank.bit_length()),)
        )

    def survivors(self, round_index: int) -> Addressed:
        """Who arrived, a bit for each client of the cohort."""
        return Addressed(round_index, self._context("survivors"), (-(-self.cohort // 8),))

    def opened(self, round_index: int) -> Addressed:
        """The decrypted sum, as integers."""
        plain = sum(Protection.body_bytes(self.scheme, group, self.numbers) for group in self.layout.groups)
        return Addressed(round_index, self._context("opened"), (plain,))

    def update_bits_at_rank(self) -> IntArray:
        """What an update weighs at rank 0, 1, ... of the layout, [rank + 1], whichever components it has."""
        ranks = np.arange(self.layout.max_rank + 1)
        groups = self.layout.sent_groups(ranks, np.zeros_like(ranks), 0, 0)
        return np.array([8 * self.update(0, Public()).bytes_of(each) for each in groups])

    def bits_beside(self, cohort: int) -> int:
        """What each of so many clients sends beside its update."""
        if not isinstance(self.scheme, Masked):
            return 0
        messages = replace(self, cohort=cohort)
        return 8 * sum(each.bytes_of(_ALL) for each in (messages.keys(0), messages.shares(0), messages.revealed(0)))

    def opening_bits(self) -> int:
        """What the client that opens a sum sends back."""
        return 8 * self.opened(0).bytes_of(_ALL)

    def downlink_bits(self, *, by_links: bool) -> tuple[int, int]:
        """What each client of the cohort receives beside the broadcast, and who opens the sum beside that.

        Ranks that follow from links are told to the cohort, those that are drawn everyone draws.
        """
        if isinstance(self.scheme, Masked):
            told = (self.ranks(0),) * by_links
            parts = sum(each.bytes_of(_ALL) for each in (self.shares(0), self.survivors(0), *told))
            return 8 * (RUN_BYTES + self.cohort * self.keys(0).bytes_of(_ALL) + parts), 0
        if isinstance(self.scheme, CKKS):
            every = np.ones(len(self.layout.groups), dtype=bool)
            return 8 * RUN_BYTES, 8 * self.update(0, Public()).bytes_of(every)
        return 0, 0

    def public_key_bits(self) -> int:
        """What a client receives of each new key of the run, once."""
        return 8 * self.scheme.public_bytes() if isinstance(self.scheme, CKKS) else 0

    def _context(self, purpose: str, public: Public | None = None) -> bytes:
        """What tells the messages of one run, and of one purpose, from all others."""
        hasher = hashlib.sha256(f"{purpose} {self.scheme.model_dump_json()} {self.cohort}".encode() + self.run)
        if public is not None:
            hasher.update(repr(self.layout.groups).encode() + public.key)
        return hasher.digest()[:CONTEXT_BYTES]
