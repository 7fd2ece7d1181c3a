"""The server's side of secure aggregation: keys are distributed before a round's training, and its sum is opened after.

`Inbox` is masked input: envelopes are checked and added on arrival, and only the sums are kept. `MaskRecovery` is
unmasking (Bonawitz et al., CCS 2017, Figure 4): from revealed shares to the masks in the sum. `SumOpener` runs both.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from narrowcast.algorithms.client.sums import TensorSum
from narrowcast.algorithms.secure.keys import SECRET_BYTES, SHARE_BYTES, KeyAgreements, combine
from narrowcast.algorithms.secure.masking_client import Step, dropout_steps
from narrowcast.algorithms.secure.masks import MaskLayout, OpenableGroups, OwnSeeds
from narrowcast.algorithms.secure.messages import EnrolledClients, Messages
from narrowcast.algorithms.secure.participation import Participation, ParticipationPolicy, RoundKeys, SmallCounts
from narrowcast.algorithms.secure.schemes import Encryption, Integers, Masked, Plain, PublicKey, RingElements
from narrowcast.algorithms.secure.sum_chain import ESTIMATE
from narrowcast.platform.contracts import Task
from narrowcast.platform.rounds.client_contracts import ClientKeyStore, refusals_end_the_run
from narrowcast.platform.rounds.ledger import ChunkResult
from narrowcast.platform.types import Arrays, BoolArray, Chunk, IntArray, PayloadError, PrefixedArrays

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class MaskRecovery:
    """Secrets that the survivors reveal: own-mask seeds of survivors, private mask keys of dropouts.

    `opened` [groups] are the groups whose masks these secrets remove.
    """

    round_index: int
    rule: OpenableGroups
    opened: BoolArray
    own_seeds: Mapping[int, OwnSeeds] = field(repr=False)
    dropout_keys: Mapping[int, X25519PrivateKey] = field(repr=False)

    @classmethod
    def of(
        cls,
        round_index: int,
        rule: OpenableGroups,
        advertised: Mapping[int, bytes],
        survivors: Collection[int],
        revealed: Mapping[int, bytes | memoryview],
    ) -> MaskRecovery:
        """Combine what clients revealed, the body of `Messages.unmasking_shares` by client.

        `advertised` are the keys of the clients that shared theirs. The first `threshold` answers are used; raise
        `PayloadError` if there are fewer, or if a secret is not the advertised one. A survivor that has not answered
        leaves its groups at risk unopened, unless all of them may be opened.
        """
        if len(revealed) < rule.threshold:
            raise PayloadError(f"{len(revealed)} of {len(survivors)} clients revealed shares, {rule.threshold} needed")
        points = {client: index for index, client in enumerate(rule.clients)}
        used, own_seeds, private = list(revealed)[: rule.threshold], dict[int, OwnSeeds](), {}
        opened = left = rule.opened(survivors)
        fully_opened = rule.fully_opened(opened)
        for client, keys in advertised.items():
            at = points[client] * SHARE_BYTES
            shares = {points[peer] + 1: bytes(revealed[peer][at : at + SHARE_BYTES]) for peer in used}
            try:
                secret = combine(shares)
            except ValueError:
                secret = bytes(SECRET_BYTES)
            if client not in survivors:
                private[client] = X25519PrivateKey.from_private_bytes(secret)
                matches = private[client].public_key().public_bytes_raw() == keys[:32]
            else:
                risky, whole = rule.risky(client), client in fully_opened
                seeds = OwnSeeds.of(secret, risky) if whole else OwnSeeds(secret, {})
                matches = hashlib.sha256(seeds.shared).digest() == keys[64:]
                if not whole and client in revealed:
                    seeds = OwnSeeds(secret, _revealed_seeds(revealed[client], risky, opened, len(rule.clients)))
                own_seeds[client] = seeds
            if not matches:
                raise PayloadError(f"the shares of client {client}'s secret do not give the one that it advertised")
        for client, seeds in own_seeds.items():
            left = left & ~(rule.sent[client] & rule.at_risk & ~_marked(seeds.of_group, len(opened)))
        return cls(round_index, rule, left, own_seeds, private)

    def masks(self, layout: MaskLayout, advertised: Mapping[int, bytes]) -> list[RingElements]:
        """Return the masks that are left in the sum of each group; meaningless for a group that is not opened."""
        totals, agreements, sent = layout.zeros(), KeyAgreements(), self.rule.sent
        for client, seeds in self.own_seeds.items():
            layout.add_own(totals, seeds, sent[client], self.rule.at_risk)
        for dropout, key in self.dropout_keys.items():
            for client in self.own_seeds:
                ends = advertised[dropout][:32], advertised[client][:32]
                seed = agreements.key(key, *ends, b"mask", self.round_index)
                layout.add(totals, seed, sent[dropout] & sent[client], negative=client > dropout)
        return [elements.astype(np.uint64) for elements in totals]


def recovered(
    messages: Messages, round_index: int, keys: RoundKeys, survivors: Collection[int], answers: Arrays
) -> MaskRecovery:
    """Combine the messages in which survivors reveal their shares, by the name of the client.

    Raise `PayloadError` as `MaskRecovery.of`, and for a message that is empty or that its client did not sign.
    """
    rule, enrolled = keys.participation.rule, EnrolledClients(keys.verify)
    revealed = dict(
        enrolled.open(messages.unmasking_shares(round_index, len(rule.risky(int(name)))), np.asarray(data).tobytes())
        for name, data in answers.items()
    )
    return MaskRecovery.of(round_index, rule, keys.advertised, survivors, revealed)


def _revealed_seeds(
    body: bytes | memoryview, risky: list[int], opened: BoolArray, participants: int
) -> dict[int, bytes]:
    """Return the seeds of groups at risk that a client revealed of its own masks."""
    start = participants * SHARE_BYTES
    seeds = [bytes(body[start + at * SECRET_BYTES :][:SECRET_BYTES]) for at in range(len(risky))]
    return {group: seed for group, seed in zip(risky, seeds, strict=True) if opened[group]}


def _marked(marked: Collection[int], groups: int) -> BoolArray:
    return np.isin(np.arange(groups), list(marked))


@dataclass
class Inbox:
    """The protected sum of each group over the clients received so far.

    `keys` are the clients' verification keys; clients that have none are refused.
    """

    messages: Messages
    round_index: int
    public: PublicKey
    keys: Mapping[int, bytes]
    sums: list[RingElements | None] = field(init=False)
    received: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.sums = [None] * len(self.messages.layout.groups)
        self._format = self.messages.update(self.round_index, self.public)

    def receive(self, data: bytes) -> int:
        """Add a client's update and return the client; a `PayloadError` leaves the sums unchanged."""
        client, bodies = self._format.open(data, self.keys)
        if client in self.received:
            raise PayloadError(f"client {client} has sent its update of round {self.round_index} before")
        scheme, numbers = self.messages.scheme, self.messages.fixed_point
        elements = [
            None if body is None else scheme.decode(group, body, numbers, self.public)
            for group, body in zip(self.messages.layout.groups, bodies, strict=True)
        ]
        self.received.add(client)
        for index, element in enumerate(elements):
            if element is not None:
                self.sums[index] = merged(self.sums[index], element, self.messages, self.public)
        return client


