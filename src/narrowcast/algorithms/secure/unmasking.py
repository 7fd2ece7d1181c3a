"""Around the rounds of a protected run: keys before the training, and the sum opened after it."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from narrowcast.algorithms.federated.sum_layout import SumLayout
from narrowcast.algorithms.secure.bit_packing import Words
from narrowcast.algorithms.secure.fixed_point import Integers
from narrowcast.algorithms.secure.inbox import Inbox, merged
from narrowcast.algorithms.secure.masking import Recovery
from narrowcast.algorithms.secure.messages import Messages
from narrowcast.algorithms.secure.participation import Participation, ParticipationPolicy
from narrowcast.algorithms.secure.schemes import CKKS, Masked, Public
from narrowcast.algorithms.secure.shamir import SHARE_BYTES
from narrowcast.platform.contracts import ClientKeyStore, Executor, Task
from narrowcast.platform.types import Arrays, BoolArray, Chunk, ChunkResult, IntArray, PayloadError

logger = logging.getLogger(__name__)

SHARED = "shared/"
"""Before the names of what the server gives all hosts beside the broadcast."""

TURNOUT = ("clients", "ranks", "uplink_bits")
_SUM, _SENDERS = "sum/", "senders/"


@dataclass(frozen=True)
class RoundKeys:
    """What everyone knows of a round: its participation [n], verification keys, the run's public key and number."""

    participation: Participation
    verify: dict[int, bytes]
    public: Public
    run: bytes

    @classmethod
    def of(cls, broadcast: Arrays) -> RoundKeys:
        """As it came with the broadcast."""
        clients, ranks, uplink_bits = (np.asarray(broadcast[SHARED + name]) for name in TURNOUT)
        participation = Participation(clients, ranks, uplink_bits)
        keys = zip(participation.clients.tolist(), broadcast[SHARED + "verify"], strict=True)
        public = Public.of({name: broadcast[SHARED + name] for name in ("key", "modulus")})
        verify = {client: key.tobytes() for client, key in keys}
        return cls(participation, verify, public, broadcast[SHARED + "run"].tobytes())

    def messages(self, messages: Messages) -> Messages:
        """Those of the round, from those of a whole cohort of any run."""
        return replace(messages, cohort=len(self.participation.clients), run=self.run)

    def groups(self, layout: SumLayout, seed: int, round_index: int) -> dict[int, BoolArray]:
        """Which groups each client sends, [G] each."""
        clients, ranks = self.participation.clients, self.participation.ranks
        return dict(zip(clients.tolist(), layout.sent_groups(ranks, clients, seed, round_index), strict=True))


def sums_of(inbox: Inbox) -> dict[str, NDArray[np.generic]]:
    """A chunk's sums that nobody can read, and of how many clients each is."""
    arrays: dict[str, NDArray[np.generic]] = {}
    for place, words in enumerate(inbox.sums):
        if words is not None:
            arrays[f"{_SUM}{place}"] = words
            arrays[f"{_SENDERS}{place}"] = np.array(inbox.senders[place])
    return arrays


