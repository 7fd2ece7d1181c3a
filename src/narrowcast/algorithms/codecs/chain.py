"""Codecs: a chain of stages, each of which passes its output to the rest of the chain.

    values --[transform]--> values --[quantiser]--> symbols --[coder]--> bytes

A transform (rotation, Top-K, factors, error feedback) maps values to values; a quantiser gives symbols; a coder gives
bytes. If the chain ends early, values are sent as they are and symbols at a fixed width (`wire.pack`).

Only data that the receiver does not know is sent. It knows the codec, the tensors' names and shapes, and the key: a
64-bit word of `seeds.stream_keys`, from the run's seed, the round and the client, so that rotations, dithers and bases
cost nothing. It does not know the levels, which a client may choose, so they are sent.
"""

from __future__ import annotations

import zlib
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import pairwise
from math import ceil, prod
from typing import Annotated, Any, ClassVar, Literal, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import AfterValidator, BeforeValidator, Field

from narrowcast.algorithms.codecs.wire import FLOAT32, Reader, pack, packed_bytes, unpack
from narrowcast.platform.config.catalog import CODECS
from narrowcast.platform.config.files import Section
from narrowcast.platform.errors import UserError
from narrowcast.platform.seeds import Words, uniform_bits
from narrowcast.platform.types import Arrays, Dtype, IntArray, Payload, PayloadError

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


_KEY_MASK = 2**64 - 1


@dataclass(frozen=True)
class EncodedUpdate(Payload):
    """Bytes of a codec. A message has a header before them, counted in addition, and row lists if it has rows."""

    data: bytes

    def wire_bits(self) -> int:
        """Return eight times the length of `to_bytes()`."""
        return 8 * len(self.data)

    def to_bytes(self) -> bytes:
        """Return the bytes that a radio would send."""
        return self.data

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        """Return an update of these bytes unchecked; `Codec.decode` raises if they are malformed."""
        return cls(bytes(data))


@dataclass(frozen=True)
class Codec:
    """A chain of stages, or its remainder; a codec without stages sends the values themselves.

    `dtype`, float32 or float64, is that of the tensors on either side; a message's header has it.
    """

    stages: tuple[Stage, ...] = ()
    dtype: Dtype = FLOAT32

    def __post_init__(self) -> None:
        check_order(self.stages)

    def encode(self, tensors: Mapping[str, NDArray[Any]], key: int, state: Arrays = NO_STATE) -> EncodedUpdate:
        """Return the encoded update; for codecs with state use `encode_with_state`."""
        return self.encode_with_state(tensors, key, state)[0]

    def encode_with_state(
        self, tensors: Mapping[str, NDArray[Any]], key: int, state: Arrays = NO_STATE
    ) -> tuple[EncodedUpdate, Arrays]:
        """Return the encoded update and the client's state after it.

        Raise `UnsendableUpdateError` without changing the state.

        `key` is known to the receiver; `state` comes from `init_state` or from the client's last encoding.
        """
        ordered = {name: np.asarray(tensors[name], dtype=self.dtype, order="C") for name in sorted(tensors)}
        check_values(ordered)
        data, after = self.write(ordered, key & _KEY_MASK, state)
        return EncodedUpdate(data), after

    def decode(self, data: bytes, shapes: Mapping[str, Sequence[int]], key: int) -> Tensors:
        """Return the decoded tensors, finite and of `dtype`; raise `PayloadError` if the bytes are malformed."""
        reader = Reader(data)
        with np.errstate(over="ignore", invalid="ignore"):
            tensors = self.read(reader, {name: tuple(shapes[name]) for name in sorted(shapes)}, key & _KEY_MASK)
        reader.finish()
        if not all(np.isfinite(values).all() for values in tensors.values()):
            raise PayloadError("the payload decodes to values that are not finite")
        # Stages may compute in float32.
        return {name: values.astype(self.dtype, copy=False) for name, values in tensors.items()}

    def init_state(self, shapes: Mapping[str, Sequence[int]]) -> Arrays:
        """Return a client's state before its first round, all zero: error memories, warm factors."""
        if not self.stages:
            return NO_STATE
        stage = self.stages[0]
        known = {name: tuple(shapes[name]) for name in sorted(shapes)}
        return stage.init_state(known, self._rest) if isinstance(stage, ValueStage) else NO_STATE

    def max_bits(self, shapes: Mapping[str, Sequence[int]]) -> int:
        """Return the largest size of an update of these shapes.

        Known before training, exact without `entropy`, `top_k` or `threshold`.
        """
        return 8 * self.max_bytes({name: tuple(shapes[name]) for name in sorted(shapes)})

    @property
    def levels(self) -> int | None:
        """Levels of the quantiser; None for a codec without one."""
        return next((int(stage.levels) for stage in self.stages if isinstance(stage, Quantiser)), None)

    @property
    def of_whole(self) -> bool:
        """Return whether a stage needs all rows of a matrix in one tensor."""
        return any(stage.of_whole for stage in self.stages)

    @property
    def levels_allowed(self) -> range | None:
        """Levels that the quantiser allows; None for a codec without one."""
        return next((stage.levels_allowed for stage in self.stages if isinstance(stage, Quantiser)), None)

    def of(self, dtype: Dtype) -> Codec:
        """Return the codec of tensors of this type."""
        return self if dtype == self.dtype else replace(self, dtype=dtype)

    def with_levels(self, levels: int) -> Codec:
        """Return the codec with other levels; the receiver reads the levels from the payload."""
        return _with_levels(self, levels)

    # What stages call on the rest of the chain.

    def write(self, tensors: Tensors, key: int, state: Arrays) -> tuple[bytes, Arrays]:
        """Return the bytes of these tensors and the state after them."""
        if not self.stages:
            little = self.dtype.newbyteorder("<")
            return b"".join(values.astype(little).tobytes() for values in tensors.values()), NO_STATE
        return self._values_stage().write(tensors, key, state, self._rest)

    def read(self, reader: Reader, shapes: Shapes, key: int) -> Tensors:
        """Return the tensors that `write` wrote."""
        if not self.stages:
            return {name: reader.floats(prod(shape), self.dtype).reshape(shape) for name, shape in shapes.items()}
        return self._values_stage().read(reader, shapes, key, self._rest)

    def max_bytes(self, shapes: Shapes) -> int:
        """Return the most bytes that `write` returns."""
        if not self.stages:
            return self.dtype.itemsize * sum(map(prod, shapes.values()))
        return self._values_stage().max_bytes(shapes, self._rest)

    def write_symbols(self, streams: Sequence[IntArray], alphabet: int) -> bytes:
        """Return the bytes of symbols, one stream per tensor."""
        if not self.stages:
            return b"".join(pack(symbols, alphabet) for symbols in streams)
        return self._symbol_stage().write_symbols(streams, alphabet)

    def read_symbols(self, reader: Reader, counts: Sequence[int], alphabet: int) -> list[IntArray]:
        """Return the symbols that `write_symbols` wrote."""
        if not self.stages:
            return [unpack(reader, count, alphabet) for count in counts]
        return self._symbol_stage().read_symbols(reader, counts, alphabet)

    def max_symbol_bytes(self, counts: Sequence[int], alphabet: int) -> int:
        """Return the most bytes that `write_symbols` returns."""
        if not self.stages:
            return sum(packed_bytes(count, alphabet) for count in counts)
        return self._symbol_stage().max_symbol_bytes(counts, alphabet)

    @cached_property
    def _rest(self) -> Codec:
        rest = object.__new__(Codec)  # a part of a chain may start with what a whole one may not
        object.__setattr__(rest, "stages", self.stages[1:])
        object.__setattr__(rest, "dtype", self.dtype)
        return rest

    def _values_stage(self) -> ValueStage:
        stage = self.stages[0]
        assert isinstance(stage, ValueStage)
        return stage

    def _symbol_stage(self) -> SymbolStage:
        stage = self.stages[0]
        assert isinstance(stage, SymbolStage)
        return stage