def merged(
    first: RingElements | None, second: RingElements | None, messages: Messages, public: PublicKey
) -> RingElements | None:
    """Return the sum of two partial sums of a group; exact, and therefore independent of the order."""
    if first is None or second is None:
        return second if first is None else first
    return messages.scheme.add(np.asarray(first), np.asarray(second), public)


_SUMS = PrefixedArrays("sum/")
_MUCH_CLIPPING = 0.01
"""Share of a round's values beyond the clip that is warned of: the bias of the sum is no longer negligible."""


def protected_sums(inbox: Inbox) -> Arrays:
    """Return a chunk's partial sum: each group's protected sum."""
    return _SUMS.add({str(group): elements for group, elements in enumerate(inbox.sums) if elements is not None})


def protected_groups(partial: Arrays) -> dict[int, RingElements]:
    """Return the protected sum of each group in a chunk's partial sum, by the index of the group."""
    return {int(group): np.asarray(elements) for group, elements in _SUMS.of(partial).items()}


class SumOpener:
    """Opens each sum of a round once, with what its clients reveal.

    A sum has keys, masks and survivors of its own. Those of a run are numbered: the first of round r, of s sums, is
    (r - 1) s + 1. A client that did not deliver in a sum, or stopped answering in it, takes part in no later one.
    """

    def __init__(self, participation_policy: ParticipationPolicy, key_store: ClientKeyStore, task: Task) -> None:
        self._policy, self._key_store, self._task = participation_policy, key_store, task
        self._of_run = dict(key_store.call("public", 0, {}))
        self._round = self._asked = self._sum = 0
        self._gone: IntArray = np.empty(0, dtype=np.int64)
        self._survivors: IntArray = np.empty(0, dtype=np.int64)
        self._participating: Participation | None = None
        self._keys: RoundKeys | None = None
        self._stops: dict[int, int] = {}
        self._warned_of: set[str] = set()

    def distribute_keys(self, chunks: Sequence[Chunk]) -> list[Chunk]:
        """Return the chunks with the sum's `RoundKeys`; its participants make their keys at the first call."""
        if chunks and chunks[0].round_index != self._round:
            self._round, self._sum, self._gone = chunks[0].round_index, 0, self._gone[:0]
            self._participating, self._keys = self._participation(chunks), None
        if chunks and self._keys is None:
            assert self._participating is not None
            participation = self._participating
            clients, scheme = participation.clients, self._policy.messages.scheme
            probability = scheme.dropout if isinstance(scheme, Masked) else 0.0
            steps = dropout_steps(self._task.seed, self._key_round, clients, probability)
            steps = np.where(np.isin(clients, self._gone), Step.ADVERTISES, steps)
            self._stops = dict(zip(clients.tolist(), steps.tolist(), strict=True))
            told: Arrays = {"clients": clients, "groups": participation.rule.sends.astype(np.uint8), "stops": steps}
            with refusals_end_the_run(self._round):
                of_round = self._key_store.call("begin", self._key_round, told)
            self._keys, self._survivors = RoundKeys.of(participation, self._of_run, of_round), of_round["survivors"]
            self._say_what_does_not_count(chunks)
        return [
            replace(chunk, relayed=self._keys, lost=self._lost(chunk), key_round=self._key_round) for chunk in chunks
        ]

    @property
    def _key_round(self) -> int:
        """The number of the present sum in the run."""
        return (self._round - 1) * self._policy.sums + self._sum + 1

    @property
    def answered_round(self) -> int:
        """The last round of which clients have answered a sum, before this process too."""
        return -(-int(self._of_run["answered"][0]) // self._policy.sums)

    def _lost(self, chunk: Chunk) -> BoolArray | None:
        """Return whose uploads do not count: in a repeated round, of all but those whose sum was opened."""
        return ~(chunk.arrives() & np.isin(chunk.clients, self._survivors)) if len(self._survivors) else chunk.lost

    def _say_what_does_not_count(self, chunks: Sequence[Chunk]) -> None:
        arrive = np.concatenate([chunk.clients[chunk.arrives()] for chunk in chunks])
        excluded = np.setdiff1d(arrive, self._survivors) if len(self._survivors) else arrive[:0]
        if len(excluded):
            logger.warning(
                "round %d is repeated over the %d clients whose sum was opened before the interruption; uploads of %d "
                "others do not count",
                self._round,
                len(self._survivors),
                len(excluded),
            )

    def _participation(self, chunks: Sequence[Chunk]) -> Participation:
        clients = np.concatenate([chunk.clients for chunk in chunks])
        order, self._asked = clients.argsort(), len(clients)
        budgets = [chunk.budget_bits for chunk in chunks if chunk.budget_bits is not None]
        budget_bits = np.concatenate(budgets)[order] if budgets else None
        return self._policy.of(self._task, clients[order], self._round, budget_bits)

    def open_sum(self, results: list[ChunkResult]) -> list[ChunkResult]:
        """Replace the chunks' protected sums by the opened one; a sum of too few clients is not opened."""
        if not results:
            return results
        self._warn_of_clipping(results)
        assert self._keys is not None
        keys, messages = self._keys, self._keys.messages(self._policy.messages)
        arrived = np.sort(np.concatenate([result.ledger.client[result.ledger.delivered] for result in results]))
        needed = messages.scheme.survivors_needed(messages.cohort)
        if len(arrived) < needed:
            of_cohort = f"{messages.cohort} clients" + f" (of {self._asked} asked)" * (messages.cohort < self._asked)
            happened = "arrived" if keys.present or not messages.cohort else "arrived, too few agreed on keys"
            why = f"{len(arrived)} of {of_cohort} {happened}, and the sum of fewer than {needed} is not opened"
            return self._refused(results, messages, why)
        survivors = frozenset(arrived.tolist())
        opened, masks = keys.participation.rule.opened(survivors), list[RingElements]()
        if isinstance(messages.scheme, Masked):
            try:
                recovery = self._recovery(messages, keys, survivors)
            except PayloadError as error:
                return self._refused(results, messages, f"the masks cannot be removed: {error}")
            opened, masks = recovery.opened, recovery.masks(messages.mask_layout(), keys.advertised)
        sums, small = list[Integers | None](), SmallCounts(messages.layout.n_items, messages.scheme.smallest_count)
        for index, may_be_opened in enumerate(opened.tolist()):
            elements = _folded(results, index, messages, keys.public)
            opens = may_be_opened and elements is not None
            sums.append(self._open(index, np.asarray(elements), messages, masks, small, arrived) if opens else None)
        self._warn_of_small_counts(sums, messages)
        total = messages.fixed_point.total(sums, messages.layout)
        return [replace(result, partial=total) for result in results]

    def next_sum(self, results: list[ChunkResult]) -> Arrays | None:
        """Return the mean of an opened sum, which the next sum of the round is made of; None after the last one."""
        arrived = np.concatenate([result.ledger.client[result.ledger.delivered] for result in results] or [self._gone])
        if not len(arrived) or self._sum + 1 == self._policy.sums:
            return None
        left = [client for client in arrived.tolist() if self._stops[client] == Step.NEVER]
        self._gone = np.setdiff1d(list(self._stops), left)
        self._sum, self._keys = self._sum + 1, None
        opened = next(result.partial for result in results if not result.dropped)
        return ESTIMATE.add(TensorSum.of(opened).means())

    def _refused(self, results: list[ChunkResult], messages: Messages, why: str) -> list[ChunkResult]:
        """Return a round in which no upload counts as delivered, so that the model stays."""
        logger.warning("round %d: %s; the model stays", self._round, why)
        zeros = messages.layout.zeros()
        return [
            replace(
                result,
                partial=zeros,
                ledger=replace(result.ledger, delivered=np.zeros_like(result.ledger.delivered)),
            )
            for result in results
        ]

    def _warn_of_clipping(self, results: Sequence[ChunkResult]) -> None:
        """Warn once a run if clients cut many values, which the simulation knows and a real server does not."""
        cut, values = sum(result.values_cut for result in results), sum(result.values for result in results)
        if cut > _MUCH_CLIPPING * values and "clipping" not in self._warned_of:
            self._warned_of.add("clipping")
            logger.warning(
                "round %d: %.1f %% of the values are larger than secure.clip = %g and are cut; use a larger one, "
                "and one more of secure.bits each time it is doubled, which keeps the step",
                self._round,
                100 * cut / values,
                self._policy.messages.scheme.clip,
            )

    def _recovery(self, messages: Messages, keys: RoundKeys, survivors: frozenset[int]) -> MaskRecovery:
        """Return what the survivors that still answer reveal; raise `PayloadError` if they are too few."""
        listed, rule = np.array(sorted(survivors)), keys.participation.rule
        signed = np.empty((0, 0), dtype=np.uint8)
        if messages.active:
            signed = self._key_store.call(
                "sign", self._key_round, {"clients": listed, "asked": self._answering(Step.SIGNS, listed)}
            )["signed"]
            if len(signed) < rule.threshold:
                raise PayloadError(f"{len(signed)} of {len(listed)} clients signed the list, {rule.threshold} needed")
            signed = signed[: rule.threshold]
        asked = {"clients": listed, "asked": self._answering(Step.REVEALS, listed), "signed": signed}
        answers = self._key_store.call("reveal", self._key_round, asked)
        return recovered(messages, self._key_round, keys, survivors, answers)

    def _answering(self, step: int, clients: IntArray) -> IntArray:
        """Return the clients that still answer in a step."""
        return np.array([client for client in clients.tolist() if self._stops[client] > step], dtype=np.int64)

    def _open(
        self,
        index: int,
        elements: RingElements,
        messages: Messages,
        masks: list[RingElements],
        small_counts: SmallCounts,
        arrived: IntArray,
    ) -> Integers:
        """Return the integers of one group's sum, without the rows that too few clients touched."""
        layout, numbers, scheme = messages.layout, messages.fixed_point, messages.scheme
        group = layout.groups[index]
        if isinstance(scheme, Encryption):
            plan = np.array(
                [index, group.n_values, group.n_counts, numbers.max_weight, numbers.max_clients, layout.n_items]
            )
            request = {"group": plan, "elements": elements, "clients": arrived}
            with refusals_end_the_run(self._round):
                answer = self._key_store.call("open", self._key_round, request)
            return np.asarray(answer["integers"])
        opened = scheme.open_sum(group, elements - masks[index] if masks else elements, numbers)
        return small_counts.blanked(group, opened)

    def _warn_of_small_counts(self, sums: Sequence[Integers | None], messages: Messages) -> None:
        """Warn once a run of items whose opened counts say that their rows are those of very few clients."""
        layout, least = messages.layout, messages.scheme.least_senders
        if isinstance(messages.scheme, Plain) or not layout.n_items or "small counts" in self._warned_of:
            return
        few = np.zeros(layout.n_items, dtype=bool)
        for group, opened in zip(layout.groups, sums, strict=True):
            if opened is not None and group.n_counts:
                counts = opened[group.n_values :].reshape(layout.n_items, -1)
                few |= ((counts > 0) & (counts < least)).any(axis=1)
        if few.any():
            self._warned_of.add("small counts")
            logger.warning(
                "round %d: %d of %d items have counts below %d, and the sums of these rows are open; "
                "use more clients_per_round, or secure.kind = ckks with smallest_count = %d",
                self._round,
                few.sum(),
                layout.n_items,
                least,
                least,
            )


def _folded(results: Sequence[ChunkResult], index: int, messages: Messages, public: PublicKey) -> RingElements | None:
    """Return the protected sum of a group over all chunks; None if no client sent it."""
    elements: RingElements | None = None
    for result in results:
        if (part := result.partial.get(_SUMS.name(str(index)))) is not None:
            elements = merged(elements, part, messages, public)
    return elements
