"""What a stage of a codec is: its contracts with the stages around it, and what all of them share."""

from __future__ import annotations

import zlib
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict

from narrowcast.algorithms.codecs.wire import Reader
from narrowcast.platform.seeds import Words, uniform_bits
from narrowcast.platform.types import Arrays, IntArray

if TYPE_CHECKING:
    from narrowcast.algorithms.codecs.chain import Codec

Tensors = dict[str, NDArray[np.float32]]
Shapes = Mapping[str, tuple[int, ...]]
Signal = Literal["values", "symbols", "bytes"]
"""What stands between two stages."""

NO_STATE: Arrays = {}


LARGEST_VALUE = 2.0**96
"""What a value may be at most: far above any update, and low enough for all norms and scales to fit float32."""


class UnsendableUpdateError(ValueError):
    """An update that is not encoded: it has values that are NaN or infinite, or beyond `LARGEST_VALUE`."""


class Stage(BaseModel, ABC):
    """A link of the chain; its fields are its hyper-parameters."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    takes: ClassVar[Signal] = "values"
    gives: ClassVar[Signal] = "values"
    of_whole: ClassVar[bool] = False
    """Whether all rows of a matrix belong together: a memory is of all of them, and factors cost least for all."""
    remembers: ClassVar[bool] = False
    """Whether clients keep state from round to round."""
    kind: str


class ValueStage(Stage):
    """A stage that takes values: `write` and `read` are each other's other half and call `rest` for what they leave."""

    @abstractmethod
    def write(self, tensors: Tensors, key: int, state: Arrays, rest: Codec) -> tuple[bytes, Arrays]:
        """The bytes of these tensors, and the client's state after sending them."""

    @abstractmethod
    def read(self, reader: Reader, shapes: Shapes, key: int, rest: Codec) -> Tensors:
        """The tensors again, as far as they were sent, or `PayloadError`."""

    @abstractmethod
    def max_bytes(self, shapes: Shapes, rest: Codec) -> int:
        """What tensors of these shapes weigh at most; exactly that where nothing is coded by what it holds."""

    def init_state(self, shapes: Shapes, rest: Codec) -> Arrays:
        """What a client keeps before its first round."""
        del shapes, rest
        return NO_STATE


class Transform(ValueStage):
    """A stage that gives other values, whose shapes both sides know."""

    @abstractmethod
    def inner_shapes(self, shapes: Shapes) -> Shapes:
        """The shapes of the tensors that `rest` gets."""

    def side_bytes(self, shapes: Shapes) -> int:
        """What this stage adds to them at most."""
        del shapes
        return 0

    def max_bytes(self, shapes: Shapes, rest: Codec) -> int:
        """What this stage adds and the rest may weigh."""
        return self.side_bytes(shapes) + rest.max_bytes(self.inner_shapes(shapes))

    def init_state(self, shapes: Shapes, rest: Codec) -> Arrays:
        """What the rest keeps."""
        return rest.init_state(self.inner_shapes(shapes))


class Quantiser(ValueStage):
    """A stage that gives symbols, with levels that may change from client to client and are sent."""

    gives: ClassVar[Signal] = "symbols"
    levels_allowed: ClassVar[range]

    levels: int


class SymbolStage(Stage):
    """A stage that takes symbols of 0..alphabet-1, one array for each tensor before it, and gives bytes."""

    takes: ClassVar[Signal] = "symbols"
    gives: ClassVar[Signal] = "bytes"

    @abstractmethod
    def write_symbols(self, streams: Sequence[IntArray], alphabet: int) -> bytes:
        """The bytes of these symbols."""

    @abstractmethod
    def read_symbols(self, reader: Reader, counts: Sequence[int], alphabet: int) -> list[IntArray]:
        """The symbols again, or `PayloadError`."""

    @abstractmethod
    def max_symbol_bytes(self, counts: Sequence[int], alphabet: int) -> int:
        """What so many symbols weigh at most."""


def check_values(tensors: Tensors) -> None:
    """Raise `UnsendableUpdateError` where a tensor has values that are not finite, or too large."""
    for name, values in tensors.items():
        if not (np.abs(values) <= LARGEST_VALUE).all():
            raise UnsendableUpdateError(f"the update of {name} has values that are not finite, or beyond 2^96")


def stream(key: int, purpose: str) -> Words:
    """The key of one purpose's stream under a client's key, [1]."""
    return uniform_bits(np.array([key], dtype=np.uint64), np.array([zlib.crc32(purpose.encode())]))
