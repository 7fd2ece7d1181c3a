"""How the sum of a round's updates is protected: the kinds of an experiment's `secure` section."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, field_validator

from narrowcast.algorithms.federated.sum_layout import Group
from narrowcast.algorithms.secure import ckks
from narrowcast.algorithms.secure.bit_packing import Words, pack_words, packed_bytes, signed, unpack_words
from narrowcast.algorithms.secure.fixed_point import FixedPoint, Integers, Rounding
from narrowcast.algorithms.secure.slots import SlotPlan
from narrowcast.platform.errors import UserError
from narrowcast.platform.kinds import Registry
from narrowcast.platform.types import Arrays

PUBLIC_HEAD = 4
"""Bytes before a public key, which is padded to a length that does not depend on the key."""


class NoProtection(BaseModel):
    """The server sees every update."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: Literal["none"] = "none"


@dataclass(frozen=True)
class Public:
    """What everyone knows of a run's keys: a public key and the modulus of sums; empty where there are none."""

    key: bytes = b""
    modulus: int = 0

    @classmethod
    def of(cls, given: Arrays) -> Public:
        """As the key holder gives it out."""
        return cls(given["key"].tobytes(), int(given["modulus"][0]))


class Protection(BaseModel):
    """What all schemes share: updates as integers of `bits` bits, cut at `clip`, added up exactly.

    With the same fields all schemes give the same model to the bit. A sum of fewer than `threshold` of the cohort, or
    of a component that fewer than `smallest_group` clients sent, is not opened.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    needs: ClassVar[tuple[str, ...]] = ("cryptography",)

    kind: str
    clip: float = Field(4.0, gt=0, allow_inf_nan=False, description="largest magnitude of an update's value")
    bits: int = Field(16, ge=2, le=32, description="of one value, its sign included")
    rounding: Rounding = "stochastic"
    threshold: float = Field(0.6, gt=0, le=1, description="share of the cohort that must arrive")
    smallest_group: int = Field(3, ge=1, description="fewest clients whose sum is opened")
    keys: str | None = Field(None, description="folder of `narrowcast keys make`; none: made anew for the run")

    @field_validator("keys")
    @classmethod
    def _absolute(cls, value: str | None) -> str | None:
        return value and str(Path(value).expanduser().absolute())

    def numbers(self, most_weight: int, clients: int) -> FixedPoint:
        """The integers of at most so many clients, whose weights add up to at most this."""
        return FixedPoint(self.clip, self.bits, self.rounding, most_weight, clients)

    def enough(self, cohort: int) -> int:
        """How many of a cohort must arrive."""
        return max(1, int(np.ceil(self.threshold * cohort - 1e-9)))

    def check(self, numbers: FixedPoint) -> None:
        """Raise a `UserError` where sums could overflow."""
        if numbers.value_bits > 63 or numbers.count_bits > 63:
            raise UserError(
                f"secure.bits = {self.bits}: sums need {numbers.value_bits} bits, and 63 are there; use at most "
                f"{63 - numbers.count_bits}"
            )

    def body_bytes(self, group: Group, numbers: FixedPoint) -> int:
        """What a group weighs on the wire."""
        return packed_bytes(group.n_values, numbers.value_bits) + packed_bytes(group.n_counts, numbers.count_bits)

    def write(
        self, group: Group, integers: Integers, numbers: FixedPoint, public: Public, mask: Words | None = None
    ) -> bytes:
        """The bytes of a client's group: ring words plus the client's mask, where it has one."""
        del public
        words = integers.view(np.uint64) if mask is None else integers.view(np.uint64) + mask
        values, counts = words[: group.n_values], words[group.n_values :]
        return pack_words(_cut(values, numbers.value_bits), numbers.value_bits) + pack_words(
            _cut(counts, numbers.count_bits), numbers.count_bits
        )

    def read(self, group: Group, data: bytes | memoryview, numbers: FixedPoint, public: Public) -> Words:
        """What those bytes hold, or `PayloadError`."""
        del public
        values = packed_bytes(group.n_values, numbers.value_bits)
        return np.concatenate(
            [
                unpack_words(data[:values], group.n_values, numbers.value_bits),
                unpack_words(data[values:], group.n_counts, numbers.count_bits),
            ]
        )

    def add(self, total: Words, words: Words, public: Public) -> Words:
        """The sum of two clients' groups; ring words wrap, and are cut to their width when they are opened."""
        del public
        return total + words

    def opened(self, group: Group, words: Words, numbers: FixedPoint) -> Integers:
        """The integers of a sum in the clear."""
        values, counts = words[: group.n_values], words[group.n_values :]
        return np.concatenate([signed(values, numbers.value_bits), _cut(counts, numbers.count_bits).view(np.int64)])


def _cut(words: Words, bits: int) -> Words:
    """Words modulo 2^bits."""
    return words & np.uint64(2**bits - 1)


class Plain(Protection):
    """The same integers without protection: what the other schemes are measured against."""

    kind: Literal["plain"] = "plain"


