"""Uplink allocation: bits for each client of a round, within the rate region and the round's upload time.

Every rule gives 0 bits to clients that cannot afford their least payload, and divides the capacity among the rest.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from narrowcast.algorithms.channel.decomposition import affordable, check_seconds, least_error
from narrowcast.algorithms.channel.distortion_curves import DistortionCurves
from narrowcast.algorithms.channel.error_curves import ErrorCurves, Shares, check_weights
from narrowcast.algorithms.channel.regions import TOLERANCE, Region
from narrowcast.algorithms.channel.rounding import whole_points
from narrowcast.platform.errors import UserError
from narrowcast.platform.section import Section
from narrowcast.platform.types import FloatArray, IntArray


@dataclass(frozen=True)
class Demand:
    """What clients ask of the uplink of a round, [C]; `least` are their lower bounds in bits."""

    region: Region
    seconds: float
    least: FloatArray
    weights: FloatArray | None
    errors: ErrorCurves | None

    def affordable(self, least: FloatArray) -> IntArray:
        """Return the clients that can have at least so many bits [C] each, as indices."""
        return np.flatnonzero(affordable(self.region, self.seconds, least))


class Allocation(Section):
    """Base of the rules that allocate the uplink: a rule has a `kind` of its own and `divided`."""

    kind: str

    def bits(
        self,
        region: Region,
        seconds: float,
        lower: IntArray,
        weights: FloatArray | None = None,
        errors: ErrorCurves | None = None,
    ) -> IntArray:
        """Return the bits that each client may send in `seconds`, [C]; 0 for a client that cannot afford `lower` [C].

        `weights` [C] scale the clients' errors or shares; `errors` gives a client's error as a function of its bits.
        Raise `UserError` for bounds that are not finite and non-negative, and for weights or seconds not above 0.
        """
        demand = Demand(region, seconds, _lower_bounds(lower, region, seconds), weights, errors)
        users, exact = self.divided(demand)
        bits = np.zeros(len(region), dtype=np.int64)
        # down, except for a whole number missed by float rounding alone
        bits[users] = np.floor(exact * (1 + TOLERANCE / 10))
        return bits

    def divided(self, demand: Demand) -> tuple[IntArray, FloatArray]:
        """Return the indices of the clients that take part, and the bits of each before they are rounded down."""
        raise NotImplementedError


class MinError(Allocation):
    """Minimise the weighted sum of the clients' errors exactly: eq. (9) of the wireless report, or distortion tables.

    With `DistortionCurves` each client gets the bits of one of its points, otherwise the exact solution in whole bits.
    """

    kind: Literal["min_error"] = "min_error"

    def divided(self, demand: Demand) -> tuple[IntArray, FloatArray]:
        """Return the bits of least error; raise `UserError` without `errors`."""
        errors, region = demand.errors, demand.region
        if errors is None:
            raise UserError("allocation.kind = min_error needs the clients' errors; use max_min, which needs none")
        if len(errors) != len(region):
            raise UserError(f"got the errors of {len(errors)} clients for {len(region)} links; give one for each")
        errors = errors if demand.weights is None else errors.weighted(demand.weights)
        least = np.maximum(demand.least, errors.min_bits())
        if isinstance(errors, DistortionCurves):  # a client that takes part sends a point, not a fraction of one
            least = errors.point_bits(errors.ceiling(least))
        users = demand.affordable(least)
        if not len(users):
            return users, np.zeros(0)
        errors, inside, least = errors.take(users), region.take(users), least[users]
        if isinstance(errors, DistortionCurves):
            points = whole_points(errors, inside, demand.seconds, least)
            return users, errors.bits[np.arange(len(users)), points]
        return users, least_error(errors, inside, demand.seconds, least)


class ByShare(Allocation):
    """Base of the rules that give bits in proportion to share x weight, as far as region and lower bounds allow."""

    def share(self, region: Region) -> FloatArray:
        """Return the share of each client, [C]."""
        raise NotImplementedError

    def divided(self, demand: Demand) -> tuple[IntArray, FloatArray]:
        """Return bits in proportion to the shares."""
        share = self.share(demand.region)
        if demand.weights is not None:
            check_weights(demand.weights, len(demand.region))
            share = share * demand.weights
        users = demand.affordable(demand.least)
        if not len(users):
            return users, np.zeros(0)
        shares, inside = Shares(share[users]), demand.region.take(users)
        return users, least_error(shares, inside, demand.seconds, demand.least[users])


class MaxMin(ByShare):
    """Max-min fair allocation of bits / weight."""

    kind: Literal["max_min"] = "max_min"

    def share(self, region: Region) -> FloatArray:
        """Return equal shares, [C]."""
        return np.ones(len(region))


class Proportional(ByShare):
    """Bits in proportion to each client's single-user rate (times its weight), as far as the region allows."""

    kind: Literal["proportional"] = "proportional"

    def share(self, region: Region) -> FloatArray:
        """Return the single-user rates, [C]."""
        return region.single_rates()


class Equal(Allocation):
    """The same bits for all: the most that every participating client can send."""

    kind: Literal["equal"] = "equal"

    def divided(self, demand: Demand) -> tuple[IntArray, FloatArray]:
        """Return the same bits for all that take part."""
        users = demand.affordable(demand.least)
        while len(users):
            # the smallest of max-min fair bits is feasible for all users at once
            fair = least_error(Shares(np.ones(len(users))), demand.region.take(users), demand.seconds).min()
            if demand.least[users].max() <= fair * (1 + TOLERANCE):
                return users, np.full(len(users), fair)
            users = np.delete(users, demand.least[users].argmax())
        return users, np.zeros(0)


def _lower_bounds(lower: IntArray, region: Region, seconds: float) -> FloatArray:
    check_seconds(seconds)
    lower = np.asarray(lower)
    if lower.shape != (len(region),) or not (np.isfinite(lower) & (lower >= 0)).all():
        raise UserError(f"lower bounds must be {len(region)} finite numbers of bits, none negative; got {lower}")
    return lower.astype(np.float64)
