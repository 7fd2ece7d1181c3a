"""A group's integers as bytes: elements of the ring that is just wide enough for the round's sum.

Values and counts have widths of their own. Elements are added as 64-bit words, which wrap, and are reduced to their
width when they are packed or opened.
"""

from __future__ import annotations

import numpy as np

from narrowcast.algorithms.federated.sum_layout import Group
from narrowcast.algorithms.secure.bit_packing import (
    RingElements,
    pack_elements,
    packed_bytes,
    to_ring,
    to_signed,
    unpack_elements,
)
from narrowcast.algorithms.secure.fixed_point import FixedPoint, Integers


def ring_bytes(group: Group, numbers: FixedPoint) -> int:
    """Return the length of a packed group."""
    return packed_bytes(group.n_values, numbers.value_bits) + packed_bytes(group.n_counts, numbers.count_bits)


def pack_ring(group: Group, elements: RingElements, numbers: FixedPoint) -> bytes:
    """Pack elements [n_values + n_counts], each modulo 2 to the power of its width."""
    values, counts = (part.view(np.int64) for part in np.split(elements, [group.n_values]))
    return pack_elements(to_ring(values, numbers.value_bits), numbers.value_bits) + pack_elements(
        to_ring(counts, numbers.count_bits), numbers.count_bits
    )


def unpack_ring(group: Group, data: bytes | memoryview, numbers: FixedPoint) -> RingElements:
    """Return the elements that `pack_ring` packed; raise `PayloadError` for another length."""
    end = packed_bytes(group.n_values, numbers.value_bits)
    values = unpack_elements(data[:end], group.n_values, numbers.value_bits)
    return np.concatenate([values, unpack_elements(data[end:], group.n_counts, numbers.count_bits)])


def integers_of(group: Group, elements: RingElements, numbers: FixedPoint) -> Integers:
    """Return the integers of a sum in the clear: signed values, then counts."""
    values, counts = np.split(elements, [group.n_values])
    cut = to_ring(counts.view(np.int64), numbers.count_bits).view(np.int64)
    return np.concatenate([to_signed(values, numbers.value_bits), cut])
