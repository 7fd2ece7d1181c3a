"""The server's side around a round's training: keys are agreed before it, and the sum is opened after it."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from narrowcast.algorithms.secure.bit_packing import RingElements
from narrowcast.algorithms.secure.ckks_scheme import CKKS
from narrowcast.algorithms.secure.fixed_point import Integers
from narrowcast.algorithms.secure.inbox import Inbox, merged
from narrowcast.algorithms.secure.mask_recovery import MaskRecovery
from narrowcast.algorithms.secure.messages import Messages
from narrowcast.algorithms.secure.participation import Participation, ParticipationPolicy
from narrowcast.algorithms.secure.protection import Masked, PublicKey
from narrowcast.algorithms.secure.round_keys import RoundKeys
from narrowcast.algorithms.secure.shamir import SHARE_BYTES
from narrowcast.platform.contracts import ClientKeyStore, Task
from narrowcast.platform.types import Arrays, Chunk, ChunkResult, IntArray, PayloadError

logger = logging.getLogger(__name__)

_SUM, _SENDERS = "sum/", "senders/"


def protected_sums(inbox: Inbox) -> Arrays:
    """Return a chunk's partial sum: each group's protected sum, and the number of clients in it."""
    arrays: dict[str, NDArray[np.generic]] = {}
    for place, elements in enumerate(inbox.sums):
        if elements is not None:
            arrays[f"{_SUM}{place}"] = elements
            arrays[f"{_SENDERS}{place}"] = np.array(inbox.senders[place])
    return arrays


class SumOpener:
    """Opens the sum of each round once, with what its clients reveal."""

    def __init__(self, participation_policy: ParticipationPolicy, key_store: ClientKeyStore, task: Task) -> None:
        self._policy, self._key_store, self._task = participation_policy, key_store, task
        self._of_run = dict(key_store.call("public", 0, {}))
        self._round = self._asked = 0
        self._keys: RoundKeys | None = None

    def before(self, chunks: Sequence[Chunk]) -> list[Chunk]:
        """Return the chunks with the round's `RoundKeys`; its participants make their keys at the first call."""
        if chunks and chunks[0].round_index != self._round:
            self._round = chunks[0].round_index
            participation = self._participation(chunks)
            of_round = self._key_store.call("begin", self._round, {"clients": participation.clients})
            self._keys = RoundKeys.of(participation, self._of_run, of_round)
        return [replace(chunk, relayed=self._keys) for chunk in chunks]

    def _participation(self, chunks: Sequence[Chunk]) -> Participation:
        clients = np.concatenate([chunk.clients for chunk in chunks])
        order, self._asked = clients.argsort(), len(clients)
        budgets = [chunk.budget_bits for chunk in chunks if chunk.budget_bits is not None]
        budget_bits = np.concatenate(budgets)[order] if budgets else None
        return self._policy.of(self._task, clients[order], self._round, budget_bits)

    def after(self, results: list[ChunkResult]) -> list[ChunkResult]:
        """Put the opened sum in the place of every chunk's; a sum of too few clients is not opened."""
        if not results:
            return results
        assert self._keys is not None
        messages = self._keys.messages(self._policy.messages)
        arrived = np.sort(np.concatenate([result.ledger.client[result.ledger.delivered] for result in results]))
        scheme = messages.scheme
        needed = max(scheme.survivor_threshold(messages.cohort), scheme.smallest_group)
        if len(arrived) < needed:
            of_cohort = f"{messages.cohort} clients" + f" (of {self._asked} asked)" * (messages.cohort < self._asked)
            why = f"{len(arrived)} of {of_cohort} arrived, and the sum of fewer than {needed} is not opened"
            return self._refused(results, messages, why)
        try:
            masks = self._masks(messages, self._keys, arrived)
        except PayloadError as error:
            return self._refused(results, messages, f"the masks cannot be removed: {error}")
        sums: list[Integers | None] = []
        for place in range(len(messages.layout.groups)):
            elements, senders = _folded(results, place, messages, self._keys.public)
            if elements is None or senders < scheme.smallest_group:
                sums.append(None)
            else:
                sums.append(self._open(place, elements, messages, masks))
        total = messages.fixed_point.total(sums, messages.layout)
        return [replace(result, partial=total) for result in results]

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

    def _masks(self, messages: Messages, keys: RoundKeys, arrived: IntArray) -> list[RingElements]:
        """Return the masks left in the sum of each group, from the survivors' shares; empty for schemes without."""
        if not isinstance(messages.scheme, Masked):
            return []
        answers = self._key_store.call("reveal", self._round, {"clients": arrived})["revealed"]
        shares: dict[int, list[bytes]] = {}
        for data in answers:
            client, (body,) = messages.unmasking_shares(self._round).open(data.tobytes(), keys.verify)
            assert body is not None
            shares[client] = [bytes(body[at : at + SHARE_BYTES]) for at in range(0, len(body), SHARE_BYTES)]
        threshold = messages.scheme.survivor_threshold(messages.cohort)
        recovery = MaskRecovery.of(self._round, keys.advertised, shares, threshold)
        groups = keys.sent_groups(messages.layout, self._task.seed, self._round)
        return recovery.masks(messages.mask_layout(), groups, keys.advertised)

    def _open(self, place: int, elements: RingElements, messages: Messages, masks: list[RingElements]) -> Integers:
        """Return the integers of one group's sum."""
        group, numbers, scheme = messages.layout.groups[place], messages.fixed_point, messages.scheme
        if isinstance(scheme, CKKS):
            plan = np.array([place, group.n_values, group.n_counts, numbers.max_weight, numbers.max_clients])
            answer = self._key_store.call("open", self._round, {"group": plan, "elements": elements})
            return np.asarray(answer["integers"])
        return scheme.open_sum(group, elements - masks[place] if masks else elements, numbers)


def _folded(
    results: Sequence[ChunkResult], place: int, messages: Messages, public: PublicKey
) -> tuple[RingElements | None, int]:
    """Return the protected sum of a group over all chunks, and the number of clients in it."""
    elements, senders = None, 0
    for result in results:
        if f"{_SUM}{place}" in result.partial:
            elements = merged(elements, result.partial[f"{_SUM}{place}"], messages, public)
            senders += int(result.partial[f"{_SENDERS}{place}"])
    return elements, senders
