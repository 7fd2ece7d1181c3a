"""Shamir's secret sharing of 32-byte secrets over a prime field.

Reference: Shamir, How to Share a Secret, CACM 1979. Implemented here because a round of 60 clients makes 7,200 shares,
and PyCryptodome's, which shares 16 bytes in a field of characteristic 2 in pure Python, is some hundred times slower
than integers modulo a prime.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache

PRIME = 2**257 - 93
"""The largest prime below 2^257: every 32-byte secret is a field element, and a share has 33 bytes."""

SECRET_BYTES, SHARE_BYTES = 32, 33
SEED_BYTES = 48
"""Uniform bytes that a share is drawn from."""


def random_share(seed: bytes) -> bytes:
    """Return the share that `SEED_BYTES` uniform bytes stand for; its distribution is within 2^-127 of uniform."""
    return (int.from_bytes(seed, "big") % PRIME).to_bytes(SHARE_BYTES, "big")


def split(secret: bytes, points: Sequence[int], chosen: Mapping[int, bytes]) -> dict[int, bytes]:
    """Return a share for each of the points 1, 2, ...: any len(chosen) + 1 give the secret, fewer reveal nothing of it.

    The shares of the first points are `chosen`, uniform and known to their recipients beforehand, so that only the
    others have to be sent.
    """
    known, others = (0, *chosen), tuple(point for point in points if point not in chosen)
    if len(secret) != SECRET_BYTES or len(known) > len(points) or min(points) < 1:
        raise ValueError(f"{len(known)} of {len(points)} shares of a secret of {len(secret)} bytes cannot be made")
    values = [int.from_bytes(each, "big") for each in (secret, *chosen.values())]
    shares = dict(chosen)
    for point, weights in zip(others, _interpolation(known, others), strict=True):
        value = sum(weight * each for weight, each in zip(weights, values, strict=True)) % PRIME
        shares[point] = value.to_bytes(SHARE_BYTES, "big")
    return shares


@lru_cache(maxsize=16)
def _interpolation(known: tuple[int, ...], others: tuple[int, ...]) -> list[list[int]]:
    """Return the weights of the values at the `known` points in the value at each of the others."""
    inverses = {each: pow(each, -1, PRIME) for each in range(1, max((*known, *others)) + 1)}

    def inverse(difference: int) -> int:
        return inverses[difference] if difference > 0 else PRIME - inverses[-difference]

    at_known = []
    for point in known:
        weight = 1
        for other in known:
            weight = weight * inverse(point - other) % PRIME if other != point else weight
        at_known.append(weight)
    rows = []
    for target in others:
        whole = 1
        for point in known:
            whole = whole * (target - point) % PRIME
        pairs = zip(known, at_known, strict=True)
        rows.append([whole * weight * inverse(target - point) % PRIME for point, weight in pairs])
    return rows


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
