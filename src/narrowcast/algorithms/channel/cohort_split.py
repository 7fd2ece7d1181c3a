"""The division of a cohort over two bands with little interference, which is the largest cut of a weighted graph."""

from __future__ import annotations

from typing import Literal

import numpy as np

from narrowcast.algorithms.sdp.max_cut_problem import MaxCut
from narrowcast.algorithms.sdp.mixing import Mixing
from narrowcast.algorithms.sdp.weighted_graph import WeightedGraph, graph_of
from narrowcast.platform.seeds import generator
from narrowcast.platform.types import FloatArray, IntArray

Split = Literal["max_cut", "greedy", "local_search", "random"]
_SWEEPS, _RESIDUAL, _MOMENTUM = 200, 1e-3, 0.45
_GAIN = 1e-12
"""Of all weight, below which moving a client does not count as an improvement."""


def lost_rates(gains: FloatArray) -> FloatArray:
    """Return what two clients lose to each other in one band, in bits per second and hertz, [n, n], symmetric.

    `gains` [n, n] are powers over noise: client j at the receiver of client i, a client's own signal on the diagonal.
    A client's rate with all others of its band is at least its rate alone less the sum of these losses.
    """
    own = np.diag(gains)[:, None]
    loss = np.log2(1 + own) - np.log2(1 + own / (1 + gains))
    both = loss + loss.T
    np.fill_diagonal(both, 0.0)
    return np.asarray(both)


def split_cohort(weights: FloatArray, rule: Split, seed: int, tries: int, block: int = 0) -> IntArray:
    """Return a band, 0 or 1, for each client [n], so that symmetric weights [n, n] within bands are small.

    `max_cut`: the best of `tries` hyperplanes of the semidefinite relaxation. `greedy`: clients by decreasing weight,
    each to the band where it loses less. `local_search`: from `tries` random splits moves of single clients, the best
    one first, until none helps; the best end. `random`: a fair coin for each client. Draws are those of the fading
    block of this seed.
    """
    size, draw = len(weights), generator(seed, "bands", block)
    if rule == "random" or not weights.any():
        return draw.integers(0, 2, size)
    if rule == "greedy":
        return _greedy(weights)
    if rule == "local_search":
        starts = draw.integers(0, 2, (tries, size))
        return min((_improved(weights, start) for start in starts), key=lambda bands: within(weights, bands))
    graph, own_seed = _graph(weights), int(draw.integers(2**63))
    problem, solver = MaxCut("cohort", "drawn", graph, 0, "lanczos", own_seed), Mixing(momentum=_MOMENTUM)
    state = solver.init(problem, own_seed)
    for _ in range(_SWEEPS):
        state, report = solver.step(problem, state)
        if report.residual <= _RESIDUAL:
            break
    return problem.rounded(state["vectors"], tries).sides


def within(weights: FloatArray, bands: IntArray) -> float:
    """Return the weight between clients of one band."""
    same = bands[:, None] == bands
    return float(weights[same].sum()) / 2


def _greedy(weights: FloatArray) -> IntArray:
    bands = np.full(len(weights), -1, dtype=np.int64)
    for client in np.argsort(-weights.sum(axis=1), kind="stable"):
        loads = [float(weights[client, bands == band].sum()) for band in (0, 1)]
        bands[client] = int(loads[1] < loads[0])
    return bands


def _improved(weights: FloatArray, bands: IntArray) -> IntArray:
    signs = 1.0 - 2.0 * bands
    pull, least = signs * (weights @ signs), _GAIN * float(weights.sum())  # weight in the own band less in the other
    while pull[moved := int(pull.argmax())] > least:
        signs[moved] = -signs[moved]
        pull[moved] = -pull[moved]
        change = 2 * signs[moved] * signs * weights[moved]
        pull += change
    return (signs < 0).astype(np.int64)


def _graph(weights: FloatArray) -> WeightedGraph:
    first, second = np.nonzero(np.triu(weights, 1))
    return graph_of(len(weights), first, second, weights[first, second])
