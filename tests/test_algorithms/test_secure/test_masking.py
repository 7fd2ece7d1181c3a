"""Pairwise masks: secret sharing, masks that cancel, recovery of dropouts, and refused shares."""

from __future__ import annotations

import contextlib
import secrets
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from narrowcast.algorithms.secure import shamir
from narrowcast.algorithms.secure.bit_packing import to_ring, to_signed
from narrowcast.algorithms.secure.mask_recovery import MaskRecovery
from narrowcast.algorithms.secure.masking_client import MaskingClient
from narrowcast.algorithms.secure.masks import MaskLayout
from narrowcast.platform.types import PayloadError


@given(st.integers(1, 12), st.integers(0, 12), st.randoms())
@settings(max_examples=30, deadline=None)
def test_enough_shares_give_the_secret_and_fewer_do_not(threshold: int, more: int, random: Any) -> None:
    secret, points = secrets.token_bytes(32), range(1, threshold + more + 1)
    shares = dict(zip(points, shamir.split(secret, points, threshold), strict=True))
    chosen = random.sample(list(points), threshold)
    assert shamir.combine({point: shares[point] for point in chosen}) == secret
    if threshold > 1:
        fewer = {point: shares[point] for point in chosen[1:]}
        with contextlib.suppress(ValueError):  # not a 32-byte secret
            assert shamir.combine(fewer) != secret


def agreed(n: int = 7, threshold: int = 4) -> tuple[dict[int, MaskingClient], dict[int, bytes]]:
    clients = {client: MaskingClient(3, client) for client in range(10, 10 + n)}
    keys = {client: each.advertise_keys() for client, each in clients.items()}
    boxes: dict[int, dict[int, bytes]] = {client: {} for client in clients}
    for client, each in clients.items():
        for peer, sealed in each.share_keys(keys, threshold).items():
            boxes[peer][client] = sealed
    for client, each in clients.items():
        each.receive_shares(boxes[client])
    return clients, keys


def test_masks_cancel_and_those_of_dropouts_are_recovered() -> None:
    clients, keys = agreed()
    masked = MaskLayout((10, 6), 32)
    # One group that all clients send, and one that two survivors and two dropouts send.
    groups = {client: np.array([True, client in (10, 11, 14, 16)]) for client in clients}
    values = {client: [to_ring(np.arange(size) * client - 99, 32) for size in masked.sizes] for client in clients}
    survivors, totals = [10, 12, 13, 16], [np.zeros(size, dtype=np.uint64) for size in masked.sizes]
    for client, each in clients.items():
        masks = masked.of_client(client, *each.mask_seeds(), groups)
        for place in np.flatnonzero(groups[client]):
            assert (masks[place] != 0).all()
            if client in survivors:
                totals[place] += values[client][place] + masks[place]
    revealed = {client: clients[client].unmask(survivors) for client in survivors}
    left = MaskRecovery.of(3, keys, revealed, 4).masks(masked, groups, keys)
    for place, senders in enumerate((survivors, [10, 16])):
        sent = sum((values[client][place].view(np.int64) << 32 >> 32 for client in senders), np.int64(0))
        assert to_signed(totals[place] - left[place], 32).tolist() == np.asarray(sent).tolist()


def test_wrong_shares_are_noticed() -> None:
    clients, keys = agreed()
    revealed = {client: clients[client].unmask([10, 11, 12, 13]) for client in (10, 11, 12, 13)}
    for place in range(7):
        spoilt = {client: list(shares) for client, shares in revealed.items()}
        share = bytearray(spoilt[12][place])
        share[20] ^= 1
        spoilt[12][place] = bytes(share)
        with pytest.raises(PayloadError, match=f"client {10 + place}'s secret do not give"):
            MaskRecovery.of(3, keys, spoilt, 4)


def test_a_client_does_not_reveal_both_masks_nor_to_too_few() -> None:
    clients, _ = agreed()
    with pytest.raises(PayloadError, match="reveals nothing"):
        clients[10].unmask([10, 11, 12])
    clients[10].unmask([10, 11, 12, 13])
    with pytest.raises(PayloadError, match="reveals nothing"):
        clients[10].unmask([10, 11, 12, 14])


def test_shares_that_were_changed_or_are_for_another_do_not_open() -> None:
    clients = {client: MaskingClient(3, client) for client in range(3)}
    keys = {client: each.advertise_keys() for client, each in clients.items()}
    sealed = clients[0].share_keys(keys, 2)
    for each in (clients[1], clients[2]):
        each.share_keys(keys, 2)
    with pytest.raises(PayloadError, match="do not open"):
        clients[1].receive_shares({0: sealed[1][:-1] + bytes([sealed[1][-1] ^ 1])})
    with pytest.raises(PayloadError, match="do not open"):
        clients[2].receive_shares({0: sealed[1]})
