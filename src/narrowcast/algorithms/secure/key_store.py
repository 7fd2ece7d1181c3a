"""The clients' key store: private keys and the state of masking clients, kept out of the server's process.

One key store holds the keys of all simulated clients. It gives public keys to everybody, a client's secrets to the
host that trains the client, and to the server what clients reveal. It is called by name and arrays, so that it can run
behind a pipe or in an actor. It decides for the clients: what they refuse to reveal, no call returns.
"""

from __future__ import annotations

import secrets
import struct
from collections.abc import Sequence
from copy import copy
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from numpy.typing import NDArray

from narrowcast.algorithms.client.sums import MaskGroup, SumBlock, SumLayout
from narrowcast.algorithms.secure.answered_rounds import AnsweredRounds
from narrowcast.algorithms.secure.keys import SECRET_BYTES, ClientKeys, derive_key, read_key_files
from narrowcast.algorithms.secure.masking_client import MaskingClient, agree_on_keys
from narrowcast.algorithms.secure.masks import OpenableGroups
from narrowcast.algorithms.secure.messages import RUN_BYTES, EnrolledClients, Messages
from narrowcast.algorithms.secure.participation import SmallCounts
from narrowcast.algorithms.secure.schemes import Encryption, Masked, Protection, PublicKey
from narrowcast.platform.errors import UserError
from narrowcast.platform.types import Arrays, PayloadError

_UNREADABLE = (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError, struct.error)


