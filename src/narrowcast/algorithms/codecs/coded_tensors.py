"""Whole tensors on the wire through a codec: a few counts that the receiver must be told, and the codec's bytes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from narrowcast.algorithms.codecs.budget import encode_within
from narrowcast.algorithms.codecs.chain import Codec
from narrowcast.algorithms.codecs.stage import NO_STATE
from narrowcast.algorithms.codecs.wire import Reader, varint
from narrowcast.platform.types import Arrays

MOST = 2**31 - 1
"""The largest count."""


@dataclass(frozen=True)
class CodedTensors:
    """What one client sends: its examples, its rank where the tensors' shapes depend on one, and the codec's bytes.

    Names and shapes are known from the model.
    """

    counts: tuple[int, ...]
    coded: bytes

    def wire_bits(self) -> int:
        """Eight times the length of `to_bytes()`."""
        return 8 * len(self.to_bytes())

    def to_bytes(self) -> bytes:
        """The counts in one to five bytes each, then the codec's bytes."""
        return b"".join(map(varint, self.counts)) + self.coded

    @classmethod
    def from_bytes(cls, data: bytes, n_counts: int = 1) -> Self:
        """Take the counts off, or raise `PayloadError`; `Codec.decode` is what reads the rest."""
        reader = Reader(data)
        counts = tuple(reader.varint(MOST) for _ in range(n_counts))
        return cls(counts, bytes(reader.rest()))


def encode_tensors(
    codec: Codec,
    tensors: Mapping[str, NDArray[Any]],
    counts: Sequence[int],
    key: int,
    *,
    state: Arrays = NO_STATE,
    budget_bits: float = np.inf,
) -> tuple[CodedTensors, Arrays] | None:
    """Pack tensors within a budget; None where not even the coarsest levels fit.

    Without a budget the levels are the codec's own. Also returns the client's state once they are sent; raises
    `UnsendableUpdateError` for values that are not finite.
    """
    head = CodedTensors(tuple(counts), b"")
    if np.isinf(budget_bits):
        encoded, after = codec.encode_with_state(tensors, key, state)
    elif (within := encode_within(codec, tensors, key, budget_bits - head.wire_bits(), state)) is not None:
        encoded, after = within
    else:
        return None
    return CodedTensors(head.counts, encoded.to_bytes()), after
