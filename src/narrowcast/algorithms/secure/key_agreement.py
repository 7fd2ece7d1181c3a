"""Keys that are derived from secrets, and keys that pairs of clients agree on (X25519, HKDF-SHA256)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from narrowcast.algorithms.secure.shamir import SECRET_BYTES
from narrowcast.platform.types import PayloadError


def derive_key(secret: bytes, purpose: bytes, *numbers: int, size: int = SECRET_BYTES) -> bytes:
    """Return `size` bytes for one purpose, derived from a secret."""
    info = b"narrowcast " + purpose + b"".join(number.to_bytes(8, "big") for number in numbers)
    return HKDF(SHA256(), size, None, info).derive(secret)


_P = 2**255 - 19
_LOW_ORDER = {
    0,
    1,
    _P - 1,
    325606250916557431795983626356110631294008115727848805560023387167927233504,
    39382357235489614581723060781553021112529911719440698176882885853963445705823,
}
"""The coordinates of the points of order 1, 2, 4 and 8 of Curve25519 and its twist."""


def check_public_key(key: bytes) -> None:
    """Raise `PayloadError` for an X25519 key of low order, whose secret with any other key is zero (RFC 7748, 6.1)."""
    if (int.from_bytes(key, "little") % 2**255) % _P in _LOW_ORDER:
        raise PayloadError("a public key is of low order")


def exchange(private: X25519PrivateKey, peer: bytes) -> bytes:
    """Return the X25519 secret; raise `PayloadError` for a peer's key of low order, whose secret anybody knows."""
    try:
        return private.exchange(X25519PublicKey.from_public_bytes(peer))
    except ValueError:
        raise PayloadError("a public key is of low order") from None


@dataclass
class KeyAgreements:
    """A cache of agreed keys, equal at both ends of a pair, so that a process that simulates both derives them once."""

    _known: dict[tuple[Any, ...], bytes] = field(default_factory=dict, repr=False)

    def key(
        self,
        private: X25519PrivateKey,
        public: bytes,
        peer: bytes,
        purpose: bytes,
        *numbers: int,
        size: int = SECRET_BYTES,
    ) -> bytes:
        """Return bytes for one purpose from `private`, whose public half is `public`, and a peer's public key."""
        pair = frozenset((public, peer))
        if (pair,) not in self._known:
            self._known[(pair,)] = exchange(private, peer)
        if (pair, purpose, *numbers) not in self._known:
            self._known[(pair, purpose, *numbers)] = derive_key(self._known[(pair,)], purpose, *numbers, size=size)
        return self._known[(pair, purpose, *numbers)]
