"""Secure aggregation with pairwise masks: one client's side of a round, and the two steps in which keys are agreed.

`MaskingClient` is the client; `agree_on_keys` passes the messages of the first two steps between server and clients.

Reference: Bonawitz et al., Practical Secure Aggregation for Privacy-Preserving Machine Learning, CCS 2017, Figure 4:
0. *advertise keys*: every client sends two public keys. 1. *share keys*: it secret-shares the private key of its
pairwise masks and the secret of its own masks among the cohort, sealed for each recipient. 2. *masked input*: it sends
its integers plus both masks modulo 2^bits. 3. *consistency check*, for an active adversary: it signs the list of
survivors. 4. *unmasking*: it reveals its share of the own-mask secret of each survivor or of the private key of each
dropout, never both of one client, and for one list of survivors only.

Differs from the paper: 1. keys are advertised under signatures for both adversaries, and every peer verifies them.
2. the hash of an own-mask seed is advertised too, so that wrong shares are noticed. 3. a pair masks the groups of
entries that both of them send, so that unequal ranks cost what they send. 4. a sum of a group over fewer than
`least_senders` survivors stays hidden: groups that dropouts may leave so small (`OpenableGroups.at_risk`) have own-mask
seeds of their own, derived from the shared secret. Survivors reveal that secret of a client whose groups may all be
opened; of any other client the seed of the groups that are not at risk, which is shared as a third secret, and the
client itself reveals the seeds of its groups that may be opened. 5. what is signed in step 3 covers the groups of all
clients, and the model that the signer was sent. 6. the first t - 1 clients, where t are needed, are sent no shares:
sender and recipient derive them from their agreed key, and the shares of the others follow from these and the secret.
Primitives are those of `cryptography`: X25519, Ed25519, HKDF-SHA256, ChaCha20-Poly1305, and AES-256 in counter mode.
"""

from __future__ import annotations

import hashlib
import secrets
import struct
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from enum import IntEnum

import numpy as np
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

from narrowcast.algorithms.secure.answered_rounds import NO_MODEL, Accepted
from narrowcast.algorithms.secure.keys import (
    SECRET_BYTES,
    SEED_BYTES,
    SHARE_BYTES,
    KeyAgreements,
    check_public_key,
    random_share,
    split,
)
from narrowcast.algorithms.secure.masks import OpenableGroups, OwnSeeds, shared_seed
from narrowcast.algorithms.secure.messages import (
    RECIPIENT_BYTES,
    EnrolledClients,
    EnvelopeFormat,
    Messages,
    sealed_bytes,
)
from narrowcast.platform.seeds import stream_keys, uniform_unit
from narrowcast.platform.types import IntArray, PayloadError

_ADDRESS = struct.Struct("<III")
_NONCE = bytes(12)  # a key seals one message: it belongs to a pair, a direction and a round
_HIDDEN_SHARE, _HIDDEN_SEED = bytes(SHARE_BYTES), bytes(SECRET_BYTES)