class KeyStore:
    """The clients' keys of one run: made when it starts and never written to disk, or made offline.

    What clients answer is remembered in the file `answered`, also for key stores that come after this one; None: by
    this one alone. A round is answered once: a request that is repeated as it was gets the same bytes, and any other is
    refused. Files are read when they are first used; a bad one is a `UserError` then.
    """

    def __init__(self, scheme: Protection, answered: Path | None = None) -> None:
        self._scheme, self._run = scheme, secrets.token_bytes(RUN_BYTES)
        self._answered_in, self._begun = answered, 0
        self._told: Arrays = {}
        self._began: Arrays = {}
        self._round: dict[int, MaskingClient] = {}
        self._small_counts: dict[int, SmallCounts] = {}

    @cached_property
    def _keys(self) -> ClientKeys:
        if self._scheme.keys is None:
            return ClientKeys.new(self._scheme)
        return read_key_files(Path(self._scheme.keys), self._scheme)

    @cached_property
    def _answered(self) -> AnsweredRounds:
        return AnsweredRounds(self._answered_in)

    @cached_property
    def _secret(self) -> Any:
        assert isinstance(self._scheme, Encryption)
        return self._scheme.read_secret(self._keys.context)

    def call(self, method: str, round_index: int, arrays: Arrays) -> Arrays:
        """Answer a request; raise `PayloadError` for one that clients refuse."""
        methods = {
            "public": self._public,
            "begin": self._begin,
            "secrets": self._secrets,
            "open": self._open,
            "sign": self._sign,
            "reveal": self._reveal,
        }
        if method not in methods:
            raise PayloadError(f"clients do not answer {method}")
        if method not in ("public", "begin") and round_index != self._begun:
            raise PayloadError(f"clients are asked for round {round_index}, and are in round {self._begun}")
        try:
            return methods[method](round_index, arrays)
        except (PayloadError, UserError):
            raise
        except _UNREADABLE as error:
            # A request is read by these methods as it is needed. The type alone is said: nothing of a key leaves.
            raise PayloadError(f"clients cannot read this request to {method} ({type(error).__name__})") from error

    def _public(self, round_index: int, arrays: Arrays) -> Arrays:
        """Return the run's number, and the public key and modulus of ciphertexts, empty for schemes without.

        `answered` [1] is the last round that clients have answered, before this process too.
        """
        del round_index, arrays
        public, keys = PublicKey(), self._keys  # a bad key file is an error here, under any scheme
        if keys.context and isinstance(self._scheme, Encryption):
            public = self._scheme.public_key(self._secret)
        modulus = np.array([public.modulus], dtype=np.uint64)
        answered = np.array([self._answered.last])
        return {"run": _bytes(self._run), "key": _bytes(public.key), "modulus": modulus, "answered": answered}

    def _begin(self, round_index: int, arrays: Arrays) -> Arrays:
        """Start a round: return the participants' verification keys, `verify` [n, 32].

        With masks the participants are told the `groups` [n, groups] that each of them sends, and agree on keys.
        `stops` [n] is the step (`Step`) from which each does not answer. The answer then also has `present`
        [m], the clients that shared their keys, and what these advertised, `keys` [m, 96]; none if they are too few.
        `survivors` are the clients whose sum was opened if the round is repeated after a crash, and is empty otherwise.
        """
        if round_index < self._begun:
            raise PayloadError(f"round {round_index} comes before round {self._begun}, which clients have begun")
        self._answered.begin(round_index, arrays)
        if round_index > self._begun:
            self._began = self._agreed(round_index, arrays)
            self._begun, self._told = round_index, arrays
        return self._began

    def _agreed(self, round_index: int, arrays: Arrays) -> Arrays:
        """Let the participants of a round make their keys; return what `begin` answers."""
        clients = arrays["clients"].tolist()
        verify = [self._signing(client).public_key().public_bytes_raw() for client in clients]
        survivors = np.array(sorted(self._answered.survivors(round_index)), dtype=np.int64)
        public: Arrays = {"verify": _rows(verify), "survivors": survivors}
        self._round = {}
        if not isinstance(self._scheme, Masked):
            return public
        enrolled = EnrolledClients(dict(zip(clients, verify, strict=True)))
        threshold = self._scheme.survivors_needed(len(clients))
        rule = OpenableGroups(tuple(clients), arrays["groups"].astype(bool), threshold, self._scheme.least_senders)
        signing = {client: self._key(client) for client in clients}
        stops = dict(zip(clients, arrays["stops"].tolist(), strict=True))
        messages = Messages(self._scheme, SumLayout((), {}, 1, 1), len(clients), self._run)
        self._round, advertised = agree_on_keys(messages, round_index, rule, enrolled, signing, stops)
        for client, accepted in self._answered.accepted(round_index).items():
            if client in self._round:
                self._round[client].accepted = accepted
        return {
            **public,
            "present": np.array(list(advertised), dtype=np.int64),
            "keys": _rows(list(advertised.values())),
        }

    def _secrets(self, round_index: int, arrays: Arrays) -> Arrays:
        """Return the private keys of c clients, for the host that trains them; see `ClientSecrets`.

        With masks, `model` [32] is the hash of the broadcast that they train on. `pairs` [c, m, 32] is 0 for a client
        with itself. A client that did not share keys has zeros for masks.
        """
        del round_index
        clients = arrays["clients"].tolist()
        held = {"signing": _rows([self._key(client) for client in clients])}
        if self._round:
            for client in self._round.keys() & set(clients):
                self._round[client].train_on(arrays["model"].tobytes())
            none = bytes(SECRET_BYTES), dict[int, bytes]()
            seeds = [self._round[client].mask_seeds() if client in self._round else none for client in clients]
            held["own"] = _rows([own_seed for own_seed, _ in seeds])
            pairs = [b"".join(of_pairs.get(peer, bytes(SECRET_BYTES)) for peer in self._round) for _, of_pairs in seeds]
            held["pairs"] = _rows(pairs).reshape(len(clients), len(self._round), SECRET_BYTES)
        return held

    def _open(self, round_index: int, arrays: Arrays) -> Arrays:
        """Decrypt a group's sum over the survivors `clients`; there are as many sums as `begin` told groups.

        `group` is (index, values, counts, max_weight, max_clients, rows). Rows that fewer than `smallest_count` clients
        touched are zeros in the answer.
        """
        if not isinstance(self._scheme, Encryption):
            raise PayloadError("there is no key to open a sum with")
        index, n_values, n_counts, max_weight, max_clients, rows = arrays["group"].tolist()
        if not 0 <= index < self._told["groups"].shape[1]:
            raise PayloadError(f"round {round_index} has no group {index}")
        group = MaskGroup((SumBlock("", None, n_values),), (SumBlock("", None, n_counts),))
        numbers = self._scheme.fixed_point(max_weight, max_clients)
        elements = np.asarray(arrays["elements"], dtype=np.uint64)
        small = copy(self._small_counts.get(round_index, SmallCounts(rows, self._scheme.smallest_count)))
        integers = self._scheme.decrypt_sum(self._secret, group, elements, numbers)
        opened = {"integers": small.blanked(group, integers)}
        self._answered.open(round_index, index, arrays["clients"].tolist(), opened)
        self._small_counts = {round_index: small}  # not the counts of a sum that was refused
        return opened

    def _sign(self, round_index: int, arrays: Arrays) -> Arrays:
        """Return the list of survivors `clients` as each of the clients `asked` signs it, [asked, bytes]."""
        survivors, asked = frozenset(arrays["clients"].tolist()), self._asked(arrays)
        signed = [client.sign_survivors(survivors) for client in asked]
        self._remember(round_index, asked)
        return {"signed": _rows(signed)}

    def _reveal(self, round_index: int, arrays: Arrays) -> Arrays:
        """Return what each of the clients `asked` reveals for the survivors `clients`, one message each.

        `signed` are the signed lists that the clients are shown, [signatures, bytes].
        """
        survivors, signed = (
            frozenset(arrays["clients"].tolist()),
            [signature.tobytes() for signature in arrays["signed"]],
        )
        asked = self._asked(arrays)
        revealed = {str(client.client): _bytes(client.unmask(survivors, signed)) for client in asked}
        self._remember(round_index, asked)
        return revealed

    def _remember(self, round_index: int, clients: Sequence[MaskingClient]) -> None:
        """Write down the lists that clients accepted, before their answers leave."""
        accepted = {client.client: client.accepted for client in clients if client.accepted is not None}
        self._answered.accept(round_index, accepted)

    def _asked(self, arrays: Arrays) -> list[MaskingClient]:
        """Return the clients that the server asks; raise `PayloadError` for one that shared no keys in this round."""
        asked = arrays["asked"].tolist()
        if any(client not in self._round for client in asked):
            raise PayloadError(f"the server asks clients that shared no keys in round {self._begun}")
        return [self._round[client] for client in asked]

    def _key(self, client: int) -> bytes:
        return derive_key(self._keys.root, b"signing", client)

    def _signing(self, client: int) -> Ed25519PrivateKey:
        return Ed25519PrivateKey.from_private_bytes(self._key(client))


def _bytes(data: bytes) -> NDArray[np.uint8]:
    return np.frombuffer(data, dtype=np.uint8)


def _rows(data: Sequence[bytes]) -> NDArray[np.uint8]:
    return np.frombuffer(b"".join(data), dtype=np.uint8).reshape(len(data), len(data[0]) if data else 0)
