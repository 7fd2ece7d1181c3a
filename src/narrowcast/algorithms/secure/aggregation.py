"""Secure aggregation: an algorithm whose server learns the sum of its clients' updates and no single one.

`SecureAggregation` wraps the training of a round: each client's result is computed as by the plain algorithm, rounded
to integers, protected, signed, counted, and checked on arrival.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from narrowcast.algorithms.channel.curves import DistortionCurves
from narrowcast.algorithms.client.client_pass import ClientPass, Contribution
from narrowcast.algorithms.client.sums import SumLayout
from narrowcast.algorithms.client.uploads import chunk_result
from narrowcast.algorithms.federated.aggregator import Aggregator, GeometricMedian
from narrowcast.algorithms.federated.fedavg import Averaging
from narrowcast.algorithms.federated.low_rank import SCoLR
from narrowcast.algorithms.federated.rank_policy import BandwidthRank, ChannelRank, RankPolicy, UniformRank
from narrowcast.algorithms.secure.key_store import KeyStore
from narrowcast.algorithms.secure.key_store_process import key_store_process
from narrowcast.algorithms.secure.messages import Messages
from narrowcast.algorithms.secure.participation import ClientSecrets, ParticipationPolicy, RoundKeys
from narrowcast.algorithms.secure.schemes import Integers, Protection, RingElements
from narrowcast.algorithms.secure.sum_chain import ESTIMATE, SumChain
from narrowcast.algorithms.secure.unmasking import Inbox, SumOpener, protected_sums
from narrowcast.platform.contracts import Algorithm, Broadcast, RateDistortion, Recipients, Task
from narrowcast.platform.errors import UserError
from narrowcast.platform.rounds.client_contracts import ClientKeyStore
from narrowcast.platform.rounds.ledger import ChunkResult, ClientLedger
from narrowcast.platform.seeds import PrivateSeed
from narrowcast.platform.traits import Traits
from narrowcast.platform.types import Arrays, Chunk, FloatArray, IntArray, PayloadError

logger = logging.getLogger(__name__)


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

    def send(self, contribution: Contribution, plain: ClientLedger, index: int) -> tuple[ClientLedger, IntArray]:
        """Send the contribution of the client at this position of the chunk; lost and refused uploads count their bits.

        `plain` is the chunk's ledger without protection. The bits are those of all sums of the round. A client that
        does not take part sends nothing. A client that stopped answering before its upload, or whose training did not
        stay finite, is counted like one whose upload was lost. Also return how many of its values are cut at the clip,
        and how many it sends: for the simulation's record, the server does not see it.
        """
        client, ledger = int(self.chunk.clients[index]), plain.take([index])
        participation, nothing = self.keys.participation, np.zeros(1, dtype=np.int64)
        groups, cut = participation.rule.sent.get(client), np.zeros(2, dtype=np.int64)
        if groups is None:
            rank = np.minimum(ledger.rank, 0)
            return replace(ledger, rank=rank, uplink_bits=nothing, delivered=nothing.astype(bool)), cut
        delivered = bool(ledger.delivered[0])
        if delivered:
            partial = contribution.partial(self.chunk.clients == client)
            cut = np.array(self.messages.fixed_point.values_cut(partial, self.messages.layout, groups))
            delivered = client in self.keys.present
        if delivered:
            data = self.envelope(partial, index, client)
            delivered = bool(self.chunk.arrives()[index]) and self._accepted(data)
        bits = participation.sums * participation.uplink_bits[[np.searchsorted(participation.clients, client)]]
        return replace(ledger, uplink_bits=bits, delivered=np.array([delivered])), cut

    def envelope(self, partial: Arrays, index: int, client: int) -> bytes:
        """Return the client's partial sum, protected and signed."""
        messages, key_round, groups = self.messages, self.chunk.key_round, self.keys.participation.rule.sent[client]
        numbers, public, rounding = messages.fixed_point, self.keys.public, (self.chunk.round_index, client)
        integers = numbers.of_client(partial, messages.layout, groups, self.private_seed, rounding)
        bodies = [
            None
            if integers_of_group is None
            else messages.scheme.encode(group, masked(integers_of_group, mask), numbers, public)
            for group, integers_of_group, mask in zip(
                messages.layout.groups, integers, self._masks(index, client), strict=True
            )
        ]
        return messages.update(key_round, public).seal(client, bodies, self.secrets.signing[index].tobytes())

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
class _Learnt:
    """The training of a chunk's clients in a round, of which the later sums of the round are made."""

    task: Task
    round_index: int
    clients: IntArray
    model: Arrays
    contribution: Contribution
    result: ChunkResult

    def of(self, model: Arrays, chunk: Chunk, task: Task) -> bool:
        """Return whether these clients would learn the same again."""
        return (
            (self.task is task and self.round_index == chunk.round_index)
            and np.array_equal(self.clients, chunk.clients)
            and self.model.keys() == model.keys()
            and all(np.array_equal(values, model[name]) for name, values in self.model.items())
        )