class Masked(Protection):
    """Pairwise masks over a ring of as many bits as the sum needs; any `threshold` of the cohort can finish a round.

    The server learns the sum, and nothing else as long as fewer than `threshold` of the cohort work with it.
    """

    kind: Literal["masked"] = "masked"
    threshold: float = Field(0.6, gt=0.5, le=1, description="share of the cohort that must arrive")


class CKKS(Protection):
    """Ciphertexts under one key that the clients share; the server adds them and cannot open anything.

    `ring` residues modulo a prime of `prime_bits[0]` bits make a polynomial; the second prime exists only in the public
    key. A slot carries integers of prime_bits[0] - 1 - scale_bits bits.
    """

    needs: ClassVar[tuple[str, ...]] = ("cryptography", "tenseal")

    kind: Literal["ckks"] = "ckks"
    bits: int = Field(24, ge=2, le=32, description="of one value, its sign included")
    ring: Literal[4096, 8192, 16384] = 8192
    prime_bits: tuple[int, int] = Field((60, 60), description="of the ciphertexts' prime, and of the special one")
    scale_bits: int | None = Field(None, ge=1, le=50, description="bits below an integer; none: what the noise needs")

    @field_validator("prime_bits")
    @classmethod
    def _whole_pairs(cls, value: tuple[int, int]) -> tuple[int, int]:
        if not all(32 <= bits <= 60 for bits in value) or value[0] % 4 or value[0] > value[1]:
            raise ValueError("the first of 32, 36, ... to 60 bits, the second of as many or more up to 60")
        return value

    def scale(self, cohort: int) -> int:
        """Bits below an integer in a slot."""
        return ckks.noise_bits(self.ring, cohort) + 2 if self.scale_bits is None else self.scale_bits

    def usable(self, cohort: int) -> int:
        """The bits of a slot's integers, sign included; one bit of the prime stays free."""
        return self.prime_bits[0] - 1 - self.scale(cohort)

    def check(self, numbers: FixedPoint) -> None:
        """Raise a `UserError` below 128 bits of security, for a scale in the noise, and for sums that overflow."""
        cohort = numbers.clients
        total, most = sum(self.prime_bits), ckks.MOST_BITS[self.ring][128]
        if not ckks.security_bits(self.ring, self.prime_bits):
            raise UserError(
                f"secure.prime_bits = {list(self.prime_bits)}: {total} bits on a ring of {self.ring} are below 128-bit "
                f"security, which allows {most}; use smaller primes or a larger secure.ring"
            )
        noise = ckks.noise_bits(self.ring, cohort)
        if self.scale(cohort) < noise + 1:
            raise UserError(
                f"secure.scale_bits = {self.scale_bits}: the noise of {cohort} ciphertexts reaches 2^{noise}, and the "
                f"sum would not come back; use at least {noise + 1}, or leave it out"
            )
        needed, there = max(numbers.value_bits, numbers.count_bits + 1), self.usable(cohort)
        if needed > there:
            raise UserError(
                f"secure.bits = {self.bits}: a sum over {cohort} clients needs {needed} bits of a slot, and a prime of "
                f"{self.prime_bits[0]} bits with a scale of {self.scale(cohort)} leaves {there}; use secure.bits of at "
                f"most {self.bits - needed + there}, or larger prime_bits"
            )

    def body_bytes(self, group: Group, numbers: FixedPoint) -> int:
        """Whole ciphertexts."""
        return ckks.wire_bytes(self._plan(group, numbers).slots, self.ring, self.prime_bits[0])

    def public_bytes(self) -> int:
        """What the public key weighs on the wire, padded: four polynomials in 64-bit words, and parameters."""
        return PUBLIC_HEAD + 4 * 8 * self.ring + 1024

    def _plan(self, group: Group, numbers: FixedPoint) -> SlotPlan:
        return SlotPlan.of(group, numbers, self.usable(numbers.clients))

    def write(
        self, group: Group, integers: Integers, numbers: FixedPoint, public: Public, mask: Words | None = None
    ) -> bytes:
        """The group's ciphertexts."""
        assert mask is None
        slots = self._plan(group, numbers).pack(integers)
        residues = ckks.encrypt(ckks.read_public(public.key), slots, self.scale(numbers.clients), self.ring)
        return ckks.write_residues(residues, self.prime_bits[0])

    def read(self, group: Group, data: bytes | memoryview, numbers: FixedPoint, public: Public) -> Words:
        """Residues, each below the modulus, or `PayloadError`."""
        count = -(-self._plan(group, numbers).slots // (self.ring // 2)) * 2 * self.ring
        return ckks.read_residues(data, count, self.prime_bits[0], public.modulus)

    def add(self, total: Words, words: Words, public: Public) -> Words:
        """The sum of two ciphertexts."""
        return ckks.add_residues(total, words, public.modulus)

    def decrypted(self, context: Any, group: Group, words: Words, numbers: FixedPoint) -> Integers:
        """The integers of a group's sum; for the key holder alone."""
        plan = self._plan(group, numbers)
        return plan.unpack(ckks.decrypt(context, words, plan.slots, self.scale(numbers.clients), self.ring))


SCHEMES = Registry("secure", Protection, {"none": NoProtection, "plain": Plain, "masked": Masked, "ckks": CKKS})
AnyScheme = Annotated[NoProtection | Protection, SCHEMES]
