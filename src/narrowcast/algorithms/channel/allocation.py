"""Uplink allocation: bits for each client of a round, within the rate region and the round's upload time.

Every rule gives 0 bits to clients that cannot afford their least payload, and divides the capacity among the rest.
"""

from __future__ import annotations

from typing import Literal, Protocol

import numpy as np

from narrowcast.algorithms.channel.decomposition import affordable, check_seconds, least_error
from narrowcast.algorithms.channel.distortion_curves import DistortionCurves
from narrowcast.algorithms.channel.error_curves import ErrorCurves, Shares, check_weights
from narrowcast.algorithms.channel.regions import TOLERANCE, Region
from narrowcast.algorithms.channel.rounding import whole_points
from narrowcast.platform.errors import UserError
from narrowcast.platform.section import Section
from narrowcast.platform.types import FloatArray, IntArray


class Allocation(Protocol):
    """A rule that allocates the uplink; a frozen model."""

    @property
    def kind(self) -> str:
        """The name in the catalog."""
        ...

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
        ...


class MinError(Section):
    """Minimise the weighted sum of the clients' errors exactly: eq. (9) of the wireless report, or distortion tables.

    With `DistortionCurves` each client gets the bits of one of its points, otherwise the exact solution in whole bits.
    """

    kind: Literal["min_error"] = "min_error"

    def bits(
        self,
        region: Region,
        seconds: float,
        lower: IntArray,
        weights: FloatArray | None = None,
        errors: ErrorCurves | None = None,
    ) -> IntArray:
        """Return the bits of each client, [C]; raise `UserError` as `Allocation.bits` does, and without `errors`."""
        if errors is None:
            raise UserError("allocation.kind = min_error needs the clients' errors; use max_min, which needs none")
        if len(errors) != len(region):
            raise UserError(f"got the errors of {len(errors)} clients for {len(region)} links; give one for each")
        errors = errors if weights is None else errors.weighted(weights)
        least = np.maximum(_lower_bounds(lower, region, seconds), errors.min_bits())
        if isinstance(errors, DistortionCurves):  # a client that takes part sends a point, not a fraction of one
            least = errors.point_bits(errors.ceiling(least))
        users = np.flatnonzero(affordable(region, seconds, least))
        if not len(users):
            return np.zeros(len(region), dtype=np.int64)
        errors, inside, least = errors.take(users), region.take(users), least[users]
        if isinstance(errors, DistortionCurves):
            points = whole_points(errors, inside, seconds, least)
            exact = errors.bits[np.arange(len(users)), points]
        else:
            exact = least_error(errors, inside, seconds, least)
        return _whole(exact, users, len(region))


class ByShare(Section):
    """Base of the rules that give bits in proportion to share x weight, as far as region and lower bounds allow."""

    def share(self, region: Region) -> FloatArray:
        """Return the share of each client, [C]."""
        raise NotImplementedError

    def bits(
        self,
        region: Region,
        seconds: float,
        lower: IntArray,
        weights: FloatArray | None = None,
        errors: ErrorCurves | None = None,
    ) -> IntArray:
        """Return the bits of each client, [C]; raise `UserError` as `Allocation.bits` does."""
        del errors
        share = self.share(region)
        if weights is not None:
            check_weights(weights, len(region))
            share = share * weights
        least = _lower_bounds(lower, region, seconds)
        users = np.flatnonzero(affordable(region, seconds, least))
        if not len(users):
            return np.zeros(len(region), dtype=np.int64)
        exact = least_error(Shares(share[users]), region.take(users), seconds, least[users])
        return _whole(exact, users, len(region))


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


class Equal(Section):
    """The same bits for all: the most that every participating client can send."""

    kind: Literal["equal"] = "equal"

    def bits(
        self,
        region: Region,
        seconds: float,
        lower: IntArray,
        weights: FloatArray | None = None,
        errors: ErrorCurves | None = None,
    ) -> IntArray:
        """Return the bits of each client, [C]; raise `UserError` as `Allocation.bits` does."""
        del errors, weights
        least = _lower_bounds(lower, region, seconds)
        users = np.flatnonzero(affordable(region, seconds, least))
        while len(users):
            # the smallest of max-min fair bits is feasible for all users at once
            fair = least_error(Shares(np.ones(len(users))), region.take(users), seconds).min()
            if least[users].max() <= fair * (1 + TOLERANCE):
                return _whole(np.full(len(users), fair), users, len(region))
            users = np.delete(users, least[users].argmax())
        return np.zeros(len(region), dtype=np.int64)


def _lower_bounds(lower: IntArray, region: Region, seconds: float) -> FloatArray:
    check_seconds(seconds)
    lower = np.asarray(lower)
    if lower.shape != (len(region),) or not (np.isfinite(lower) & (lower >= 0)).all():
        raise UserError(f"lower bounds must be {len(region)} finite numbers of bits, none negative; got {lower}")
    return lower.astype(np.float64)


def _whole(exact: FloatArray, users: IntArray, n_clients: int) -> IntArray:
    """Round bits down, except for a whole number missed by float rounding alone; [C], 0 for clients left out."""
    bits = np.zeros(n_clients, dtype=np.int64)
    bits[users] = np.floor(exact * (1 + TOLERANCE / 10))
    return bits
