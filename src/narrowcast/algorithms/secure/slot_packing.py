"""Packing of several integers into one slot of a ciphertext: as many values as fit, and counts in the bits above."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from narrowcast.algorithms.federated.sum_layout import Group
from narrowcast.algorithms.secure.fixed_point import FixedPoint, Integers


@dataclass(frozen=True)
class SlotPlan:
    """The places of a group's values and counts: several values a slot, and counts in the bits above them.

    If the counts do not fit above the values, they take slots of their own after those of the values.
    """

    n_values: int
    n_counts: int
    value_bits: int
    count_bits: int
    usable_bits: int

    @classmethod
    def of(cls, group: Group, numbers: FixedPoint, usable_bits: int) -> SlotPlan:
        """Return the plan of a group for slots that carry integers of `usable_bits` bits, sign included."""
        return cls(group.n_values, group.n_counts, numbers.value_bits, numbers.count_bits, usable_bits)

    @property
    def values(self) -> int:
        """The values in a slot."""
        return self.usable_bits // self.value_bits

    @property
    def _value_slots(self) -> int:
        return -(-self.n_values // self.values)

    @property
    def _above(self) -> int:
        """The counts above the values of a slot; one bit stays free for the sign."""
        if not self.n_values:
            return 0
        fit = (self.usable_bits - 1 - self.values * self.value_bits) // self.count_bits
        return fit if fit * self._value_slots >= self.n_counts else 0

    @property
    def _counts_alone(self) -> int:
        return 0 if self._above else (self.usable_bits - 1) // self.count_bits

    @property
    def slots(self) -> int:
        """The slots that the group takes."""
        alone = -(-self.n_counts // self._counts_alone) if self._counts_alone else 0
        return self._value_slots + alone

    def pack(self, integers: Integers) -> Integers:
        """Return the integers of a group [n_values + n_counts] as signed slots [slots]."""
        values, counts = integers[: self.n_values], integers[self.n_values :]
        slots = _joined(values, self.values, self.value_bits, self._value_slots)
        if self._above:
            above = _joined(counts, self._above, self.count_bits, self._value_slots)
            return slots + (above << np.int64(self.values * self.value_bits))
        alone = self.slots - self._value_slots
        return np.concatenate([slots, _joined(counts, self._counts_alone, self.count_bits, alone)])

    def unpack(self, slots: Integers) -> Integers:
        """Return the integers that slots, or sums of slots, carry, [n_values + n_counts]."""
        values, rest = _split(slots[: self._value_slots], self.values, self.value_bits)
        per_slot = self._above or self._counts_alone
        counts = _digits(rest if self._above else slots[self._value_slots :], per_slot, self.count_bits)
        return np.concatenate([values[: self.n_values], counts[: self.n_counts]])


def _joined(integers: Integers, per_slot: int, bits: int, slots: int) -> Integers:
    """Return the sum of integer << (bits * place) over the digits of each slot, signed carries included, [slots]."""
    digits = np.zeros(slots * per_slot, dtype=np.int64)
    digits[: len(integers)] = integers
    shifts = np.arange(per_slot, dtype=np.int64) * bits
    return np.asarray((digits.reshape(slots, per_slot) << shifts).sum(axis=1, dtype=np.int64))


def _split(slots: Integers, per_slot: int, bits: int) -> tuple[Integers, Integers]:
    """Return the signed digits [slots * per_slot] and the bits above them [slots]."""
    digits: NDArray[np.int64] = np.empty((len(slots), per_slot), dtype=np.int64)
    half, rest = np.int64(1) << np.int64(bits - 1), slots
    for place in range(per_slot):
        digits[:, place] = ((rest + half) & ((half << np.int64(1)) - 1)) - half
        rest = (rest - digits[:, place]) >> np.int64(bits)
    return digits.ravel(), rest


def _digits(slots: Integers, per_slot: int, bits: int) -> Integers:
    """Return the digits of 0..2^bits - 1, [slots * per_slot]."""
    shifts = np.arange(per_slot, dtype=np.int64) * bits
    return np.asarray(((slots[:, None] >> shifts) & ((np.int64(1) << np.int64(bits)) - 1)).ravel())
