"""Secure aggregation: an algorithm whose server learns the sum of its clients' updates and no single one.

`SecureAggregation` wraps the training of a round: each client's result is computed as by the plain algorithm, rounded
to integers, protected, signed, counted, and checked on arrival.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from narrowcast.algorithms.channel.curves import DistortionCurves
from narrowcast.algorithms.client.sums import SumLayout
from narrowcast.algorithms.federated.low_rank import SCoLR
from narrowcast.algorithms.federated.shared_basis import BandwidthRank, ChannelRank, RankPolicy, UniformRank
from narrowcast.algorithms.secure.key_store import KeyStore
from narrowcast.algorithms.secure.key_store_process import key_store_process
from narrowcast.algorithms.secure.messages import Messages
from narrowcast.algorithms.secure.participation import ClientSecrets, ParticipationPolicy, RoundKeys
from narrowcast.algorithms.secure.schemes import Integers, Protection, RingElements
from narrowcast.algorithms.secure.unmasking import Inbox, SumOpener, protected_sums
from narrowcast.platform.contracts import Algorithm, Broadcast, RateDistortion, Recipients, Task, Traits
from narrowcast.platform.errors import UserError
from narrowcast.platform.rounds.client_contracts import ClientKeyStore
from narrowcast.platform.seeds import PrivateSeed
from narrowcast.platform.types import (
    Arrays,
    Chunk,
    ChunkResult,
    ClientLedger,
    FloatArray,
    IntArray,
    PayloadError,
    joined_metrics,
)

logger = logging.getLogger(__name__)


def train_each(algorithm: Algorithm, broadcast: Arrays, chunk: Chunk, task: Task) -> list[ChunkResult]:
    """Return the plain result of each client alone, in the order of the chunk.

    The clients are still trained as one program if the algorithm allows it. Budgets, losses and keys concern the
    protected upload: the plain algorithm sees none of them.
    """
    chunk = replace(chunk, budget_bits=None, lost=None, relayed=None, secrets={})
    positions = np.arange(len(chunk.clients))[:, None]
    if (calls := algorithm.local_calls(broadcast, chunk, task)) is None:
        return [algorithm.train(broadcast, chunk.take(position), task) for position in positions]
    (call,) = calls
    updates = task.training.train(call.server, chunk, task, call.terms)
    return [algorithm.send(broadcast, chunk.take(position), task, [updates.take(position)]) for position in positions]


def masked(integers: Integers, mask: RingElements | None) -> Integers:
    """Return the integers plus a client's mask, modulo 2^64, if it has one."""
    return integers if mask is None else (integers.view(np.uint64) + mask).view(np.int64)


