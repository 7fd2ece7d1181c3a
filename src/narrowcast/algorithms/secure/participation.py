"""Participation in the sum of a round: clients and ranks, the counts that release a row, and the keys of the round.

Participants and ranks are decided before the training from the clients' links. The size of everything that a client
sends is known beforehand, keys and shares included. Under masks it grows with the number of participants, so the cohort
is the largest whose members can all afford their messages.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from narrowcast.algorithms.client.sums import MaskGroup
from narrowcast.algorithms.federated.rank_policy import BandwidthRank, UniformRank
from narrowcast.algorithms.secure.masks import OpenableGroups, with_enough_senders
from narrowcast.algorithms.secure.messages import Messages
from narrowcast.algorithms.secure.schemes import Encryption, Integers, PublicKey
from narrowcast.platform.config.files import Section
from narrowcast.platform.contracts import Task
from narrowcast.platform.types import Arrays, FloatArray, IntArray, PayloadError, Profiles


class FixedRanks(Section):
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

    A round has so many `sums`, and the bits are those of each of them.
    `rule` has the groups that each sends: those of its rank without the ones that too few would send. Ranks are 0 for
    updates without ranks. Under encryption the client at index `opener` also sends back the opened sum.
    """

    clients: IntArray
    ranks: IntArray
    uplink_bits: IntArray
    rule: OpenableGroups
    opener: int = 0
    sums: int = 1

    @property
    def at_risk(self) -> IntArray:
        """The number of groups at risk that each participant sends, [n]."""
        return np.asarray((self.rule.sends & self.rule.at_risk).sum(axis=1))

    def rank_policy(self) -> FixedRanks:
        """Return these ranks as a policy for the plain algorithm."""
        return FixedRanks(kind="agreed", of_client=dict(zip(self.clients.tolist(), self.ranks.tolist(), strict=True)))


@dataclass(frozen=True)
class ParticipationPolicy:
    """The rule by which participants and ranks follow from links; `policy` is the algorithm's rank policy or None.

    Under the policies `bandwidth` and `channel` a client's rank is the highest that fits, and a client that cannot
    afford rank 1 does not take part. Under `uniform`, a client that cannot afford its drawn rank does not take part.
    Neither does a client without examples. If so few remain that their sum would not be opened, no client takes part.

    A client's bits have to suffice for the case that all groups are at risk, since which are follows from the ranks;
    and for all `sums` of a round.
    """

    messages: Messages
    policy: object
    sums: int = 1

    @property
    def ranks_follow_links(self) -> bool:
        """Return whether ranks depend on links, instead of being drawn from the seed."""
        return self.messages.layout.max_rank > 0 and not isinstance(self.policy, UniformRank)

    def of(self, task: Task, cohort: IntArray, round_index: int, budget_bits: IntArray | None) -> Participation:
        """Return the participants of a cohort [C] with uplink budgets `budget_bits` [C]; None: no limit."""
        profiles = task.profiles.take(cohort)
        budget = np.full(len(cohort), np.inf) if budget_bits is None else (budget_bits // self.sums).astype(np.float64)
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
        chosen = Participation(clients, ranks, np.zeros(n, dtype=np.int64), rule, opener, self.sums)
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


@dataclass
class SmallCounts:
    """Blanks the rows of a round's sums that fewer than `least` clients touched, before the sums are released.

    A group with counts of its own is judged by them; other groups by the counts of the group that was opened before,
    which have to come first. With `per_item_mean` and unequal ranks these count the clients that touched the item,
    whichever of its components they sent.
    """

    n_items: int
    least: int
    _counts: Integers | None = field(default=None, repr=False)

    def blanked(self, group: MaskGroup, integers: Integers) -> Integers:
        """Return the integers of a group's sum [n_values + n_counts] with zeros for values and counts of such rows.

        Raise `PayloadError` for a group whose counts are not by item, or not known yet.
        """
        if self.least <= 1:
            return integers
        values, counts = np.split(integers, [group.n_values])
        if not self.n_items or group.n_values % self.n_items or group.n_counts % self.n_items:
            raise PayloadError("the sum has no counts by item, and is not opened with secure.smallest_count above 1")
        if group.n_counts:
            self._counts = counts.reshape(self.n_items, -1)
        if self._counts is None:
            raise PayloadError("the counts of the items have to be opened before their values")
        few = self._counts < self.least
        blanked_values = np.where(few, 0, values.reshape(self.n_items, -1)).ravel() if group.n_values else values
        return np.concatenate([blanked_values, np.where(few, 0, self._counts).ravel() if group.n_counts else counts])


@dataclass(frozen=True)
class RoundKeys:
    """Public data of a round: participants, their verification and advertised keys, the run's public key and number.

    `verify` has the Ed25519 key of each participant; `advertised` what each sent in the protocol's first step, empty
    without masks. `present` are the participants that may send updates: with masks, those that shared their keys.
    """

    participation: Participation
    verify: Mapping[int, bytes]
    advertised: Mapping[int, bytes]
    present: tuple[int, ...]
    public: PublicKey
    run: bytes

    @classmethod
    def of(cls, participation: Participation, of_run: Arrays, of_round: Arrays) -> RoundKeys:
        """Read the key store's answers to `public` and to `begin`."""
        clients = participation.clients.tolist()
        present = of_round["present"].tolist() if "present" in of_round else clients
        verify = dict(zip(clients, map(bytes, of_round["verify"]), strict=True))
        advertised = dict(zip(present, map(bytes, of_round.get("keys", ())), strict=False))
        return cls(participation, verify, advertised, tuple(present), PublicKey.of(of_run), of_run["run"].tobytes())

    def messages(self, messages: Messages) -> Messages:
        """Return the messages of this round, from those of a whole cohort of any run."""
        return replace(messages, cohort=len(self.participation.clients), run=self.run)


@dataclass(frozen=True)
class ClientSecrets:
    """Private keys of the c clients of a chunk, which only the hosts of these clients hold.

    An own secret gives the seeds of a client's own masks; pair seeds are by the m clients that are present. None
    without masks. `repr` shows none of them.

    Shapes: signing [c, 32]; own_secrets [c, 32]; pair_seeds [c, m, 32].
    """

    signing: NDArray[Any]
    own_secrets: NDArray[Any] | None
    pair_seeds: NDArray[Any] | None

    @classmethod
    def of(cls, arrays: Arrays) -> ClientSecrets:
        """Read the key store's answer to `secrets`."""
        own_secrets, pairs = (np.asarray(arrays[name]) if name in arrays else None for name in ("own", "pairs"))
        return cls(np.asarray(arrays["signing"]), own_secrets, pairs)

    def __repr__(self) -> str:
        return "ClientSecrets(...)"
