"""What the clients of a run hold and the server does not: keys, in a process of their own, reached by name.

One key store stands for those of all simulated clients. It makes its keys itself and gives out public ones, to the
hosts that train a client that client's secrets, and to the server what clients decide to open.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from numpy.typing import NDArray

from narrowcast.algorithms.federated.sum_layout import Group, Part, SumLayout
from narrowcast.algorithms.secure import ckks
from narrowcast.algorithms.secure.key_files import Keys, read_key_files
from narrowcast.algorithms.secure.masking import Agreements, MaskingClient, derived
from narrowcast.algorithms.secure.messages import RECIPIENT_BYTES, RUN_BYTES, Messages
from narrowcast.algorithms.secure.schemes import CKKS, Masked, Protection
from narrowcast.algorithms.secure.shamir import SECRET_BYTES
from narrowcast.platform.types import Arrays, PayloadError


class KeyStore:
    """The clients' keys of one run: made when it starts, gone when it ends and never written down, or made offline.

    Those are read when they are first used, and what is wrong with them is then a `UserError`.
    """

    def __init__(self, scheme: Protection) -> None:
        self._scheme, self._run = scheme, secrets.token_bytes(RUN_BYTES)
        self._round: dict[int, MaskingClient] = {}
        self._opened: set[tuple[int, int]] = set()

    @cached_property
    def _keys(self) -> Keys:
        if self._scheme.keys is None:
            return Keys.new(self._scheme)
        return read_key_files(Path(self._scheme.keys), self._scheme)

    @cached_property
    def _context(self) -> Any:
        return ckks.read_secret(self._keys.context)

    def call(self, method: str, round_index: int, arrays: Arrays) -> Arrays:
        """Do what is asked; raises `PayloadError` for what no client would do."""
        known = {
            "public": self._public,
            "begin": self._begin,
            "secrets": self._secrets,
            "open": self._open,
            "reveal": self._reveal,
        }
        if method not in known:
            raise PayloadError(f"clients do not answer {method}")
        return known[method](round_index, arrays)

    def _public(self, round_index: int, arrays: Arrays) -> Arrays:
        """The number of this run, the public key and the modulus of ciphertexts; empty where there are none."""
        del round_index, arrays
        key, modulus = b"", 0
        if self._keys.context:
            key, modulus = ckks.public_part(self._context), ckks.modulus(self._context)
        return {"run": _bytes(self._run), "key": _bytes(key), "modulus": np.array([modulus], dtype=np.uint64)}

    def _begin(self, round_index: int, arrays: Arrays) -> Arrays:
        """The cohort's public keys, `verify` [n, 32] and with masks `keys` [n, 96]; shares are made and exchanged."""
        clients = arrays["clients"].tolist()
        verify = [self._signing(client).public_key().public_bytes_raw() for client in clients]
        public = {"verify": _rows(verify)}
        if not isinstance(self._scheme, Masked):
            return public
        agreements = Agreements()
        cohort = {client: MaskingClient(round_index, client, agreements) for client in clients}
        messages = Messages(self._scheme, SumLayout((), {}, 1, 1), len(clients), self._run)
        known, keys = dict(zip(clients, verify, strict=True)), {}
        for client, each in cohort.items():
            sent = messages.keys(round_index).seal(client, [each.advertise()], self._key(client))
            sender, (advert,) = messages.keys(round_index).open(sent, known)
            assert advert is not None
            keys[sender] = bytes(advert)
        boxes: dict[int, dict[int, bytes]] = {client: {} for client in clients}
        for client, each in cohort.items():
            sealed = each.share(keys, self._scheme.enough(len(clients)))
            body = b"".join(peer.to_bytes(RECIPIENT_BYTES, "little") + data for peer, data in sealed.items())
            messages.shares(round_index).seal(client, [body], self._key(client))
            for peer, data in sealed.items():
                boxes[peer][client] = data
        for client, each in cohort.items():
            each.receive(boxes[client])
        self._round = cohort
        return {**public, "keys": _rows(list(keys.values()))}

    def _secrets(self, round_index: int, arrays: Arrays) -> Arrays:
        """For the host that trains these clients, what they sign and mask with; `pairs` [c, n, 32] is 0 for oneself.

        Who takes no part in the round has no masks, and zeros in their place.
        """
        del round_index
        clients = arrays["clients"].tolist()
        held = {"signing": _rows([self._key(client) for client in clients])}
        if self._round:
            none = bytes(SECRET_BYTES), dict[int, bytes]()
            seeds = [self._round[client].seeds() if client in self._round else none for client in clients]
            held["own"] = _rows([own for own, _ in seeds])
            pairs = [b"".join(each.get(peer, bytes(SECRET_BYTES)) for peer in self._round) for _, each in seeds]
            held["pairs"] = _rows(pairs).reshape(len(clients), len(self._round), SECRET_BYTES)
        return held

    def _open(self, round_index: int, arrays: Arrays) -> Arrays:
        """The integers of a group's sum, once; `group` holds its place, values, counts, most weight and clients."""
        if not isinstance(self._scheme, CKKS):
            raise PayloadError("there is no key to open a sum with")
        place, n_values, n_counts, most_weight, clients = arrays["group"].tolist()
        if (round_index, place) in self._opened:
            raise PayloadError(f"the sum of group {place} in round {round_index} has been opened before")
        self._opened.add((round_index, place))
        group = Group((Part("", None, n_values),), (Part("", None, n_counts),))
        numbers = self._scheme.numbers(most_weight, clients)
        words = np.asarray(arrays["words"], dtype=np.uint64)
        return {"integers": self._scheme.decrypted(self._context, group, words, numbers)}

    def _reveal(self, round_index: int, arrays: Arrays) -> Arrays:
        """What each survivor reveals, a signed message each, [survivors, bytes]."""
        survivors = arrays["clients"].tolist()
        messages = Messages(self._scheme, SumLayout((), {}, 1, 1), len(self._round), self._run).revealed(round_index)
        revealed = [
            messages.seal(client, [b"".join(self._round[client].reveal(survivors))], self._key(client))
            for client in survivors
        ]
        return {"revealed": _rows(revealed)}

    def _key(self, client: int) -> bytes:
        return derived(self._keys.root, b"signing", client)

    def _signing(self, client: int) -> Ed25519PrivateKey:
        return Ed25519PrivateKey.from_private_bytes(self._key(client))


def _bytes(data: bytes) -> NDArray[np.uint8]:
    return np.frombuffer(data, dtype=np.uint8)


def _rows(data: Sequence[bytes]) -> NDArray[np.uint8]:
    return np.frombuffer(b"".join(data), dtype=np.uint8).reshape(len(data), len(data[0]) if data else 0)
