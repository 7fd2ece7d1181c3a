"""Updates as fixed-point integers, so that their sum is exact in any order and under any protection.

A value x becomes round(x / step) with step = clip / 2^(bits - 1), rounded stochastically without bias or to the
nearest; values beyond the clip are cut. All clients of a run share the step, since only integers of one unit add up.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from narrowcast.algorithms.federated.sum_layout import Group, Part, SumLayout
from narrowcast.platform.seeds import PrivateSeed, uniform_unit
from narrowcast.platform.types import Arrays, BoolArray

Rounding = Annotated[Literal["stochastic", "nearest"], Field(description="rounding of values to integers")]
Integers = NDArray[np.int64]


@dataclass(frozen=True)
class FixedPoint:
    """The integers of one client, and the width of sums over `max_clients` clients of total weight `max_weight`."""

    clip: float
    bits: int
    rounding: Rounding
    max_weight: int
    max_clients: int

    @property
    def value_bits(self) -> int:
        """The width of a signed sum of weighted values."""
        return self.bits + self.max_weight.bit_length()

    @property
    def count_bits(self) -> int:
        """The width of an unsigned sum of counts."""
        return self.max_weight.bit_length()

    @property
    def step(self) -> float:
        """The value that the integer 1 represents."""
        return self.clip / 2 ** (self.bits - 1)

    def of_client(
        self, partial: Arrays, layout: SumLayout, sends: BoolArray, seed: PrivateSeed, key: tuple[int, int]
    ) -> list[Integers | None]:
        """Return the integers of each group that a client sends, [n_values + n_counts]; None for the other groups.

        `partial` is the client's own partial sum, `sends` [groups] marks what it sends, and `key` is (round, client).
        With `layout.one_weight` the change without its weight is rounded and then multiplied by the weight, so that
        the bits are spent on the change.
        """
        round_index, client = key
        random_key = seed.stream_keys("secure rounding", round_index, np.array([client]))
        weight = _weight(partial, layout)
        start, integers = 0, list[Integers | None]()
        for group, sent in zip(layout.groups, sends, strict=True):
            places = np.arange(start, start + group.n_values)
            start += group.n_values
            if not sent:
                integers.append(None)
                continue
            scaled = _concatenated(group.values, partial) / (weight * self.step)
            random = uniform_unit(random_key, places) if self.rounding == "stochastic" else 0.5
            most = 2 ** (self.bits - 1)
            rounded = np.clip(np.floor(scaled + random), -most, most).astype(np.int64) * weight
            integers.append(np.concatenate([rounded, _concatenated(group.counts, partial).astype(np.int64)]))
        return integers

    def values_cut(self, partial: Arrays, layout: SumLayout, sends: BoolArray) -> tuple[int, int]:
        """Return how many of the values that a client sends are cut at the clip, and how many it sends."""
        most, groups = self.clip * _weight(partial, layout), zip(layout.groups, sends, strict=True)
        values = [_concatenated(group.values, partial) for group, sent in groups if sent]
        return sum(int((np.abs(each) > most).sum()) for each in values), sum(map(len, values))

    def total(self, sums: list[Integers | None], layout: SumLayout) -> dict[str, NDArray[Any]]:
        """Return the partial sum that the groups' integer sums represent; zeros for a group without one."""
        arrays = layout.zeros()
        for group, integers in zip(layout.groups, sums, strict=True):
            if integers is not None:
                _fill(group, integers, self.step, arrays)
        return arrays


def _weight(partial: Arrays, layout: SumLayout) -> int:
    """Return the weight that a client's values carry as a factor."""
    if not layout.one_weight:
        return 1
    return max(int(part.of(partial).max()) for group in layout.groups for part in group.counts)


def _concatenated(parts: tuple[Part, ...], arrays: Arrays) -> NDArray[np.float64]:
    return np.concatenate([np.empty(0), *(part.of(arrays).astype(np.float64) for part in parts)])


def _fill(group: Group, integers: Integers, step: float, arrays: dict[str, NDArray[Any]]) -> None:
    start = 0
    for parts, scale in ((group.values, step), (group.counts, 1.0)):
        for part in parts:
            part.of(arrays)[...] = integers[start : start + part.size] * scale
            start += part.size
