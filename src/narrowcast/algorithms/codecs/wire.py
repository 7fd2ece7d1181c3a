"""Reading bytes that nobody vouches for: every read says how much it takes, and the end has to be the end."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from narrowcast.platform.types import PayloadError

_VARINT_BYTES = 5


class Reader:
    """Hands out bytes from the front; whatever is missing, left over or malformed is a `PayloadError`."""

    def __init__(self, data: bytes) -> None:
        self._rest = memoryview(data)

    def take(self, size: int) -> memoryview:
        """The next `size` bytes."""
        if size > len(self._rest):
            raise PayloadError(f"the payload ends {size - len(self._rest)} bytes early")
        taken, self._rest = self._rest[:size], self._rest[size:]
        return taken

    def peek(self, size: int) -> memoryview:
        """The next bytes, `size` or as many as there are, which stay to be read."""
        return self._rest[:size]

    def floats(self, count: int) -> NDArray[np.float32]:
        """`count` little-endian float32 values, which must be finite."""
        values = np.frombuffer(self.take(4 * count), dtype="<f4").astype(np.float32)
        if not np.isfinite(values).all():
            raise PayloadError("the payload has values that are not finite")
        return values

    def varint(self, highest: int) -> int:
        """An integer of 0 to `highest` in as few bytes as it needs, seven bits each, least significant first."""
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
        """All bytes that are left."""
        return self.take(len(self._rest))

    def finish(self) -> None:
        """Raise where bytes are left."""
        if len(self._rest):
            raise PayloadError(f"the payload goes on for {len(self._rest)} bytes after its end")


def varint(value: int) -> bytes:
    """The bytes that `Reader.varint` reads."""
    parts = bytearray()
    while value >= 0x80:
        parts.append(value & 0x7F | 0x80)
        value >>= 7
    parts.append(value)
    return bytes(parts)
