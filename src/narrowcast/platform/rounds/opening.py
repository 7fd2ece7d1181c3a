"""The opening of a synchronous round: cohort, links, broadcast and chunks; who is waited for, and what is downloaded.

Deadlines are on the virtual clock, so that the clients that the server waits for follow from their times alone. Late
clients are predicted if upload sizes are known before the training, else observed after it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from narrowcast.platform.contracts import Broadcast, LinkAllocation, Recipients, SecureSums
from narrowcast.platform.rounds.chunks import OpenRound, TrainingCall, make_chunks
from narrowcast.platform.rounds.ledger import ChunkResult, ClientLedger, RoundLedger
from narrowcast.platform.rounds.plan import Plan
from narrowcast.platform.rounds.sampling import Draw, PredictedSeconds, cohort_size
from narrowcast.platform.rounds.state import LiveState, Run
from narrowcast.platform.types import BoolArray, Chunk, FloatArray, IntArray


def download_bits(live: LiveState, broadcast: Broadcast, clients: IntArray) -> IntArray:
    """Return the size of the model that each client is sent, as `Plan.downlink` says, [C]."""
    run, round_index = live.run, live.round_index + 1
    catches_up = run.plan.downlink != "every_round"
    last_round = live.population.last_round[clients] if catches_up else np.full(len(clients), round_index - 1)
    recipients = Recipients(clients, last_round, round_index)
    sizes = run.algorithm.download_bits(live.server, broadcast, run.task, recipients)
    if sizes is not None:
        return sizes
    full = np.full(len(clients), broadcast.full.wire_bits())
    has_start = run.plan.downlink == "from_start"
    if has_start and round_index == 1:
        return np.zeros_like(full)
    if broadcast.update is None:
        return full
    sent_before = np.cumsum([0, *live.update_bits, broadcast.update.wire_bits()])
    missed = last_round if catches_up else len(live.update_bits)
    follows = (last_round > 0) | has_start if catches_up else np.array(True)
    return np.where(follows, np.minimum(sent_before[-1] - sent_before[missed], full), full)


def first_model_bits(live: LiveState, broadcast: Broadcast, clients: IntArray) -> IntArray:
    """Return the size of the whole model for clients that have not been sent one, [C]; 0 for the others."""
    return np.where(live.population.last_round[clients] == 0, broadcast.full.wire_bits(), 0)


def key_bits(live: LiveState, secure: SecureSums, cohort: IntArray) -> tuple[IntArray, IntArray]:
    """Return the size of the public key for clients that lack it, [C] each: on first participation, after a resume."""
    bits, last_round = secure.public_key_bits(live.run.task), live.population.last_round[cohort]
    since = 0 if secure.keys_last else live.keys_since()
    return bits * (last_round == 0), bits * ((last_round > 0) & (last_round <= since))


def cutoff(
    seconds: FloatArray, uploads: BoolArray, wanted: int, deadline: float | None = None
) -> tuple[BoolArray, float]:
    """Return which clients are late [C] and the second at which the server stops waiting, infinity if none is late.

    The server waits for the first `wanted` uploads, and no longer than `deadline`. Of uploads at one instant, that of
    the client with the lower place in the cohort comes first.

    Shapes: seconds [C] until each client is done; uploads [C], whether its upload then arrives.
    """
    limit = np.inf if deadline is None else deadline
    in_order = np.argsort(seconds, kind="stable")
    arrived = np.cumsum((uploads & (seconds <= limit))[in_order])
    if arrived.max(initial=0) < wanted:
        late = seconds > limit
        return late, limit if late.any() else np.inf
    last = int(np.searchsorted(arrived, wanted))
    late = np.ones(len(seconds), dtype=bool)
    late[in_order[: last + 1]] = False
    return late, float(seconds[in_order[last]])


def epochs_in_time(
    seconds_after: Callable[[IntArray], FloatArray], n_clients: int, most: int, deadline: float
) -> IntArray:
    """Return the epochs, at most `most`, after which each client's upload meets the deadline, [C].

    At least 1: a client for which one epoch is too many is late. `seconds_after` gives the clients' times after the
    given epochs [C].
    """
    epochs = np.ones(n_clients, dtype=np.int64)
    for count in range(2, most + 1):
        epochs += seconds_after(np.full(n_clients, count)) <= deadline
    return epochs


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
    sent, received = opened.exchanged_bits(bits)

    def seconds_after(epochs: IntArray) -> FloatArray:
        return opened.seconds_until_done(samples * epochs, sent, received)

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
    """Return the union of two masks; None means an empty mask."""
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
    excluded = either(opened.link_allocation.lost, account(opened, results)[0].late)
    assert excluded is not None
    without_excluded = [
        replace(chunk, lost=excluded[np.searchsorted(opened.cohort, chunk.clients)]) for chunk in opened.chunks
    ]
    chunks = [
        after
        for before, after, result in zip(opened.chunks, without_excluded, results, strict=True)
        if not (result.dropped or np.array_equal(before.arrives(), after.arrives()))
    ]
    return [TrainingCall(opened.broadcast.arrays, chunks)] if chunks else []


def chunks_left(chunks: Sequence[Chunk], results: Sequence[ChunkResult]) -> list[Chunk]:
    """Return the chunks whose hosts have not failed, with the uploads lost of clients that did not deliver."""
    by_index = {result.index: result for result in results if not result.dropped}
    return [replace(chunk, lost=~by_index[chunk.index].ledger.delivered) for chunk in chunks if chunk.index in by_index]


def replaced(results: list[ChunkResult], repeated: Sequence[ChunkResult]) -> list[ChunkResult]:
    """Return the results of a round's chunks, those of repeated training in place of the first ones."""
    by_index = {result.index: result for result in repeated}
    return [by_index.get(result.index, result) for result in results]