@dataclass
class MaskingClient:
    """The state of one client in one round; private except for what its methods return.

    `signing_key` is its Ed25519 key, and `enrolled` are its peers as it knows them. `accepted` is what it has accepted
    in this round, before a crash too: it answers for no other list of survivors, and trains no other model.
    """

    messages: Messages
    round_index: int
    client: int
    signing_key: bytes = field(repr=False)
    enrolled: EnrolledClients = field(repr=False)
    agreements: KeyAgreements = field(default_factory=KeyAgreements, repr=False)
    _mask_key: X25519PrivateKey = field(default_factory=X25519PrivateKey.generate, repr=False)
    _seal_key: X25519PrivateKey = field(default_factory=X25519PrivateKey.generate, repr=False)
    _own_secret: bytes = field(default_factory=lambda: secrets.token_bytes(SECRET_BYTES), repr=False)
    _peers: dict[int, bytes] = field(default_factory=dict, repr=False)
    _shares: dict[int, bytes] = field(default_factory=dict, repr=False)
    _rule: OpenableGroups | None = None
    accepted: Accepted | None = None
    _model: bytes | None = None

    def __post_init__(self) -> None:
        self._mask_public = self._mask_key.public_key().public_bytes_raw()
        self._seal_public = self._seal_key.public_key().public_bytes_raw()

    def advertise_keys(self) -> bytes:
        """Return the message with the public keys for masks and for sealing, and the hash of an own-mask seed."""
        commitment = hashlib.sha256(shared_seed(self._own_secret)).digest()
        keys = self._mask_public + self._seal_public + commitment
        return self.messages.advertised_keys(self.round_index).seal(self.client, [keys], self.signing_key)

    def share_keys(self, advertised: Sequence[bytes], rule: OpenableGroups) -> bytes:
        """Return the message with the sealed shares of its secrets, for all other clients that do not derive theirs.

        `advertised` are the messages of these clients, its own included, and `rule` is what the participants are told.
        Raise `PayloadError` for a message that its sender did not sign, for keys of low order, and for too few clients.
        """
        message = self.messages.advertised_keys(self.round_index)
        self._peers = dict(sorted(self.enrolled.open(message, data) for data in advertised))
        self._rule = rule
        own_keys = self._mask_public + self._seal_public
        if len(self._peers) < rule.threshold or self._peers.get(self.client, b"")[:64] != own_keys:
            raise PayloadError(f"client {self.client} shares nothing: {len(self._peers)} clients advertised keys")
        if not self._peers.keys() <= rule.sent.keys():
            raise PayloadError(f"client {self.client} shares nothing: clients advertised keys that do not take part")
        points = {peer: index + 1 for index, peer in enumerate(rule.clients) if peer in self._peers}
        held = [self._mask_key.private_bytes_raw(), self._own_secret]
        held += [shared_seed(self._own_secret)] * bool(rule.risky(self.client))
        derived = {peer: self._derived_shares(self.client, peer) for peer in self._deriving()}
        shares = [
            split(secret, list(points.values()), {points[peer]: drawn[index] for peer, drawn in derived.items()})
            for index, secret in enumerate(held)
        ]
        sealed = []
        for peer, point in points.items():
            data = b"".join(share[point] for share in shares)
            if peer == self.client:
                self._shares[peer] = data
            elif peer not in derived:
                box = self._cipher(peer, peer).encrypt(_NONCE, data, self._label(self.client, peer))
                sealed.append(peer.to_bytes(4, "little") + box)
        message = self.messages.shares(self.round_index, len(sealed), len(rule.risky(self.client)))
        return message.seal(self.client, [b"".join(sealed)], self.signing_key)

    def receive_shares(self, shared: Collection[int], sealed: Mapping[int, bytes]) -> None:
        """Keep the shares of the clients that shared theirs: those that came sealed, and those that both ends derive.

        Raise `PayloadError` for one that was changed or is for another client. The peers that did not share have
        dropped out: they share no masks.
        """
        derives = self.client in self._deriving()
        for peer in sorted(set(shared) - {self.client}):
            try:
                if derives:
                    self._shares[peer] = b"".join(self._derived_shares(peer, self.client))
                else:
                    cipher = self._cipher(peer, self.client)
                    self._shares[peer] = cipher.decrypt(_NONCE, sealed[peer], self._label(peer, self.client))
            except (InvalidTag, KeyError):
                raise PayloadError(f"the shares of client {peer} for client {self.client} do not open") from None
            if len(self._shares[peer]) != SHARE_BYTES * (3 if self._told.risky(peer) else 2):
                raise PayloadError(f"client {peer} shares another number of secrets than its groups need")

    def _deriving(self) -> list[int]:
        """Return the clients that derive their shares from the keys of pairs: one less than needed."""
        return [peer for peer in self._told.clients if peer in self._peers][: self._told.threshold - 1]

    def _derived_shares(self, sender: int, recipient: int) -> list[bytes]:
        """Return the recipient's shares of the sender's secrets, which both derive; the sender's own are random."""
        size = SEED_BYTES * (3 if self._told.risky(sender) else 2)
        if sender == recipient:
            stream = secrets.token_bytes(size)
        else:
            peer = recipient if self.client == sender else sender
            ends, numbers = (self._seal_public, self._peers[peer][32:64]), (self.round_index, sender)
            stream = self.agreements.key(self._seal_key, *ends, b"derived shares", *numbers, size=size)
        return [random_share(stream[at : at + SEED_BYTES]) for at in range(0, size, SEED_BYTES)]

    def mask_seeds(self) -> tuple[bytes, dict[int, bytes]]:
        """Return the secret of the own masks, and the seed of the mask shared with each other client.

        Raise `PayloadError` if too few clients shared their keys.
        """
        if len(self._shares) < self._told.threshold:
            raise PayloadError(f"client {self.client} sends nothing: {len(self._shares)} clients shared their keys")
        pairs = {
            peer: self.agreements.key(self._mask_key, self._mask_public, keys[:32], b"mask", self.round_index)
            for peer, keys in self._peers.items()
            if peer in self._shares and peer != self.client
        }
        return self._own_secret, pairs

    def train_on(self, model: bytes) -> None:
        """Take the hash of the model that the client is sent; raise `PayloadError` for a second one in the round."""
        known = self._model if self.accepted is None else self.accepted.model
        if known not in (None, model):
            raise PayloadError(f"client {self.client} has been sent another model in round {self.round_index}")
        self._model = model

    def sign_survivors(self, survivors: Collection[int]) -> bytes:
        """Return the list of survivors under the client's signature, with what it was told of the round.

        Raise `PayloadError` for a list that it does not accept, or another one than the round's first.
        """
        self._accept(survivors)
        return self._seen.seal(self.client, [self._packed(survivors)], self.signing_key)

    def unmask(self, survivors: Collection[int], signed: Sequence[bytes] = ()) -> bytes:
        """Return the message with a share for each participant, and with the client's own seeds of groups at risk.

        `signed` are the signed lists of survivors, of which the active model needs as many as a round needs survivors.
        Raise `PayloadError` for a list that the client does not accept, another one than the round's first, or too few
        signatures.
        """
        rule = self._told
        self._accept(survivors)
        if self.messages.active:
            self._check_signatures(survivors, signed)
        opened, own_seeds = rule.opened(survivors), OwnSeeds.of(self._own_secret, rule.risky(self.client))
        whole = rule.fully_opened(opened)
        shares = [self._share_of(peer, survivors, whole) for peer in rule.clients]
        seeds = [seed if opened[group] else _HIDDEN_SEED for group, seed in own_seeds.of_group.items()]
        message = self.messages.unmasking_shares(self.round_index, len(seeds))
        return message.seal(self.client, [b"".join([*shares, *seeds])], self.signing_key)

    def _share_of(self, peer: int, survivors: Collection[int], whole: Collection[int]) -> bytes:
        """Return the one share of a peer that this list of survivors lets the client reveal."""
        if peer not in self._shares:
            return _HIDDEN_SHARE
        kind = 0 if peer not in survivors else 1 if peer in whole else 2
        start = kind * SHARE_BYTES
        return self._shares[peer][start : start + SHARE_BYTES]

    def _accept(self, survivors: Collection[int]) -> None:
        listed = frozenset(survivors)
        why = ""
        if len(listed) < self._told.threshold:
            why = f"{len(listed)} arrived, {self._told.threshold} are needed"
        elif not listed <= self._shares.keys():
            why = "the list has clients that shared no keys"
        elif self.client not in listed:
            why = "it is not on the list of those that arrived"
        elif self.accepted is not None and self.accepted.survivors != listed:
            why = "it has answered for another list"
        if why:
            raise PayloadError(f"client {self.client} reveals nothing: {why}")
        self.accepted = self.accepted or Accepted(listed, self._model or NO_MODEL)

    def _check_signatures(self, survivors: Collection[int], signed: Sequence[bytes]) -> None:
        """Raise `PayloadError` unless enough survivors signed this very list, told the same as this client."""
        agreed = {
            client
            for client, body in (self.enrolled.open(self._seen, data) for data in signed)
            if body == self._packed(survivors)
        } & set(survivors)
        if len(agreed) < self._told.threshold:
            raise PayloadError(
                f"client {self.client} reveals nothing: {len(agreed)} signed its list of survivors, "
                f"{self._told.threshold} are needed"
            )

    @property
    def _seen(self) -> EnvelopeFormat:
        """The signed list, made with what the client was told and with the model that it was sent."""
        return self.messages.survivors_seen(self.round_index, self._told.digest + (self._model or NO_MODEL))

    def _packed(self, survivors: Collection[int]) -> bytes:
        return np.packbits([client in survivors for client in self._told.clients]).tobytes()

    @property
    def _told(self) -> OpenableGroups:
        if self._rule is None:
            raise PayloadError(f"client {self.client} has shared no keys in round {self.round_index}")
        return self._rule

    def _cipher(self, peer: int, recipient: int) -> ChaCha20Poly1305:
        key, public = self._peers[peer][32:64], self._seal_public
        numbers = (self.round_index, recipient)
        return ChaCha20Poly1305(self.agreements.key(self._seal_key, public, key, b"shares", *numbers))

    def _label(self, sender: int, recipient: int) -> bytes:
        return _ADDRESS.pack(self.round_index, sender, recipient)


