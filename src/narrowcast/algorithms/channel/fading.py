"""Channels whose rates follow from signal-to-noise ratios or a capacity: cells with fading, a single user, one band."""

from __future__ import annotations

import csv
from functools import lru_cache
from pathlib import Path
from typing import Literal, Self

import numpy as np
from pydantic import Field, model_validator

from narrowcast.algorithms.channel.links import (
    FOR_THE_WHOLE_RUN,
    GainEstimates,
    Links,
    block_of,
    check_cohort,
    exponentials,
    no_losses,
    normals,
    uniforms,
)
from narrowcast.algorithms.channel.regions import GaussianRegion, Independent, Region, TableRegion
from narrowcast.platform.config.fields import METRES, ROUNDS, SECONDS
from narrowcast.platform.config.files import Section
from narrowcast.platform.errors import UserError
from narrowcast.platform.types import FloatArray, Profiles


class Rayleigh(GainEstimates):
    """A cell with path loss, shadowing and Rayleigh block fading, in which a rate is B log2(1 + SNR).

    SNR = reference x (distance / reference distance)^-exponent x shadowing x |h|^2. A client's position and shadowing
    are drawn once for the run, |h|^2 ~ Exp(1) for every block of `coherence` rounds, independently for uplink and
    downlink. The rates of the profile are not used.

    With neither `margin_decibel` nor `outage_probability` the client knows its fade, sends at capacity and is never
    lost. With one of them it sends at the rate of a gain t instead of |h|^2, and is lost if |h|^2 < t: t =
    10^(-margin / 10), or the quantile of |h|^2 at the chosen probability. With `csi_error_decibel` its rate is planned
    for an estimate of |h|^2. The server knows the downlink.

    Differs from a real cell: 1. with `access: shared`, and a margin or an outage probability, a lost upload does not
    disturb the others, which are decoded as if its sender were silent; uploads lost to an estimate are noise to them.
    """

    kind: Literal["rayleigh"] = "rayleigh"
    bandwidth_hertz: float = Field(
        1e6, gt=0, allow_inf_nan=False, description="bandwidth B of a client's band, or of the shared one"
    )
    access: Literal["orthogonal", "shared"] = Field(
        "orthogonal", description="a band for each client, or one for all: the Gaussian multiple-access channel"
    )
    reference_snr_decibel: float = Field(60.0, ge=-200, le=300, description="mean uplink SNR at reference_distance")
    reference_distance: float = Field(
        1.0, gt=0, allow_inf_nan=False, description="distance of reference_snr_decibel", json_schema_extra=METRES
    )
    downlink_gain_decibel: float = Field(
        10.0, ge=-200, le=200, description="downlink SNR over uplink SNR at the same distance"
    )
    exponent: float = Field(3.0, ge=0, le=10, description="path-loss exponent")
    shadowing_decibel: float = Field(0.0, ge=0, le=30, description="standard deviation of log-normal shadowing")
    nearest: float = Field(
        10.0, gt=0, allow_inf_nan=False, description="inner radius of the ring of clients", json_schema_extra=METRES
    )
    farthest: float = Field(
        100.0,
        gt=0,
        allow_inf_nan=False,
        description="outer radius; clients are uniform over the area of the ring",
        json_schema_extra=METRES,
    )
    coherence: int = Field(1, ge=1, description="length of a fading block", json_schema_extra=ROUNDS)
    margin_decibel: float | None = Field(
        None,
        ge=-30,
        le=100,
        description="a client sends at the rate of a gain so far below the mean, and is lost below that gain",
    )
    outage_probability: float | None = Field(
        None, gt=0, lt=1, description="probability of a lost upload; sets the gain, in place of margin_decibel"
    )

    @model_validator(mode="after")
    def _one_way_to_lose(self) -> Self:
        if self.margin_decibel is not None and self.outage_probability is not None:
            raise ValueError("margin_decibel and outage_probability set the same gain; give one of them")
        if self.nearest > self.farthest:
            raise ValueError(f"nearest = {self.nearest:g} m is beyond farthest = {self.farthest:g} m")
        if not self.knows_gains and self.planned_gain() is not None:
            raise ValueError(
                "margin_decibel and outage_probability plan rates without an estimate of the fade; leave out "
                "csi_error_decibel and back_off_decibel, or plan on the estimate alone"
            )
        return self

    def draw(self, profiles: Profiles, seed: int, round_index: int) -> Links:
        """Return the rates of this round's block of fades; raise `UserError` for an empty cohort."""
        check_cohort(profiles)
        block = block_of(round_index, self.coherence)
        mean = self.mean_snr(profiles, seed)
        gain = exponentials(seed, "fading uplink", block, profiles.client)
        planned = self.planned_gain()
        uplink_snr = mean * (gain if planned is None else planned)
        planned_snr = self.planned(uplink_snr, seed, block, profiles.client)
        lost = no_losses(profiles) if planned is None else gain < planned
        downlink_gain = exponentials(seed, "fading downlink", block, profiles.client)
        downlink_snr = mean * 10 ** (self.downlink_gain_decibel / 10) * downlink_gain
        downlink = self.bandwidth_hertz * np.log1p(downlink_snr) / np.log(2)
        region, actual = self._region(planned_snr), None if self.knows_gains else self._region(uplink_snr)
        return Links(region.single_rates(), downlink, lost, region, actual)

    def _region(self, snr: FloatArray) -> Region:
        shared = GaussianRegion(snr, self.bandwidth_hertz)
        return shared if self.access == "shared" else Independent(shared.single_rates())

    def planned_gain(self) -> float | None:
        """Return the gain t that replaces |h|^2; None if the client knows its fade."""
        if self.margin_decibel is not None:
            return 10 ** (-self.margin_decibel / 10)
        if self.outage_probability is not None:
            return float(-np.log1p(-self.outage_probability))
        return None

    def mean_snr(self, profiles: Profiles, seed: int) -> FloatArray:
        """Return the mean linear SNR of the uplink over fades, [C]."""
        uniform = uniforms(seed, "place", FOR_THE_WHOLE_RUN, profiles.client)
        distance = np.sqrt(self.nearest**2 + uniform * (self.farthest**2 - self.nearest**2))
        shadow = self.shadowing_decibel * normals(seed, "shadowing", FOR_THE_WHOLE_RUN, profiles.client)
        loss = 10 * self.exponent * np.log10(distance / self.reference_distance)
        return 10 ** ((self.reference_snr_decibel - loss + shadow) / 10)


