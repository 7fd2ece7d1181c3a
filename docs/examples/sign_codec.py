"""A codec stage: the sign of every value, and one scale a tensor.

Reference: Seide et al., 1-Bit Stochastic Gradient Descent, Interspeech 2014; the scale is that of Karimireddy et al.,
Error Feedback Fixes SignSGD, ICML 2019: the mean magnitude.
"""

from math import prod
from typing import ClassVar, Literal

import numpy as np

from narrowcast.extend import NO_STATE, Arrays, Codec, PayloadError, Reader, Shapes, Signal, Tensors, ValueStage


class Sign(ValueStage):
    """Send a float32 scale and one bit a value; use it after `error_feedback`."""

    gives: ClassVar[Signal] = "bytes"

    kind: Literal["sign"] = "sign"

    def write(self, tensors: Tensors, key: int, state: Arrays, rest: Codec) -> tuple[bytes, Arrays]:
        """Return the scale and the packed signs of each tensor in turn."""
        del key, state, rest
        parts = []
        for values in tensors.values():
            scale = np.float32(np.abs(values).mean(dtype=np.float64)) if values.size else np.float32(0)
            parts += [scale.astype("<f4").tobytes(), np.packbits(values.ravel() < 0).tobytes()]
        return b"".join(parts), NO_STATE

    def read(self, reader: Reader, shapes: Shapes, key: int, rest: Codec) -> Tensors:
        """Return the scale with the sign of each value; raise `PayloadError` for a scale that is none."""
        del key, rest
        tensors = {}
        for name, shape in shapes.items():
            scale, count = reader.floats(1)[0], prod(shape)
            if not (np.isfinite(scale) and scale >= 0):
                raise PayloadError(f"the scale of {name} is {scale}")
            signs = np.unpackbits(np.frombuffer(reader.take(-(-count // 8)), np.uint8), count=count)
            tensors[name] = np.where(signs, -scale, scale).astype(np.float32).reshape(shape)
        return tensors

    def max_bytes(self, shapes: Shapes, rest: Codec) -> int:
        """Return 4 bytes a tensor and a bit a value."""
        del rest
        return sum(4 - (-prod(shape) // 8) for shape in shapes.values())
