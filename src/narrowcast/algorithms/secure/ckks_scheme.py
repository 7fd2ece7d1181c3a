"""The scheme `ckks`: updates as ciphertexts under one key that the clients share."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import Field, field_validator

from narrowcast.algorithms.federated.sum_layout import Group
from narrowcast.algorithms.secure import ckks
from narrowcast.algorithms.secure.bit_packing import RingElements
from narrowcast.algorithms.secure.fixed_point import FixedPoint, Integers
from narrowcast.algorithms.secure.protection import Encryption, PublicKey
from narrowcast.algorithms.secure.slot_packing import SlotPlan
from narrowcast.platform.errors import UserError
from narrowcast.platform.units import BITS

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
        return ckks.noise_bits(self.ring, cohort) + 2 if self.scale_bits is None else self.scale_bits

    def slot_bits(self, cohort: int) -> int:
        """Return the width of a slot's integers, sign included; one bit of the prime stays free."""
        return self.prime_bits[0] - 1 - self.noise_scale_bits(cohort)

    def check(self, numbers: FixedPoint) -> None:
        """Raise a `UserError` for less than 128-bit security, a scale below the noise, or sums that overflow."""
        cohort = numbers.max_clients
        total, most = sum(self.prime_bits), ckks.MOST_BITS[self.ring][128]
        if not ckks.security_bits(self.ring, self.prime_bits):
            raise UserError(
                f"secure.prime_bits = {list(self.prime_bits)}: {total} bits on a ring of {self.ring} are below 128-bit "
                f"security, which allows {most}; use smaller primes or a larger secure.ring"
            )
        noise = ckks.noise_bits(self.ring, cohort)
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
        return ckks.with_secret(ckks.make_context(self.ring, self.prime_bits))

    def read_secret(self, data: bytes) -> Any:
        """Return the context of a secret key."""
        return ckks.read_secret(data)

    def public_key(self, secret: Any) -> PublicKey:
        """Return the public part of a context, and its modulus."""
        return PublicKey(ckks.public_part(secret), ckks.modulus(secret))

    def public_key_bytes(self) -> int:
        """Return the length of the public key on the wire, padded: four polynomials in 64-bit words, and parameters."""
        return _LENGTH_BYTES + 4 * 8 * self.ring + 1024

    def group_bytes(self, group: Group, numbers: FixedPoint) -> int:
        """Return the length of a group's ciphertexts."""
        return ckks.wire_bytes(self._plan(group, numbers).slots, self.ring, self.prime_bits[0])

    def encode(self, group: Group, integers: Integers, numbers: FixedPoint, public: PublicKey) -> bytes:
        """Return the bytes of a group's ciphertexts."""
        slots = self._plan(group, numbers).pack(integers)
        scale_bits = self.noise_scale_bits(numbers.max_clients)
        return ckks.write_residues(
            ckks.encrypt(ckks.read_public(public.key), slots, scale_bits, self.ring), self.prime_bits[0]
        )

    def decode(self, group: Group, data: bytes | memoryview, numbers: FixedPoint, public: PublicKey) -> RingElements:
        """Return the residues of a group; raise `PayloadError` for one that is not below the modulus."""
        count = -(-self._plan(group, numbers).slots // (self.ring // 2)) * 2 * self.ring
        return ckks.read_residues(data, count, self.prime_bits[0], public.modulus)

    def add(self, total: RingElements, elements: RingElements, public: PublicKey) -> RingElements:
        """Return the residues of the sum of two ciphertexts."""
        return ckks.add_residues(total, elements, public.modulus)

    def decrypt_sum(self, secret: Any, group: Group, elements: RingElements, numbers: FixedPoint) -> Integers:
        """Return the integers of a group's sum, [n_values + n_counts]; for the key holder alone."""
        plan, scale_bits = self._plan(group, numbers), self.noise_scale_bits(numbers.max_clients)
        return plan.unpack(ckks.decrypt(secret, elements, plan.slots, scale_bits, self.ring))

    def _plan(self, group: Group, numbers: FixedPoint) -> SlotPlan:
        return SlotPlan.of(group, numbers, self.slot_bits(numbers.max_clients))
