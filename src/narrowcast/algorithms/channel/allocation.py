"""How the clients of a round share the uplink: bits for each, within the rate region and the round's upload time.

All rules leave out the clients that cannot afford their least payload (they get 0) and share everything among the rest.
"""

from __future__ import annotations

from typing import Literal, Protocol

import numpy as np
from pydantic import BaseModel, ConfigDict

from narrowcast.algorithms.channel.curves import Curves
from narrowcast.algorithms.channel.decomposition import affordable, check_seconds, least_error
from narrowcast.algorithms.channel.error_curves import Errors, Shares, check_weights
from narrowcast.algorithms.channel.regions import TOLERANCE, Region
from narrowcast.algorithms.channel.rounding import whole_points
from narrowcast.platform.errors import UserError
from narrowcast.platform.types import FloatArray, IntArray


class Allocation(Protocol):
    """A frozen model of a rule that shares the uplink."""

    @property
    def kind(self) -> str:
        """Its name in the catalog."""
        ...

    def bits(
        self,
        region: Region,
        seconds: float,
        lower: IntArray,
        weights: FloatArray | None = None,
        errors: Errors | None = None,
    ) -> IntArray:
        """How many bits each client may send in `seconds`, [C]; 0 for those that cannot afford `lower` [C].

        `weights` [C] say whose error or share counts how much; `errors` what a client's error is at so many bits.
        Raises `UserError` for lower bounds that are no numbers of bits, weights or seconds not above 0.
        """
        ...


class MinError(BaseModel):
    """The least weighted sum of the clients' errors, exactly: eq. (9) of the report, or tables of distortions.

    With `Curves` each client gets the bits of one of its points; otherwise the exact solution in whole bits.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: Literal["min_error"] = "min_error"

    def bits(
        self,
        region: Region,
        seconds: float,
        lower: IntArray,
        weights: FloatArray | None = None,
        errors: Errors | None = None,
    ) -> IntArray:
        """How many bits each client may send, [C]; raises `UserError` as `Allocation` says, and without `errors`."""
        if errors is None:
            raise UserError("allocation.kind = min_error needs the clients' errors; use max_min, which needs none")
        if len(errors) != len(region):
            raise UserError(f"got the errors of {len(errors)} clients for {len(region)} links; give one for each")
        errors = errors if weights is None else errors.weighted(weights)
        least = np.maximum(_lower_bounds(lower, region, seconds), errors.least())
        if isinstance(errors, Curves):  # a client that takes part sends a point, not a fraction of one
            least = errors.point_bits(errors.ceiling(least))
        users = np.flatnonzero(affordable(region, seconds, least))
        if not len(users):
            return np.zeros(len(region), dtype=np.int64)
        errors, inside, least = errors.take(users), region.take(users), least[users]
        if isinstance(errors, Curves):
            points = whole_points(errors, inside, seconds, least)
            exact = errors.bits[np.arange(len(users)), points]
        else:
            exact = least_error(errors, inside, seconds, least)
        return _whole(exact, users, len(region))


class ByShare(BaseModel):
    """Bits in proportion to a share of each client, times its weight, as far as region and lower bounds allow."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    def share(self, region: Region) -> FloatArray:
        """The share of each client, [C]."""
        raise NotImplementedError

    def bits(
        self,
        region: Region,
        seconds: float,
        lower: IntArray,
        weights: FloatArray | None = None,
        errors: Errors | None = None,
    ) -> IntArray:
        """How many bits each client may send, [C]; raises `UserError` as `Allocation` says."""
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
    """The least bits as many as possible, then the next, and so on: max-min fair, in bits / weight."""

    kind: Literal["max_min"] = "max_min"

    def share(self, region: Region) -> FloatArray:
        """The same for all."""
        return np.ones(len(region))


class Proportional(ByShare):
    """Bits in proportion to what each client could send alone (and to its weight), as far as the region allows."""

    kind: Literal["proportional"] = "proportional"

    def share(self, region: Region) -> FloatArray:
        """What each could send alone."""
        return region.alone()


class Equal(BaseModel):
    """One number of bits for all: the most that every client that takes part can send."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: Literal["equal"] = "equal"

    def bits(
        self,
        region: Region,
        seconds: float,
        lower: IntArray,
        weights: FloatArray | None = None,
        errors: Errors | None = None,
    ) -> IntArray:
        """How many bits each client may send, [C]; raises `UserError` as `Allocation` says."""
        del errors, weights
        least = _lower_bounds(lower, region, seconds)
        users = np.flatnonzero(affordable(region, seconds, least))
        while len(users):
            # what the region allows to the worst placed of max-min fair users, it allows to all
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
    """Bits rounded down, but not where a whole number is missed by float rounding alone; [C], 0 for who is left out."""
    bits = np.zeros(n_clients, dtype=np.int64)
    bits[users] = np.floor(exact * (1 + TOLERANCE / 10))
    return bits