@dataclass(frozen=True)
class UploadProtector:
    """Sends the uploads of a chunk's clients to an inbox."""

    chunk: Chunk
    private_seed: PrivateSeed
    messages: Messages
    keys: RoundKeys
    secrets: ClientSecrets
    inbox: Inbox

    def send(self, result: ChunkResult, index: int) -> ClientLedger:
        """Send the result of the client at this position of the chunk; lost and refused uploads count their bits.

        A client that does not take part sends nothing. A client that stopped answering before its upload, or whose
        training did not stay finite, is counted like one whose upload was lost.
        """
        client, ledger, participation = int(self.chunk.clients[index]), result.ledger, self.keys.participation
        if client not in participation.rule.sent:
            nothing, rank = np.zeros(1, dtype=np.int64), np.minimum(ledger.rank, 0)
            return replace(ledger, rank=rank, uplink_bits=nothing, delivered=nothing.astype(bool))
        delivered = bool(ledger.delivered[0]) and client in self.keys.present
        if delivered:
            data = self.envelope(result.partial, index, client)
            delivered = bool(self.chunk.arrives()[index]) and self._accepted(data)
        bits = participation.uplink_bits[[np.searchsorted(participation.clients, client)]]
        return replace(ledger, uplink_bits=bits, delivered=np.array([delivered]))

    def values_cut(self, result: ChunkResult, index: int) -> tuple[int, int]:
        """Return how many values of the client at this position are cut at the clip, and how many it sends.

        The server does not see this: it is for the simulation's record.
        """
        sent = self.keys.participation.rule.sent.get(int(self.chunk.clients[index]))
        if sent is None or not result.ledger.delivered[0]:
            return 0, 0
        return self.messages.fixed_point.values_cut(result.partial, self.messages.layout, sent)

    def envelope(self, partial: Arrays, index: int, client: int) -> bytes:
        """Return the client's partial sum, protected and signed."""
        messages, round_index, groups = self.messages, self.chunk.round_index, self.keys.participation.rule.sent[client]
        numbers, public = messages.fixed_point, self.keys.public
        integers = numbers.of_client(partial, messages.layout, groups, self.private_seed, (round_index, client))
        bodies = [
            None
            if integers_of_group is None
            else messages.scheme.encode(group, masked(integers_of_group, mask), numbers, public)
            for group, integers_of_group, mask in zip(
                messages.layout.groups, integers, self._masks(index, client), strict=True
            )
        ]
        return messages.update(round_index, public).seal(client, bodies, self.secrets.signing[index].tobytes())

    def _masks(self, index: int, client: int) -> Sequence[RingElements | None]:
        """Return a client's mask of each group; None for schemes without masks."""
        if self.secrets.own_secrets is None or self.secrets.pair_seeds is None:
            return [None] * len(self.messages.layout.groups)
        own_secret, pairs = self.secrets.own_secrets[index].tobytes(), self.secrets.pair_seeds[index]
        seeds = {peer: seed.tobytes() for peer, seed in zip(self.keys.present, pairs, strict=True) if peer != client}
        return self.messages.mask_layout().of_client(client, own_secret, seeds, self.keys.participation.rule)

    def _accepted(self, data: bytes) -> bool:
        """Return whether the server accepts an envelope; a round continues without the refused ones."""
        try:
            self.inbox.receive(data)
        except PayloadError as error:
            logger.warning("round %d: an update was refused: %s", self.chunk.round_index, error)
            return False
        return True


