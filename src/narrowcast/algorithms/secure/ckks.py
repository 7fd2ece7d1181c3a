"""CKKS for sums: one prime, no keys for products, exact integers.

Reference: Cheon, Kim, Kim and Song, Homomorphic Encryption for Arithmetic of Approximate Numbers, ASIACRYPT 2017; uses
TenSEAL on Microsoft SEAL. A ciphertext is two polynomials of `ring` residues modulo one prime q and has ring / 2 slots.

Differs from the paper: 1. slots carry integers times 2^scale_bits, with the scale above the noise of the whole sum, so
that rounding gives the exact sum for any keys and noise; approximate results, which can reveal the key (Li and
Micciancio, EUROCRYPT 2021), do not leave the key holder. 2. ciphertexts are sent as bare residues: their length is
known beforehand and every residue is checked, so that SEAL never reads bytes that came over a wire. The server adds
residues modulo q, which gives the sum of the ciphertexts.
"""

from __future__ import annotations

import struct
from functools import lru_cache
from typing import Any

import numpy as np
import pyarrow as pa

from narrowcast.algorithms.codecs.wire import varint
from narrowcast.algorithms.secure.bit_packing import RingElements, pack_elements, packed_bytes, unpack_elements
from narrowcast.algorithms.secure.fixed_point import Integers
from narrowcast.algorithms.secure.optional_imports import library
from narrowcast.platform.errors import UserError
from narrowcast.platform.types import PayloadError

MOST_BITS = {4096: {128: 109, 192: 75, 256: 58}, 8192: {128: 218, 192: 152, 256: 118}, 16384: {128: 438, 192: 305}}
"""Ring -> security level -> most bits of all primes, for ternary secrets (Homomorphic Encryption Standard, 2018)."""

_SEAL_HEADER = struct.Struct("<HBBBBHQ")  # magic, header size, version (2), compression, reserved, total size
_SEAL_MAGIC, _STORED = 0xA15E, 0
_NOISE_SIGMAS = 8.0  # a slot beyond them in 10^15


def security_bits(ring: int, prime_bits: tuple[int, ...]) -> int:
    """Return the level of the standard that the parameters reach: 256, 192, 128 or 0."""
    levels = MOST_BITS[ring]
    return max((level for level, most in levels.items() if sum(prime_bits) <= most), default=0)


def noise_bits(ring: int, ciphertexts: int) -> int:
    """Return b such that the noise of each slot of a sum of fresh ciphertexts is below 2^b.

    The bound is eight standard deviations. Encryption drops the special prime; the noise that remains is the rounding
    error of that step: residues uniform on [-1/2, 1/2], one polynomial of them times a ternary secret, and a slot adds
    `ring` of them.
    """
    deviation = (ring * (2 * ring / 3 + 1) / 12 * ciphertexts) ** 0.5
    return int(np.ceil(np.log2(_NOISE_SIGMAS * deviation)))


def make_context(ring: int, prime_bits: tuple[int, ...]) -> Any:
    """Make new keys, the secret one included, for the key holder alone; raise `UserError` for primes SEAL refuses."""
    tenseal = library("tenseal", "secure.kind = ckks")
    try:
        return tenseal.context(tenseal.SCHEME_TYPE.CKKS, ring, coeff_mod_bit_sizes=list(prime_bits), n_threads=1)
    except (ValueError, RuntimeError) as error:
        raise UserError(f"secure.prime_bits = {list(prime_bits)}: SEAL refuses them ({error})") from None


def with_secret(context: Any) -> bytes:
    """Serialise the parameters and both keys; for the key holder alone."""
    return bytes(context.serialize(save_public_key=True, save_secret_key=True, save_galois_keys=False))


def read_secret(data: bytes) -> Any:
    """Read the context that `with_secret` wrote; for the key holder alone."""
    return library("tenseal", "secure.kind = ckks").context_from(data, n_threads=1)


def public_part(context: Any) -> bytes:
    """Serialise the parameters and the public key."""
    return bytes(
        context.serialize(save_public_key=True, save_secret_key=False, save_galois_keys=False, save_relin_keys=False)
    )


@lru_cache(maxsize=4)
def read_public(data: bytes) -> Any:
    """Read the context that `public_part` wrote."""
    return library("tenseal", "secure.kind = ckks").context_from(data, n_threads=1)


