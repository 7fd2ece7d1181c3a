"""Encrypted sums: CKKS on TenSEAL, Paillier, and the security levels of their parameters."""

from __future__ import annotations

import numpy as np
import pytest
import tenseal

from narrowcast.algorithms.secure import ckks, paillier
from narrowcast.algorithms.secure.ckks import CKKS
from narrowcast.platform.errors import UserError
from narrowcast.platform.types import PayloadError


@pytest.mark.parametrize(("ring", "prime_bits"), [(4096, (48, 60)), (8192, (60, 60))])
def test_sums_of_ciphertexts_are_tenseals_and_come_back_exact(ring: int, prime_bits: tuple[int, int]) -> None:
    scheme = CKKS(ring=ring, prime_bits=prime_bits)
    secret = ckks.make_context(ring, prime_bits)
    public = ckks.read_public(ckks.public_part(secret))
    assert not public.has_secret_key()
    prime, scale = ckks.modulus(public), scheme.noise_scale_bits(60)
    assert prime.bit_length() == prime_bits[0]
    most = 2 ** (scheme.slot_bits(60) - 1) // 60
    slots = np.random.default_rng(0).integers(-most, most, (60, ring // 2 + 3))
    total = ckks.encrypt(public, slots[0], scale, ring)
    for each in slots[1:]:
        data = ckks.write_residues(ckks.encrypt(public, each, scale, ring), prime_bits[0])
        total = ckks.add_residues(total, ckks.read_residues(data, len(total), prime_bits[0], prime), prime)
    assert np.array_equal(ckks.decrypt(secret, total, slots.shape[1], scale, ring), slots.sum(axis=0))
    two = [tenseal.ckks_vector(public, [float(x)] * (ring // 2), 2.0**scale) for x in (3, 4)]
    ours = ckks.add_residues(*(ckks._residues(each.serialize(), ring) for each in two), prime)
    assert np.array_equal(ours, ckks._residues((two[0] + two[1]).serialize(), ring))


def test_security_levels_are_those_of_the_standard() -> None:
    levels = {(4096, (48, 60)): 128, (8192, (60, 60)): 192, (8192, (56, 60)): 256, (4096, (60, 60)): 0}
    assert {each: ckks.security_bits(*each) for each in levels} == levels
    with pytest.raises(UserError, match="below 128-bit security"):
        paillier.make_keys(2048)


def test_paillier_adds_value_by_value() -> None:
    public, secret = paillier.make_keys()
    first, second = ([5, -7, 0, 2**40], [-6, 7, 1, 1])
    total = paillier.encrypt(public, first) + paillier.encrypt(public, second)
    data = total.to_bytes()
    assert total.wire_bits() == 8 * len(data) == 8 * 4 * 768
    assert paillier.decrypt(secret, paillier.Ciphertexts.from_bytes(data, public)) == [-1, 0, 1, 2**40 + 1]
    for bad in (data[:-1], bytes(768), b"\xff" * 768):
        with pytest.raises(PayloadError):
            paillier.Ciphertexts.from_bytes(bad, public)
