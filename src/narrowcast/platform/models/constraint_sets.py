"""Sets that factors of a matrix may be constrained to, and the projections onto them."""

from __future__ import annotations

from typing import Any, Literal, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from narrowcast.platform.section import Section

SetKind = Literal["none", "nonnegative", "box", "ball", "simplex", "orthogonal_nonnegative"]


class ConstraintSet(Section):
    """A closed set of factors, by its kind alone or with its fields.

    `ball` and `simplex` constrain each column of H, and each column of W: to a Euclidean norm of at most `radius`, and
    to non-negative values of sum `radius`. `orthogonal_nonnegative` allows one positive value in each column of H, and
    in each row of W, so that the K rows of H, or columns of W, are orthogonal; it is not convex.
    """

    kind: SetKind = Field("none", description="set of the factors' values; none: all real numbers")
    low: float = Field(0.0, allow_inf_nan=False, description="least value of a box")
    high: float = Field(1.0, allow_inf_nan=False, description="largest value of a box")
    radius: float = Field(1.0, gt=0, allow_inf_nan=False, description="largest norm in a ball, or sum in a simplex")

    @model_validator(mode="before")
    @classmethod
    def _by_kind_alone(cls, values: Any) -> Any:
        return {"kind": values} if isinstance(values, str) else values

    @model_validator(mode="after")
    def _low_below_high(self) -> Self:
        if self.low >= self.high:
            raise ValueError(f"low = {self.low:g} should be below high = {self.high:g}")
        return self

    def project(self, vectors: NDArray[Any]) -> NDArray[Any]:
        """Return the nearest vectors [..., K] of the set, each by its last axis.

        Onto a simplex by the sort of Held et al. (1974), as in Duchi et al., ICML 2008, Figure 1.
        """
        match self.kind:
            case "none":
                return vectors
            case "nonnegative":
                return np.maximum(vectors, 0)
            case "box":
                return np.clip(vectors, self.low, self.high)
            case "ball":
                norms = np.sqrt(np.square(vectors).sum(axis=-1, keepdims=True))
                return np.asarray(vectors * (self.radius / np.maximum(norms, self.radius)).astype(vectors.dtype))
            case "simplex":
                falling = -np.sort(-vectors, axis=-1)
                sums = falling.cumsum(axis=-1) - self.radius
                counts = np.arange(1, vectors.shape[-1] + 1, dtype=vectors.dtype)
                last = (falling * counts > sums).sum(axis=-1, keepdims=True) - 1
                shift = np.take_along_axis(sums / counts, last, axis=-1)
                return np.asarray(np.maximum(vectors - shift, 0), dtype=vectors.dtype)
            case _:
                largest = vectors.argmax(axis=-1, keepdims=True)
                kept = np.maximum(np.take_along_axis(vectors, largest, axis=-1), 0)
                projected = np.zeros_like(vectors)
                np.put_along_axis(projected, largest, kept, axis=-1)
                return projected

    def project_w(self, w: NDArray[Any]) -> NDArray[Any]:
        """Return the nearest W [N, K] of the set."""
        return self.project(w) if self.kind == "orthogonal_nonnegative" else self.project(w.T).T
