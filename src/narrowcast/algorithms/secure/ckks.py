"""CKKS for sums alone: one prime, no keys for products, integers that come back exact.

Reference: Cheon, Kim, Kim and Song, Homomorphic Encryption for Arithmetic of Approximate Numbers, ASIACRYPT 2017; by
TenSEAL on Microsoft SEAL. A ciphertext is two polynomials of `ring` residues modulo one prime q and has ring / 2 slots.

Differs from the paper: 1. slots carry integers times 2^scale_bits, with the scale above the noise of the whole sum, so
that rounding gives the exact sum, the same whatever keys and noise were drawn; approximate results, which can give a
key away (Li and Micciancio, EUROCRYPT 2021), do not leave the key holder. 2. ciphertexts travel as bare residues: their
length is known beforehand and every residue is checked, so that SEAL never reads bytes that came over a wire, and the
server adds residues modulo q, which is all that adding ciphertexts is.
"""

from __future__ import annotations

import struct
from functools import lru_cache
from typing import Any

import numpy as np
import pyarrow as pa

from narrowcast.algorithms.codecs.wire import varint
from narrowcast.algorithms.secure.bit_packing import Words, pack_words, packed_bytes, unpack_words
from narrowcast.algorithms.secure.fixed_point import Integers
from narrowcast.algorithms.secure.optional_imports import library
from narrowcast.platform.errors import UserError
from narrowcast.platform.types import PayloadError

MOST_BITS = {4096: {128: 109, 192: 75, 256: 58}, 8192: {128: 218, 192: 152, 256: 118}, 16384: {128: 438, 192: 305}}
"""Ring -> security level -> the most bits of all primes, ternary secrets (Homomorphic Encryption Standard, 2018)."""

_SEAL_HEADER = struct.Struct("<HBBBBHQ")  # magic, its own size, version (2), compression, reserved, size of it all
_SEAL_MAGIC, _STORED = 0xA15E, 0
_NOISE_SIGMAS = 8.0  # a slot beyond them in 10^15


def security_bits(ring: int, prime_bits: tuple[int, ...]) -> int:
    """The level of the standard that the parameters reach: 256, 192, 128 or 0."""
    levels = MOST_BITS[ring]
    return max((level for level, most in levels.items() if sum(prime_bits) <= most), default=0)


def noise_bits(ring: int, ciphertexts: int) -> int:
    """No slot of a sum of so many fresh ciphertexts is further off than 2^this.

    Encryption drops the special prime, and the rounding of that is the noise that is left: residues uniform on
    [-1/2, 1/2], one of them times a ternary secret, and a slot adds `ring` of them.
    """
    deviation = (ring * (2 * ring / 3 + 1) / 12 * ciphertexts) ** 0.5
    return int(np.ceil(np.log2(_NOISE_SIGMAS * deviation)))


def make_context(ring: int, prime_bits: tuple[int, ...]) -> Any:
    """New keys, the secret one included; for the key holder alone."""
    tenseal = library("tenseal", "secure.kind = ckks")
    try:
        return tenseal.context(tenseal.SCHEME_TYPE.CKKS, ring, coeff_mod_bit_sizes=list(prime_bits), n_threads=1)
    except (ValueError, RuntimeError) as error:
        raise UserError(f"secure.prime_bits = {list(prime_bits)}: SEAL refuses them ({error})") from None


def with_secret(context: Any) -> bytes:
    """The parameters and both keys; for the key holder alone."""
    return bytes(context.serialize(save_public_key=True, save_secret_key=True, save_galois_keys=False))


def read_secret(data: bytes) -> Any:
    """The context that `with_secret` wrote; for the key holder alone."""
    return library("tenseal", "secure.kind = ckks").context_from(data, n_threads=1)


def public_part(context: Any) -> bytes:
    """The parameters and the public key."""
    return bytes(
        context.serialize(save_public_key=True, save_secret_key=False, save_galois_keys=False, save_relin_keys=False)
    )


@lru_cache(maxsize=4)
def read_public(data: bytes) -> Any:
    """The context that the key holder made public."""
    return library("tenseal", "secure.kind = ckks").context_from(data, n_threads=1)