class Step(IntEnum):
    """The steps of a round; a client stops answering at one of them, or at none."""

    ADVERTISES = 0
    SHARES = 1
    UPLOADS = 2
    SIGNS = 3
    REVEALS = 4
    NEVER = 5


def dropout_steps(seed: int, round_index: int, clients: IntArray, probability: float) -> IntArray:
    """Draw the step from which each client no longer answers, [C]; whether an upload arrives is drawn elsewhere."""
    keys = stream_keys(seed, "secure dropout", round_index, clients)
    steps = np.array([Step.ADVERTISES, Step.SHARES, Step.SIGNS, Step.REVEALS])
    gone = uniform_unit(keys[:, None], steps[None, :]) < probability
    return np.where(gone.any(axis=1), steps[gone.argmax(axis=1)], Step.NEVER)


def agree_on_keys(
    messages: Messages,
    round_index: int,
    rule: OpenableGroups,
    enrolled: EnrolledClients,
    signing_keys: Mapping[int, bytes],
    stop: Mapping[int, int],
) -> tuple[dict[int, MaskingClient], dict[int, bytes]]:
    """Run the steps *advertise keys* and *share keys* for all participants.

    Return the clients that shared their keys, and what they advertised; nobody if too few clients answer. A
    client whose message the server refuses counts as one that did not answer.
    """
    agreements = KeyAgreements()
    clients = {
        client: MaskingClient(messages, round_index, client, signing_keys[client], enrolled, agreements)
        for client in rule.clients
    }
    sent = {client: state.advertise_keys() for client, state in clients.items() if stop[client] > Step.ADVERTISES}
    advertised, accepted = dict[int, bytes](), list[bytes]()
    for client, data in sent.items():
        with suppress(PayloadError):
            advertised[client] = checked_keys(messages, round_index, enrolled, data)
            accepted.append(data)
    if len(advertised) < rule.threshold:
        return {}, {}
    boxes: dict[int, dict[int, bytes]] = {client: {} for client in advertised}
    present = dict[int, bytes]()
    for client, keys in advertised.items():
        if stop[client] <= Step.SHARES:
            continue
        shared = clients[client].share_keys(accepted, rule)
        with suppress(PayloadError):
            for peer, box in sealed_shares(messages, round_index, enrolled, rule, advertised, shared).items():
                boxes[peer][client] = box
            present[client] = keys
    if len(present) < rule.threshold:
        return {}, {}
    for client in present:
        clients[client].receive_shares(present, boxes[client])
    return {client: clients[client] for client in present}, present


