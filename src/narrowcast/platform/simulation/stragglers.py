"""Stragglers of a round: predicted if upload sizes are known before the training, else observed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from narrowcast.platform.open_round import OpenRound, TrainingCall
from narrowcast.platform.simulation.deadlines import cutoff, epochs_in_time
from narrowcast.platform.types import BoolArray, ChunkResult, ClientLedger, FloatArray, IntArray, RoundLedger


def predict_stragglers(opened: OpenRound) -> tuple[IntArray | None, BoolArray | None]:
    """Return the epochs that each client has time for, and which clients will be late, [C] each.

    An entry is None if nothing limits the epochs, and if lateness is known only after the training.
    """
    plan, task = opened.run.plan, opened.run.task
    bits = None if plan.waits_for_all else opened.upload_bits()
    if bits is None:
        return None, None
    if opened.link_allocation.budget_bits is not None:
        bits = np.where(bits <= opened.link_allocation.budget_bits, bits, 0)
    samples, epochs = task.training.samples(task, opened.cohort), np.full(len(bits), task.training.epochs)

    def seconds_after(epochs: IntArray) -> FloatArray:
        return opened.seconds_until_done(samples * epochs, bits)

    partial = None
    if plan.stragglers == "partial" and plan.deadline_seconds is not None:
        partial = epochs = epochs_in_time(seconds_after, len(bits), task.training.epochs, plan.deadline_seconds)
    return partial, late_clients(opened, seconds_after(epochs), bits)[0]


def late_clients(opened: OpenRound, seconds: FloatArray, uplink_bits: IntArray) -> tuple[BoolArray, float]:
    """Return whether each client is late [C], and the second at which the server stops waiting."""
    plan, uploads = opened.run.plan, uplink_bits > 0
    if plan.waits_for_all:
        return np.zeros(len(seconds), dtype=bool), np.inf
    if opened.link_allocation.lost is not None:
        uploads = uploads & ~opened.link_allocation.lost
    return cutoff(seconds, uploads, plan.clients_per_round, plan.deadline_seconds)


def dropped_clients(results: Sequence[ChunkResult], clients: IntArray) -> BoolArray:
    """Return whether each client's host failed in this round and was not replaced, [C]."""
    dropped = [result.ledger.client for result in results if result.dropped]
    if not dropped:
        return np.zeros(len(clients), dtype=bool)
    return np.isin(clients, np.concatenate(dropped))


def either(first: BoolArray | None, second: BoolArray | None) -> BoolArray | None:
    """Return the union of two masks; None stands for a mask of nobody."""
    if first is None or second is None:
        return second if first is None else first
    return first | second


def calls_to_repeat(opened: OpenRound, results: Sequence[ChunkResult]) -> list[TrainingCall]:
    """Return the training to repeat because its sums hold uploads that turned out to be late, or lack others.

    If upload sizes are known only after the training, the first training tells which clients are late. The size of an
    upload does not depend on whether it counts, so that one repetition is enough.
    """
    if opened.run.plan.waits_for_all:
        return []
    excluded = either(opened.link_allocation.lost, account(opened, results).late)
    assert excluded is not None
    again = [replace(each, lost=excluded[np.searchsorted(opened.cohort, each.clients)]) for each in opened.chunks]
    chunks = [
        after
        for before, after, result in zip(opened.chunks, again, results, strict=True)
        if not (result.dropped or np.array_equal(before.arrives(), after.arrives()))
    ]
    return [TrainingCall(opened.broadcast.arrays, chunks)] if chunks else []


def replaced(results: list[ChunkResult], repeated: Sequence[ChunkResult]) -> list[ChunkResult]:
    """Return the results of a round's chunks, those of repeated training in place of the first ones."""
    by_index = {result.index: result for result in repeated}
    return [by_index.get(result.index, result) for result in results]


def account(opened: OpenRound, results: Sequence[ChunkResult]) -> RoundLedger:
    """Return what each client of the round received, computed and sent, in ascending order of clients."""
    trained = ClientLedger.merged([result.ledger for result in results])
    seconds = opened.seconds_until_done(trained.examples, trained.uplink_bits)
    late = late_clients(opened, seconds, trained.uplink_bits)[0] | dropped_clients(results, opened.cohort)
    return RoundLedger(
        **vars(trained),
        downlink_bits=opened.downlink_bits,
        seconds=seconds,
        late=late,
        staleness=np.zeros(len(opened.cohort), dtype=np.int64),
    )