def modulus(context: Any) -> int:
    """The prime q that residues are modulo."""
    library("tenseal.sealapi", "secure.kind = ckks")  # knows how to hand a modulus to Python
    (prime,) = context.seal_context().data.first_context_data().parms().coeff_modulus()
    return int(prime.value())


def encrypt(context: Any, slots: Integers, scale_bits: int, ring: int) -> Words:
    """Signed slots [n] as the residues of ceil(2 n / ring) ciphertexts, [ciphertexts * 2 * ring]."""
    tenseal = library("tenseal", "secure.kind = ckks")
    parts = []
    for start in range(0, len(slots), ring // 2):
        full = np.zeros(ring // 2)
        part = slots[start : start + ring // 2]
        full[: len(part)] = part
        parts.append(_residues(tenseal.ckks_vector(context, full.tolist(), 2.0**scale_bits).serialize(), ring))
    return np.concatenate(parts)


def decrypt(context: Any, residues: Words, n_slots: int, scale_bits: int, ring: int) -> Integers:
    """The integers [n_slots] in a sum of ciphertexts; for the key holder alone."""
    tenseal = library("tenseal", "secure.kind = ckks")
    template = tenseal.ckks_vector(context, [0.0] * (ring // 2), 2.0**scale_bits).serialize()
    slots = [
        tenseal.ckks_vector_from(context, _with_residues(template, each)).decrypt()
        for each in residues.reshape(-1, 2 * ring)
    ]
    return np.rint(np.concatenate(slots)[:n_slots]).astype(np.int64)


def wire_bytes(n_slots: int, ring: int, bits: int) -> int:
    """What the ciphertexts of so many slots weigh."""
    return packed_bytes(-(-n_slots // (ring // 2)) * 2 * ring, bits)


def write_residues(residues: Words, bits: int) -> bytes:
    """Residues as they travel."""
    return pack_words(residues, bits)


def read_residues(data: bytes | memoryview, count: int, bits: int, prime: int) -> Words:
    """The residues that were written, each below q, or `PayloadError`."""
    residues = unpack_words(data, count, bits)
    if (residues >= prime).any():
        raise PayloadError("the ciphertext has residues that are not below its modulus")
    return residues


def add_residues(total: Words, residues: Words, prime: int) -> Words:
    """The sum of two ciphertexts; q has at most 60 bits, so nothing overflows."""
    added = total + residues
    return np.where(added >= prime, added - np.uint64(prime), added)


def _residues(serialised: bytes, ring: int) -> Words:
    """The residues at the end of what SEAL wrote of one ciphertext."""
    start, stop, head = _blob(serialised)
    body = pa.Codec("zstd").decompress(serialised[start + _SEAL_HEADER.size : stop], head + 16 * ring)
    return np.frombuffer(body, dtype="<u8", offset=head).astype(np.uint64)


def _with_residues(template: bytes, residues: Words) -> bytes:
    """What SEAL would have written of these residues, from what it wrote of others of the same context."""
    start, stop, head = _blob(template)
    magic, size, major, minor, _, reserved, _ = _SEAL_HEADER.unpack_from(template, start)
    old = pa.Codec("zstd").decompress(template[start + size : stop], head + 8 * len(residues), asbytes=True)
    body = old[:head] + residues.astype("<u8").tobytes()
    blob = _SEAL_HEADER.pack(magic, size, major, minor, _STORED, reserved, size + len(body)) + body
    # TenSEAL's message: the sizes, then field 2 with the length of the blob, then the scale.
    before = template[: template.rindex(b"\x12", 0, start) + 1]
    return before + varint(len(blob)) + blob + template[stop:]


_HEAD = 97
"""Bytes before the residues in SEAL's ciphertext: parameters' hash, form, sizes, scale, and the header of an array."""


def _blob(serialised: bytes) -> tuple[int, int, int]:
    """Where SEAL's ciphertext begins and ends in TenSEAL's message, and how much of it precedes the residues."""
    start = serialised.index(struct.pack("<H", _SEAL_MAGIC), 0, 64)
    return start, start + _SEAL_HEADER.unpack_from(serialised, start)[-1], _HEAD
