"""Which clients are late in a round, predicted where upload sizes are known before the training, else observed."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from narrowcast.platform.contracts import Algorithm, Broadcast, KnowsUploads, LinkAllocation, Task
from narrowcast.platform.plan import Plan
from narrowcast.platform.simulation.deadlines import cutoff, epochs_in_time
from narrowcast.platform.types import BoolArray, Chunk, ChunkResult, ClientLedger, FloatArray, IntArray, RoundLedger


def upload_bits(algorithm: Algorithm, broadcast: Broadcast, task: Task, clients: IntArray) -> IntArray | None:
    """What each client will send where nothing limits it, [C]; None where that is not known before the training."""
    return algorithm.upload_bits(broadcast.arrays, task, clients) if isinstance(algorithm, KnowsUploads) else None


@dataclass(frozen=True)
class OpenRound:
    """A round up to the training: who takes part over which links, what the server sends, and the chunks.

    Shapes: cohort [C] ascending; downlink_bits [C], what each downloads; download_seconds [C].
    """

    round_index: int
    cohort: IntArray
    link_allocation: LinkAllocation
    broadcast: Broadcast
    downlink_bits: IntArray
    download_seconds: FloatArray
    chunks: list[Chunk]


def predict_stragglers(
    plan: Plan, algorithm: Algorithm, task: Task, opened: OpenRound
) -> tuple[IntArray | None, BoolArray | None]:
    """The epochs that each client has time for, and who will be late, [C] each; None where that cannot be known yet."""
    bits = None if plan.waits_for_all else upload_bits(algorithm, opened.broadcast, task, opened.cohort)
    if bits is None:
        return None, None
    if opened.link_allocation.budget_bits is not None:
        bits = np.where(bits <= opened.link_allocation.budget_bits, bits, 0)
    samples, epochs = task.training.samples(task, opened.cohort), np.full(len(bits), task.training.epochs)

    def seconds_after(epochs: IntArray) -> FloatArray:
        return seconds_of(plan, task, opened, samples * epochs, bits)

    partial = None
    if plan.stragglers == "partial" and plan.deadline_seconds is not None:
        partial = epochs = epochs_in_time(seconds_after, len(bits), task.training.epochs, plan.deadline_seconds)
    return partial, who_is_late(plan, opened, seconds_after(epochs), bits)[0]


def seconds_of(plan: Plan, task: Task, opened: OpenRound, examples: IntArray, uplink_bits: IntArray) -> FloatArray:
    """Seconds from the start of the round until each client's upload is in, [C] in the order of the cohort."""
    upload_seconds = uplink_bits / opened.link_allocation.uplink_bits_per_second
    profiles = task.profiles.take(opened.cohort)
    return plan.clock.client_seconds(profiles, examples, opened.download_seconds, upload_seconds)


def who_is_late(plan: Plan, opened: OpenRound, seconds: FloatArray, uplink_bits: IntArray) -> tuple[BoolArray, float]:
    """Whom the server does not wait for, [C], and when it stops waiting."""
    uploads = uplink_bits > 0
    if opened.link_allocation.lost is not None:
        uploads = uploads & ~opened.link_allocation.lost
    return cutoff(seconds, uploads, plan.clients_per_round, plan.deadline_seconds)


def given_up(results: list[ChunkResult], clients: IntArray) -> BoolArray:
    """Whose host failed and was not replaced in this round, [C]; the server waited for them in vain."""
    dropped = [result.ledger.client for result in results if result.dropped]
    return np.isin(clients, np.concatenate([np.empty(0, dtype=np.int64), *dropped]))


def either(first: BoolArray | None, second: BoolArray | None) -> BoolArray | None:
    """Both marks together; None where there are none."""
    if first is None or second is None:
        return second if first is None else first
    return first | second


def chunks_with_late(plan: Plan, task: Task, opened: OpenRound, results: list[ChunkResult]) -> list[Chunk]:
    """The chunks to train again, since more or fewer uploads count than was known: those of the late do not.

    Where uploads are weighed only after the training, the first one tells who is late. What a client sends does not
    depend on whether it counts, so that the second is the last.
    """
    if plan.waits_for_all:
        return []
    ledger = weigh(plan, task, opened, results)
    counts_not = either(opened.link_allocation.lost, ledger.late)
    assert counts_not is not None
    renewed = [replace(each, lost=counts_not[np.searchsorted(opened.cohort, each.clients)]) for each in opened.chunks]
    return [
        after
        for before, after, result in zip(opened.chunks, renewed, results, strict=True)
        if not (result.dropped or np.array_equal(before.arrives(), after.arrives()))
    ]


def renewed(results: list[ChunkResult], again: list[ChunkResult]) -> list[ChunkResult]:
    """The results in the order of the chunks, with some of them replaced."""
    by_index = {result.index: result for result in (*results, *again)}
    return [by_index[result.index] for result in results]


def weigh(plan: Plan, task: Task, opened: OpenRound, results: list[ChunkResult]) -> RoundLedger:
    """What each client of the round received, computed and sent, in ascending order of clients."""
    trained = ClientLedger.merged([result.ledger for result in results])
    seconds = seconds_of(plan, task, opened, trained.examples, trained.uplink_bits)
    late = who_is_late(plan, opened, seconds, trained.uplink_bits)[0] | given_up(results, opened.cohort)
    return RoundLedger(
        **vars(trained),
        downlink_bits=opened.downlink_bits,
        seconds=seconds,
        late=late,
        staleness=np.zeros(len(opened.cohort), dtype=np.int64),
    )
