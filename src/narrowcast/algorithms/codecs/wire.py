"""Reading of untrusted bytes: every read states its length, and nothing may be left at the end."""

from __future__ import annotations

from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from narrowcast.platform.types import Dtype, IntArray, PayloadError

Count = TypeVar("Count", int, IntArray)
_VARINT_BYTES = 5
_FLOAT32 = np.dtype(np.float32)


class Reader:
    """Reads bytes from the front; raises `PayloadError` if bytes are missing, left over or malformed."""

    def __init__(self, data: bytes) -> None:
        self._rest = memoryview(data)

    def take(self, size: int) -> memoryview:
        """Return the next `size` bytes and advance."""
        if size > len(self._rest):
            raise PayloadError(f"the payload ends {size - len(self._rest)} bytes early")
        taken, self._rest = self._rest[:size], self._rest[size:]
        return taken

    def peek(self, size: int) -> memoryview:
        """Return the next bytes, at most `size`, without advancing."""
        return self._rest[:size]

    def floats(self, count: int, dtype: Dtype = _FLOAT32) -> NDArray[Any]:
        """Return `count` little-endian floating-point values; raise `PayloadError` if they are not finite."""
        values = np.frombuffer(self.take(dtype.itemsize * count), dtype=dtype.newbyteorder("<")).astype(dtype)
        if not np.isfinite(values).all():
            raise PayloadError("the payload has values that are not finite")
        return values

    def varint(self, highest: int) -> int:
        """Return an integer of 0 to `highest`, stored in groups of seven bits, least significant first."""
        value = 0
        for place in range(_VARINT_BYTES):
            byte = self.take(1)[0]
            value |= (byte & 0x7F) << 7 * place
            if byte < 0x80:
                if value > highest or (place and not byte):
                    raise PayloadError(f"the payload has a count of {value} where 0 to {highest} is allowed")
                return value
        raise PayloadError("the payload has a count that does not end")

    def rest(self) -> memoryview:
        """Return all remaining bytes."""
        return self.take(len(self._rest))

    def finish(self) -> None:
        """Raise `PayloadError` if bytes are left."""
        if len(self._rest):
            raise PayloadError(f"the payload goes on for {len(self._rest)} bytes after its end")


def varint(value: int) -> bytes:
    """Return the bytes that `Reader.varint` reads."""
    parts = bytearray()
    while value >= 0x80:
        parts.append(value & 0x7F | 0x80)
        value >>= 7
    parts.append(value)
    return bytes(parts)


def varint_bytes(value: Count) -> Count:
    """Return the length of `varint(value)`, for values below 2^35."""
    return 1 + (value >= 2**7) + (value >= 2**14) + (value >= 2**21) + (value >= 2**28)