def account(opened: OpenRound, results: Sequence[ChunkResult]) -> tuple[RoundLedger, float]:
    """Return what each client of the round received, computed and sent, and the second at which the waiting ends."""
    trained = ClientLedger.merged([result.ledger for result in results])
    sent, received = opened.exchanged_bits(trained.uplink_bits)
    seconds = opened.seconds_until_done(trained.examples, sent, received)
    late, until = late_clients(opened, seconds, trained.uplink_bits)
    ledger = RoundLedger(
        **vars(replace(trained, uplink_bits=sent)),
        downlink_bits=received,
        seconds=seconds,
        late=late | dropped_clients(results, opened.cohort),
        staleness=np.zeros(len(opened.cohort), dtype=np.int64),
    )
    return ledger, until


def open_round(live: LiveState) -> OpenRound:
    """Sample the cohort, allocate its links, broadcast, and divide the cohort into chunks."""
    run, round_index = live.run, live.round_index + 1
    free = run.free(round_index, live.simulated_seconds)
    broadcast = run.algorithm.broadcast(live.server, run.task, round_index)

    def predicted(clients: IntArray) -> PredictedSeconds:
        return predicted_seconds(live, broadcast, clients)

    sampled = sample_cohort(run.plan, live.rotation, round_index, free, run.task.data.examples, predicted)
    cohort, draws = np.unique(sampled, return_counts=True) if run.plan.replacement else (np.sort(sampled), None)
    link_allocation = allocate_links(run, cohort, round_index)
    downlink_bits, renewed_bits = download_bits(live, broadcast, cohort), np.zeros(len(cohort), dtype=np.int64)
    if (secure := run.algorithm.secure_sums) is not None:
        relayed_bits = secure.relayed_bits(run.task, cohort, round_index, link_allocation.budget_bits)
        first, renewed_bits = key_bits(live, secure, cohort)
        downlink_bits = downlink_bits + relayed_bits + first
    rates = link_allocation.downlink_bits_per_second
    radio = run.plan.radio if len(cohort) else None
    timed_bits = downlink_bits
    if run.algorithm.sending_rates(run.task, cohort, round_index) is not None:
        timed_bits = np.minimum(downlink_bits, first_model_bits(live, broadcast, cohort))
    download_seconds = radio.download_seconds(timed_bits, rates) if radio else timed_bits / rates
    # Keys that a resume renews cost bits and no simulated time, or results would depend on the resume.
    downlink_bits = downlink_bits + renewed_bits
    opened = OpenRound(run, round_index, cohort, link_allocation, broadcast, downlink_bits, download_seconds)
    epochs, late = predict_stragglers(opened)
    known = link_allocation if late is None else replace(link_allocation, lost=either(link_allocation.lost, late))
    chunk_size, population = run.plan.chunk_size, live.population
    adversary, examples = run.task.adversary, run.task.data.examples
    apart = None if adversary is None else adversary.apart(round_index, cohort)
    chunks = make_chunks(cohort, examples, chunk_size, round_index, population, known, epochs, draws, apart)
    if adversary is not None and adversary.attack.sees == "all" and apart is not None:
        chunks[-1] = replace(chunks[-1], watched=tuple(chunks[:-1]))
    return replace(opened, chunks=chunks)


def sample_cohort(
    plan: Plan,
    rotation: IntArray,
    round_index: int,
    free: BoolArray | None = None,
    examples: IntArray | None = None,
    predicted: Callable[[IntArray], PredictedSeconds] | None = None,
) -> IntArray:
    """Return the clients of a round, drawn among those that are free; `rotation` [U] is the plan's `sampling.order`.

    They are distinct, unless the plan draws with replacement. `examples` [U] are those of all clients.
    """
    size = cohort_size(plan.clients_per_round, plan.over_selection, len(rotation))
    first = (round_index - 1) * size
    draw = Draw(size, plan.seed, round_index, rotation, first, free, examples, plan.replacement, predicted=predicted)
    return plan.sampling.draw(draw)


def predicted_seconds(live: LiveState, broadcast: Broadcast, clients: IntArray) -> PredictedSeconds:
    """Return the seconds that each client would take in this round, if upload sizes are known before the training."""
    run, task = live.run, live.run.task
    profiles, uplink_bits = task.profiles.take(clients), run.algorithm.upload_bits(broadcast.arrays, task, clients)
    assert uplink_bits is not None, "Run.check() has seen to it"
    samples, work = task.training.samples(task, clients), run.algorithm.relative_work(broadcast.arrays, task, clients)
    examples, none = samples * task.training.epochs, np.zeros(len(clients))
    clock = run.plan.clock
    return PredictedSeconds(
        download_bits(live, broadcast, clients) / profiles.downlink_bits_per_second,
        clock.client_seconds(profiles, examples if work is None else examples * work, none, none),
        uplink_bits / profiles.uplink_bits_per_second,
        clock.server_seconds,
    )


def allocate_links(run: Run, cohort: IntArray, round_index: int) -> LinkAllocation:
    """Return the rates and budgets of the cohort's links in this round."""
    plan, task, algorithm = run.plan, run.task, run.algorithm
    profiles = task.profiles.take(cohort)
    if plan.radio is None or not len(cohort):
        sending = algorithm.sending_rates(task, cohort, round_index)
        uplink = profiles.uplink_bits_per_second if sending is None else sending
        return LinkAllocation(None, None, uplink, profiles.downlink_bits_per_second)
    return plan.radio.share(profiles, algorithm.rate_distortion(task, cohort), plan.seed, round_index)
