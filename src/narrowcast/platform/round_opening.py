"""The opening of a synchronous round: cohort, links, broadcast and chunks."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from narrowcast.platform.contracts import LinkAllocation
from narrowcast.platform.downloads import download_bits, key_bits
from narrowcast.platform.open_round import OpenRound, make_chunks
from narrowcast.platform.plan import Plan
from narrowcast.platform.run import Run
from narrowcast.platform.sampling import cohort_size, drawn_from, next_in, weights_of
from narrowcast.platform.seeds import generator
from narrowcast.platform.simulation.stragglers import either, predict_stragglers
from narrowcast.platform.state import LiveState
from narrowcast.platform.types import BoolArray, IntArray


def open_round(live: LiveState) -> OpenRound:
    """Sample the cohort, allocate its links, broadcast, and divide the cohort into chunks."""
    run, round_index = live.run, live.round_index + 1
    n_clients = run.task.data.n_clients
    free = run.plan.availability.free(n_clients, run.plan.seed, round_index, live.simulated_seconds)
    sampled = sample_cohort(run.plan, live.rotation, round_index, free, run.task.data.examples)
    cohort, draws = np.unique(sampled, return_counts=True) if run.plan.replacement else (np.sort(sampled), None)
    link_allocation = allocate_links(run, cohort, round_index)
    broadcast = run.algorithm.broadcast(live.server, run.task, round_index)
    downlink_bits, renewed_bits = download_bits(live, broadcast, cohort), np.zeros(len(cohort), dtype=np.int64)
    if (secure := run.algorithm.secure_sums) is not None:
        relayed_bits = secure.relayed_bits(run.task, cohort, round_index, link_allocation.budget_bits)
        first, renewed_bits = key_bits(live, secure, cohort)
        downlink_bits = downlink_bits + relayed_bits + first
    rates = link_allocation.downlink_bits_per_second
    radio = run.plan.radio if len(cohort) else None
    download_seconds = radio.download_seconds(downlink_bits, rates) if radio else downlink_bits / rates
    # Keys that a resume renews cost bits and no simulated time, or results would depend on the resume.
    downlink_bits = downlink_bits + renewed_bits
    opened = OpenRound(run, round_index, cohort, link_allocation, broadcast, downlink_bits, download_seconds)
    epochs, late = predict_stragglers(opened)
    known = link_allocation if late is None else replace(link_allocation, lost=either(link_allocation.lost, late))
    chunk_size, population = run.plan.chunk_size, live.population
    chunks = make_chunks(cohort, run.task.data.examples, chunk_size, round_index, population, known, epochs, draws)
    return replace(opened, chunks=chunks)


def sample_cohort(
    plan: Plan,
    rotation: IntArray,
    round_index: int,
    free: BoolArray | None = None,
    examples: IntArray | None = None,
) -> IntArray:
    """Return the clients of a round: the next in the rotation, or a fresh draw, among those that are free.

    They are distinct, unless the plan draws with replacement. `examples` [U] are the weights of a draw by examples.
    """
    size = cohort_size(plan.clients_per_round, plan.over_selection, len(rotation))
    if plan.sampling == "round_robin":
        return next_in(rotation, (round_index - 1) * size, size, free)
    draw, weights = generator(plan.seed, "cohort", round_index), weights_of(plan.sampling, examples)
    return drawn_from(free, size, draw, len(rotation), weights, plan.replacement)


def allocate_links(run: Run, cohort: IntArray, round_index: int) -> LinkAllocation:
    """Return the rates and budgets of the cohort's links in this round."""
    plan, task, algorithm = run.plan, run.task, run.algorithm
    profiles = task.profiles.take(cohort)
    if plan.radio is None or not len(cohort):
        return LinkAllocation(None, None, profiles.uplink_bits_per_second, profiles.downlink_bits_per_second)
    return plan.radio.share(profiles, algorithm.rate_distortion(task, cohort), plan.seed, round_index)
