"""The schemes of an experiment's `secure` section: their base classes, and those that need no encryption.

Updates become fixed-point integers, so that their sum is exact in any order and under any protection. On the wire and
in masked sums an integer is an element of the ring that is just wide enough for the round's sum.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from importlib import import_module
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, field_validator, model_validator

from narrowcast.algorithms.client.sums import MaskGroup, SumBlock, SumLayout
from narrowcast.platform.config.catalog import SECURES
from narrowcast.platform.config.fields import BITS
from narrowcast.platform.config.files import Section
from narrowcast.platform.config.run_fields import LastingPath
from narrowcast.platform.errors import UserError
from narrowcast.platform.seeds import PrivateSeed, uniform_unit
from narrowcast.platform.types import Arrays, BoolArray, PayloadError

Rounding = Annotated[Literal["stochastic", "nearest"], Field(description="rounding of values to integers")]
Integers = NDArray[np.int64]


@dataclass(frozen=True)
class FixedPoint:
    """The integers of one client, and the width of sums over `max_clients` clients of total weight `max_weight`.

    A value x becomes round(x / step) with step = clip / 2^(bits - 1), rounded stochastically without bias or to the
    nearest; values beyond the clip are cut. All clients of a run share the step, since only integers of one unit add
    up. Values and counts have widths of their own.
    """

    clip: float
    bits: int
    rounding: Rounding
    max_weight: int
    max_clients: int

    @property
    def value_bits(self) -> int:
        """The width of a signed sum of weighted values."""
        return self.bits + self.max_weight.bit_length()

    @property
    def count_bits(self) -> int:
        """The width of an unsigned sum of counts."""
        return self.max_weight.bit_length()

    @property
    def step(self) -> float:
        """The value that the integer 1 represents."""
        return self.clip / 2 ** (self.bits - 1)

    def of_client(
        self, partial: Arrays, layout: SumLayout, sends: BoolArray, seed: PrivateSeed, key: tuple[int, int]
    ) -> list[Integers | None]:
        """Return the integers of each group that a client sends, [n_values + n_counts]; None for the other groups.

        `partial` is the client's own partial sum, `sends` [groups] marks what it sends, and `key` is (round, client).
        With `layout.one_weight` the change without its weight is rounded and then multiplied by the weight, so that
        the bits are spent on the change.
        """
        round_index, client = key
        random_key = seed.stream_keys("secure rounding", round_index, np.array([client]))
        weight = _weight(partial, layout)
        start, integers = 0, list[Integers | None]()
        for group, sent in zip(layout.groups, sends, strict=True):
            counters = np.arange(start, start + group.n_values)
            start += group.n_values
            if not sent:
                integers.append(None)
                continue
            scaled = _concatenated(group.values, partial) / (weight * self.step)
            random = uniform_unit(random_key, counters) if self.rounding == "stochastic" else 0.5
            most = 2 ** (self.bits - 1)
            rounded = np.clip(np.floor(scaled + random), -most, most).astype(np.int64) * weight
            integers.append(np.concatenate([rounded, _concatenated(group.counts, partial).astype(np.int64)]))
        return integers

    def values_cut(self, partial: Arrays, layout: SumLayout, sends: BoolArray) -> tuple[int, int]:
        """Return how many of the values that a client sends are cut at the clip, and how many it sends."""
        most, groups = self.clip * _weight(partial, layout), zip(layout.groups, sends, strict=True)
        values = [_concatenated(group.values, partial) for group, sent in groups if sent]
        return sum(int((np.abs(block) > most).sum()) for block in values), sum(map(len, values))

    def total(self, sums: list[Integers | None], layout: SumLayout) -> dict[str, NDArray[Any]]:
        """Return the partial sum that the groups' integer sums represent; zeros for a group without one."""
        arrays = layout.zeros()
        for group, integers in zip(layout.groups, sums, strict=True):
            if integers is not None:
                _fill(group, integers, self.step, arrays)
        return arrays


def _weight(partial: Arrays, layout: SumLayout) -> int:
    """Return the weight that a client's values carry as a factor."""
    if not layout.one_weight:
        return 1
    return max(int(part.of(partial).max()) for group in layout.groups for part in group.counts)


def _concatenated(parts: tuple[SumBlock, ...], arrays: Arrays) -> NDArray[np.float64]:
    return np.concatenate([np.empty(0), *(part.of(arrays).astype(np.float64) for part in parts)])


