"""The channel `two_bands`: a cohort is divided over two bands by the largest cut of a graph of interference."""

from __future__ import annotations

import math
from typing import Literal

import numpy as np
from pydantic import Field

from narrowcast.algorithms.channel.links import (
    FOR_THE_WHOLE_RUN,
    Links,
    block_of,
    check_cohort,
    exponentials,
    no_losses,
    uniforms,
)
from narrowcast.algorithms.channel.regions import InterferenceRegion
from narrowcast.platform.config.fields import METRES, ROUNDS
from narrowcast.platform.config.files import Section
from narrowcast.platform.seeds import generator
from narrowcast.platform.types import FloatArray, IntArray, Profiles
from narrowcast.solves.max_cut import MaxCut
from narrowcast.solves.mixing import Mixing
from narrowcast.solves.weighted_graph import WeightedGraph, graph_of

Split = Literal["max_cut", "greedy", "local_search", "random"]
_SWEEPS, _RESIDUAL, _MOMENTUM = 200, 1e-3, 0.45
_GAIN = 1e-12
"""Of all weight, below which moving a client does not count as an improvement."""


def lost_rates(gains: FloatArray) -> FloatArray:
    """Return what two clients lose to each other in one band, in bits per second and hertz, [n, n], symmetric.

    `gains` [n, n] are powers over noise: client j at the receiver of client i, a client's own signal on the diagonal.
    A client's rate with all others of its band is at least its rate alone less the sum of these losses.
    """
    signal = np.diag(gains)[:, None]
    loss = np.log2(1 + signal) - np.log2(1 + signal / (1 + gains))
    lost = loss + loss.T
    np.fill_diagonal(lost, 0.0)
    return np.asarray(lost)


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
    same_band = bands[:, None] == bands
    return float(weights[same_band].sum()) / 2


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


_NEAREST = 1.0
"""Least distance in metres, at which the reference SNR holds."""


class TwoBands(Section):
    """All clients of a round upload at once, each in one of two bands, and disturb the others of their band.

    A client is uniform in a square with a grid of access points and is served by the one with the best mean gain, over
    path loss and Rayleigh block fading. Its rate is B / 2 log2(1 + S / (1 + I)), with the power I that its access point
    hears from the others of its band. `split` divides the cohort: the weight of two clients is the rate that they lose
    to each other, and the largest cut of this graph leaves the least within the bands. Downlinks are those of the
    profiles.

    Source: Goemans and Williamson, Journal of the ACM 42(6), 1995, for `max_cut`.
    """

    kind: Literal["two_bands"] = "two_bands"
    bandwidth_hertz: float = Field(1e6, gt=0, allow_inf_nan=False, description="bandwidth B of both bands together")
    access_points: int = Field(25, ge=1, le=10_000, description="access points, on a grid")
    side: float = Field(
        250.0, gt=0, allow_inf_nan=False, description="side of the square of clients", json_schema_extra=METRES
    )
    reference_snr_decibel: float = Field(90.0, ge=-200, le=300, description="mean uplink SNR at one metre")
    exponent: float = Field(3.5, ge=0, le=10, description="path-loss exponent")
    coherence: int = Field(1, ge=1, description="length of a fading block", json_schema_extra=ROUNDS)
    split: Split = Field(
        "max_cut",
        description="division of the cohort: semidefinite relaxation and hyperplanes, one client after the other, "
        "moves of single clients from random splits, or a coin for each",
    )
    tries: int = Field(100, ge=1, le=10**6, description="hyperplanes of max_cut, or random splits of local_search")

    def draw(self, profiles: Profiles, seed: int, round_index: int) -> Links:
        """Return the rates of this round's block; raise `UserError` for an empty cohort."""
        check_cohort(profiles)
        gains = self.gains(profiles, seed, round_index)
        block = block_of(round_index, self.coherence)
        bands = split_cohort(lost_rates(gains), self.split, seed, self.tries, block)
        region = InterferenceRegion(gains, bands, self.bandwidth_hertz / 2)
        alone = self.bandwidth_hertz / 2 * np.log1p(np.diag(gains)) / np.log(2)
        return Links(alone, profiles.downlink_bits_per_second, no_losses(profiles), region)

    def gains(self, profiles: Profiles, seed: int, round_index: int) -> FloatArray:
        """Return the power over noise of client j at the access point of client i, [C, C]."""
        block = block_of(round_index, self.coherence)
        mean, faded = [], []
        across = math.ceil(math.sqrt(self.access_points))
        coordinates = [
            self.side * uniforms(seed, f"place in the square {axis}", FOR_THE_WHOLE_RUN, profiles.client)
            for axis in ("x", "y")
        ]
        for point in range(self.access_points):
            centre = [(step + 0.5) * self.side / across for step in divmod(point, across)]
            distance = np.hypot(coordinates[0] - centre[0], coordinates[1] - centre[1])
            loss = 10 * self.exponent * np.log10(np.maximum(distance, _NEAREST))
            mean.append(10 ** ((self.reference_snr_decibel - loss) / 10))
            faded.append(mean[-1] * exponentials(seed, f"fading at access point {point}", block, profiles.client))
        serving = np.argmax(mean, axis=0)
        return np.asarray(np.array(faded)[serving])