_ANSWER = ".safetensors"
_ADVICE = "give the answer.safetensors of a localisation, or a CSV file with the columns x and y"


class LocatedRayleigh(Rayleigh):
    """`rayleigh` with the distances of given positions to a base station, instead of drawn ones.

    The file is the `answer.safetensors` of a localisation, whose `positions` [n, d] are used, or a CSV file with the
    columns x and y, and z if there is one. Row c is the position of client c; more rows than clients are allowed. No
    client is nearer to the base station than `nearest`, and `farthest` has no effect. Raises `UserError` if the file
    is not a table of positions, or has fewer rows than the number of a client.
    """

    kind: Literal["located_rayleigh"] = "located_rayleigh"  # type: ignore[assignment]
    path: Path = Field(description="answer.safetensors of a localisation, or a CSV file with the columns x and y")
    unit: float = Field(
        100.0, gt=0, allow_inf_nan=False, description="length of the positions' unit", json_schema_extra=METRES
    )
    base: tuple[float, float] | tuple[float, float, float] = Field(
        (0.5, 0.5), description="position of the base station, in the positions' unit"
    )

    @model_validator(mode="after")
    def _file_is_there(self) -> Self:
        if not self.path.is_file():
            raise ValueError(f"no file {self.path}; give the answer.safetensors of a localisation, or a CSV file")
        return self

    def mean_snr(self, profiles: Profiles, seed: int) -> FloatArray:
        """Return the mean linear SNR of the uplink over fades, [C]."""
        stamp = self.path.stat()
        positions = _positions(self.path, stamp.st_mtime_ns, stamp.st_size)
        if positions.shape[1] != len(self.base):
            raise UserError(
                f"{self.path} has positions of {positions.shape[1]} coordinates, but radio.channel.base has "
                f"{len(self.base)}; give as many"
            )
        if len(profiles) and (last := int(profiles.client.max())) >= len(positions):
            raise UserError(f"{self.path} has {len(positions)} positions and none of client {last}; add it")
        metres = self.unit * np.linalg.norm(positions[profiles.client] - np.array(self.base), axis=1)
        shadow = self.shadowing_decibel * normals(seed, "shadowing", FOR_THE_WHOLE_RUN, profiles.client)
        loss = 10 * self.exponent * np.log10(np.maximum(metres, self.nearest) / self.reference_distance)
        return np.asarray(10 ** ((self.reference_snr_decibel - loss + shadow) / 10))


