"""The closing of a round: the server's step, the time and bits of the round, its evaluation and its record.

An allocation of the uplink costs bits besides the updates: channel states and data sizes up, grants down. They go over
control channels beside the data, so that they take no simulated time and no part of a client's budget.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from narrowcast.platform.contracts import Algorithm, Broadcast
from narrowcast.platform.errors import NoLearningError, UnresumableFailure, UserError
from narrowcast.platform.rounds.chunks import OpenRound
from narrowcast.platform.rounds.contract_checks import check_round_metrics, check_step, method_of
from narrowcast.platform.rounds.evaluation import evaluate
from narrowcast.platform.rounds.ledger import NO_RANK, ChunkResult, RoundLedger, RoundRecord, joined_metrics
from narrowcast.platform.rounds.opening import account
from narrowcast.platform.rounds.outcome import Outcome, Timing
from narrowcast.platform.rounds.state import LiveState
from narrowcast.platform.storage.host import host_clock
from narrowcast.platform.types import Arrays, FloatArray, IntArray, all_finite

CHANNEL_STATE_BITS = 16
"""A client's report of its channel: a signal-to-noise ratio of 256 dB in steps of 2^-8 dB, 0.1 % of a rate."""
EXAMPLES_BITS = 32
"""A client's number of examples, used to predict its quantisation error; sent once, same width as in the header."""
GRANT_BITS = 32
"""The bits that a client may send in the round, up to 2^32 - 1, 0 included."""


class Overhead(NamedTuple):
    """The bits of a round that no client's ledger has."""

    uplink_bits: int = 0
    downlink_bits: int = 0


def allocation_bits(live: LiveState, opened: OpenRound) -> Overhead:
    """Return the uplink and downlink bits of a round's allocation; none if uploads have no budgets."""
    if opened.link_allocation.budget_bits is None:
        return Overhead()
    clients = len(opened.cohort)
    newcomers = int((live.population.last_round[opened.cohort] == 0).sum())
    return Overhead(CHANNEL_STATE_BITS * clients + EXAMPLES_BITS * newcomers, GRANT_BITS * clients)


def close_round(live: LiveState, opened: OpenRound, results: Sequence[ChunkResult]) -> Outcome:
    """Step the server and commit a synchronous round; the caller fills in the outcome's wall time."""
    clock = live.run.plan.clock
    stepped = step_server(live, opened.broadcast.arrays, counted(opened, results))
    ledger, until = account(opened, results)
    waited = np.minimum(ledger.seconds, until)
    if stepped.requested_bits is not None:
        requested = stepped.requested_bits[opened.cohort]
        ledger = with_requests(opened, ledger, requested, float(waited.max(initial=0.0)))
        waited = np.where(requested > 0, ledger.seconds, waited)
    seconds = clock.round_seconds(waited)
    if not results:
        seconds += clock.idle_seconds
    overhead = allocation_bits(live, opened)
    now = live.simulated_seconds + seconds
    return commit(live, stepped, opened.broadcast, results, ledger, now, seconds, overhead)


def counted(opened: OpenRound, results: Sequence[ChunkResult]) -> list[Arrays]:
    """Return the partial sums that the server of a round adds up: of all chunks that were trained.

    An attacker that is the server may count the last chunk, which is the attackers', in place of each client.
    """
    task, round_index = opened.run.task, opened.round_index
    if task.adversary is not None:
        server = opened.run.algorithm.elected_server(task, opened.cohort, round_index)
        if task.adversary.serves_alone(round_index, server):
            return [] if results[-1].dropped else [results[-1].partial] * len(opened.cohort)
    return [result.partial for result in results if not result.dropped]


def with_requests(opened: OpenRound, ledger: RoundLedger, bits: IntArray, asked_at: float) -> RoundLedger:
    """Return the account of a round in whose step the server asked clients for so many bits, [C], at that second."""
    asked, upload_seconds = np.full(len(bits), asked_at), bits / opened.link_allocation.uplink_bits_per_second
    sent_at = opened.run.plan.clock.seconds_with_uploads(asked, upload_seconds)
    return replace(ledger, uplink_bits=ledger.uplink_bits + bits, seconds=np.where(bits > 0, sent_at, ledger.seconds))


class Stepped(NamedTuple):
    """A server state after a step, the algorithm's metrics of that step, and the bits that it asked for, [U]."""

    server: Arrays
    metrics: Mapping[str, float]
    requested_bits: IntArray | None = None


def step_server(live: LiveState, broadcast: Arrays, partials: Sequence[Arrays]) -> Stepped:
    """Return the next server state, from the partial sums in the order of the chunks; without any, the present one.

    Raise `NoLearningError` if the global model is no longer finite.
    """
    if not partials:
        return Stepped(live.server, {})
    algorithm, task, round_index = live.run.algorithm, live.run.task, live.round_index + 1
    with np.errstate(over="ignore", invalid="ignore"):  # an overflow is reported as not finite, see below
        total = algorithm.fold(partials)
        server = algorithm.step(live.server, broadcast, total, task, round_index)
    final = check_step(algorithm, live.server, server, grows=live.run.traits.grows)
    if not all_finite(*final.values()):
        raise NoLearningError(
            f"round {round_index}: the global model is no longer finite; lower training.learning_rate "
            f"(now {task.training.traits.rate_text}) and run again"
        )
    metrics = algorithm.step_metrics(live.server, server, total, task)
    return Stepped(server, metrics, algorithm.requested_bits(server))


