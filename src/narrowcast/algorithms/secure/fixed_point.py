"""Updates as integers, so that their sum is exact in whatever order and under whatever protection it is formed.

A value x becomes round(x / step) with step = clip / 2^(bits - 1), unbiased at random or to the nearest; what lies
beyond the clip is cut. All clients of a run share the step, which is what lets a server add what it cannot read.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from narrowcast.algorithms.federated.sum_layout import Group, Part, SumLayout
from narrowcast.platform.seeds import stream_keys, uniform_unit
from narrowcast.platform.types import Arrays, BoolArray

Rounding = Literal["stochastic", "nearest"]
Integers = NDArray[np.int64]


@dataclass(frozen=True)
class FixedPoint:
    """The integers of one client, and how wide the sums over at most `clients` of `most_weight` together are."""

    clip: float
    bits: int
    rounding: Rounding
    most_weight: int
    clients: int

    @property
    def value_bits(self) -> int:
        """The width of a signed sum of values: the weights add at most `most_weight`."""
        return self.bits + self.most_weight.bit_length()

    @property
    def count_bits(self) -> int:
        """The width of a sum of counts."""
        return self.most_weight.bit_length()

    @property
    def step(self) -> float:
        """What an integer of 1 stands for."""
        return self.clip / 2 ** (self.bits - 1)

    def of_client(
        self, partial: Arrays, layout: SumLayout, sends: BoolArray, seed: int, key: tuple[int, int]
    ) -> list[Integers | None]:
        """The integers of each group that a client sends, [n_values + n_counts]; None for the others.

        `key` is its round and its number. Where a layout has one weight for all that a client sends, the change without
        the weight is rounded and then multiplied by it, so that the bits are spent on the change.
        """
        round_index, client = key
        word = stream_keys(seed, "secure rounding", round_index, np.array([client]))
        weights = [part for group in layout.groups for part in group.counts]
        weight = max(int(part.of(partial).max()) for part in weights) if layout.one_weight else 1
        place, integers = 0, list[Integers | None]()
        for group, sent in zip(layout.groups, sends, strict=True):
            places = np.arange(place, place + group.n_values)
            place += group.n_values
            if not sent:
                integers.append(None)
                continue
            scaled = _joined(group.values, partial) / (weight * self.step)
            random = uniform_unit(word, places) if self.rounding == "stochastic" else 0.5
            most = 2 ** (self.bits - 1)
            rounded = np.clip(np.floor(scaled + random), -most, most).astype(np.int64) * weight
            integers.append(np.concatenate([rounded, _joined(group.counts, partial).astype(np.int64)]))
        return integers

    def total(self, sums: list[Integers | None], layout: SumLayout) -> dict[str, Any]:
        """The partial sum that the sums of the groups stand for; nothing where a group has none."""
        arrays = layout.zeros()
        for group, integers in zip(layout.groups, sums, strict=True):
            if integers is not None:
                _put(group, integers, self.step, arrays)
        return arrays


def _joined(parts: tuple[Part, ...], arrays: Arrays) -> NDArray[np.float64]:
    return np.concatenate([np.empty(0), *(part.of(arrays).astype(np.float64) for part in parts)])


def _put(group: Group, integers: Integers, step: float, arrays: dict[str, Any]) -> None:
    place = 0
    for parts, scale in ((group.values, step), (group.counts, 1.0)):
        for part in parts:
            part.of(arrays)[...] = integers[place : place + part.size] * scale
            place += part.size
