"""Who takes part in the sum of a round and what each sends: decided before the training, from what links carry.

All that a client sends weighs what everyone can work out, keys and shares included. Under masks these grow with the
number of clients that take part, so that the cohort is the largest whose members can all afford theirs.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from narrowcast.algorithms.federated.rank_policy import BandwidthRank, UniformRank
from narrowcast.algorithms.secure.messages import Messages
from narrowcast.algorithms.secure.schemes import CKKS
from narrowcast.platform.contracts import Task
from narrowcast.platform.types import FloatArray, IntArray, Profiles


@dataclass(frozen=True)
class Participation:
    """The n clients of a cohort that take part. Shapes, all [n]: clients ascending, ranks, and all that each sends.

    Ranks are 0 where updates have none. With CKKS the client at `opener` opens the sum and sends that back too.
    """

    clients: IntArray
    ranks: IntArray
    uplink_bits: IntArray
    opener: int = 0


@dataclass(frozen=True)
class ParticipationPolicy:
    """How a cohort's ranks follow from its links: `policy` is that of the plain algorithm, None where it has no ranks.

    Ranks by bandwidth or channel are the highest that fit, and who cannot afford rank 1 takes no part; nor does who
    cannot afford the rank that it drew, or has nothing to learn from. Of fewer than `smallest_group` nothing would be
    opened, so that nobody takes part.
    """

    messages: Messages
    policy: object

    @property
    def by_links(self) -> bool:
        """Whether ranks are unknown until links are."""
        return self.messages.layout.max_rank > 0 and not isinstance(self.policy, UniformRank)

    def of(self, task: Task, cohort: IntArray, round_index: int, budget_bits: IntArray | None) -> Participation:
        """Return who takes part of a cohort [C] with `budget_bits` [C]; None where nothing limits uploads."""
        profiles = task.profiles.take(cohort)
        budget = np.full(len(cohort), np.inf) if budget_bits is None else budget_bits.astype(np.float64)
        if isinstance(self.policy, BandwidthRank):
            budget = np.minimum(budget, self.policy.upload_seconds * profiles.uplink_bits_per_second)
        update = self.messages.update_bits_at_rank()
        least = np.ones(len(cohort), dtype=np.int64) if self.by_links else self._drawn(profiles, task, round_index)
        spare = np.where(profiles.examples > 0, budget - update[least], -np.inf)
        richest = np.argsort(-spare, kind="stable")
        # What the n-th richest has falls with n, and what it has to pay rises.
        n = next((n for n in range(len(cohort), 0, -1) if spare[richest[n - 1]] >= self.messages.bits_beside(n)), 0)
        part = np.sort(richest[:n])
        opener, opening = self._opener(spare[part])
        if n < self.messages.scheme.smallest_group or opener is None:
            nobody = np.empty(0, dtype=np.int64)
            return Participation(nobody, nobody, nobody)
        around = self.messages.bits_beside(n) + opening * (np.arange(n) == opener)
        ranks = least[part]
        if self.by_links:
            ranks = (update[1:] <= (budget[part] - around)[:, None]).sum(axis=1)
        return Participation(cohort[part], ranks, update[ranks] + around, opener)

    def _drawn(self, profiles: Profiles, task: Task, round_index: int) -> IntArray:
        """The ranks that do not depend on links; 0 where updates have none."""
        if not isinstance(self.policy, UniformRank) or not self.messages.layout.max_rank:
            return np.zeros(len(profiles), dtype=np.int64)
        nothing = np.zeros((len(profiles), self.messages.layout.max_rank + 1), dtype=np.int64)
        return self.policy.ranks(profiles, nothing, task.seed, round_index)

    def _opener(self, spare: FloatArray) -> tuple[int | None, int]:
        """Of those that take part, who opens the sum and what that weighs; None where nobody can afford it."""
        if not isinstance(self.messages.scheme, CKKS) or not len(spare):
            return 0, 0
        opening, best = self.messages.opening_bits(), int(spare.argmax())
        return (best if spare[best] >= opening else None), opening
