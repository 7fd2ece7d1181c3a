"""The scheme `ckks`: updates as ciphertexts under one key that the clients share, whose sum is exact.

CKKS is used for sums alone: one prime, no keys for products. A ciphertext is two polynomials of `ring` residues modulo
one prime q and has ring / 2 slots; `SlotPlan` packs several integers into a slot.

Reference: Cheon, Kim, Kim and Song, Homomorphic Encryption for Arithmetic of Approximate Numbers, ASIACRYPT 2017; uses
TenSEAL on Microsoft SEAL.

Differs from the paper: 1. slots carry integers times 2^scale_bits, with the scale above the noise of the whole sum, so
that rounding gives the exact sum for any keys and noise; approximate results, which can reveal the key (Li and
Micciancio, EUROCRYPT 2021), do not leave the key holder. 2. ciphertexts are sent as bare residues: their length is
known beforehand and every residue is checked, so that SEAL never reads bytes that came over a wire. The server adds
residues modulo q, which gives the sum of the ciphertexts.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar, Literal

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pydantic import Field, field_validator

from narrowcast.algorithms.client.sums import MaskGroup
from narrowcast.algorithms.codecs.wire import varint
from narrowcast.algorithms.secure.schemes import (
    Encryption,
    FixedPoint,
    Integers,
    PublicKey,
    RingElements,
    library,
    pack_elements,
    packed_bytes,
    unpack_elements,
)
from narrowcast.platform.config.fields import BITS
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
        tenseal.ckks_vector_from(context, _with_residues(template, part)).decrypt()
        for part in residues.reshape(-1, 2 * ring)
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


@dataclass(frozen=True)
class SlotPlan:
    """The positions of a group's values and counts: several values a slot, and counts in the bits above them.

    If the counts do not fit above the values, they take slots of their own after those of the values.
    """

    n_values: int
    n_counts: int
    value_bits: int
    count_bits: int
    usable_bits: int

    @classmethod
    def of(cls, group: MaskGroup, numbers: FixedPoint, usable_bits: int) -> SlotPlan:
        """Return the plan of a group for slots that carry integers of `usable_bits` bits, sign included."""
        return cls(group.n_values, group.n_counts, numbers.value_bits, numbers.count_bits, usable_bits)

    @property
    def values(self) -> int:
        """The values in a slot."""
        return self.usable_bits // self.value_bits

    @property
    def _value_slots(self) -> int:
        return -(-self.n_values // self.values)

    @property
    def _above(self) -> int:
        """The counts above the values of a slot; one bit stays free for the sign."""
        if not self.n_values:
            return 0
        fit = (self.usable_bits - 1 - self.values * self.value_bits) // self.count_bits
        return fit if fit * self._value_slots >= self.n_counts else 0

    @property
    def _counts_alone(self) -> int:
        return 0 if self._above else (self.usable_bits - 1) // self.count_bits

    @property
    def slots(self) -> int:
        """The slots that the group takes."""
        alone = -(-self.n_counts // self._counts_alone) if self._counts_alone else 0
        return self._value_slots + alone

    def pack(self, integers: Integers) -> Integers:
        """Return the integers of a group [n_values + n_counts] as signed slots [slots]."""
        values, counts = integers[: self.n_values], integers[self.n_values :]
        slots = _joined(values, self.values, self.value_bits, self._value_slots)
        if self._above:
            above = _joined(counts, self._above, self.count_bits, self._value_slots)
            return slots + (above << np.int64(self.values * self.value_bits))
        alone = self.slots - self._value_slots
        return np.concatenate([slots, _joined(counts, self._counts_alone, self.count_bits, alone)])

    def unpack(self, slots: Integers) -> Integers:
        """Return the integers that slots, or sums of slots, carry, [n_values + n_counts]."""
        values, rest = _split(slots[: self._value_slots], self.values, self.value_bits)
        per_slot = self._above or self._counts_alone
        counts = _digits(rest if self._above else slots[self._value_slots :], per_slot, self.count_bits)
        return np.concatenate([values[: self.n_values], counts[: self.n_counts]])


def _joined(integers: Integers, per_slot: int, bits: int, slots: int) -> Integers:
    """Return the sum of integer << (bits * position) over the digits of each slot, signed carries included, [slots]."""
    digits = np.zeros(slots * per_slot, dtype=np.int64)
    digits[: len(integers)] = integers
    shifts = np.arange(per_slot, dtype=np.int64) * bits
    return np.asarray((digits.reshape(slots, per_slot) << shifts).sum(axis=1, dtype=np.int64))


def _split(slots: Integers, per_slot: int, bits: int) -> tuple[Integers, Integers]:
    """Return the signed digits [slots * per_slot] and the bits above them [slots]."""
    digits: NDArray[np.int64] = np.empty((len(slots), per_slot), dtype=np.int64)
    half, rest = np.int64(1) << np.int64(bits - 1), slots
    for index in range(per_slot):
        digits[:, index] = ((rest + half) & ((half << np.int64(1)) - 1)) - half
        rest = (rest - digits[:, index]) >> np.int64(bits)
    return digits.ravel(), rest


def _digits(slots: Integers, per_slot: int, bits: int) -> Integers:
    """Return the digits of 0..2^bits - 1, [slots * per_slot]."""
    shifts = np.arange(per_slot, dtype=np.int64) * bits
    return np.asarray(((slots[:, None] >> shifts) & ((np.int64(1) << np.int64(bits)) - 1)).ravel())


_LENGTH_BYTES = 4
"""Before a public key, which is padded to a length that does not depend on the key."""


class CKKS(Encryption):
    """Ciphertexts under one key that the clients share; the server adds them and cannot decrypt.

    A polynomial is `ring` residues modulo a prime of `prime_bits[0]` bits; the second prime exists only in the public
    key. A slot carries integers of prime_bits[0] - 1 - scale_bits bits, sign included.
    """

    needs: ClassVar[tuple[str, ...]] = ("cryptography", "tenseal")

    kind: Literal["ckks"] = "ckks"
    bits: int = Field(
        24, ge=2, le=32, description="width of the integer of a value, sign included", json_schema_extra=BITS
    )
    ring: Literal[4096, 8192, 16384] = Field(8192, description="degree of the polynomial ring")
    prime_bits: tuple[int, int] = Field((60, 60), description="sizes of the ciphertext prime and of the special prime")
    scale_bits: int | None = Field(
        None, ge=1, le=50, description="bits of scale below an integer; null: as many as the noise needs"
    )

    @field_validator("prime_bits")
    @classmethod
    def _whole_pairs(cls, value: tuple[int, int]) -> tuple[int, int]:
        if not all(32 <= bits <= 60 for bits in value) or value[0] % 4 or value[0] > value[1]:
            raise ValueError("the first of 32, 36, ... to 60 bits, the second of as many or more up to 60")
        return value

    def noise_scale_bits(self, cohort: int) -> int:
        """Return the bits below an integer in a slot: `scale_bits`, or two more than the noise of the sum."""
        return noise_bits(self.ring, cohort) + 2 if self.scale_bits is None else self.scale_bits

    def slot_bits(self, cohort: int) -> int:
        """Return the width of a slot's integers, sign included; one bit of the prime stays free."""
        return self.prime_bits[0] - 1 - self.noise_scale_bits(cohort)

    def check(self, numbers: FixedPoint) -> None:
        """Raise a `UserError` for less than 128-bit security, a scale below the noise, or sums that overflow."""
        cohort = numbers.max_clients
        total, most = sum(self.prime_bits), MOST_BITS[self.ring][128]
        if not security_bits(self.ring, self.prime_bits):
            raise UserError(
                f"secure.prime_bits = {list(self.prime_bits)}: {total} bits on a ring of {self.ring} are below 128-bit "
                f"security, which allows {most}; use smaller primes or a larger secure.ring"
            )
        noise = noise_bits(self.ring, cohort)
        if self.noise_scale_bits(cohort) < noise + 1:
            raise UserError(
                f"secure.scale_bits = {self.scale_bits}: the noise of {cohort} ciphertexts reaches 2^{noise}, and the "
                f"sum would not come back; use at least {noise + 1}, or leave it out"
            )
        needed, available = max(numbers.value_bits, numbers.count_bits + 1), self.slot_bits(cohort)
        if needed > available:
            raise UserError(
                f"secure.bits = {self.bits}: a sum over {cohort} clients needs {needed} bits of a slot, and a prime of "
                f"{self.prime_bits[0]} bits with a scale of {self.noise_scale_bits(cohort)} leaves {available}; use "
                f"secure.bits of at most {self.bits - needed + available}, or larger prime_bits"
            )

    def key_parameters(self) -> dict[str, str]:
        """Return the ring and its primes."""
        return {"ring": str(self.ring), "prime_bits": str(list(self.prime_bits))}

    def new_secret(self) -> bytes:
        """Return a new context with its secret key."""
        return with_secret(make_context(self.ring, self.prime_bits))

    def read_secret(self, data: bytes) -> Any:
        """Return the context of a secret key."""
        return read_secret(data)

    def public_key(self, secret: Any) -> PublicKey:
        """Return the public part of a context, and its modulus."""
        return PublicKey(public_part(secret), modulus(secret))

    def public_key_bytes(self) -> int:
        """Return the length of the public key on the wire, padded: four polynomials in 64-bit words, and parameters."""
        return _LENGTH_BYTES + 4 * 8 * self.ring + 1024

    def group_bytes(self, group: MaskGroup, numbers: FixedPoint) -> int:
        """Return the length of a group's ciphertexts."""
        return wire_bytes(self._plan(group, numbers).slots, self.ring, self.prime_bits[0])

    def encode(self, group: MaskGroup, integers: Integers, numbers: FixedPoint, public: PublicKey) -> bytes:
        """Return the bytes of a group's ciphertexts."""
        slots = self._plan(group, numbers).pack(integers)
        scale_bits = self.noise_scale_bits(numbers.max_clients)
        return write_residues(encrypt(read_public(public.key), slots, scale_bits, self.ring), self.prime_bits[0])

    def decode(
        self, group: MaskGroup, data: bytes | memoryview, numbers: FixedPoint, public: PublicKey
    ) -> RingElements:
        """Return the residues of a group; raise `PayloadError` for one that is not below the modulus."""
        count = -(-self._plan(group, numbers).slots // (self.ring // 2)) * 2 * self.ring
        return read_residues(data, count, self.prime_bits[0], public.modulus)

    def add(self, total: RingElements, elements: RingElements, public: PublicKey) -> RingElements:
        """Return the residues of the sum of two ciphertexts."""
        return add_residues(total, elements, public.modulus)

    def decrypt_sum(self, secret: Any, group: MaskGroup, elements: RingElements, numbers: FixedPoint) -> Integers:
        """Return the integers of a group's sum, [n_values + n_counts]; for the key holder alone."""
        plan, scale_bits = self._plan(group, numbers), self.noise_scale_bits(numbers.max_clients)
        return plan.unpack(decrypt(secret, elements, plan.slots, scale_bits, self.ring))

    def _plan(self, group: MaskGroup, numbers: FixedPoint) -> SlotPlan:
        return SlotPlan.of(group, numbers, self.slot_bits(numbers.max_clients))
