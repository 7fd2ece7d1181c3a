"""Convergence of gradient descent over quantised links: Theorem 1 and Corollary 1 of the wireless report.

The report: N. Mehrotra, Federated Learning at the Wireless Edge. Letters: L smoothness, mu strong convexity, gamma step
size, d dimension, k quantisation levels, w variance factor of a quantiser, t = gamma L, "up" uplink, "down" downlink.
"""

from __future__ import annotations

from typing import Literal, Self

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, model_validator

from narrowcast.platform.errors import UserError
from narrowcast.platform.types import FloatArray
from narrowcast_papers.wireless.errors import Neighbourhoods


class QuantisedDescent(BaseModel):
    """Gradient descent on an L-smooth, mu-strongly convex loss whose models are quantised on the way up and down.

    x' = mean over users of Q_up(y - gamma grad f_i(y)), y = Q_down(x), with unbiased quantisers of variance w ||x||^2.

    Differs from the paper, with `constants: corrected`: 1. the quantisation errors of n users are averaged, so that
    Theorem 1 holds for users with a common minimiser with the uplink factor (w_1 + ... + w_n) / n^2, without a
    condition per user; the report (eq. 9) adds n single-user bounds. 2. the levels of two users that exhaust their sum
    rate have the ratio D_2 / D_1; eq. (12) has an additional square root that stationarity does not give. 3. a
    quantiser's factor is min(d / 4 k^2, sqrt(d) / k); the report uses the former, the looser one for k < sqrt(d) / 4.
    With `constants: report` all three follow the report.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    smoothness: float = Field(gt=0, allow_inf_nan=False, description="L")
    convexity: float = Field(gt=0, allow_inf_nan=False, description="mu")
    step_size: float = Field(gt=0, allow_inf_nan=False, description="gamma")
    dimension: int = Field(ge=1, description="d")
    optimum: float = Field(1.0, gt=0, allow_inf_nan=False, description="||x*||^2")
    constants: Literal["corrected", "report"] = "corrected"

    @model_validator(mode="after")
    def _is_convex(self) -> Self:
        if self.convexity > self.smoothness:
            raise ValueError(f"convexity = {self.convexity:g} is above smoothness = {self.smoothness:g}")
        return self

    @property
    def growth(self) -> float:
        """1 + t^2."""
        return 1 + (self.step_size * self.smoothness) ** 2

    @property
    def contraction(self) -> float:
        """The product mu gamma, the relative decrease of the squared distance in an exact step."""
        return self.convexity * self.step_size

    def variance(self, levels: FloatArray | float) -> FloatArray:
        """Return the variance factor w of a quantiser for an array of levels; raise `UserError` for levels <= 0."""
        levels = np.asarray(levels, dtype=np.float64)
        if not (levels > 0).all():
            raise UserError(f"levels = {levels}; a quantiser has more than 0")
        dithered = self.dimension / (4 * levels**2)
        return dithered if self.constants == "report" else np.minimum(dithered, np.sqrt(self.dimension) / levels)

    def uplink_limit(self, down: float = 0.0) -> float:
        """Return the w_up at and above which Theorem 1 gives no contraction, its first condition."""
        return self.contraction / (4 * self.growth * (1 + 2 * down))

    def downlink_limit(self) -> float:
        """Return the largest w_down of Theorem 1's second condition; negative for t above 1/2."""
        gamma, L = self.step_size, self.smoothness
        return self.convexity / 4 * (1 - 2 * gamma * L) / (2 * gamma * L**2 + 2 / gamma + L - self.convexity)

    def uplink_levels(self, down: float = 0.0) -> float:
        """Return the k_up at `uplink_limit`."""
        return float(np.sqrt(self.dimension / (4 * self.uplink_limit(down))))

    def downlink_levels(self) -> float:
        """Return the k_down at `downlink_limit`; infinite if no number of levels suffices."""
        limit = self.downlink_limit()
        return float(np.sqrt(self.dimension / (4 * limit))) if limit > 0 else float("inf")

    def rate(self, up: float, down: float) -> float:
        """Return the factor of the squared distance per step (Theorem 1; Corollary 1 at up = 0)."""
        return 1 - self.contraction + 4 * up * self.growth * (1 + 2 * down)

    def downlink_neighbourhood(self, down: float) -> float:
        """Return the limit of the squared distance with a quantised downlink only (Corollary 1), unchecked."""
        return 2 * self.optimum * self._first(down) / self.contraction

    def neighbourhood(self, up: float, down: float) -> float:
        """Return the limit of the squared distance (Theorem 1); raise `UserError` if a condition is violated."""
        self.check(up, down)
        second = 2 * up + 4 * up * down * self.growth
        return 2 * self.optimum * (self._first(down) + second) / (1 - self.rate(up, down))

    def _first(self, down: float) -> float:
        """Return C_1, the contribution of the downlink; the report's C_2 is that of the uplink."""
        return self.step_size * down * (self.smoothness - self.convexity) + 2 * down * self.growth

    def check(self, up: float, down: float) -> None:
        """Raise `UserError` if Theorem 1 does not hold for these factors."""
        if not (up >= 0 and down >= 0):
            raise UserError(f"variance factors {up:g} (up) and {down:g} (down); they cannot be negative")
        if down > self.downlink_limit():
            raise UserError(
                f"w_down = {down:g} is above {self.downlink_limit():g}, the limit of Theorem 1; send more bits"
            )
        if up >= self.uplink_limit(down):
            raise UserError(
                f"w_up = {up:g} is not below {self.uplink_limit(down):g}, the limit of Theorem 1; send more bits"
            )

    def total_neighbourhood(self, up: FloatArray, down: float = 0.0) -> float:
        """Return the objective of eq. (9) for factors [n]: a sum over users, or Theorem 1 at the mean error."""
        if self.constants == "report":
            return sum(self.neighbourhood(float(each), down) for each in up)
        return self.neighbourhood(float(up.sum()) / len(up) ** 2, down)

    def uplink_errors(self, n_users: int, down: float = 0.0) -> Neighbourhoods:
        """Return eq. (9) as a function of the uplink bits, up to a constant.

        Corrected, the variance grows with the sum of the users' 1 / k^2, so there is no pole.
        """
        if self.constants == "corrected":
            weight, pole = self.dimension / (4 * n_users**2), 0.0
        else:
            # (a + b w) / (c - e w) with w = d / 4 k^2 is a / c + (d / 4 c^2) (b c + a e) / (k^2 - d e / 4 c)
            a = self._first(down)
            b, c, e = 2 + 4 * down * self.growth, self.contraction, 4 * self.growth * (1 + 2 * down)
            weight, pole = self._weight_and_pole(a, b, c, e)
        return Neighbourhoods(np.full(n_users, weight), np.full(n_users, pole), self.dimension)

    def downlink_errors(self, n_users: int, up: float = 0.0) -> Neighbourhoods:
        """Return eq. (9) as a function of the downlink bits, with a model per user, up to a constant."""
        a, c = 2 * up, self.contraction - 4 * up * self.growth
        b = self._first(1.0) + 4 * up * self.growth
        weight, pole = self._weight_and_pole(a, b, c, 8 * up * self.growth)
        return Neighbourhoods(np.full(n_users, weight), np.full(n_users, pole), self.dimension)

    def _weight_and_pole(self, a: float, b: float, c: float, e: float) -> tuple[float, float]:
        if c <= 0:
            raise UserError(f"the other link's variance leaves no contraction ({c:g}); give it more bits")
        quarter = self.dimension / 4
        return 2 * self.optimum * quarter * (b * c + a * e) / c**2, quarter * e / c

    def uplink_bits(self, down: float = 0.0) -> float:
        """Return the least bits of an uplink under eq. (9): d log2 of `uplink_levels`."""
        return self.dimension * float(np.log2(self.uplink_levels(down)))

    def downlink_bits(self) -> float:
        """Return the least bits of a downlink: d log2 of `downlink_levels`."""
        return self.dimension * float(np.log2(self.downlink_levels()))

    def level_ratio(self, up: tuple[float, float]) -> float:
        """Return k_1 / k_2 of two uplinks limited by their sum rate only (eq. 12), at these factors."""
        first, second = (4 * w * self.growth for w in up)
        ratio = (self.contraction - second) / (self.contraction - first)
        if self.constants == "report":
            ratio *= float(np.sqrt((self.contraction + first) / (self.contraction + second)))
        return ratio
