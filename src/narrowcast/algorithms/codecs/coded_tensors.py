"""Whole tensors on the wire through a codec: the header and the codec's bytes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

from narrowcast.algorithms.codecs.budget import ClientEncoder
from narrowcast.algorithms.codecs.message_header import MessageHeader, MessageKind
from narrowcast.algorithms.codecs.wire import Reader
from narrowcast.platform.types import Arrays


@dataclass(frozen=True)
class TensorUpdate:
    """The tensors that one client changed, its examples, and its rank, 0 if it has none."""

    tensors: Mapping[str, NDArray[np.float32]]
    examples: int
    rank: int = 0


@dataclass(frozen=True)
class CodedTensors:
    """One upload: examples, rank (0 for none) and the codec's bytes; the model gives names and shapes."""

    examples: int
    rank: int
    coded: bytes

    def wire_bits(self) -> int:
        """Return eight times the length of `to_bytes()`."""
        return 8 * len(self.to_bytes())

    def to_bytes(self) -> bytes:
        """Return the header, then the codec's bytes."""
        return MessageHeader(MessageKind.CODED_TENSORS, 0, self.rank, self.examples).to_bytes() + self.coded

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        """Split off the header; raise `PayloadError` if it is malformed. `Codec.decode` reads the rest."""
        reader = Reader(data)
        header = MessageHeader.read(reader, MessageKind.CODED_TENSORS)
        return cls(header.examples, header.columns, bytes(reader.rest()))


def encode_tensors(encoder: ClientEncoder, update: TensorUpdate) -> tuple[CodedTensors, Arrays] | None:
    """Pack tensors within the client's budget; None if not even the coarsest levels fit.

    Also return the client's codec state once the tensors are sent. Raise `UnsendableUpdateError` for values that are
    not finite.
    """
    head = CodedTensors(update.examples, update.rank, b"").to_bytes()
    fitting = encoder.encode(update.tensors, head)
    return None if fitting is None else (CodedTensors.from_bytes(fitting[0]), fitting[1])
