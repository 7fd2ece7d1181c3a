"""Fields and ring arithmetic that all schemes share, and the two schemes that need nothing else."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np
from pydantic import Field, field_validator, model_validator

from narrowcast.algorithms.federated.sum_layout import Group
from narrowcast.algorithms.secure.bit_packing import RingElements
from narrowcast.algorithms.secure.fixed_point import FixedPoint, Integers, Rounding
from narrowcast.algorithms.secure.ring_encoding import integers_of, pack_ring, ring_bytes, unpack_ring
from narrowcast.platform.disk import expand_home
from narrowcast.platform.errors import UserError
from narrowcast.platform.section import Section
from narrowcast.platform.types import Arrays
from narrowcast.platform.units import BITS


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
    keys: str | None = Field(None, description="folder of `narrowcast keys make`; null: made for the run")

    @field_validator("keys")
    @classmethod
    def _absolute(cls, value: str | None) -> str | None:
        return value and str(expand_home(value).absolute())

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

    def group_bytes(self, group: Group, numbers: FixedPoint) -> int:
        """Return the length of an encoded group."""
        return ring_bytes(group, numbers)

    def encode(self, group: Group, integers: Integers, numbers: FixedPoint, public: PublicKey) -> bytes:
        """Return the bytes of a client's group: its integers as ring elements, to which a mask may have been added."""
        del public
        return pack_ring(group, integers.view(np.uint64), numbers)

    def decode(self, group: Group, data: bytes | memoryview, numbers: FixedPoint, public: PublicKey) -> RingElements:
        """Return what `encode` wrote; raise `PayloadError` for bytes that it cannot have written."""
        del public
        return unpack_ring(group, data, numbers)

    def add(self, total: RingElements, elements: RingElements, public: PublicKey) -> RingElements:
        """Return the sum of two decoded groups."""
        del public
        return total + elements

    def open_sum(self, group: Group, elements: RingElements, numbers: FixedPoint) -> Integers:
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
    def decrypt_sum(self, secret: Any, group: Group, elements: RingElements, numbers: FixedPoint) -> Integers:
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
