"""The logistic function and loss in float32, written so that compiled loops over a block become vector code."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from narrowcast.algorithms.local_training.compiled import compiled

Floats = NDArray[np.float32]
Exponents = NDArray[np.int32]

_LOWEST = np.float32(-87)  # below, e^x is subnormal
_PER_LOG_2, _HALF, _ONE, _TWO = np.float32(1.44269504), np.float32(0.5), np.float32(1), np.float32(2)
# log 2 in two parts, and e^x on |x| <= log(2) / 2: Cephes' expf (Moshier, 1992).
_LOG_2_HIGH, _LOG_2_LOW = np.float32(0.693359375), np.float32(-2.12194440e-4)
_E0, _E1, _E2 = np.float32(1.9875691500e-4), np.float32(1.3981999507e-3), np.float32(8.3334519073e-3)
_E3, _E4, _E5 = np.float32(4.1665795894e-2), np.float32(1.6666665459e-1), np.float32(5.0000001201e-1)
# The series of artanh(s) / s in s^2.
_A3, _A5, _A7 = np.float32(1 / 3), np.float32(1 / 5), np.float32(1 / 7)
_A9, _A11, _A13 = np.float32(1 / 9), np.float32(1 / 11), np.float32(1 / 13)


@compiled(inline=True)
def exp_of_minus_abs(scores: Floats, out: Floats, exponents: Exponents) -> None:
    """Compute e^-|z| of each score into `out`; NaN stays NaN. All arrays are [n]; `exponents` is scratch."""
    for place in range(len(scores)):
        x = -abs(scores[place])
        x = _LOWEST if x < _LOWEST else x  # max() might replace NaN
        twos = np.floor(x * _PER_LOG_2 + _HALF)
        exponents[place] = (np.int32(twos) + np.int32(127)) << np.int32(23)
        x = x - twos * _LOG_2_HIGH - twos * _LOG_2_LOW
        series = ((((_E0 * x + _E1) * x + _E2) * x + _E3) * x + _E4) * x + _E5
        out[place] = series * x * x + x + _ONE
    powers = exponents.view(np.float32)
    for place in range(len(scores)):
        out[place] *= powers[place]


@compiled(inline=True)
def sigmoid(scores: Floats, tails: Floats, out: Floats) -> None:
    """Compute 1 / (1 + e^-z) of each score into `out` from `tails`, the values e^-|z|; all arrays are [n]."""
    for place in range(len(scores)):
        numerator = tails[place] if scores[place] < 0 else _ONE
        out[place] = numerator / (_ONE + tails[place])


@compiled(inline=True)
def logistic_loss(scores: Floats, tails: Floats, labels: Floats, out: Floats) -> None:
    """Compute the logistic loss of each score from `tails`, the values e^-|z|; all arrays are [n].

    The loss is log(1 + e^z) for label 0 and log(1 + e^-z) for label 1. log(1 + t) = 2 artanh(t / (2 + t)), and s = t /
    (2 + t) is at most 1/3.
    """
    for place in range(len(scores)):
        s = tails[place] / (_TWO + tails[place])
        q = s * s
        series = (((((_A13 * q + _A11) * q + _A9) * q + _A7) * q + _A5) * q + _A3) * q + _ONE
        z = -scores[place] if labels[place] > 0 else scores[place]
        out[place] = max(z, np.float32(0)) + _TWO * s * series
