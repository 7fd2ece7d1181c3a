"""The first steps of a round with masks, *advertise keys* and *share keys*: messages between the server and clients."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from contextlib import suppress

import numpy as np

from narrowcast.algorithms.secure.envelope import EnrolledClients, EnvelopeFormat
from narrowcast.algorithms.secure.key_agreement import KeyAgreements, check_public_key
from narrowcast.algorithms.secure.masking_client import MaskingClient
from narrowcast.algorithms.secure.messages import RECIPIENT_BYTES, Messages, sealed_bytes
from narrowcast.algorithms.secure.openable_groups import OpenableGroups
from narrowcast.platform.seeds import stream_keys, uniform_unit
from narrowcast.platform.types import IntArray, PayloadError

ADVERTISES, SHARES, UPLOADS, SIGNS, REVEALS, STAYS = range(6)
"""The steps of a round; a client stops answering at one of them, or stays."""


def stops(seed: int, round_index: int, clients: IntArray, probability: float) -> IntArray:
    """Draw the step from which each client no longer answers, [C]; whether an upload arrives is drawn elsewhere."""
    keys = stream_keys(seed, "secure dropout", round_index, clients)
    steps = np.array([ADVERTISES, SHARES, SIGNS, REVEALS])
    gone = uniform_unit(keys[:, None], steps[None, :]) < probability
    return np.where(gone.any(axis=1), steps[gone.argmax(axis=1)], STAYS)


def agree_on_keys(
    messages: Messages,
    round_index: int,
    rule: OpenableGroups,
    enrolled: EnrolledClients,
    signing_keys: Mapping[int, bytes],
    stop: Mapping[int, int],
) -> tuple[dict[int, MaskingClient], dict[int, bytes]]:
    """Run both steps for all participants; return the clients that shared their keys, and what they advertised.

    Nobody is returned if too few clients answer. A client whose message the server refuses counts as one that did not
    answer.
    """
    agreements = KeyAgreements()
    clients = {
        client: MaskingClient(messages, round_index, client, signing_keys[client], enrolled, agreements)
        for client in rule.clients
    }
    sent = {client: each.advertise_keys() for client, each in clients.items() if stop[client] > ADVERTISES}
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
        if stop[client] <= SHARES:
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
