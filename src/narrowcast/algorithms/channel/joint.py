"""Joint choice of the rank and the quantiser's step that spend a client's bits with the least distortion.

A client's update is m rows of d values. At rank r it is projected on r random directions, and each of the m r values is
rounded with a dithered step of s root mean squares. The decoded update is unbiased and has the error

    D(r, s) = (d / r) (1 + s^2 / 12) - 1

relative to the update's energy: d / r - 1 for the missing directions, the rest for the rounding. Its size is m r h(s)
bits plus a part that does not depend on s, where h(s) is the entropy of a rounded normal value. Doubling the rank beats
halving the step until a value costs little more than one bit.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch

from narrowcast.algorithms.channel.curves import DistortionCurves
from narrowcast.algorithms.codecs.wire import HEADER_BITS
from narrowcast.platform.types import FloatArray, IntArray

STEPS = np.geomspace(0.02, 6.0, 72)
"""The steps to choose from, in root mean squares of the rounded values."""
_DITHERS, _FURTHEST = 16, 8.0
_MOST_POINTS = 48
_SIDE_BITS = 84.0  # models of the entropy coder, padding of each list


@dataclass(frozen=True)
class RankLevelGrid:
    """The choices for updates with `dimension` columns: ranks 1..`rank` at each of `STEPS`.

    `bits_per_rank` is the cost of a column besides its values, such as its norm.
    """

    rank: int
    dimension: int
    bits_per_rank: float

    def bits(self, values: FloatArray, head_bits: FloatArray) -> FloatArray:
        """Return the bits of updates, [C, rank, steps], of `values` [C, rank] at each rank and `head_bits` [C]."""
        overhead = head_bits[:, None] + self._ranks() * self.bits_per_rank
        return values[:, :, None] * symbol_bits() + overhead[:, :, None]

    def distortion(self) -> FloatArray:
        """Return D(r, s), [rank, steps]."""
        return self.dimension / self._ranks()[:, None] * (1 + STEPS**2 / 12) - 1

    def values_per_rank(self, rows: FloatArray) -> FloatArray:
        """Return the number of values of `rows` [C] rows at each rank, [C, rank]."""
        return rows[:, None] * self._ranks()

    def curves(self, values: FloatArray, head_bits: FloatArray, most_error: float = np.inf) -> DistortionCurves:
        """Return each client's error as a function of its bits, at the choices that are best for a typical client.

        Choices with more than `most_error` are left out, unless all have more. Shapes: values [C, rank], which weight
        the clients; head_bits [C].
        """
        typical = self.bits(np.median(values, axis=0)[None], np.array([np.median(head_bits)])).ravel()
        order = np.argsort(typical, kind="stable")
        errors = self.distortion().ravel()[order]
        better = order[errors < np.minimum.accumulate(np.concatenate([[np.inf], errors]))[:-1]]
        better = better[self.distortion().ravel()[better] <= max(most_error, errors.min())]
        spread = np.unique(np.linspace(0, len(better) - 1, _MOST_POINTS).round().astype(np.int64))
        ranks, steps = np.divmod(better[spread], len(STEPS))
        bits = self.bits(values, head_bits)[:, ranks, steps]
        distortion = np.broadcast_to(self.distortion()[ranks, steps], bits.shape)
        return DistortionCurves.of(bits, distortion, weight=np.maximum(values[:, 0], 1.0))

    def best(self, budget_bits: FloatArray, values: FloatArray, head_bits: FloatArray) -> tuple[IntArray, FloatArray]:
        """Return the rank and the step of the best choice within each budget [C], [C] each; rank 0 if none fits."""
        fits = (self.bits(values, head_bits) <= budget_bits[:, None, None]).reshape(len(values), -1)
        errors = np.where(fits, self.distortion().ravel(), np.inf)
        ranks, steps = np.divmod(errors.argmin(axis=1), len(STEPS))
        return np.where(fits.any(axis=1), ranks + 1, 0), STEPS[steps]

    def _ranks(self) -> FloatArray:
        return np.arange(1.0, self.rank + 1)


@lru_cache(maxsize=1)
def symbol_bits() -> FloatArray:
    """Return h(s), [steps]: the entropy of floor(X / s + U) for X normal and U uniform, unknown to the coder."""
    dithers = (torch.arange(_DITHERS, dtype=torch.float64) + 0.5) / _DITHERS
    entropies = []
    for step in STEPS:
        reach = int(_FURTHEST / step) + 2
        edges = (torch.arange(-reach, reach + 1, dtype=torch.float64) - dithers[:, None]) * step
        shares = torch.special.ndtr(edges).diff(dim=1).mean(dim=0)
        entropies.append(float(torch.special.entr(shares).sum()) / np.log(2))
    return np.array(entropies)


def bits_per_value(lengths: FloatArray, levels: float | FloatArray) -> FloatArray:
    """Return the entropy of a value of columns of so many normal values [...], rounded at these levels."""
    steps = np.log(np.maximum(lengths, 1.0)) / 2 - np.log(levels)
    return np.interp(steps, np.log(STEPS), symbol_bits())


def head_bits(n_items: int, unexpected: FloatArray | IntArray) -> FloatArray:
    """Estimate the bits [C] of a list of rows with `unexpected` [C] entries, or of all rows but these.

    The receiver expects the negatives that it regenerates, and otherwise no row.
    """
    share = np.clip(unexpected / n_items, 1e-6, 1 - 1e-6)
    entropy = -share * np.log2(share) - (1 - share) * np.log2(1 - share)
    return 1.1 * n_items * entropy + HEADER_BITS + _SIDE_BITS
