"""The counts that the figure of a partition shows: little, whatever the size of the data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from narrowcast.platform.types import FloatArray, IntArray

MOST_BARS = 50
"""Clients that have a bar, or a box, each."""


@dataclass(frozen=True)
class PartitionCounts:
    """The counts of each client. `targets` says what `values` are; None if targets have no picture."""

    name: str
    examples: IntArray
    """Training examples per client, [U]."""
    targets: Literal["classes", "classes held", "items", "numbers", "means"] | None
    values: IntArray | Sequence[FloatArray]
    """Examples of each class per client, [U, classes]; number of classes per client, [U]; interactions per item; the
    numbers to predict, for each client; or their means per client."""


def no_values() -> IntArray:
    """Return the `values` of a partition whose targets have no picture."""
    return np.zeros(0, dtype=np.int64)
