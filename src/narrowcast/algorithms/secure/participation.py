"""The clients that take part in the sum of a round and the rank of each, decided before the training from their links.

The size of everything that a client sends is known beforehand, keys and shares included. Under masks it grows with the
number of participants, so the cohort is the largest whose members can all afford their messages.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from narrowcast.algorithms.federated.rank_policy import BandwidthRank, UniformRank
from narrowcast.algorithms.secure.messages import Messages
from narrowcast.algorithms.secure.openable_groups import OpenableGroups, with_enough_senders
from narrowcast.algorithms.secure.protection import Encryption
from narrowcast.platform.contracts import Task
from narrowcast.platform.section import Section
from narrowcast.platform.types import FloatArray, IntArray, Profiles


class AgreedRanks(Section):
    """A rank policy with ranks that were agreed before the training; 0 for a client that does not take part."""

    kind: str
    of_client: dict[int, int]

    def ranks(
        self, profiles: Profiles, global_rank: int, bits_at_rank: IntArray, seed: int, round_index: int
    ) -> IntArray:
        """Return the agreed ranks, [C]."""
        del global_rank, bits_at_rank, seed, round_index
        return np.array([self.of_client.get(client, 0) for client in profiles.client.tolist()], dtype=np.int64)


@dataclass(frozen=True)
class Participation:
    """The n participants of a cohort. Shapes, all [n]: clients ascending, ranks, uplink_bits of all that each sends.

    `rule` has the groups that each sends: those of its rank without the ones that too few would send. Ranks are 0 for
    updates without ranks. Under encryption the client at place `opener` also sends back the opened sum.
    """

    clients: IntArray
    ranks: IntArray
    uplink_bits: IntArray
    rule: OpenableGroups
    opener: int = 0

    @property
    def at_risk(self) -> IntArray:
        """The number of groups at risk that each participant sends, [n]."""
        return np.asarray((self.rule.rows & self.rule.at_risk).sum(axis=1))

    def rank_policy(self) -> AgreedRanks:
        """Return these ranks as a policy for the plain algorithm."""
        return AgreedRanks(kind="agreed", of_client=dict(zip(self.clients.tolist(), self.ranks.tolist(), strict=True)))


@dataclass(frozen=True)
class ParticipationPolicy:
    """The rule by which participants and ranks follow from links; `policy` is the algorithm's rank policy or None.

    Under the policies `bandwidth` and `channel` a client's rank is the highest that fits, and a client that cannot
    afford rank 1 does not take part. Under `uniform`, a client that cannot afford its drawn rank does not take part.
    Neither does a client without examples. If so few remain that their sum would not be opened, nobody takes part.

    A client's bits have to suffice for the case that all groups are at risk, since which are follows from the ranks.
    """

    messages: Messages
    policy: object

    @property
    def ranks_follow_links(self) -> bool:
        """Return whether ranks depend on links, instead of being drawn from the seed."""
        return self.messages.layout.max_rank > 0 and not isinstance(self.policy, UniformRank)

    def of(self, task: Task, cohort: IntArray, round_index: int, budget_bits: IntArray | None) -> Participation:
        """Return the participants of a cohort [C] with uplink budgets `budget_bits` [C]; None: no limit."""
        profiles = task.profiles.take(cohort)
        budget = np.full(len(cohort), np.inf) if budget_bits is None else budget_bits.astype(np.float64)
        if isinstance(self.policy, BandwidthRank):
            budget = np.minimum(budget, self.policy.upload_seconds * profiles.uplink_bits_per_second)
        update = self.messages.most_bits_at_rank()
        if self.ranks_follow_links:
            least = np.ones(len(cohort), dtype=np.int64)
        else:
            least = self._drawn_ranks(profiles, task, round_index)
        slack = np.where(profiles.examples > 0, budget - update[least], -np.inf)
        most_slack_first = np.argsort(-slack, kind="stable")
        # The slack of the n-th client falls with n, and the bits that a cohort of n needs rise: one crossing.
        n = next(
            (
                n
                for n in range(len(cohort), 0, -1)
                if slack[most_slack_first[n - 1]] >= self.messages.most_protocol_bits(n)
            ),
            0,
        )
        part = np.sort(most_slack_first[:n])
        opener, opening_bits = self._opener(slack[part])
        if n < self.messages.scheme.survivors_needed(n) or opener is None:
            part, ranks, opener = part[:0], np.empty(0, dtype=np.int64), 0
        else:
            most = self.messages.most_protocol_bits(n) + opening_bits * (np.arange(n) == opener)
            ranks = least[part]
            if self.ranks_follow_links:
                ranks = (update[1:] <= (budget[part] - most)[:, None]).sum(axis=1)
        return self._sending(cohort[part], ranks, opener, opening_bits, task.seed, round_index)

    def _sending(
        self, clients: IntArray, ranks: IntArray, opener: int, opening_bits: int, seed: int, round_index: int
    ) -> Participation:
        """Return the participation of clients of these ranks, with the groups and bits that each of them sends."""
        messages, n = replace(self.messages, cohort=len(clients)), len(clients)
        scheme = messages.scheme
        groups = with_enough_senders(
            messages.layout.sent_groups(ranks, clients, seed, round_index), scheme.least_senders
        )
        rule = OpenableGroups(tuple(clients.tolist()), groups, scheme.survivors_needed(n), scheme.least_senders)
        chosen = Participation(clients, ranks, np.zeros(n, dtype=np.int64), rule, opener)
        opening = opening_bits * (np.arange(n) == opener)
        bits = messages.update_bits(groups) + messages.protocol_bits(chosen.at_risk) + opening
        return replace(chosen, uplink_bits=bits)

    def _drawn_ranks(self, profiles: Profiles, task: Task, round_index: int) -> IntArray:
        """Return the ranks that do not depend on links, [C]; 0 for updates without ranks."""
        if not isinstance(self.policy, UniformRank) or not self.messages.layout.max_rank:
            return np.zeros(len(profiles), dtype=np.int64)
        return self.policy.draw(profiles.client, self.messages.layout.max_rank, task.seed, round_index)

    def _opener(self, slack: FloatArray) -> tuple[int | None, int]:
        """Return the participant that opens the sum and the bits of that; None if no participant can afford it."""
        if not isinstance(self.messages.scheme, Encryption) or not len(slack):
            return 0, 0
        opening_bits, best = self.messages.opened_sum_bits(), int(slack.argmax())
        return (best if slack[best] >= opening_bits else None), opening_bits