def commit(
    live: LiveState,
    stepped: Stepped,
    broadcast: Broadcast,
    results: Sequence[ChunkResult],
    ledger: RoundLedger,
    now: float,
    seconds: float,
    overhead: Overhead = Overhead(),  # noqa: B008 - a tuple
) -> Outcome:
    """Advance a run by a step of its server to simulated second `now`; evaluate and snapshot it if that is due.

    The round took `seconds` of simulated time. `overhead` is not attributed to any client.
    """
    plan, round_index, live.server = live.run.plan, live.round_index + 1, stepped.server
    if not math.isfinite(now):
        raise UnresumableFailure(
            f"round {round_index}: its simulated time is {now}; lower the seconds of clock, or raise the rates"
        )
    for result in results:
        live.population.put(result.ledger.client, result.state)
    live.population.last_round[ledger.client] = round_index - ledger.staleness
    live.update_bits.append(broadcast.update.wire_bits() if broadcast.update and results else 0)
    live.round_index, live.simulated_seconds = round_index, now
    uplink = int(ledger.uplink_bits.sum()) + overhead.uplink_bits
    downlink = int(ledger.downlink_bits.sum()) + overhead.downlink_bits
    live.uplink_bits += uplink
    live.downlink_bits += downlink
    began = time.perf_counter()
    metrics = evaluate(live) if plan.evaluates(round_index) else {}
    timing = Timing(evaluate=time.perf_counter() - began)
    # A round with dropped clients would come out differently if it were repeated, so it is always kept.
    must_keep = any(result.dropped for result in results)
    due = must_keep or plan.keeps(round_index, host_clock().monotonic() - live.kept_at)
    of_round = metrics_of_round(live.run.algorithm.plain, results, stepped.metrics)
    record = record_of(live, ledger, seconds, results, (uplink, downlink), sum(overhead), of_round)
    return Outcome(record, ledger, metrics, 0.0, live.snapshot() if due else None, timing)


def metrics_of_round(
    algorithm: Algorithm, results: Sequence[ChunkResult], of_step: Mapping[str, float]
) -> dict[str, float]:
    """Return the means of the metrics of clients that delivered, in the order of the chunks, and those of the step."""
    if of_step == {} and not any(result.metrics for result in results):
        return {}
    parts = [
        {name: values.take(result.ledger.delivered) for name, values in result.metrics.items()} for result in results
    ]
    of_clients = {name: values.mean for name, values in joined_metrics(parts).items()}
    method = method_of(algorithm, "step_metrics")
    own = check_round_metrics(of_step, method)
    if twice := of_clients.keys() & own.keys():
        raise UserError(f"{method} returned {min(twice)!r}, a metric of contributions too; name one of them otherwise")
    return {**check_round_metrics(of_clients, method_of(algorithm, "contribution")), **own}


def record_of(
    live: LiveState,
    ledger: RoundLedger,
    seconds: float,
    results: Sequence[ChunkResult],
    bits: tuple[int, int],
    allocation_bits: int,
    metrics: Mapping[str, float],
) -> RoundRecord:
    """Return the round that was just committed as one flat row; `bits` are all of its uplink and downlink bits."""
    values, adversary = sum(result.values for result in results), live.run.task.adversary
    attackers = None if adversary is None else adversary.attacking(live.round_index, ledger.client).sum()
    ranks = ledger.rank[ledger.rank != NO_RANK]
    return RoundRecord(
        round=live.round_index,
        clients=len(ledger.client),
        delivered=int(ledger.delivered.sum()),
        late=int(ledger.late.sum()),
        loss=_mean(ledger.loss[ledger.delivered]),
        mean_rank=_mean(ranks) if len(ranks) else None,
        mean_staleness=_mean(ledger.staleness),
        uplink_bits=bits[0],
        downlink_bits=bits[1],
        total_uplink_bits=live.uplink_bits,
        total_downlink_bits=live.downlink_bits,
        total_bits=live.uplink_bits + live.downlink_bits,
        round_simulated_seconds=seconds,
        simulated_seconds=live.simulated_seconds,
        clipped_share=sum(result.values_cut for result in results) / values if values else None,
        allocation_bits=allocation_bits,
        touched_bits=sum(result.touched_bits for result in results),
        metrics=metrics if attackers is None else {"attackers": float(attackers), **metrics},
    )


def _mean(values: IntArray | FloatArray) -> float:
    return float(values.sum() / len(values)) if len(values) else float("nan")
