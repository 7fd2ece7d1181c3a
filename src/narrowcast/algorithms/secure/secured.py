"""An algorithm whose server learns the sum of its clients' updates only."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from pydantic import BaseModel, ConfigDict

from narrowcast.algorithms.channel.curves import Curves
from narrowcast.algorithms.federated.scolr import SCoLR
from narrowcast.algorithms.secure.inbox import Inbox
from narrowcast.algorithms.secure.key_store import KeyStore
from narrowcast.algorithms.secure.key_store_process import key_store_process
from narrowcast.algorithms.secure.layout import layout_of
from narrowcast.algorithms.secure.messages import Messages
from narrowcast.algorithms.secure.participation import Participation, ParticipationPolicy
from narrowcast.algorithms.secure.protected_upload import Sending
from narrowcast.algorithms.secure.schemes import Protection
from narrowcast.algorithms.secure.unmasking import SHARED, RoundKeys, SecureExecutor, sums_of
from narrowcast.platform.contracts import (
    SECRET,
    Broadcast,
    ClientKeyStore,
    Executor,
    RateDistortion,
    Task,
    TrainsThenUploads,
)
from narrowcast.platform.errors import UserError
from narrowcast.platform.types import (
    Arrays,
    Chunk,
    ChunkResult,
    ClientLedger,
    IntArray,
    LocalUpdates,
    Profiles,
)


class AgreedRanks(BaseModel):
    """A rank policy of ranks that were agreed before the training; 0 for who takes no part."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: str
    of_client: dict[int, int]

    def ranks(self, profiles: Profiles, bits_at_rank: IntArray, seed: int, round_index: int) -> IntArray:
        """Those agreed, [C]."""
        del bits_at_rank, seed, round_index
        return np.array([self.of_client.get(client, 0) for client in profiles.client.tolist()], dtype=np.int64)


