"""Around the rounds of a protected run: keys before the training, and the sum opened after it."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from narrowcast.algorithms.secure.fixed_point import Integers
from narrowcast.algorithms.secure.inbox import Inbox, merged
from narrowcast.algorithms.secure.masking import Recovery
from narrowcast.algorithms.secure.messages import Messages
from narrowcast.algorithms.secure.schemes import CKKS, Masked, Public, mask_bits
from narrowcast.algorithms.secure.shamir import SHARE_BYTES
from narrowcast.algorithms.secure.words import Words
from narrowcast.platform.contracts import ClientVault, Executor, Task
from narrowcast.platform.types import Arrays, BoolArray, Chunk, ChunkResult, IntArray, PayloadError

logger = logging.getLogger(__name__)

SHARED = "shared/"
"""Before the names of what the server gives all hosts beside the broadcast."""

_SUM, _SENDERS = "sum/", "senders/"


@dataclass(frozen=True)
class RoundKeys:
    """What everyone knows of a round: its cohort [n] ascending, what each signs with, and the run's public key."""

    cohort: IntArray
    verify: dict[int, bytes]
    public: Public

    @classmethod
    def of(cls, broadcast: Arrays) -> RoundKeys:
        """As it came with the broadcast."""
        cohort = np.asarray(broadcast[SHARED + "cohort"])
        keys = broadcast[SHARED + "verify"]
        public = Public(broadcast[SHARED + "key"].tobytes(), int(broadcast[SHARED + "modulus"][0]))
        return cls(cohort, {int(client): key.tobytes() for client, key in zip(cohort, keys, strict=True)}, public)


def sums_of(inbox: Inbox) -> dict[str, NDArray[np.generic]]:
    """A chunk's sums that nobody can read, and who is in them."""
    arrays: dict[str, NDArray[np.generic]] = {}
    for place, words in enumerate(inbox.sums):
        if words is not None:
            arrays[f"{_SUM}{place}"] = words
            arrays[f"{_SENDERS}{place}"] = np.array(inbox.senders[place], dtype=np.int64)
    return arrays


class SecureExecutor:
    """An executor whose chunks' sums are opened once a round, by what clients give out; the server's side of it."""

    def __init__(self, messages: Messages, executor: Executor, vault: ClientVault, task: Task) -> None:
        self._all, self._executor, self._vault, self._task = messages, executor, vault, task
        self._run = dict(vault.call("public", 0, {}))
        self._round = 0
        self._shared: Arrays = {}

    def train(self, broadcast: Arrays, chunks: Sequence[Chunk]) -> list[ChunkResult]:
        """Train all chunks; the clients of a round make their keys before its first training."""
        if chunks and chunks[0].round_index != self._round:
            self._round = chunks[0].round_index
            cohort = np.sort(np.concatenate([chunk.clients for chunk in chunks]))
            keys = self._vault.call("begin", self._round, {"clients": cohort})
            known = {**self._run, **keys, "cohort": cohort}
            self._shared = {SHARED + name: values for name, values in known.items()}
        return self._executor.train({**broadcast, **self._shared}, chunks)

    def gather(self, results: list[ChunkResult]) -> list[ChunkResult]:
        """Put the opened sum of the round in the place of every chunk's; nothing is opened of too few clients."""
        if not results:
            return results
        keys = RoundKeys.of(self._shared)
        messages = replace(self._all, cohort=len(keys.cohort))
        arrived = np.sort(np.concatenate([result.ledger.client[result.ledger.delivered] for result in results]))
        scheme = messages.scheme
        enough = max(scheme.enough(len(keys.cohort)), scheme.smallest_group)
        if len(arrived) < enough:
            n = len(keys.cohort)
            why = f"{len(arrived)} of {n} clients arrived, and the sum of fewer than {enough} is not opened"
            return self._refused(results, messages, why)
        groups = messages.layout.of(self._task, keys.cohort, self._round)
        try:
            recovery = self._recover(messages, keys, arrived)
        except PayloadError as error:
            return self._refused(results, messages, f"the masks cannot be taken off: {error}")
        sums: list[Integers | None] = []
        for place in range(len(messages.layout.groups)):
            words, senders = _folded(results, place, messages, keys.public)
            if words is None or len(senders) < messages.scheme.smallest_group:
                sums.append(None)
            else:
                sums.append(self._open(place, words, senders, groups[:, place], messages, keys, recovery))
        total = messages.numbers.total(sums, messages.layout)
        return [replace(result, partial=total) for result in results]

    def _refused(self, results: list[ChunkResult], messages: Messages, why: str) -> list[ChunkResult]:
        """A round of which nothing is opened: nobody delivered, and the model stays."""
        logger.warning("round %d: %s; the model stays", self._round, why)
        nothing = messages.layout.nothing()
        return [
            replace(
                result,
                partial=nothing,
                ledger=replace(result.ledger, delivered=np.zeros_like(result.ledger.delivered)),
            )
            for result in results
        ]

    def _recover(self, messages: Messages, keys: RoundKeys, arrived: IntArray) -> Recovery | None:
        """Ask the clients that arrived for what takes the masks off; None where there are none."""
        if not isinstance(messages.scheme, Masked):
            return None
        answers = self._vault.call("reveal", self._round, {"clients": arrived})["revealed"]
        shares: dict[int, list[bytes]] = {}
        for data in answers:
            client, (body,) = messages.revealed(self._round).open(data.tobytes(), keys.verify)
            assert body is not None
            shares[client] = [bytes(body[at : at + SHARE_BYTES]) for at in range(0, len(body), SHARE_BYTES)]
        return Recovery.of(self._round, self._advertised(keys), shares, messages.scheme.enough(len(keys.cohort)))

    def _advertised(self, keys: RoundKeys) -> dict[int, bytes]:
        return dict(zip(keys.cohort.tolist(), map(bytes, self._shared[SHARED + "keys"]), strict=True))

    def _open(
        self,
        place: int,
        words: Words,
        senders: IntArray,
        sending: BoolArray,
        messages: Messages,
        keys: RoundKeys,
        recovery: Recovery | None,
    ) -> Integers:
        """The integers of one group's sum."""
        group, numbers, scheme = messages.layout.groups[place], messages.numbers, messages.scheme
        if isinstance(scheme, CKKS):
            plan = np.array([place, group.n_values, group.n_counts, numbers.most_weight, numbers.clients])
            return np.asarray(self._vault.call("open", self._round, {"group": plan, "words": words})["integers"])
        if recovery is not None:
            left = np.setdiff1d(keys.cohort[sending], senders)
            bits, advertised = mask_bits(numbers), self._advertised(keys)
            words = recovery.unmask(words, bits, place, senders.tolist(), left.tolist(), advertised)
        return scheme.opened(group, words, numbers)


def _folded(
    results: Sequence[ChunkResult], place: int, messages: Messages, public: Public
) -> tuple[Words | None, IntArray]:
    """The sum of a group over all chunks, and who is in it, ascending."""
    words, senders = None, [np.empty(0, dtype=np.int64)]
    for result in results:
        if f"{_SUM}{place}" in result.partial:
            words = merged(words, result.partial[f"{_SUM}{place}"], messages, public)
            senders.append(result.partial[f"{_SENDERS}{place}"])
    return words, np.sort(np.concatenate(senders))