@dataclass(frozen=True)
class SecureAggregation(Algorithm):
    """`algorithm` with its sums protected by `scheme`, in rounds of at most `max_cohort` clients.

    Clients train as under the plain algorithm, one by one or as a batch; each rounds its own contribution to integers,
    protects and signs it. Chunks hold protected sums; `SumOpener` opens the round's. An aggregator that is a `SumChain`
    takes several sums of one training: the process of the clients keeps it for the round, and one that has not trains
    again.
    """

    algorithm: Algorithm
    scheme: Protection
    max_cohort: int
    _learnt: dict[int, _Learnt] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if (rule := self._rule) is not None:
            least = max(self.scheme.smallest_group, rule.traits.sums + 1)
            object.__setattr__(self, "scheme", self.scheme.model_copy(update={"smallest_group": least}))

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_learnt": {}}

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
    def _rule(self) -> Aggregator | None:
        """The aggregator that is a chain of sums; None if there is none."""
        rule = self.algorithm.aggregator if isinstance(self.algorithm, Averaging) else None
        return rule if rule is not None and rule.traits.sums else None

    @cached_property
    def _mean(self) -> Algorithm:
        """The algorithm with the weighted mean, which a sum gives, in place of its chain of sums."""
        if self._rule is None:
            return self.algorithm
        assert isinstance(self.algorithm, Averaging)
        return self.algorithm.model_copy(update={"aggregator": None})

    def chain(self, task: Task) -> SumChain | None:
        """Return the chain of sums that a round is made of; None if it has one sum."""
        if self._rule is None:
            return None
        return SumChain(self._rule, self.scheme.clip, self._layout_of_mean(task, 1).max_weight)

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
        self._check_widths(task)
        least = self.scheme.survivor_threshold(min(self.max_cohort, task.data.n_clients))
        if self._rule is not None and least < self.scheme.least_senders:
            raise UserError(
                f"secure: {self._rule.traits.sums} sums by algorithm.aggregator tell the changes of as many clients, "
                f"and are opened over {self.scheme.least_senders} or more: {least} clients of a round are enough by "
                "secure.threshold; ask more clients_per_round, or lower aggregator.iterations"
            )
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

    def _check_widths(self, task: Task) -> None:
        numbers = self.messages(task).fixed_point
        try:
            self.scheme.check(numbers)
        except UserError as error:
            if self._rule is None:
                raise
            raise UserError(
                f"{error}; {numbers.count_bits} of the bits are for the weights of algorithm.aggregator, fewer with a "
                "larger nu"
            ) from error

    def messages(self, task: Task) -> Messages:
        """Return the messages of a sum of this task with a full cohort."""
        cohort = min(self.max_cohort, task.data.n_clients)
        layout, chain = self._layout_of_mean(task, cohort), self.chain(task)
        return Messages(self.scheme, layout if chain is None else chain.layout(layout), cohort)

    def _layout_of_mean(self, task: Task, cohort: int) -> SumLayout:
        """Return the layout that the algorithm declares; raise `UserError` if it needs more than a sum."""
        traits = self.algorithm.traits
        rule = self.algorithm.aggregator if isinstance(self.algorithm, Averaging) else None
        if isinstance(rule, GeometricMedian) and rule.tolerance:
            raise UserError(
                f"secure: algorithm.aggregator.tolerance = {rule.tolerance:g} ends iterations by what they find, and "
                "the bits of a round are settled before it; leave it out and set aggregator.iterations"
            )
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
        if isinstance(self._mean, ClientPass):
            layout: SumLayout | None = self._mean.sum_layout(task, cohort)
            if layout is not None:
                return layout
        raise UserError(
            f"secure: {self.kind} on {task.model.kind} needs more than the weighted sum of the clients' updates, or "
            "declares no sum_layout; use fedavg, fedprox, fedpara, lora, fedmf, colr or scolr, or secure=none"
        )

    def participation_policy(self, task: Task) -> ParticipationPolicy:
        """Return the rule by which clients take part in a round of this task."""
        sums = 1 if self._rule is None else self._rule.traits.sums
        return ParticipationPolicy(self.messages(task), self._rank_policy, sums)

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
        """Return each client's downlink bits besides the broadcast, [C]: keys, shares, ranks, the sum to open.

        Those of a chain are the same for each of its sums, and its means.
        """
        policy, chain, bits = self.participation_policy(task), self.chain(task), np.zeros(len(cohort), dtype=np.int64)
        if len(cohort):
            participation = policy.of(task, cohort, round_index, budget_bits)
            part = np.isin(cohort, participation.clients)
            messages = replace(policy.messages, cohort=len(participation.clients))
            per_client, opener = messages.downlink_bits(participation.at_risk, sends_ranks=policy.ranks_follow_links)
            bits[part] = policy.sums * (per_client + opener * (np.arange(part.sum()) == participation.opener))
            bits[part] += 0 if chain is None else chain.estimate_bits(messages.layout)
        return bits

    def public_key_bits(self, task: Task) -> int:
        """Return the bits of the public key, which every client receives once."""
        return self.messages(task).public_key_bits()

    def train(self, broadcast: Arrays, chunk: Chunk, task: Task) -> ChunkResult:
        """Train a chunk's clients, and add up what each of them sends, protected and signed.

        In a later sum of a round `broadcast` has the last mean too, and clients send once more what they have learnt.
        `chunk.relayed` are the `RoundKeys`; `chunk.secrets` the arrays of the clients' `ClientSecrets`.
        """
        keys, secrets = chunk.relayed, ClientSecrets.of(chunk.secrets)
        assert isinstance(keys, RoundKeys)
        messages = keys.messages(self.messages(task))
        algorithm, estimate = self._mean, ESTIMATE.of(broadcast)
        if messages.layout.max_rank and isinstance(algorithm, SCoLR):
            algorithm = algorithm.model_copy(update={"rank_policy": keys.participation.rank_policy()})
        assert isinstance(algorithm, ClientPass), "check() refuses others"
        # Budgets, losses and keys concern the protected upload: the plain algorithm sees none of them.
        plain = replace(chunk, budget_bits=None, lost=None, relayed=None, secrets={})
        contribution, result = self._trained(algorithm, ESTIMATE.without(broadcast), plain, task, again=bool(estimate))
        if (chain := self.chain(task)) is not None:
            contribution = chain.pulled(contribution, estimate, messages.layout)
        began = time.perf_counter()
        inbox = Inbox(messages, chunk.key_round, keys.public, keys.verify)
        protector = UploadProtector(chunk, task.private_seed, messages, keys, secrets, inbox)
        sent = [protector.send(contribution, result.ledger, index) for index in range(len(chunk.clients))]
        cut, values = np.array([cut for _, cut in sent]).sum(axis=0)
        return replace(
            result,
            partial=protected_sums(inbox),
            ledger=ClientLedger.merged([ledger for ledger, _ in sent]),
            values_cut=int(cut),
            values=int(values),
        ).encoded_since(began)

    def _trained(
        self, algorithm: ClientPass, broadcast: Arrays, chunk: Chunk, task: Task, *, again: bool
    ) -> tuple[Contribution, ChunkResult]:
        """Return what the clients of a chunk learn, or have learnt if they are asked `again`, and its plain ledger."""
        known = self._learnt.get(chunk.index)
        if again and known is not None and known.of(broadcast, chunk, task):
            return known.contribution, known.result
        trained = algorithm.each_update(broadcast, chunk, task)
        contribution, uploads = algorithm.contributed(broadcast, chunk, task, trained)
        result = chunk_result(chunk, trained, uploads, {}, contribution.state, contribution.metrics)
        if self._rule is not None:
            self._learnt[chunk.index] = _Learnt(task, chunk.round_index, chunk.clients, broadcast, contribution, result)
        return contribution, result

    def fold(self, partials: Sequence[Arrays]) -> Arrays:
        """Return the round's sum, which has been opened and replaces every chunk's."""
        return partials[0]

    def step(self, server: Arrays, broadcast: Arrays, total: Arrays, task: Task, round_index: int) -> Arrays:
        """Return the plain algorithm's next server state."""
        return self._mean.step(server, broadcast, total, task, round_index)

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