@dataclass(frozen=True)
class Secured:
    """`algorithm` with the sum protected by `scheme`, in rounds that ask at most `asked` clients.

    Clients train one by one or as a batch as the plain algorithm has it; each rounds its own contribution to integers,
    protects and signs it. Chunks hold sums that nobody has opened yet; `over` opens the round's.
    """

    algorithm: Any
    scheme: Protection
    asked: int

    @property
    def kind(self) -> str:
        """That of the plain algorithm."""
        return str(self.algorithm.kind)

    @property
    def keys_last(self) -> bool:
        """Whether keys were made offline, so that a resumed run has them too."""
        return self.scheme.keys is not None

    def check(self, task: Task) -> None:
        """Raise a `UserError` for what cannot be added up, and for sums that would not come back."""
        self.algorithm.check(task)
        self.scheme.check(self.messages(task).numbers)
        least = self.scheme.enough(min(self.asked, task.data.n_clients))
        if least < self.scheme.smallest_group:
            raise UserError(
                f"secure.smallest_group = {self.scheme.smallest_group}: {least} clients of a round are enough by "
                "secure.threshold; ask more clients_per_round, or lower smallest_group"
            )
        if self.keys_last:
            with self.key_store_process() as key_store:
                key_store.call("public", 0, {})  # reads the key files, which this process must not

    def messages(self, task: Task) -> Messages:
        """What is sent in this task."""
        cohort = min(self.asked, task.data.n_clients)
        return Messages(self.scheme, layout_of(self.algorithm, task, cohort), cohort)

    def participation_policy(self, task: Task) -> ParticipationPolicy:
        """Who takes part in a round of this task."""
        return ParticipationPolicy(self.messages(task), getattr(self.algorithm, "rank_policy", None))

    def rate_distortion(self, task: Task, cohort: IntArray) -> RateDistortion | None:
        """What each client's update is worth at so many bits under protection, where its rank follows from them."""
        if getattr(getattr(self.algorithm, "rank_policy", None), "kind", "") != "channel" or not len(cohort):
            return None
        messages = self.messages(task)
        bits = messages.update_bits_at_rank()[1:] + messages.bits_beside(len(cohort))
        shape = len(cohort), len(bits)
        errors = len(bits) / np.arange(1.0, len(bits) + 1) - 1  # as `channel.joint`, of values finely rounded
        weight = self.algorithm.expected_values(task, cohort)
        curves = Curves.of(np.broadcast_to(bits, shape), np.broadcast_to(errors, shape), weight)
        return RateDistortion(np.full(len(cohort), bits[0]), curves)

    def init(self, task: Task) -> Arrays:
        """The plain algorithm's server state."""
        return self.algorithm.init(task)

    def init_clients(self, task: Task) -> Arrays:
        """What its clients keep."""
        return self.algorithm.init_clients(task)

    def broadcast(self, server: Arrays, task: Task, round_index: int) -> Broadcast:
        """What its server sends."""
        return self.algorithm.broadcast(server, task, round_index)

    def relayed_bits(self, task: Task, cohort: IntArray, round_index: int, budget_bits: IntArray | None) -> IntArray:
        """What the server sends each client beside the broadcast, [C]: keys, shares, ranks, the sum to open."""
        participation_policy, bits = self.participation_policy(task), np.zeros(len(cohort), dtype=np.int64)
        if len(cohort):
            participation = participation_policy.of(task, cohort, round_index, budget_bits)
            messages, part = (
                replace(participation_policy.messages, cohort=len(participation.clients)),
                np.isin(cohort, participation.clients),
            )
            each, opener = messages.downlink_bits(by_links=participation_policy.by_links)
            bits[part] = each + opener * (np.arange(part.sum()) == participation.opener)
        return bits

    def public_key_bits(self, task: Task) -> int:
        """What the public key weighs, which every client is sent once."""
        return self.messages(task).public_key_bits()

    def train(self, broadcast: Arrays, chunk: Chunk, task: Task) -> ChunkResult:
        """Train a chunk's clients, and add up what each of them sends, protected and signed."""
        given = {name: values for name, values in broadcast.items() if not name.startswith((SHARED, SECRET))}
        keys = RoundKeys.of(broadcast)
        messages = keys.messages(self.messages(task))
        groups = keys.groups(messages.layout, task.seed, chunk.round_index)
        inbox = Inbox(messages, chunk.round_index, keys.public, keys.verify)
        sending = Sending(chunk, task, messages, keys, groups, broadcast, inbox)
        results = self._train_each(self.plain(keys.participation), given, chunk, task)
        began = time.perf_counter()
        ledgers = [sending.send(result, place) for place, result in enumerate(results)]
        encoding = time.perf_counter() - began
        states = {name: np.concatenate([result.state[name] for result in results]) for name in results[0].state}
        ledger = ClientLedger.merged(ledgers)
        return ChunkResult(chunk.index, sums_of(inbox), states, ledger, encode_seconds=encoding)

    def plain(self, participation: Participation) -> Any:
        """The plain algorithm at the ranks of a participation."""
        if not isinstance(self.algorithm, SCoLR):
            return self.algorithm
        of_client = dict(zip(participation.clients.tolist(), participation.ranks.tolist(), strict=True))
        return self.algorithm.model_copy(update={"rank_policy": AgreedRanks(kind="agreed", of_client=of_client)})

    def _train_each(self, algorithm: Any, broadcast: Arrays, chunk: Chunk, task: Task) -> list[ChunkResult]:
        """What each client alone gives, of a training that is one program where the plain algorithm's is."""
        alone = [_one(chunk, place) for place in range(len(chunk.clients))]
        if isinstance(algorithm, TrainsThenUploads) and (call := algorithm.local_call(broadcast, chunk, task)):
            updates = task.training.train(call.server, chunk, task, call.terms)
            return [
                algorithm.upload(broadcast, one, task, _updates_of(updates, place)) for place, one in enumerate(alone)
            ]
        return [algorithm.train(broadcast, one, task) for one in alone]

    def fold(self, partials: Sequence[Arrays]) -> Arrays:
        """The round's sum, which `over` has opened and put in every chunk's place."""
        return partials[0]

    def step(self, server: Arrays, broadcast: Arrays, total: Arrays) -> Arrays:
        """The plain algorithm's step."""
        return self.algorithm.step(server, broadcast, total)

    def final(self, server: Arrays) -> Arrays:
        """The plain algorithm's global parameters."""
        return self.algorithm.final(server)

    def key_store(self) -> KeyStore:
        """What the clients hold, made new; for a process that is not the server's."""
        return KeyStore(self.scheme)

    def key_store_process(self) -> AbstractContextManager[ClientKeyStore]:
        """A key_store in a process of its own on this machine."""
        return key_store_process(self.scheme)

    def over(self, executor: Executor, key_store: ClientKeyStore, task: Task) -> Executor:
        """An executor that opens the sum of each round."""
        return SecureExecutor(self.participation_policy(task), executor, key_store, task)


def _one(chunk: Chunk, place: int) -> Chunk:
    """A chunk of one client, whose training nothing limits and whose plain update nobody loses."""
    only = slice(place, place + 1)
    return replace(
        chunk,
        clients=chunk.clients[only],
        state={name: values[only] for name, values in chunk.state.items()},
        budget_bits=None,
        lost=None,
        epochs=None if chunk.epochs is None else chunk.epochs[only],
    )


def _updates_of(updates: LocalUpdates, place: int) -> LocalUpdates:
    """What one client of a chunk learnt."""
    only = slice(place, place + 1)
    return LocalUpdates(
        changes={name: values[only] for name, values in updates.changes.items()},
        state={name: values[only] for name, values in updates.state.items()},
        loss=updates.loss[only],
        examples=updates.examples[only],
        steps=updates.steps[only],
    )
