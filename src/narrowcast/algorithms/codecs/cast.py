"""Values in fewer bits each: IEEE half precision or bfloat16, rounded to nearest, ties to even."""

from __future__ import annotations

from math import prod
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from narrowcast.algorithms.codecs.chain import Codec
from narrowcast.algorithms.codecs.stage import NO_STATE, Shapes, Signal, Tensors, ValueStage
from narrowcast.algorithms.codecs.wire import Reader
from narrowcast.platform.types import Arrays, PayloadError

_LARGEST_HALF = np.float32(65504)
_LARGEST_BFLOAT = np.uint32(0x7F7F0000).view(np.float32)


class Cast(ValueStage):
    """Send all values as `dtype`; values beyond its range become its largest finite number."""

    gives: ClassVar[Signal] = "bytes"

    kind: Literal["cast"] = "cast"
    dtype: Literal["float32", "float16", "bfloat16"] = Field("float16", description="type of the values sent")

    def write(self, tensors: Tensors, key: int, state: Arrays, rest: Codec) -> tuple[bytes, Arrays]:
        """Return the values in order, little-endian."""
        del key, state, rest
        return b"".join(self._narrow(values.ravel()).tobytes() for values in tensors.values()), NO_STATE

    def read(self, reader: Reader, shapes: Shapes, key: int, rest: Codec) -> Tensors:
        """Return the values as float32."""
        del key, rest
        return {name: self._widen(reader, prod(shape)).reshape(shape) for name, shape in shapes.items()}

    def max_bytes(self, shapes: Shapes, rest: Codec) -> int:
        """Return 2 or 4 bytes per value."""
        del rest
        return (4 if self.dtype == "float32" else 2) * sum(map(prod, shapes.values()))

    def _narrow(self, values: NDArray[Any]) -> NDArray[np.generic]:
        if self.dtype == "float32":
            return values.astype("<f4")
        if self.dtype == "float16":
            return np.clip(values, -_LARGEST_HALF, _LARGEST_HALF).astype("<f2")
        words = np.clip(values, -_LARGEST_BFLOAT, _LARGEST_BFLOAT).astype(np.float32, copy=False).view(np.uint32)
        return ((words + np.uint32(0x7FFF) + (words >> 16 & np.uint32(1))) >> 16).astype("<u2")

    def _widen(self, reader: Reader, count: int) -> NDArray[np.float32]:
        if self.dtype == "float32":
            return reader.floats(count)
        data = reader.take(2 * count)
        if self.dtype == "float16":
            values = np.frombuffer(data, dtype="<f2").astype(np.float32)
        else:
            values = (np.frombuffer(data, dtype="<u2").astype(np.uint32) << 16).view(np.float32)
        if not np.isfinite(values).all():
            raise PayloadError("the payload has values that are not finite")
        return values