def _fill(group: MaskGroup, integers: Integers, step: float, arrays: dict[str, NDArray[Any]]) -> None:
    start = 0
    for parts, scale in ((group.values, step), (group.counts, 1.0)):
        for part in parts:
            part.of(arrays)[...] = integers[start : start + part.size] * scale
            start += part.size


RingElements = NDArray[np.uint64]
"""Unsigned integers modulo 2^bits, or residues of ciphertexts. They are added as 64-bit words, which wrap, and are
reduced to their width when they are packed or opened."""


def packed_bytes(count: int, bits: int) -> int:
    """Return the bytes that `count` elements of `bits` bits take."""
    return (count * bits + 7) // 8


def pack_elements(elements: RingElements, bits: int) -> bytes:
    """Pack the lowest `bits` bits of each element, one after the other, least significant first."""
    if bits % 8 == 0:
        return elements.astype("<u8").view(np.uint8).reshape(-1, 8)[:, : bits // 8].tobytes()
    if bits % 4 == 0 and bits >= 32 and len(elements) % 2 == 0:
        # Two elements are whole bytes: the first and the low bits of the second in 64 bits, then the rest of it.
        first, second = elements[0::2], elements[1::2]
        pairs = np.empty((len(first), 2), dtype="<u8")
        pairs[:, 0], pairs[:, 1] = first | second << np.uint64(bits), second >> np.uint64(64 - bits)
        return pairs.view(np.uint8).reshape(-1, 16)[:, : bits // 4].tobytes()
    expanded = np.unpackbits(
        elements.astype("<u8").view(np.uint8).reshape(-1, 8), axis=1, count=bits, bitorder="little"
    )
    return np.packbits(expanded.ravel(), bitorder="little").tobytes()


def unpack_elements(data: bytes | memoryview, count: int, bits: int) -> RingElements:
    """Return the `count` elements that `pack_elements` packed, [count]; raise `PayloadError` for another length."""
    if len(data) != packed_bytes(count, bits):
        raise PayloadError(f"{count} elements of {bits} bits are {packed_bytes(count, bits)} bytes, got {len(data)}")
    raw = np.frombuffer(data, dtype=np.uint8)
    if bits % 8 == 0:
        return _widened(raw.reshape(count, bits // 8), 8).view("<u8")[:, 0].astype(np.uint64)
    if bits % 4 == 0 and bits >= 32 and count % 2 == 0:
        pairs = _widened(raw.reshape(count // 2, bits // 4), 16).view("<u8")
        elements = np.empty(count, dtype=np.uint64)
        elements[0::2] = pairs[:, 0] & np.uint64(2**bits - 1)
        elements[1::2] = pairs[:, 0] >> np.uint64(bits) | pairs[:, 1] << np.uint64(64 - bits)
        return elements
    expanded = np.unpackbits(raw, bitorder="little")
    if expanded[count * bits :].any():
        raise PayloadError("there are bits after the last element")
    wide = np.zeros((count, 64), dtype=np.uint8)
    wide[:, :bits] = expanded[: count * bits].reshape(count, bits)
    return np.packbits(wide, axis=1, bitorder="little").view("<u8")[:, 0].astype(np.uint64)


def _widened(rows: NDArray[np.uint8], width: int) -> NDArray[np.uint8]:
    wide = np.zeros((len(rows), width), dtype=np.uint8)
    wide[:, : rows.shape[1]] = rows
    return wide


def to_ring(integers: NDArray[np.int64], bits: int) -> RingElements:
    """Return integers modulo 2^bits."""
    return integers.view(np.uint64) & np.uint64(2**bits - 1)


def to_signed(elements: RingElements, bits: int) -> NDArray[np.int64]:
    """Return the integers from -2^(bits - 1) to 2^(bits - 1) - 1 that the elements represent."""
    shift = np.int64(64 - bits)
    return (elements << np.uint64(shift)).view(np.int64) >> shift


def ring_bytes(group: MaskGroup, numbers: FixedPoint) -> int:
    """Return the length of a packed group."""
    return packed_bytes(group.n_values, numbers.value_bits) + packed_bytes(group.n_counts, numbers.count_bits)


def pack_ring(group: MaskGroup, elements: RingElements, numbers: FixedPoint) -> bytes:
    """Pack elements [n_values + n_counts], values and counts, each modulo 2 to the power of its width."""
    values, counts = (part.view(np.int64) for part in np.split(elements, [group.n_values]))
    return pack_elements(to_ring(values, numbers.value_bits), numbers.value_bits) + pack_elements(
        to_ring(counts, numbers.count_bits), numbers.count_bits
    )


def unpack_ring(group: MaskGroup, data: bytes | memoryview, numbers: FixedPoint) -> RingElements:
    """Return the elements that `pack_ring` packed; raise `PayloadError` for another length."""
    end = packed_bytes(group.n_values, numbers.value_bits)
    values = unpack_elements(data[:end], group.n_values, numbers.value_bits)
    return np.concatenate([values, unpack_elements(data[end:], group.n_counts, numbers.count_bits)])


def integers_of(group: MaskGroup, elements: RingElements, numbers: FixedPoint) -> Integers:
    """Return the integers of a sum in the clear: signed values, then counts."""
    values, counts = np.split(elements, [group.n_values])
    cut = to_ring(counts.view(np.int64), numbers.count_bits).view(np.int64)
    return np.concatenate([to_signed(values, numbers.value_bits), cut])


class NoProtection(Section):
    """The server sees every update."""

    kind: Literal["none"] = "none"


@dataclass(frozen=True)
class PublicKey:
    """The run's public encryption key and the modulus of its ciphertexts; empty for schemes without one."""

    key: bytes = b""
    modulus: int = 0

    @classmethod
    def of(cls, arrays: Arrays) -> PublicKey:
        """Read the arrays `key` and `modulus` of the key store's answer to `public`."""
        return cls(arrays["key"].tobytes(), int(arrays["modulus"][0]))


class Protection(Section):
    """Base of the schemes: values cut at `clip` and rounded to integers of `bits` bits, which add up exactly.

    With equal fields all schemes give the same model to the bit. The sum is not opened if fewer than `threshold` of the
    cohort arrive, and a component that fewer than `smallest_group` clients other than `colluders` sent is left out.
    """

    needs: ClassVar[tuple[str, ...]] = ("cryptography",)

    kind: str
    clip: float = Field(4.0, gt=0, allow_inf_nan=False, description="values of an update are clipped to this magnitude")
    bits: int = Field(
        16, ge=2, le=32, description="width of the integer of a value, sign included", json_schema_extra=BITS
    )
    rounding: Rounding = "stochastic"
    threshold: float = Field(0.6, gt=0, le=1, description="share of the cohort whose uploads must arrive")
    smallest_group: int = Field(3, ge=1, description="fewest honest clients whose sum is opened")
    colluders: int = Field(0, ge=0, description="number of clients of a round assumed to collude with the server")
    smallest_count: int = Field(
        1, ge=1, description="fewest clients of an item whose row is opened; for ckks and plain"
    )
    keys: LastingPath = Field(None, description="folder of `narrowcast keys make`; null: made for the run")

    def fixed_point(self, max_weight: int, max_clients: int) -> FixedPoint:
        """Return the integers of at most `max_clients` clients, whose weights add up to at most `max_weight`."""
        return FixedPoint(self.clip, self.bits, self.rounding, max_weight, max_clients)

    @property
    def least_senders(self) -> int:
        """The fewest clients whose sum is opened."""
        return self.smallest_group + self.colluders

    def survivor_threshold(self, cohort: int) -> int:
        """Return how many clients of a cohort must arrive by `threshold`."""
        return max(1, int(np.ceil(self.threshold * cohort - 1e-9)))

    def survivors_needed(self, cohort: int) -> int:
        """Return how many clients of a cohort must arrive for a sum to be opened; may be more than the cohort."""
        return max(self.survivor_threshold(cohort), self.least_senders)

    def check(self, numbers: FixedPoint) -> None:
        """Raise a `UserError` if sums could overflow."""
        if numbers.value_bits > 63 or numbers.count_bits > 63:
            raise UserError(
                f"secure.bits = {self.bits}: sums need {numbers.value_bits} bits, and 63 are available; use at most "
                f"{63 - numbers.count_bits}"
            )

    def group_bytes(self, group: MaskGroup, numbers: FixedPoint) -> int:
        """Return the length of an encoded group."""
        return ring_bytes(group, numbers)

    def encode(self, group: MaskGroup, integers: Integers, numbers: FixedPoint, public: PublicKey) -> bytes:
        """Return the bytes of a client's group: its integers as ring elements, to which a mask may have been added."""
        del public
        return pack_ring(group, integers.view(np.uint64), numbers)

    def decode(
        self, group: MaskGroup, data: bytes | memoryview, numbers: FixedPoint, public: PublicKey
    ) -> RingElements:
        """Return what `encode` wrote; raise `PayloadError` for bytes that it cannot have written."""
        del public
        return unpack_ring(group, data, numbers)

    def add(self, total: RingElements, elements: RingElements, public: PublicKey) -> RingElements:
        """Return the sum of two decoded groups."""
        del public
        return total + elements

    def open_sum(self, group: MaskGroup, elements: RingElements, numbers: FixedPoint) -> Integers:
        """Return the integers of a sum in the clear, [n_values + n_counts]."""
        return integers_of(group, elements, numbers)


class Encryption(Protection, ABC):
    """Base of the schemes of ciphertexts under one key that the clients share; the server adds what it cannot read.

    One client opens a sum: it is sent the ciphertexts, and sends back the integers.
    """

    @abstractmethod
    def key_parameters(self) -> dict[str, str]:
        """Return the parameters that keys depend on."""

    @abstractmethod
    def new_secret(self) -> bytes:
        """Return a new secret key; raise `UserError` for parameters that the library refuses."""

    @abstractmethod
    def read_secret(self, data: bytes) -> Any:
        """Return the key holder's object for a secret key."""

    @abstractmethod
    def public_key(self, secret: Any) -> PublicKey:
        """Return the public key of a secret."""

    @abstractmethod
    def public_key_bytes(self) -> int:
        """Return the length of the public key on the wire."""

    @abstractmethod
    def decrypt_sum(self, secret: Any, group: MaskGroup, elements: RingElements, numbers: FixedPoint) -> Integers:
        """Return the integers of a group's sum, [n_values + n_counts]; for the key holder alone."""


class Plain(Protection):
    """The same integers without protection: the reference that the other schemes are compared with."""

    kind: Literal["plain"] = "plain"


class Masked(Protection):
    """Pairwise masks over a ring as wide as the sum needs; `threshold` of the cohort can unmask it.

    `adversary: active` adds the consistency check of the survivors' lists, and needs a `threshold` above 2/3. See
    `masking_client` for the protocol, its source, and the server's view.
    """

    kind: Literal["masked"] = "masked"
    adversary: Literal["honest_but_curious", "active"] = Field(
        "honest_but_curious", description="whether the server is assumed to follow the protocol"
    )
    threshold: float = Field(
        0.6, gt=0.5, le=1, description="share of the cohort whose uploads must arrive; at least 0.7 if active"
    )
    dropout: float = Field(0.0, ge=0, lt=1, description="probability that a client stops answering, at each step")

    @model_validator(mode="before")
    @classmethod
    def _threshold_of_the_active_model(cls, values: Any) -> Any:
        if isinstance(values, dict) and values.get("adversary") == "active":
            return {"threshold": 0.7, **values}
        return values

    @model_validator(mode="after")
    def _two_thirds(self) -> Masked:
        if self.adversary == "active" and self.threshold <= 2 / 3:
            raise ValueError(
                f"adversary: active needs a threshold above 2/3 of the cohort, got {self.threshold}; use 0.7 or more"
            )
        return self

    @field_validator("smallest_count")
    @classmethod
    def _masks_open_all_rows(cls, value: int) -> int:
        if value > 1:
            raise ValueError("masks open all rows of a sum or none; use kind: ckks, or larger cohorts and leave it out")
        return value

    def survivors_needed(self, cohort: int) -> int:
        """Return how many must arrive; in the active model any two such sets share more clients than collude."""
        needed = super().survivors_needed(cohort)
        return max(needed, (cohort + self.colluders) // 2 + 1) if self.adversary == "active" else needed


AnyScheme = Annotated[NoProtection | Protection, SECURES]

_PAILLIER = ("phe", "gmpy2")  # an extra of their own, since phe is under the GPL


def library(name: str, wanted_by: str) -> Any:
    """Import a module of the extras `he` or `paillier`; raise a `UserError` that names the extra if it is missing."""
    try:
        return import_module(name)
    except ImportError as error:
        package = name.split(".", maxsplit=1)[0]
        extra = "paillier" if package in _PAILLIER else "he"
        raise UserError(f"{wanted_by} needs {package}; pip install 'narrowcast[{extra}]'") from error