class SecureExecutor:
    """An executor whose chunks' sums are opened once a round, by what clients give out; the server's side of it."""

    def __init__(
        self, participation_policy: ParticipationPolicy, executor: Executor, key_store: ClientKeyStore, task: Task
    ) -> None:
        self._admission, self._executor, self._vault, self._task = participation_policy, executor, key_store, task
        self._run = dict(key_store.call("public", 0, {}))
        self._round = self._asked = 0
        self._shared: Arrays = {}

    def train(self, broadcast: Arrays, chunks: Sequence[Chunk]) -> list[ChunkResult]:
        """Train all chunks; the clients of a round make their keys before its first training."""
        if chunks and chunks[0].round_index != self._round:
            self._round = chunks[0].round_index
            participation = self._turnout(chunks)
            keys = self._vault.call("begin", self._round, {"clients": participation.clients})
            known = {**self._run, **keys, **{name: getattr(participation, name) for name in TURNOUT}}
            self._shared = {SHARED + name: values for name, values in known.items()}
        return self._executor.train({**broadcast, **self._shared}, chunks)

    def _turnout(self, chunks: Sequence[Chunk]) -> Participation:
        clients = np.concatenate([chunk.clients for chunk in chunks])
        order, self._asked = clients.argsort(), len(clients)
        budgets = [chunk.budget_bits for chunk in chunks if chunk.budget_bits is not None]
        budget_bits = np.concatenate(budgets)[order] if budgets else None
        return self._admission.of(self._task, clients[order], self._round, budget_bits)

    def gather(self, results: list[ChunkResult]) -> list[ChunkResult]:
        """Put the opened sum of the round in the place of every chunk's; nothing is opened of too few clients."""
        if not results:
            return results
        keys = RoundKeys.of(self._shared)
        messages = keys.messages(self._admission.messages)
        arrived = np.sort(np.concatenate([result.ledger.client[result.ledger.delivered] for result in results]))
        scheme = messages.scheme
        enough = max(scheme.enough(messages.cohort), scheme.smallest_group)
        if len(arrived) < enough:
            of_whom = f"{messages.cohort} clients" + f" (of {self._asked} asked)" * (messages.cohort < self._asked)
            why = f"{len(arrived)} of {of_whom} arrived, and the sum of fewer than {enough} is not opened"
            return self._refused(results, messages, why)
        try:
            masks = self._masks(messages, keys, arrived)
        except PayloadError as error:
            return self._refused(results, messages, f"the masks cannot be taken off: {error}")
        sums: list[Integers | None] = []
        for place in range(len(messages.layout.groups)):
            words, senders = _folded(results, place, messages, keys.public)
            if words is None or senders < scheme.smallest_group:
                sums.append(None)
            else:
                sums.append(self._open(place, words, messages, masks))
        total = messages.numbers.total(sums, messages.layout)
        return [replace(result, partial=total) for result in results]

    def _refused(self, results: list[ChunkResult], messages: Messages, why: str) -> list[ChunkResult]:
        """A round of which nothing is opened: nobody delivered, and the model stays."""
        logger.warning("round %d: %s; the model stays", self._round, why)
        nothing = messages.layout.zeros()
        return [
            replace(
                result,
                partial=nothing,
                ledger=replace(result.ledger, delivered=np.zeros_like(result.ledger.delivered)),
            )
            for result in results
        ]

    def _masks(self, messages: Messages, keys: RoundKeys, arrived: IntArray) -> list[Words]:
        """What the clients that arrived help to take off the sum of each group; nothing where there are no masks."""
        if not isinstance(messages.scheme, Masked):
            return []
        answers = self._vault.call("reveal", self._round, {"clients": arrived})["revealed"]
        shares: dict[int, list[bytes]] = {}
        for data in answers:
            client, (body,) = messages.revealed(self._round).open(data.tobytes(), keys.verify)
            assert body is not None
            shares[client] = [bytes(body[at : at + SHARE_BYTES]) for at in range(0, len(body), SHARE_BYTES)]
        clients = keys.participation.clients.tolist()
        advertised = dict(zip(clients, map(bytes, self._shared[SHARED + "keys"]), strict=True))
        recovery = Recovery.of(self._round, advertised, shares, messages.scheme.enough(messages.cohort))
        groups = keys.groups(messages.layout, self._task.seed, self._round)
        return recovery.masks(messages.masked_groups(), groups, advertised)

    def _open(self, place: int, words: Words, messages: Messages, masks: list[Words]) -> Integers:
        """The integers of one group's sum."""
        group, numbers, scheme = messages.layout.groups[place], messages.numbers, messages.scheme
        if isinstance(scheme, CKKS):
            plan = np.array([place, group.n_values, group.n_counts, numbers.most_weight, numbers.clients])
            return np.asarray(self._vault.call("open", self._round, {"group": plan, "words": words})["integers"])
        return scheme.opened(group, words - masks[place] if masks else words, numbers)


def _folded(results: Sequence[ChunkResult], place: int, messages: Messages, public: Public) -> tuple[Words | None, int]:
    """The sum of a group over all chunks, and of how many clients it is."""
    words, senders = None, 0
    for result in results:
        if f"{_SUM}{place}" in result.partial:
            words = merged(words, result.partial[f"{_SUM}{place}"], messages, public)
            senders += int(result.partial[f"{_SENDERS}{place}"])
    return words, senders
