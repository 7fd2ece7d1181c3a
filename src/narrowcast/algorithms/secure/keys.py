"""Keys of clients: shared as secrets, derived and agreed on by pairs (X25519, HKDF-SHA256), and kept in files.

Secrets of 32 bytes are shared over a prime field (Shamir, How to Share a Secret, CACM 1979). This is implemented here
because a round of 60 clients makes 7,200 shares, and PyCryptodome's, which shares 16 bytes in a field of characteristic
2 in pure Python, is some hundred times slower than integers modulo a prime.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from safetensors import SafetensorError
from safetensors.numpy import save

from narrowcast.algorithms.secure.schemes import Encryption, Protection
from narrowcast.platform.errors import UserError
from narrowcast.platform.storage.disk import make_folders, read_tensors, write_atomically
from narrowcast.platform.types import PayloadError

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
    known, remaining = (0, *chosen), tuple(point for point in points if point not in chosen)
    if len(secret) != SECRET_BYTES or len(known) > len(points) or min(points) < 1:
        raise ValueError(f"{len(known)} of {len(points)} shares of a secret of {len(secret)} bytes cannot be made")
    values = [int.from_bytes(part, "big") for part in (secret, *chosen.values())]
    shares = dict(chosen)
    for point, weights in zip(remaining, _interpolation(known, remaining), strict=True):
        value = sum(weight * term for weight, term in zip(weights, values, strict=True)) % PRIME
        shares[point] = value.to_bytes(SHARE_BYTES, "big")
    return shares


@lru_cache(maxsize=16)
def _interpolation(known: tuple[int, ...], targets: tuple[int, ...]) -> list[list[int]]:
    """Return the weights of the values at the `known` points in the value at each of the others."""
    inverses = {factor: pow(factor, -1, PRIME) for factor in range(1, max((*known, *targets)) + 1)}

    def inverse(difference: int) -> int:
        return inverses[difference] if difference > 0 else PRIME - inverses[-difference]

    at_known = []
    for point in known:
        weight = 1
        for node in known:
            weight = weight * inverse(point - node) % PRIME if node != point else weight
        at_known.append(weight)
    rows = []
    for target in targets:
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
        for node in points:
            if node != point:
                above, below = above * node % PRIME, below * (node - point) % PRIME
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


FILE = "clients.key"
_FORMAT = "narrowcast-keys-1"
_MOST_SHOWN = 200  # characters of a file's parameters


@dataclass(frozen=True)
class ClientKeys:
    """The clients' private keys: the root of their signing keys, and for encryption the secret key.

    Clients make them offline and keep them in one file that only its owner may read.
    """

    root: bytes
    context: bytes

    @classmethod
    def new(cls, scheme: Protection) -> ClientKeys:
        """Make keys for runs under this scheme; raise `UserError` for parameters that a library refuses."""
        context = scheme.new_secret() if isinstance(scheme, Encryption) else b""
        return cls(os.urandom(SECRET_BYTES), context)

    def __repr__(self) -> str:
        return "ClientKeys(...)"


def parameters(scheme: Protection) -> str:
    """Return the parameters that keys depend on, as one line."""
    parts = {"kind": scheme.kind}
    if isinstance(scheme, Encryption):
        parts |= scheme.key_parameters()
    return ", ".join(f"{name} {value}" for name, value in parts.items())


def make_key_files(folder: Path, scheme: Protection) -> Path:
    """Write new keys into a folder, for its owner alone; raise `UserError` if it has keys or cannot be written."""
    path = folder / FILE
    if path.exists():
        raise UserError(f"{path} exists already, and runs may have been started with it; give another folder")
    keys = ClientKeys.new(scheme)
    tensors = {name: np.frombuffer(value, dtype=np.uint8) for name, value in vars(keys).items()}
    metadata = {"format": _FORMAT, "parameters": parameters(scheme), "sha256": _sha256(keys)}
    try:
        make_folders(folder, 0o700)
        write_atomically(path, save(tensors, metadata), mode=0o600)
    except OSError as error:
        raise UserError(f"cannot write keys to {folder} ({error.strerror}); give another folder") from error
    return path


def read_key_files(folder: Path, scheme: Protection) -> ClientKeys:
    """Read the keys in a folder, for the key holder alone.

    Raise `UserError` if others may read or replace them, or if they are damaged or for other parameters.
    """
    path = folder / FILE
    advice = "run `narrowcast keys make FOLDER EXPERIMENT` and set secure.keys to that folder"
    try:
        _check_modes(path)
        tensors, header = read_tensors(path)
        keys = ClientKeys(tensors["root"].tobytes(), tensors["context"].tobytes())
        made_for = " ".join(header["parameters"].split())[:_MOST_SHOWN]
        whole = header["format"] == _FORMAT and header["sha256"] == _sha256(keys) and len(keys.root) == SECRET_BYTES
    except UserError:
        raise
    except FileNotFoundError:
        raise UserError(f"secure.keys: there is no {path}; {advice}") from None
    except OSError as error:
        raise UserError(f"secure.keys: cannot read {path} ({error.strerror}); {advice}") from error
    except (SafetensorError, KeyError, TypeError, ValueError):  # the last two: tensors of types that numpy lacks
        whole = False
    if not whole:
        raise UserError(f"secure.keys: {path} is damaged or incomplete; {advice}")
    if made_for != parameters(scheme):
        raise UserError(f"secure.keys: {path} is for {made_for}, not for {parameters(scheme)}; {advice}")
    return keys


def _check_modes(path: Path) -> None:
    for checked, forbidden, action in ((path, 0o077, "read"), (path.parent, 0o022, "replace")):
        if (mode := checked.stat().st_mode) & forbidden:
            right = "600" if checked is path else "700"
            raise UserError(f"others may {action} the keys: {checked} has mode {mode & 0o777:o}; chmod {right} it")


def _sha256(keys: ClientKeys) -> str:
    return hashlib.sha256(keys.root + keys.context).hexdigest()
