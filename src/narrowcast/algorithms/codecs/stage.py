"""Stages of a codec: their base classes and the contracts with the stages around them."""

from __future__ import annotations

import zlib
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from narrowcast.algorithms.codecs.wire import Reader
from narrowcast.platform.section import Section
from narrowcast.platform.seeds import Words, uniform_bits
from narrowcast.platform.types import Arrays, IntArray

if TYPE_CHECKING:
    from narrowcast.algorithms.codecs.chain import Codec

Tensors = dict[str, NDArray[Any]]
Shapes = Mapping[str, tuple[int, ...]]
Signal = Literal["values", "symbols", "bytes"]
"""The data passed between two stages."""

NO_STATE: Arrays = {}


LARGEST_VALUE = 2.0**96
"""Largest magnitude of a value: far above any update, and low enough for all norms and scales to fit float32."""


class UnsendableUpdateError(ValueError):
    """An update that cannot be encoded: it has values that are NaN, infinite, or beyond `LARGEST_VALUE`."""


class Stage(Section, ABC):
    """A stage of the chain; its fields are its hyper-parameters."""

    takes: ClassVar[Signal] = "values"
    gives: ClassVar[Signal] = "values"
    of_whole: ClassVar[bool] = False
    """True if the stage needs all rows of a matrix in one tensor, as for a memory or factors."""
    kind: str

    @property
    def remembers(self) -> bool:
        """Return whether clients keep state from round to round."""
        return False


class ValueStage(Stage):
    """A stage that takes values; `write` and `read` are inverses and call `rest` for the remaining chain."""

    @abstractmethod
    def write(self, tensors: Tensors, key: int, state: Arrays, rest: Codec) -> tuple[bytes, Arrays]:
        """Return the bytes of these tensors, and the client's state after sending them."""

    @abstractmethod
    def read(self, reader: Reader, shapes: Shapes, key: int, rest: Codec) -> Tensors:
        """Return the decoded tensors; raise `PayloadError` if the bytes are malformed."""

    @abstractmethod
    def max_bytes(self, shapes: Shapes, rest: Codec) -> int:
        """Return the largest size of tensors of these shapes; exact if no stage's size depends on the values."""

    def init_state(self, shapes: Shapes, rest: Codec) -> Arrays:
        """Return a client's state before its first round."""
        del shapes, rest
        return NO_STATE


class Transform(ValueStage):
    """A stage that gives other values, whose shapes both sides know."""

    @abstractmethod
    def inner_shapes(self, shapes: Shapes) -> Shapes:
        """Return the shapes of the tensors passed to `rest`."""

    def side_bytes(self, shapes: Shapes) -> int:
        """Return the most bytes that this stage adds."""
        del shapes
        return 0

    def max_bytes(self, shapes: Shapes, rest: Codec) -> int:
        """Return the most bytes of this stage and the rest."""
        return self.side_bytes(shapes) + rest.max_bytes(self.inner_shapes(shapes))

    def init_state(self, shapes: Shapes, rest: Codec) -> Arrays:
        """Return the state of the rest of the chain."""
        return rest.init_state(self.inner_shapes(shapes))


class Quantiser(ValueStage):
    """A stage that gives symbols; its number of levels may differ between clients and is sent."""

    gives: ClassVar[Signal] = "symbols"
    levels_allowed: ClassVar[range]

    levels: int


class SymbolStage(Stage):
    """A stage that takes symbols of 0..alphabet-1, one array per tensor, and gives bytes."""

    takes: ClassVar[Signal] = "symbols"
    gives: ClassVar[Signal] = "bytes"

    @abstractmethod
    def write_symbols(self, streams: Sequence[IntArray], alphabet: int) -> bytes:
        """Return the bytes of these symbols."""

    @abstractmethod
    def read_symbols(self, reader: Reader, counts: Sequence[int], alphabet: int) -> list[IntArray]:
        """Return the decoded symbols; raise `PayloadError` if the bytes are malformed."""

    @abstractmethod
    def max_symbol_bytes(self, counts: Sequence[int], alphabet: int) -> int:
        """Return the most bytes of streams with these numbers of symbols."""


def check_values(tensors: Tensors) -> None:
    """Raise `UnsendableUpdateError` if a tensor has values that are not finite, or too large."""
    for name, values in tensors.items():
        if not (values.min(initial=0) >= -LARGEST_VALUE and values.max(initial=0) <= LARGEST_VALUE):
            raise UnsendableUpdateError(f"the update of {name} has values that are not finite, or beyond 2^96")


def stream(key: int, purpose: str) -> Words:
    """Return the key of one purpose's stream under a client's key, [1]."""
    return uniform_bits(np.array([key], dtype=np.uint64), np.array([zlib.crc32(purpose.encode())]))