@dataclass(frozen=True)
class SecureAggregation(Algorithm):
    """`algorithm` with its sum protected by `scheme`, in rounds of at most `max_cohort` clients.

    Clients train as under the plain algorithm, one by one or as a batch; each rounds its own contribution to integers,
    protects and signs it. Chunks hold protected sums; `SumOpener` opens the round's.
    """

    algorithm: Algorithm
    scheme: Protection
    max_cohort: int

    @property
    def kind(self) -> str:
        """The kind of the plain algorithm."""
        return self.algorithm.kind

    @property
    def keys_last(self) -> bool:
        """Return whether keys were made offline, so that a resumed run has the same."""
        return self.scheme.keys is not None

    @property
    def plain(self) -> Algorithm:
        """The algorithm that is protected."""
        return self.algorithm

    @property
    def traits(self) -> Traits:
        """Those of the plain algorithm; but clients count once, and no negatives shorten what they send."""
        return replace(self.algorithm.traits, counts_draws=False, codes_row_lists=False)

    @property
    def _rank_policy(self) -> RankPolicy | None:
        return self.algorithm.rank_policy if isinstance(self.algorithm, SCoLR) else None

    def check(self, task: Task) -> None:
        """Raise a `UserError` if the updates cannot be added up, or if no sum could be opened."""
        self.algorithm.check(task)
        policy = self._rank_policy
        if not isinstance(policy, UniformRank | BandwidthRank | ChannelRank | None):
            raise UserError(
                f"algorithm.rank_policy = {policy.kind}: secure chooses ranks before the training, by rules "
                "of its own for uniform, bandwidth and channel; use one of these, or secure=none"
            )
        self.scheme.check(self.messages(task).fixed_point)
        least = self.scheme.survivor_threshold(min(self.max_cohort, task.data.n_clients))
        if least < self.scheme.least_senders:
            besides = f" besides secure.colluders = {self.scheme.colluders}" * bool(self.scheme.colluders)
            raise UserError(
                f"secure.smallest_group = {self.scheme.smallest_group}{besides}: {least} clients of a round are enough "
                "by secure.threshold; ask more clients_per_round, or lower smallest_group"
            )
        if self.scheme.smallest_count > 1 and not self.messages(task).layout.n_items:
            raise UserError(
                f"secure.smallest_count = {self.scheme.smallest_count}: {self.kind} on {task.model.kind} has no counts "
                "of the clients of each item; leave it out, or use aggregation = per_item_mean or per_component_mean"
            )
        if self.keys_last:
            with self.key_store_process() as key_store:
                key_store.call("public", 0, {})  # reads the key files, which this process must not

    def messages(self, task: Task) -> Messages:
        """Return the messages of a round of this task with a full cohort."""
        cohort = min(self.max_cohort, task.data.n_clients)
        return Messages(self.scheme, self._sum_layout(task, cohort), cohort)

    def _sum_layout(self, task: Task, cohort: int) -> SumLayout:
        """Return the layout that the algorithm declares; raise `UserError` if it needs more than a sum."""
        traits = self.algorithm.traits
        if traits.codec:
            raise UserError(
                f"secure: what algorithm.codec ({traits.codec[0].kind}) sends cannot be added up under encryption; "
                "leave out algorithm.codec and set secure.bits"
            )
        if traits.needs_each:
            raise UserError(
                f"secure: algorithm.{traits.needs_each} needs the change of each client, which a sum hides; leave out "
                f"algorithm.{traits.needs_each.partition(' ')[0]}, or set secure=none"
            )
        if traits.asks_rows:
            raise UserError(
                "secure hides the rows that a client touches, and algorithm.download.rows = touched asks for them; use "
                "download.rows = all"
            )
        layout: SumLayout | None = self.algorithm.sum_layout(task, cohort)
        if layout is not None:
            return layout
        raise UserError(
            f"secure: {self.kind} on {task.model.kind} needs more than the weighted sum of the clients' updates, or "
            "declares no sum_layout; use fedavg, fedprox, fedpara, fedmf, colr or scolr, or secure=none"
        )

    def participation_policy(self, task: Task) -> ParticipationPolicy:
        """Return the rule by which clients take part in a round of this task."""
        return ParticipationPolicy(self.messages(task), self._rank_policy)

    def rate_distortion(self, task: Task, cohort: IntArray) -> RateDistortion | None:
        """Return each client's error at each size of its protected update; None unless ranks follow the channel."""
        algorithm = self.algorithm
        if not (isinstance(algorithm, SCoLR) and isinstance(algorithm.rank_policy, ChannelRank) and len(cohort)):
            return None
        messages = self.messages(task)
        bits = messages.most_bits_at_rank()[1:] + messages.most_protocol_bits(len(cohort))
        shape = len(cohort), len(bits)
        errors = len(bits) / np.arange(1.0, len(bits) + 1) - 1  # as `channel.joint`, with finely rounded values
        weight = algorithm.expected_values(task, cohort)
        curves = DistortionCurves.of(np.broadcast_to(bits, shape), np.broadcast_to(errors, shape), weight)
        return RateDistortion(np.full(len(cohort), bits[0]), curves)

    def init(self, task: Task) -> Arrays:
        """Return the plain algorithm's server state."""
        return self.algorithm.init(task)

    def init_clients(self, task: Task) -> Arrays:
        """Return the plain algorithm's client state."""
        return self.algorithm.init_clients(task)

    def broadcast(self, server: Arrays, task: Task, round_index: int) -> Broadcast:
        """Return the plain algorithm's broadcast."""
        return self.algorithm.broadcast(server, task, round_index)

    def download_bits(
        self, server: Arrays, broadcast: Broadcast, task: Task, recipients: Recipients
    ) -> IntArray | None:
        """Return the plain algorithm's."""
        return self.algorithm.download_bits(server, broadcast, task, recipients)

    def relative_work(self, broadcast: Arrays, task: Task, clients: IntArray) -> FloatArray | None:
        """Return the plain algorithm's."""
        return self.algorithm.relative_work(broadcast, task, clients)

    def relayed_bits(self, task: Task, cohort: IntArray, round_index: int, budget_bits: IntArray | None) -> IntArray:
        """Return each client's downlink bits besides the broadcast, [C]: keys, shares, ranks, the sum to open."""
        policy, bits = self.participation_policy(task), np.zeros(len(cohort), dtype=np.int64)
        if len(cohort):
            participation = policy.of(task, cohort, round_index, budget_bits)
            part = np.isin(cohort, participation.clients)
            messages = replace(policy.messages, cohort=len(participation.clients))
            per_client, opener = messages.downlink_bits(participation.at_risk, sends_ranks=policy.ranks_follow_links)
            bits[part] = per_client + opener * (np.arange(part.sum()) == participation.opener)
        return bits

    def public_key_bits(self, task: Task) -> int:
        """Return the bits of the public key, which every client receives once."""
        return self.messages(task).public_key_bits()

    def train(self, broadcast: Arrays, chunk: Chunk, task: Task) -> ChunkResult:
        """Train a chunk's clients, and add up what each of them sends, protected and signed.

        `chunk.relayed` are the `RoundKeys`; `chunk.secrets` the arrays of the clients' `ClientSecrets`.
        """
        keys, secrets = chunk.relayed, ClientSecrets.of(chunk.secrets)
        assert isinstance(keys, RoundKeys)
        messages = keys.messages(self.messages(task))
        algorithm = self.algorithm
        if messages.layout.max_rank and isinstance(algorithm, SCoLR):
            algorithm = algorithm.model_copy(update={"rank_policy": keys.participation.rank_policy()})
        results = train_each(algorithm, broadcast, chunk, task)
        began = time.perf_counter()
        inbox = Inbox(messages, chunk.round_index, keys.public, keys.verify)
        protector = UploadProtector(chunk, task.private_seed, messages, keys, secrets, inbox)
        ledger = ClientLedger.merged([protector.send(result, index) for index, result in enumerate(results)])
        cut, values = np.array([protector.values_cut(result, index) for index, result in enumerate(results)]).sum(
            axis=0
        )
        encoding = time.perf_counter() - began
        states = {name: np.concatenate([result.state[name] for result in results]) for name in results[0].state}
        return ChunkResult(
            chunk.index,
            protected_sums(inbox),
            states,
            ledger,
            encode_seconds=encoding,
            values_cut=int(cut),
            touched_bits=sum(result.touched_bits for result in results),
            values=int(values),
            metrics=joined_metrics([result.metrics for result in results]),
        )

    def fold(self, partials: Sequence[Arrays]) -> Arrays:
        """Return the round's sum, which has been opened and replaces every chunk's."""
        return partials[0]

    def step(self, server: Arrays, broadcast: Arrays, total: Arrays, task: Task, round_index: int) -> Arrays:
        """Return the plain algorithm's next server state."""
        return self.algorithm.step(server, broadcast, total, task, round_index)

    def step_metrics(self, before: Arrays, after: Arrays, total: Arrays, task: Task) -> Mapping[str, float]:
        """Return the plain algorithm's."""
        return self.algorithm.step_metrics(before, after, total, task)

    def final(self, server: Arrays) -> Arrays:
        """Return the plain algorithm's global parameters."""
        return self.algorithm.final(server)

    def key_store(self, answered: Path | None = None) -> KeyStore:
        """Return a new key store, which remembers its answers in a file; for a process that is not the server's."""
        return KeyStore(self.scheme, answered)

    def key_store_process(self, answered: Path | None = None) -> AbstractContextManager[ClientKeyStore]:
        """Start a key store in a process of its own on this machine."""
        return key_store_process(self.scheme, answered)

    @property
    def secure_sums(self) -> SecureAggregation:
        """The algorithm itself protects its sums."""
        return self

    def rounds(self, key_store: ClientKeyStore, task: Task) -> SumOpener:
        """Return the server's side of one run."""
        return SumOpener(self.participation_policy(task), key_store, task)
