"""The scheme `paillier`: updates as Paillier ciphertexts, many values in each, under one key that the clients share.

Paillier encryption with one ciphertext a value is what the CoLR paper uses for Top-K; it is here to compare CKKS with.

Reference: Paillier, Public-Key Cryptosystems Based on Composite Degree Residuosity Classes, EUROCRYPT 1999; uses
python-paillier with gmpy2 at its default of 3,072 bits, which is 128-bit security (NIST SP 800-57).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar, Literal

import numpy as np
from pydantic import Field

from narrowcast.algorithms.client.sums import MaskGroup
from narrowcast.algorithms.secure.schemes import Encryption, FixedPoint, Integers, PublicKey, RingElements, library
from narrowcast.platform.config.fields import BITS
from narrowcast.platform.errors import UserError
from narrowcast.platform.types import Payload, PayloadError

LEAST_BITS = 3072
"""The bits of a modulus with 128-bit security."""


@dataclass(frozen=True)
class Ciphertexts(Payload):
    """Ciphertexts, one a number: integers modulo n^2, all of the width of n^2 on the wire."""

    public: Any
    values: tuple[int, ...]

    def __add__(self, other: Ciphertexts) -> Ciphertexts:
        """Return the encrypted sum, value by value."""
        square = self.public.nsquare
        return Ciphertexts(self.public, tuple(a * b % square for a, b in zip(self.values, other.values, strict=True)))

    def wire_bits(self) -> int:
        """Return eight times the length of `to_bytes()`."""
        return 8 * self._width * len(self.values)

    def to_bytes(self) -> bytes:
        """Pack all ciphertexts, each as wide as n^2."""
        return b"".join(int(value).to_bytes(self._width, "big") for value in self.values)

    @classmethod
    def from_bytes(cls, data: bytes, public: Any) -> Ciphertexts:
        """Unpack; raise `PayloadError` for another length or a value that is not below the modulus."""
        empty = cls(public, ())
        width, square = empty._width, public.nsquare
        if len(data) % width:
            raise PayloadError(f"{len(data)} bytes are not ciphertexts of {width} bytes each")
        values = tuple(int.from_bytes(data[at : at + width], "big") for at in range(0, len(data), width))
        if not all(0 < value < square for value in values):
            raise PayloadError("there is a ciphertext that is not below its modulus")
        return cls(public, values)

    @property
    def _width(self) -> int:
        return -(-self.public.nsquare.bit_length() // 8)


def make_keys(bits: int = LEAST_BITS) -> tuple[Any, Any]:
    """Return a public and a secret key; raise `UserError` for a modulus below 128-bit security."""
    if bits < LEAST_BITS:
        raise UserError(f"a Paillier modulus of {bits} bits is below 128-bit security; use {LEAST_BITS} or more")
    library("gmpy2", "Paillier")  # without it, python-paillier is four times slower
    return library("phe.paillier", "Paillier").generate_paillier_keypair(n_length=bits)


def encrypt(public: Any, values: Sequence[int]) -> Ciphertexts:
    """Encrypt integers between -n/3 and n/3."""
    return Ciphertexts(public, tuple(public.raw_encrypt(value % public.n) for value in values))


def decrypt(secret: Any, ciphertexts: Ciphertexts) -> list[int]:
    """Return the integers between -n/2 and n/2."""
    n = ciphertexts.public.n
    values = (secret.raw_decrypt(value) for value in ciphertexts.values)
    return [value - n if value > n // 2 else value for value in values]


_FREE_BITS = 2
"""Bits of the modulus left free, so that a packed sum, sign included, stays below half of it."""


class Paillier(Encryption):
    """Ciphertexts of `key_bits` bits of packed values, under one key that the clients share.

    A ciphertext carries as many values as fit, each in as many bits as its sum needs: with a key of 3,072 bits and
    sums of 34 bits, 90. The server multiplies ciphertexts, which adds up the values, and cannot decrypt. Encryption
    takes seconds where `ckks` takes milliseconds: this is the scheme of SFMF, to compare with.
    """

    needs: ClassVar[tuple[str, ...]] = ("cryptography", "phe", "gmpy2")

    kind: Literal["paillier"] = "paillier"
    bits: int = Field(
        24, ge=2, le=32, description="width of the integer of a value, sign included", json_schema_extra=BITS
    )
    key_bits: int = Field(
        LEAST_BITS,
        ge=LEAST_BITS,
        le=8192,
        multiple_of=64,
        description="size of the modulus; 3072 is 128-bit security",
        json_schema_extra=BITS,
    )

    def key_parameters(self) -> dict[str, str]:
        """Return the size of the modulus."""
        return {"key_bits": str(self.key_bits)}

    def new_secret(self) -> bytes:
        """Return the two primes of a new key."""
        _, secret = make_keys(self.key_bits)
        return b"".join(int(prime).to_bytes(self.key_bits // 8, "big") for prime in (secret.p, secret.q))

    def read_secret(self, data: bytes) -> Any:
        """Return the secret key of two primes."""
        module = library("phe.paillier", "secure.kind = paillier")
        p, q = (int.from_bytes(part, "big") for part in (data[: len(data) // 2], data[len(data) // 2 :]))
        return module.PaillierPrivateKey(module.PaillierPublicKey(p * q), p, q)

    def public_key(self, secret: Any) -> PublicKey:
        """Return the modulus, as bytes."""
        return PublicKey(int(secret.public_key.n).to_bytes(self.key_bits // 8, "big"))

    def public_key_bytes(self) -> int:
        """Return the length of the modulus."""
        return self.key_bits // 8

    def values_each(self, numbers: FixedPoint) -> int:
        """Return the values in a ciphertext."""
        return (self.key_bits - _FREE_BITS) // _width(numbers)

    def group_bytes(self, group: MaskGroup, numbers: FixedPoint) -> int:
        """Return the length of a group's ciphertexts."""
        return self._ciphertexts(group, numbers) * 2 * self.key_bits // 8

    def encode(self, group: MaskGroup, integers: Integers, numbers: FixedPoint, public: PublicKey) -> bytes:
        """Return the bytes of a group's ciphertexts."""
        del group
        packed = pack(integers, self.values_each(numbers), _width(numbers))
        return encrypt(_public(public.key), packed).to_bytes()

    def decode(
        self, group: MaskGroup, data: bytes | memoryview, numbers: FixedPoint, public: PublicKey
    ) -> RingElements:
        """Return the words of a group's ciphertexts; raise `PayloadError` for one that is not below its modulus."""
        if len(data) != self.group_bytes(group, numbers):
            raise PayloadError(f"{len(data)} bytes are not the {self.group_bytes(group, numbers)} of a group")
        return _words(Ciphertexts.from_bytes(bytes(data), _public(public.key)))

    def add(self, total: RingElements, elements: RingElements, public: PublicKey) -> RingElements:
        """Return the words of the encrypted sum."""
        key = _public(public.key)
        return _words(_of_words(total, key) + _of_words(elements, key))

    def decrypt_sum(self, secret: Any, group: MaskGroup, elements: RingElements, numbers: FixedPoint) -> Integers:
        """Return the integers of a group's sum, [n_values + n_counts]; for the key holder alone."""
        packed = decrypt(secret, _of_words(elements, secret.public_key))
        return unpack(packed, self.values_each(numbers), _width(numbers), group.n_values + group.n_counts)

    def _ciphertexts(self, group: MaskGroup, numbers: FixedPoint) -> int:
        return -(-(group.n_values + group.n_counts) // self.values_each(numbers))


def pack(integers: Integers, per_number: int, width: int) -> list[int]:
    """Return signed integers `per_number` at a time as sums of integer * 2^(width * index)."""
    numbers = integers.tolist()
    return [
        sum(value << (width * index) for index, value in enumerate(numbers[start : start + per_number]))
        for start in range(0, len(numbers), per_number)
    ]


def unpack(packed: Sequence[int], per_number: int, width: int, count: int) -> Integers:
    """Return the signed integers of `width` bits that numbers, or sums of numbers, of `pack` carry, [count]."""
    half, integers = 1 << (width - 1), list[int]()
    for number in packed:
        rest = number
        for _ in range(min(per_number, count - len(integers))):
            value = ((rest + half) & (2 * half - 1)) - half
            integers.append(value)
            rest = (rest - value) >> width
    return np.array(integers, dtype=np.int64)


def _width(numbers: FixedPoint) -> int:
    """Return the bits of a signed sum of values, or of counts with a bit for the sign."""
    return max(numbers.value_bits, numbers.count_bits + 1)


@cache
def _public(key: bytes) -> Any:
    return library("phe.paillier", "secure.kind = paillier").PaillierPublicKey(int.from_bytes(key, "big"))


def _words(ciphertexts: Ciphertexts) -> RingElements:
    return np.frombuffer(ciphertexts.to_bytes(), dtype=">u8").astype(np.uint64)


def _of_words(words: RingElements, public: Any) -> Ciphertexts:
    return Ciphertexts.from_bytes(np.asarray(words).astype(">u8").tobytes(), public)
