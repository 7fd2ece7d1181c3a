"""Paillier encryption, one ciphertext a value: the scheme that the CoLR paper uses for Top-K, to compare CKKS with.

Reference: Paillier, Public-Key Cryptosystems Based on Composite Degree Residuosity Classes, EUROCRYPT 1999; uses
python-paillier with gmpy2 at its default of 3,072 bits, which is 128-bit security (NIST SP 800-57).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from narrowcast.algorithms.secure.optional_imports import library
from narrowcast.platform.errors import UserError
from narrowcast.platform.types import PayloadError

LEAST_BITS = 3072
"""The bits of a modulus with 128-bit security."""


@dataclass(frozen=True)
class Ciphertexts:
    """One ciphertext a value: integers modulo n^2, all of the width of n^2 on the wire."""

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
