"""Bit packing of ring elements: unsigned integers modulo 2^bits, and residues of ciphertexts, at a fixed width."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from narrowcast.platform.types import PayloadError

RingElements = NDArray[np.uint64]


def packed_bytes(count: int, bits: int) -> int:
    """Return the bytes that `count` elements of `bits` bits take."""
    return (count * bits + 7) // 8


def pack_elements(elements: RingElements, bits: int) -> bytes:
    """Pack the lowest `bits` bits of each element, one after the other, least significant first."""
    if bits % 8 == 0:
        return elements.astype("<u8").view(np.uint8).reshape(-1, 8)[:, : bits // 8].tobytes()
    if bits % 4 == 0 and bits >= 32 and len(elements) % 2 == 0:
        # Two elements are whole bytes: the first and the low bits of the second in 64 bits, then the rest of it.
        first, second = elements[0::2], elements[1::2]
        pairs = np.empty((len(first), 2), dtype="<u8")
        pairs[:, 0], pairs[:, 1] = first | second << np.uint64(bits), second >> np.uint64(64 - bits)
        return pairs.view(np.uint8).reshape(-1, 16)[:, : bits // 4].tobytes()
    each = np.unpackbits(elements.astype("<u8").view(np.uint8).reshape(-1, 8), axis=1, count=bits, bitorder="little")
    return np.packbits(each.ravel(), bitorder="little").tobytes()


def unpack_elements(data: bytes | memoryview, count: int, bits: int) -> RingElements:
    """Return the `count` elements that `pack_elements` packed, [count]; raise `PayloadError` for another length."""
    if len(data) != packed_bytes(count, bits):
        raise PayloadError(f"{count} elements of {bits} bits are {packed_bytes(count, bits)} bytes, got {len(data)}")
    raw = np.frombuffer(data, dtype=np.uint8)
    if bits % 8 == 0:
        return _widened(raw.reshape(count, bits // 8), 8).view("<u8")[:, 0].astype(np.uint64)
    if bits % 4 == 0 and bits >= 32 and count % 2 == 0:
        pairs = _widened(raw.reshape(count // 2, bits // 4), 16).view("<u8")
        elements = np.empty(count, dtype=np.uint64)
        elements[0::2] = pairs[:, 0] & np.uint64(2**bits - 1)
        elements[1::2] = pairs[:, 0] >> np.uint64(bits) | pairs[:, 1] << np.uint64(64 - bits)
        return elements
    each = np.unpackbits(raw, bitorder="little")
    if each[count * bits :].any():
        raise PayloadError("there are bits after the last element")
    wide = np.zeros((count, 64), dtype=np.uint8)
    wide[:, :bits] = each[: count * bits].reshape(count, bits)
    return np.packbits(wide, axis=1, bitorder="little").view("<u8")[:, 0].astype(np.uint64)


def _widened(rows: NDArray[np.uint8], width: int) -> NDArray[np.uint8]:
    wide = np.zeros((len(rows), width), dtype=np.uint8)
    wide[:, : rows.shape[1]] = rows
    return wide


def to_ring(integers: NDArray[np.int64], bits: int) -> RingElements:
    """Return integers modulo 2^bits."""
    return integers.view(np.uint64) & np.uint64(2**bits - 1)


def to_signed(elements: RingElements, bits: int) -> NDArray[np.int64]:
    """Return the integers from -2^(bits - 1) to 2^(bits - 1) - 1 that the elements represent."""
    shift = np.int64(64 - bits)
    return (elements << np.uint64(shift)).view(np.int64) >> shift