def checked_keys(messages: Messages, round_index: int, enrolled: EnrolledClients, data: bytes) -> bytes:
    """Return the keys that a client advertised, [ADVERTISED_BYTES].

    Raise `PayloadError` for a message that a client did not sign, and for keys of low order.
    """
    _, keys = enrolled.open(messages.advertised_keys(round_index), data)
    check_public_key(keys[:32])
    check_public_key(keys[32:64])
    return keys


def sealed_shares(
    messages: Messages,
    round_index: int,
    enrolled: EnrolledClients,
    rule: OpenableGroups,
    advertised: Collection[int],
    data: bytes,
) -> dict[int, bytes]:
    """Return the sealed shares in a client's message, by recipient.

    `advertised` are the clients that advertised keys, in the order of the participants. Raise `PayloadError` for a
    message that a client did not sign, or that is not for each of its recipients once.
    """
    sender = EnvelopeFormat.sender(data)
    at_risk = len(rule.risky(sender)) if sender in advertised else 0
    recipients = set(list(advertised)[rule.threshold - 1 :]) - {sender}
    _, body = enrolled.open(messages.shares(round_index, len(recipients), at_risk), data)
    size = int(sealed_bytes(np.array(at_risk)))
    parts = [body[at : at + size] for at in range(0, len(body), size)]
    boxes = {int.from_bytes(part[:RECIPIENT_BYTES], "little"): part[RECIPIENT_BYTES:] for part in parts}
    if boxes.keys() != recipients:
        raise PayloadError(f"the shares of client {sender} are not for each of the others once")
    return boxes
