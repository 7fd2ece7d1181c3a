"""Fewer rows for a budget that does not carry a client's whole update: those that changed most, or a random choice.

The rows that a client touched cost more than their values: on MovieLens-1M their list takes about 2,300 bits of an
upload, the values of one direction 500 to 1,500. Coarser levels therefore save little, and fewer rows nearly all.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import numpy as np

from narrowcast.algorithms.channel.distortion_curves import DistortionCurves
from narrowcast.algorithms.channel.joint import bits_per_value, head_bits
from narrowcast.algorithms.codecs.coded_rows import RowUpdate
from narrowcast.platform.seeds import generator
from narrowcast.platform.types import FloatArray, IntArray

RowChoice = Literal["all", "strongest", "random"]
_SHARES = np.linspace(0.1, 0.9, 9)
_ENERGY_EXPONENT = 0.6  # the strongest tenth of a client's rows has 0.23 of the energy, half of them 0.69
_FEWEST = 8
_USED = 0.95  # of a budget, by the estimated size


def estimated_bits(rows: FloatArray, dimension: int, n_items: int, norm_bits: float) -> FloatArray:
    """Return the bits of one direction of so many rows, rounded with a step of their root mean square."""
    values = rows + dimension
    return head_bits(n_items, rows) + values * bits_per_value(values, np.sqrt(values)) + norm_bits


def with_fewer_rows(
    curves: DistortionCurves, choice: RowChoice, rows: FloatArray, dimension: int, n_items: int, norm_bits: float
) -> DistortionCurves:
    """Return the curves with a point for each tenth of the clients' `rows` [C]; the missing energy is their error."""
    share = _SHARES ** (_ENERGY_EXPONENT if choice == "strongest" else 1.0)
    bits = estimated_bits(rows[:, None] * _SHARES, dimension, n_items, norm_bits) / _USED
    errors = np.broadcast_to(1 - share * (1 - 1 / 12), bits.shape)
    bits, errors = np.hstack([bits, curves.bits]), np.hstack([errors, curves.distortion])
    return DistortionCurves.of(bits, errors, curves.weight)


def rows_within(update: RowUpdate, bits: float, norm_bits: float) -> int:
    """Return how many of the rows should fit these bits."""
    rows = np.arange(1.0, len(update.rows) + 1)
    sizes = estimated_bits(rows, update.values.shape[1], update.n_rows, norm_bits)
    return int((sizes <= _USED * bits).sum())


def with_rows(update: RowUpdate, choice: RowChoice, number: int, key: int) -> RowUpdate | None:
    """Return the update with so many of its rows; None if these are too few to be worth naming."""
    if number < _FEWEST:
        return None
    if choice == "strongest":
        order: IntArray = np.argsort(-np.square(update.values).sum(axis=1), kind="stable")
    else:
        order = generator(key, "rows").permutation(len(update.rows))
    kept = np.sort(order[:number])
    return replace(update, rows=update.rows[kept], values=update.values[kept])
