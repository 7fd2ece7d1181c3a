"""The scheme `paillier`: updates as Paillier ciphertexts, many values in each, under one key that the clients share."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any, ClassVar, Literal

import numpy as np
from pydantic import Field

from narrowcast.algorithms.federated.sum_layout import Group
from narrowcast.algorithms.secure import paillier
from narrowcast.algorithms.secure.bit_packing import RingElements
from narrowcast.algorithms.secure.fixed_point import FixedPoint, Integers
from narrowcast.algorithms.secure.optional_imports import library
from narrowcast.algorithms.secure.protection import Encryption, PublicKey
from narrowcast.platform.types import PayloadError
from narrowcast.platform.units import BITS

_FREE_BITS = 2
"""Bits of the modulus left free, so that a packed sum, sign included, stays below half of it."""


class Paillier(Encryption):
    """Ciphertexts of `key_bits` bits of packed values, under one key that the clients share.

    A ciphertext carries as many values as fit, each in as many bits as its sum needs: with a key of 3,072 bits and
    sums of 34 bits, 90. The server multiplies ciphertexts, which adds up the values, and cannot decrypt. Encryption
    takes seconds where `ckks` takes milliseconds: this is the scheme of SFMF, to compare with.

    Reference: Paillier, EUROCRYPT 1999; 3,072 bits are 128-bit security (NIST SP 800-57).
    """

    needs: ClassVar[tuple[str, ...]] = ("cryptography", "phe", "gmpy2")

    kind: Literal["paillier"] = "paillier"
    bits: int = Field(
        24, ge=2, le=32, description="width of the integer of a value, sign included", json_schema_extra=BITS
    )
    key_bits: int = Field(
        paillier.LEAST_BITS,
        ge=paillier.LEAST_BITS,
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
        _, secret = paillier.make_keys(self.key_bits)
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

    def group_bytes(self, group: Group, numbers: FixedPoint) -> int:
        """Return the length of a group's ciphertexts."""
        return self._ciphertexts(group, numbers) * 2 * self.key_bits // 8

    def encode(self, group: Group, integers: Integers, numbers: FixedPoint, public: PublicKey) -> bytes:
        """Return the bytes of a group's ciphertexts."""
        del group
        packed = pack(integers, self.values_each(numbers), _width(numbers))
        return paillier.encrypt(_public(public.key), packed).to_bytes()

    def decode(self, group: Group, data: bytes | memoryview, numbers: FixedPoint, public: PublicKey) -> RingElements:
        """Return the words of a group's ciphertexts; raise `PayloadError` for one that is not below its modulus."""
        if len(data) != self.group_bytes(group, numbers):
            raise PayloadError(f"{len(data)} bytes are not the {self.group_bytes(group, numbers)} of a group")
        return _words(paillier.Ciphertexts.from_bytes(bytes(data), _public(public.key)))

    def add(self, total: RingElements, elements: RingElements, public: PublicKey) -> RingElements:
        """Return the words of the encrypted sum."""
        key = _public(public.key)
        return _words(_of_words(total, key) + _of_words(elements, key))

    def decrypt_sum(self, secret: Any, group: Group, elements: RingElements, numbers: FixedPoint) -> Integers:
        """Return the integers of a group's sum, [n_values + n_counts]; for the key holder alone."""
        packed = paillier.decrypt(secret, _of_words(elements, secret.public_key))
        return unpack(packed, self.values_each(numbers), _width(numbers), group.n_values + group.n_counts)

    def _ciphertexts(self, group: Group, numbers: FixedPoint) -> int:
        return -(-(group.n_values + group.n_counts) // self.values_each(numbers))


def pack(integers: Integers, each: int, width: int) -> list[int]:
    """Return signed integers `each` at a time as sums of integer * 2^(width * place)."""
    numbers = integers.tolist()
    return [
        sum(value << (width * place) for place, value in enumerate(numbers[start : start + each]))
        for start in range(0, len(numbers), each)
    ]


def unpack(packed: Sequence[int], each: int, width: int, count: int) -> Integers:
    """Return the signed integers of `width` bits that numbers, or sums of numbers, of `pack` carry, [count]."""
    half, integers = 1 << (width - 1), list[int]()
    for number in packed:
        rest = number
        for _ in range(min(each, count - len(integers))):
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


def _words(ciphertexts: paillier.Ciphertexts) -> RingElements:
    return np.frombuffer(ciphertexts.to_bytes(), dtype=">u8").astype(np.uint64)


def _of_words(words: RingElements, public: Any) -> paillier.Ciphertexts:
    return paillier.Ciphertexts.from_bytes(np.asarray(words).astype(">u8").tobytes(), public)
