"""Shamir's secret sharing of 32-byte secrets over a prime field.

Reference: Shamir, How to Share a Secret, CACM 1979. Implemented here because a round of 60 clients makes 7,200 shares,
and PyCryptodome's, which shares 16 bytes in a field of characteristic 2 in pure Python, is some hundred times slower
than integers modulo a prime.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from functools import lru_cache

PRIME = 2**257 - 93
"""The largest prime below 2^257: every 32-byte secret is a field element, and a share has 33 bytes."""

SECRET_BYTES, SHARE_BYTES = 32, 33


def split(secret: bytes, points: Sequence[int], threshold: int) -> list[bytes]:
    """Return a share for each of the points 1, 2, ...: any `threshold` give the secret, fewer reveal nothing of it."""
    if len(secret) != SECRET_BYTES or not 1 <= threshold <= len(set(points)) or min(points) < 1:
        raise ValueError(f"{threshold} of {len(points)} shares of a secret of {len(secret)} bytes cannot be made")
    coefficients = [*(secrets.randbelow(PRIME) for _ in range(threshold - 1)), int.from_bytes(secret, "big")]
    shares = []
    for point in points:
        value = 0
        for coefficient in coefficients:
            value = (value * point + coefficient) % PRIME
        shares.append(value.to_bytes(SHARE_BYTES, "big"))
    return shares


@lru_cache(maxsize=16)
def lagrange_weights(points: tuple[int, ...]) -> list[int]:
    """Return the Lagrange weights at 0: the secret is the sum of weight x share over these points."""
    weights = []
    for point in points:
        above, below = 1, 1
        for other in points:
            if other != point:
                above, below = above * other % PRIME, below * (other - point) % PRIME
        weights.append(above * pow(below, -1, PRIME) % PRIME)
    return weights


def combine(shares: Mapping[int, bytes]) -> bytes:
    """Return the secret that shares, by point, determine; raise `ValueError` if they determine none."""
    weights = lagrange_weights(tuple(shares))
    numbers = [int.from_bytes(share, "big") for share in shares.values()]
    secret = sum(weight * number for weight, number in zip(weights, numbers, strict=True)) % PRIME
    if any(len(share) != SHARE_BYTES for share in shares.values()) or secret >= 2 ** (8 * SECRET_BYTES):
        raise ValueError("these shares are not of one secret")
    return secret.to_bytes(SECRET_BYTES, "big")
