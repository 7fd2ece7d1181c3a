"""A message of whole tensors through a codec has a header, perhaps a seed, and the codec's bytes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from narrowcast.algorithms.codecs.budget import ClientEncoder
from narrowcast.algorithms.codecs.message_header import (
    FLOAT32,
    HAS_FLOAT64,
    HAS_SEED,
    MessageHeader,
    MessageKind,
    read_seed,
    tensor_dtype,
    tensor_flags,
    write_seed,
)
from narrowcast.algorithms.codecs.wire import Reader
from narrowcast.platform.types import Arrays, Dtype


@dataclass(frozen=True)
class TensorUpdate:
    """The tensors that one client changed, its examples, and its rank, 0 if it has none."""

    tensors: Arrays
    examples: int
    rank: int = 0


@dataclass(frozen=True)
class CodedTensors:
    """One message: examples, rank (0 for none) and the codec's bytes; the model gives names and shapes.

    `seed` lets the receiver regenerate a basis; None sends none. The codec's bytes decode to values of `dtype`.
    """

    examples: int
    rank: int
    coded: bytes
    seed: int | None = None
    dtype: Dtype = FLOAT32

    def wire_bits(self) -> int:
        """Return eight times the length of `to_bytes()`."""
        return 8 * len(self.to_bytes())

    def to_bytes(self) -> bytes:
        """Return the header, the seed if there is one, then the codec's bytes."""
        flags = tensor_flags(self.dtype, self.seed)
        header = MessageHeader(MessageKind.CODED_TENSORS, flags, self.rank, self.examples)
        return header.to_bytes() + write_seed(self.seed) + self.coded

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        """Split off the header; raise `PayloadError` if it is malformed. `Codec.decode` reads the rest."""
        reader = Reader(data)
        header = MessageHeader.read(reader, MessageKind.CODED_TENSORS, HAS_SEED | HAS_FLOAT64)
        seed = read_seed(reader, header)
        return cls(header.examples, header.columns, bytes(reader.rest()), seed, tensor_dtype(header))


def encode_tensors(encoder: ClientEncoder, update: TensorUpdate) -> tuple[CodedTensors, Arrays] | None:
    """Pack tensors within the client's budget; None if not even the coarsest levels fit.

    Also return the client's codec state once the tensors are sent. Raise `UnsendableUpdateError` for values that are
    not finite.
    """
    head = CodedTensors(update.examples, update.rank, b"", dtype=encoder.codec.dtype).to_bytes()
    fitting = encoder.encode(update.tensors, head)
    return None if fitting is None else (CodedTensors.from_bytes(fitting[0]), fitting[1])