@lru_cache(maxsize=4)
def _positions(path: Path, modified: int, size: int) -> FloatArray:
    """Return the positions of a file [n, d]; `modified` and `size` are the cache key of its content."""
    del modified, size
    try:
        positions = _answered(path) if path.name.endswith(_ANSWER) else _table(path)
    except Exception as error:  # a file of any content; safetensors has an exception class of its own
        raise UserError(f"{path}: cannot be read ({error}); {_ADVICE}") from error
    if positions is None:
        raise UserError(f"{path}: has no positions; {_ADVICE}")
    if positions.ndim != 2 or positions.shape[1] not in (2, 3) or not np.isfinite(positions).all():
        wrong = f"has positions of the shape {positions.shape}, or some that are not numbers"
        raise UserError(f"{path}: {wrong}; {_ADVICE}")
    return np.asarray(positions, dtype=np.float64)


def _answered(path: Path) -> FloatArray | None:
    from safetensors.numpy import load_file

    return load_file(path).get("positions")


def _table(path: Path) -> FloatArray:
    with path.open(newline="", encoding="utf-8") as lines:
        rows = list(csv.DictReader(lines))
    names = [name for name in ("x", "y", "z") if rows and name in rows[0]]
    return np.array([[float(row[name]) for name in names] for row in rows], dtype=np.float64)


class SingleUser(Section):
    """Each client sends alone, with a budget of K levels a coordinate (eq. (6) of the wireless report).

    The budget is d log2 K bits a round. Values quantised to k <= K levels arrive unchanged. Above the budget they
    arrive with N(0, 1 / (4 K^2)) added, clipped to [0, 1] and quantised again to k levels. The report calls this
    unbiased; its folder of `papers/` has both, and the bias in closed form.

    Differs from the paper: 1. drawn as `Links`, k levels count log2 k bits, as in the wireless report, although
    0..k are k + 1 symbols, and norm and signs count nothing.
    """

    kind: Literal["single_user"] = "single_user"
    dimension: int = Field(ge=1, description="d, the number of a model's coordinates")
    uplink_levels: float = Field(
        2.0**8, gt=1, allow_inf_nan=False, description="K_U, uplink levels for each coordinate"
    )
    downlink_levels: float = Field(
        2.0**8, gt=1, allow_inf_nan=False, description="K_D, downlink levels for each coordinate"
    )
    seconds: float = Field(
        1.0,
        gt=0,
        allow_inf_nan=False,
        description="time in which a client can send its budget",
        json_schema_extra=SECONDS,
    )

    def draw(self, profiles: Profiles, seed: int, round_index: int) -> Links:
        """Return the same budget for every client and round; raise `UserError` for an empty cohort."""
        del seed, round_index
        check_cohort(profiles)
        uplink, downlink = (
            np.full(len(profiles), self.dimension * np.log2(levels) / self.seconds)
            for levels in (self.uplink_levels, self.downlink_levels)
        )
        return Links(uplink, downlink, no_losses(profiles), Independent(uplink))