def modulus(context: Any) -> int:
    """Return the prime q, the modulus of residues."""
    library("tenseal.sealapi", "secure.kind = ckks")  # registers the type of a modulus with Python
    (prime,) = context.seal_context().data.first_context_data().parms().coeff_modulus()
    return int(prime.value())


def encrypt(context: Any, slots: Integers, scale_bits: int, ring: int) -> RingElements:
    """Encrypt signed slots [n] to the residues of ceil(2 n / ring) ciphertexts, [ciphertexts * 2 * ring]."""
    tenseal = library("tenseal", "secure.kind = ckks")
    parts = []
    for start in range(0, len(slots), ring // 2):
        full = np.zeros(ring // 2)
        part = slots[start : start + ring // 2]
        full[: len(part)] = part
        parts.append(_residues(tenseal.ckks_vector(context, full.tolist(), 2.0**scale_bits).serialize(), ring))
    return np.concatenate(parts)


def decrypt(context: Any, residues: RingElements, n_slots: int, scale_bits: int, ring: int) -> Integers:
    """Decrypt a sum of ciphertexts to integers [n_slots]; for the key holder alone."""
    tenseal = library("tenseal", "secure.kind = ckks")
    template = tenseal.ckks_vector(context, [0.0] * (ring // 2), 2.0**scale_bits).serialize()
    slots = [
        tenseal.ckks_vector_from(context, _with_residues(template, each)).decrypt()
        for each in residues.reshape(-1, 2 * ring)
    ]
    return np.rint(np.concatenate(slots)[:n_slots]).astype(np.int64)


def wire_bytes(n_slots: int, ring: int, bits: int) -> int:
    """Return the bytes of the ciphertexts of `n_slots` slots, with residues of `bits` bits."""
    return packed_bytes(-(-n_slots // (ring // 2)) * 2 * ring, bits)


def write_residues(residues: RingElements, bits: int) -> bytes:
    """Pack residues for the wire."""
    return pack_elements(residues, bits)


def read_residues(data: bytes | memoryview, count: int, bits: int, prime: int) -> RingElements:
    """Unpack residues [count]; raise `PayloadError` for another length, or for one that is not below q = `prime`."""
    residues = unpack_elements(data, count, bits)
    if (residues >= prime).any():
        raise PayloadError("the ciphertext has residues that are not below its modulus")
    return residues


def add_residues(total: RingElements, residues: RingElements, prime: int) -> RingElements:
    """Return the residues of the sum of two ciphertexts; q has at most 60 bits, so nothing overflows."""
    added = total + residues
    return np.where(added >= prime, added - np.uint64(prime), added)


def _residues(serialised: bytes, ring: int) -> RingElements:
    """Return the residues of one ciphertext that SEAL serialised."""
    start, stop, head = _blob(serialised)
    body = pa.Codec("zstd").decompress(serialised[start + _SEAL_HEADER.size : stop], head + 16 * ring)
    return np.frombuffer(body, dtype="<u8", offset=head).astype(np.uint64)


def _with_residues(template: bytes, residues: RingElements) -> bytes:
    """Return the serialised ciphertext of these residues, from another one of the same context."""
    start, stop, head = _blob(template)
    magic, size, major, minor, _, reserved, _ = _SEAL_HEADER.unpack_from(template, start)
    old = pa.Codec("zstd").decompress(template[start + size : stop], head + 8 * len(residues), asbytes=True)
    body = old[:head] + residues.astype("<u8").tobytes()
    blob = _SEAL_HEADER.pack(magic, size, major, minor, _STORED, reserved, size + len(body)) + body
    # TenSEAL's message: the sizes, field 2 with the length of the blob, the scale.
    before = template[: template.rindex(b"\x12", 0, start) + 1]
    return before + varint(len(blob)) + blob + template[stop:]


_HEAD = 97
"""Bytes before the residues in SEAL's ciphertext: parameters' hash, form, sizes, scale, header of the array."""


def _blob(serialised: bytes) -> tuple[int, int, int]:
    """Return the start and end of SEAL's ciphertext in TenSEAL's message, and the bytes of it before the residues."""
    start = serialised.index(struct.pack("<H", _SEAL_MAGIC), 0, 64)
    return start, start + _SEAL_HEADER.unpack_from(serialised, start)[-1], _HEAD