def check_order(stages: Sequence[Stage]) -> None:
    """Raise `ValueError` if a stage does not take the output of the one before it."""
    if stages and stages[0].takes != "values":
        raise ValueError(f'"{stages[0].kind}" takes {stages[0].takes}; put a quantiser before it')
    for before, after in pairwise(stages):
        if before.gives != after.takes:
            raise ValueError(f'"{before.kind}" gives {before.gives}, but "{after.kind}" after it takes {after.takes}')
    for index, stage in enumerate(stages):
        if stage.kind == "error_feedback" and index:
            raise ValueError('"error_feedback" must come first, where its memory has the rows of the update')
    kinds = [stage.kind for stage in stages]
    if len(set(kinds)) < len(kinds):
        raise ValueError(f"a codec may have each kind once, got {', '.join(kinds)}")


@lru_cache(maxsize=4096)
def _with_levels(codec: Codec, levels: int) -> Codec:
    if not any("levels" in type(stage).model_fields for stage in codec.stages):
        raise ValueError(f"no stage of this codec has levels: {', '.join(stage.kind for stage in codec.stages)}")
    return Codec(
        tuple(
            type(stage).model_validate({**stage.model_dump(), "levels": levels})
            if "levels" in type(stage).model_fields
            else stage
            for stage in codec.stages
        ),
        codec.dtype,
    )


def _listed(value: Any) -> Any:
    """Accept a single stage as a chain of one."""
    return [value] if isinstance(value, str | Mapping) else value


def _in_order(stages: tuple[Stage, ...]) -> tuple[Stage, ...]:
    check_order(stages)
    return stages


Stages = Annotated[
    tuple[Annotated[Stage, CODECS], ...],
    BeforeValidator(_listed, json_schema_input_type=Annotated[Stage, CODECS] | tuple[Annotated[Stage, CODECS], ...]),
    AfterValidator(_in_order),
    Field(description="chain of codec stages for uploads; an empty one sends the values themselves"),
]
"""The type of a field that takes a chain of the registry's stages, or a single one."""


def refuse_stateful(codec: Sequence[Stage], reason: str, field: str = "codec") -> None:
    """Raise `UserError` with a reason and advice for a codec with a stage that keeps state between rounds."""
    if stateful := [stage.kind for stage in codec if stage.remembers]:
        raise UserError(f"algorithm.{field} has {stateful[0]}, which keeps state between rounds, but {reason}")


def n_values(shapes: Shapes) -> int:
    """Return the number of values of tensors of these shapes."""
    return sum(map(prod, shapes.values()))


def share_of(fraction: float, count: int) -> int:
    """Return ceil(fraction count), at most `count`; 7 for 0.07 of 100, of which the product in float64 is above 7."""
    return min(count, max(ceil(fraction * count - 1e-9), int(count > 0)))


def flatten(tensors: Tensors) -> NDArray[Any]:
    """Return the values of all tensors [n], in the order of the tensors."""
    return np.concatenate([values.ravel() for values in tensors.values()] or [np.empty(0, np.float32)])


def unflatten(values: NDArray[Any], shapes: Shapes) -> Tensors:
    """Return tensors of these shapes from the values [n, or more]."""
    parts, start = Tensors(), 0
    for name, shape in shapes.items():
        parts[name] = values[start : start + prod(shape)].reshape(shape)
        start += prod(shape)
    return parts