_HIGHEST_BITS_PER_HERTZ = 300.0


class MultipleAccess(GainEstimates):
    """All clients upload in the same band, each with the SNR at which its single-user rate is its profile's uplink.

    The region is R(S) = B log2(1 + the sum of the SNRs over S). SNRs are constant; their estimates differ by the round.
    """

    kind: Literal["multiple_access"] = "multiple_access"
    bandwidth_hertz: float = Field(1e6, gt=0, allow_inf_nan=False, description="bandwidth of the shared band")

    def draw(self, profiles: Profiles, seed: int, round_index: int) -> Links:
        """Return the links of this round; raise `UserError` for an empty cohort, or a rate beyond the band."""
        check_cohort(profiles)
        uplink = profiles.uplink_bits_per_second
        fastest = int(uplink.argmax())
        if uplink[fastest] > _HIGHEST_BITS_PER_HERTZ * self.bandwidth_hertz:
            raise UserError(
                f"client {profiles.client[fastest]}: {uplink[fastest]:g} bits per second in a band of "
                f"{self.bandwidth_hertz:g} Hz; give the channel at least a {_HIGHEST_BITS_PER_HERTZ:g}th of it in hertz"
            )
        snr = np.expm1(uplink / self.bandwidth_hertz * np.log(2))
        region = GaussianRegion(snr, self.bandwidth_hertz)
        downlink, lost = profiles.downlink_bits_per_second, no_losses(profiles)
        if self.knows_gains:
            return Links(uplink, downlink, lost, region)
        planned = GaussianRegion(self.planned(snr, seed, round_index, profiles.client), self.bandwidth_hertz)
        return Links(planned.single_rates(), downlink, lost, planned, region)


class Capacity(Section):
    """The total uplink rate of a set of clients."""

    clients: tuple[int, ...] = Field(min_length=1, description="the clients of the set")
    bits_per_second: float = Field(ge=0, allow_inf_nan=False, description="largest sum of their uplink rates")


class RateTable(Section):
    """The rate region of a few clients, set by set, eq. (7) of the wireless report; downlinks are those of profiles.

    A cohort gets its part of the table. A table that is not a polymatroid is refused with the sets that show it.
    """

    kind: Literal["table"] = "table"
    capacities: tuple[Capacity, ...] = Field(
        min_length=1, description="capacity of each non-empty set of the clients 0, 1, ..."
    )

    @model_validator(mode="after")
    def _is_a_polymatroid(self) -> Self:
        sets = [frozenset(capacity.clients) for capacity in self.capacities]
        if twice := {tuple(sorted(users)) for users in sets if sets.count(users) > 1}:
            raise ValueError(f"capacities: the set {sorted(twice)[0]} is given twice; keep one")
        self.region()
        return self

    def region(self) -> TableRegion:
        """Return the region of all the table's clients."""
        return TableRegion.of({capacity.clients: capacity.bits_per_second for capacity in self.capacities})

    def draw(self, profiles: Profiles, seed: int, round_index: int) -> Links:
        """Return the same links in every round; raise `UserError` for an empty cohort, or a client not in the table."""
        del seed, round_index
        check_cohort(profiles)
        region = self.region()
        if (unknown := profiles.client[profiles.client >= len(region)]).size:
            raise UserError(
                f"client {unknown[0]} is not in the K(S) table, which has the clients 0 to {len(region) - 1}"
            )
        cohort = region.take(profiles.client)
        return Links(cohort.single_rates(), profiles.downlink_bits_per_second, no_losses(profiles), cohort)
