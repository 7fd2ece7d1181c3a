"""Whole tensors on the wire through a codec: a few counts that the receiver does not know, and the codec's bytes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from narrowcast.algorithms.codecs.budget import ClientEncoder
from narrowcast.algorithms.codecs.wire import Reader, varint
from narrowcast.platform.types import Arrays

MAX_COUNT = 2**31 - 1


@dataclass(frozen=True)
class TensorUpdate:
    """The tensors that one client changed, and the counts sent with them: its examples, and its rank if it has one."""

    tensors: Mapping[str, NDArray[np.float32]]
    counts: tuple[int, ...]


@dataclass(frozen=True)
class CodedTensors:
    """One client's upload: the counts, each 0..`MAX_COUNT`, and the codec's bytes; the model gives names and shapes."""

    counts: tuple[int, ...]
    coded: bytes

    def wire_bits(self) -> int:
        """Return eight times the length of `to_bytes()`."""
        return 8 * len(self.to_bytes())

    def to_bytes(self) -> bytes:
        """Return the counts in one to five bytes each, then the codec's bytes."""
        return b"".join(map(varint, self.counts)) + self.coded

    @classmethod
    def from_bytes(cls, data: bytes, n_counts: int = 1) -> Self:
        """Split off the counts; raise `PayloadError` if they are malformed. `Codec.decode` reads the rest."""
        reader = Reader(data)
        counts = tuple(reader.varint(MAX_COUNT) for _ in range(n_counts))
        return cls(counts, bytes(reader.rest()))


def encode_tensors(
    encoder: ClientEncoder, tensors: Mapping[str, NDArray[Any]], counts: tuple[int, ...]
) -> tuple[CodedTensors, Arrays] | None:
    """Pack tensors within the client's budget; None if not even the coarsest levels fit.

    Also return the client's codec state once the tensors are sent. Raise `UnsendableUpdateError` for values that are
    not finite.
    """
    head = CodedTensors(counts, b"").to_bytes()
    fitting = encoder.encode(tensors, head)
    return None if fitting is None else (CodedTensors(counts, fitting[0][len(head) :]), fitting[1])
