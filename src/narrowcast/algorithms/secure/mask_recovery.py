"""The server's side of unmasking (Bonawitz et al., CCS 2017, round 4): from revealed shares to the masks in the sum."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

import numpy as np
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from narrowcast.algorithms.secure.bit_packing import RingElements
from narrowcast.algorithms.secure.envelope import EnrolledClients
from narrowcast.algorithms.secure.key_agreement import KeyAgreements
from narrowcast.algorithms.secure.masks import MaskLayout, OwnSeeds
from narrowcast.algorithms.secure.messages import Messages
from narrowcast.algorithms.secure.openable_groups import OpenableGroups
from narrowcast.algorithms.secure.round_keys import RoundKeys
from narrowcast.algorithms.secure.shamir import SECRET_BYTES, SHARE_BYTES, combine
from narrowcast.platform.types import Arrays, BoolArray, PayloadError


@dataclass(frozen=True)
class MaskRecovery:
    """Secrets that the survivors reveal: own-mask seeds of survivors, private mask keys of dropouts.

    `opened` [groups] are the groups whose masks these secrets remove.
    """

    round_index: int
    rule: OpenableGroups
    opened: BoolArray
    own_seeds: Mapping[int, OwnSeeds] = field(repr=False)
    dropout_keys: Mapping[int, X25519PrivateKey] = field(repr=False)

    @classmethod
    def of(
        cls,
        round_index: int,
        rule: OpenableGroups,
        advertised: Mapping[int, bytes],
        survivors: Collection[int],
        revealed: Mapping[int, bytes | memoryview],
    ) -> MaskRecovery:
        """Combine what clients revealed, the body of `Messages.unmasking_shares` by client.

        `advertised` are the keys of the clients that shared theirs. The first `threshold` answers are used; raise
        `PayloadError` if there are fewer, or if a secret is not the advertised one. A survivor that has not answered
        leaves its groups at risk unopened, unless all of them may be opened.
        """
        if len(revealed) < rule.threshold:
            raise PayloadError(f"{len(revealed)} of {len(survivors)} clients revealed shares, {rule.threshold} needed")
        places = {client: place for place, client in enumerate(rule.clients)}
        used, own_seeds, private = list(revealed)[: rule.threshold], dict[int, OwnSeeds](), {}
        opened = left = rule.opened(survivors)
        fully_opened = rule.fully_opened(opened)
        for client, keys in advertised.items():
            at = places[client] * SHARE_BYTES
            shares = {places[each] + 1: bytes(revealed[each][at : at + SHARE_BYTES]) for each in used}
            try:
                secret = combine(shares)
            except ValueError:
                secret = bytes(SECRET_BYTES)
            if client not in survivors:
                private[client] = X25519PrivateKey.from_private_bytes(secret)
                matches = private[client].public_key().public_bytes_raw() == keys[:32]
            else:
                risky, whole = rule.risky(client), client in fully_opened
                own = OwnSeeds.of(secret, risky) if whole else OwnSeeds(secret, {})
                matches = hashlib.sha256(own.shared).digest() == keys[64:]
                if not whole and client in revealed:
                    own = OwnSeeds(secret, _revealed_seeds(revealed[client], risky, opened, len(rule.clients)))
                own_seeds[client] = own
            if not matches:
                raise PayloadError(f"the shares of client {client}'s secret do not give the one that it advertised")
        for client, own in own_seeds.items():
            left = left & ~(rule.sent[client] & rule.at_risk & ~_marked(own.of_group, len(opened)))
        return cls(round_index, rule, left, own_seeds, private)

    def masks(self, layout: MaskLayout, advertised: Mapping[int, bytes]) -> list[RingElements]:
        """Return the masks that are left in the sum of each group; meaningless for a group that is not opened."""
        totals, agreements, sent = layout.zeros(), KeyAgreements(), self.rule.sent
        for client, own in self.own_seeds.items():
            layout.add_own(totals, own, sent[client], self.rule.at_risk)
        for dropout, key in self.dropout_keys.items():
            for client in self.own_seeds:
                ends = advertised[dropout][:32], advertised[client][:32]
                seed = agreements.key(key, *ends, b"mask", self.round_index)
                layout.add(totals, seed, sent[dropout] & sent[client], negative=client > dropout)
        return [elements.astype(np.uint64) for elements in totals]


def recovered(
    messages: Messages, round_index: int, keys: RoundKeys, survivors: Collection[int], answers: Arrays
) -> MaskRecovery:
    """Combine the messages in which survivors reveal their shares, by the name of the client.

    Raise `PayloadError` as `MaskRecovery.of`, and for a message that is empty or that its client did not sign.
    """
    rule, enrolled = keys.participation.rule, EnrolledClients(keys.verify)
    revealed = dict(
        enrolled.open(messages.unmasking_shares(round_index, len(rule.risky(int(name)))), np.asarray(data).tobytes())
        for name, data in answers.items()
    )
    return MaskRecovery.of(round_index, rule, keys.advertised, survivors, revealed)


def _revealed_seeds(
    body: bytes | memoryview, risky: list[int], opened: BoolArray, participants: int
) -> dict[int, bytes]:
    """Return the seeds of groups at risk that a client revealed of its own masks."""
    start = participants * SHARE_BYTES
    seeds = [bytes(body[start + at * SECRET_BYTES :][:SECRET_BYTES]) for at in range(len(risky))]
    return {place: seed for place, seed in zip(risky, seeds, strict=True) if opened[place]}


def _marked(places: Collection[int], groups: int) -> BoolArray:
    return np.isin(np.arange(groups), list(places))
