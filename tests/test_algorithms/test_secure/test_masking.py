"""Pairwise masks: secret sharing, masks that cancel, dropouts at every step, groups of few clients, refused shares."""

from __future__ import annotations

import contextlib
import secrets
from itertools import product
from typing import Any

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from hypothesis import given, settings
from hypothesis import strategies as st

from masked_round import ROUND, MaskedRound
from narrowcast.algorithms.secure import keys
from narrowcast.algorithms.secure.keys import KeyAgreements
from narrowcast.algorithms.secure.masking_client import (
    Step,
    checked_keys,
    sealed_shares,
)
from narrowcast.algorithms.secure.messages import EnrolledClients, sealed_bytes
from narrowcast.algorithms.secure.unmasking import MaskRecovery
from narrowcast.platform.types import PayloadError

STEPS = [Step.ADVERTISES, Step.SHARES, Step.UPLOADS, Step.SIGNS, Step.REVEALS, Step.NEVER]


@given(st.integers(1, 12), st.integers(0, 12), st.randoms())
@settings(max_examples=30, deadline=None)
def test_enough_shares_give_the_secret_and_fewer_do_not(threshold: int, more: int, random: Any) -> None:
    secret, points = secrets.token_bytes(32), range(1, threshold + more + 1)
    known = {point: keys.random_share(secrets.token_bytes(48)) for point in points[: threshold - 1]}
    shares = keys.split(secret, points, known)
    assert shares.keys() == set(points)
    assert {point: shares[point] for point in known} == known
    chosen = random.sample(list(points), threshold)
    assert keys.combine({point: shares[point] for point in chosen}) == secret
    if threshold > 1:
        fewer = {point: shares[point] for point in chosen[1:]}
        with contextlib.suppress(ValueError):  # not a 32-byte secret
            assert keys.combine(fewer) != secret


@st.composite
def plays(draw: Any) -> MaskedRound:
    n, n_groups = draw(st.integers(3, 7)), draw(st.integers(1, 4))
    groups = {
        10 + client: [True, *draw(st.lists(st.booleans(), min_size=n_groups - 1, max_size=n_groups - 1))]
        for client in range(n)
    }
    stop = st.sampled_from([*STEPS, Step.NEVER, Step.NEVER, Step.NEVER, Step.NEVER])
    return MaskedRound(
        groups,
        draw(st.integers(n // 2 + 1, n)),
        draw(st.integers(1, 3)),
        {client: draw(stop) for client in groups},
        draw(st.sampled_from(["honest_but_curious", "active"])),
    )


@given(plays())
@settings(max_examples=60, deadline=None)
def test_any_dropouts_leave_the_plain_sums_of_the_groups_that_may_be_opened(masked: MaskedRound) -> None:
    assert masked.run() == masked.reference()


@pytest.mark.parametrize("adversary", ["honest_but_curious", "active"])
@pytest.mark.parametrize("step", STEPS[:-1])
def test_a_round_completes_with_as_many_as_needed_and_not_with_fewer(step: int, adversary: str) -> None:
    groups = {client: [True, client % 2 == 0] for client in range(7)}
    for gone in (2, 3):
        masked = MaskedRound(groups, 5, 2, dict.fromkeys(range(1, 1 + gone), step), adversary)
        assert masked.run() == masked.reference()
        assert (masked.run() is None) == (gone == 3)


@pytest.mark.slow
@pytest.mark.parametrize("senders", [1, 2, 3])
def test_a_group_of_few_stays_hidden_under_every_pattern_of_dropouts(senders: int) -> None:
    """Six clients, of which four may finish; a group of 1, 2 or 3 needs three senders, another may not."""
    groups = {client: [True, client < senders, client % 2 == 0] for client in range(6)}
    opened = 0
    for pattern in product([Step.NEVER, Step.UPLOADS, Step.REVEALS], repeat=6):
        if sum(each != Step.NEVER for each in pattern) > 2:
            continue
        masked = MaskedRound(groups, 4, 3, dict(enumerate(pattern)))
        result = masked.run()
        assert result is not None
        assert result == masked.reference()
        arrived = sum(each != Step.UPLOADS for each in pattern[:senders])
        assert (1 in result) <= (arrived == 3)
        opened += 1 in result
    assert (opened > 0) == (senders == 3)


def revealed_seeds(masked: MaskedRound) -> tuple[MaskRecovery, dict[int, Any], dict[int, bytes], list[int]]:
    clients, advertised = masked.agree()
    survivors = [client for client in clients if masked.stop(client) > Step.UPLOADS]
    return masked.recovery(clients, advertised, survivors), clients, advertised, survivors


def test_the_server_cannot_read_a_thin_group_from_all_that_is_revealed() -> None:
    """The control: with a smaller bound the same subtraction reads the group of one client."""
    groups = {client: [True, client in (0, 1), True] for client in range(6)}
    for least, reads in ((2, False), (1, True)):
        masked = MaskedRound(groups, 4, least, {1: Step.UPLOADS})
        recovery, clients, advertised, survivors = revealed_seeds(masked)
        upload = masked.upload(clients[0])[1]
        left = recovery.masks(masked.layout, advertised)[1]
        assert bool(recovery.opened[1]) == reads
        assert np.array_equal((upload - left) % 2**32, masked.values(0, 1)) == reads
        assert recovery.opened[[0, 2]].all()
        assert survivors == [0, 2, 3, 4, 5]


def test_wrong_shares_are_noticed() -> None:
    masked = MaskedRound({client: [True] for client in range(10, 17)}, 4)
    clients, advertised = masked.agree()
    survivors = [10, 11, 12, 13]
    bodies = {each: masked.body(each, clients[each].unmask(survivors)) for each in survivors}
    assert MaskRecovery.of(ROUND, masked.rule, advertised, survivors, bodies).opened.all()
    for place in range(7):
        spoilt = bytearray(bodies[12])
        spoilt[33 * place + 20] ^= 1
        with pytest.raises(PayloadError, match=f"client {10 + place}'s secret do not give"):
            MaskRecovery.of(ROUND, masked.rule, advertised, survivors, {**bodies, 12: bytes(spoilt)})
    del bodies[11]
    with pytest.raises(PayloadError, match="3 of 4 clients revealed shares, 4 needed"):
        MaskRecovery.of(ROUND, masked.rule, advertised, survivors, bodies)


def test_shares_that_were_changed_or_are_for_another_do_not_open() -> None:
    masked = MaskedRound({client: [True] for client in range(3)}, 2)
    clients, _ = masked.agree()  # client 0 derives its shares
    boxes = {}
    for recipient in (1, 2):
        share = bytes(66)
        cipher = clients[0]._cipher(recipient, recipient)
        boxes[recipient] = cipher.encrypt(bytes(12), share, clients[0]._label(0, recipient))
    clients[1].receive_shares([0], {0: boxes[1]})
    with pytest.raises(PayloadError, match="do not open"):
        clients[1].receive_shares([0], {0: boxes[1][:-1] + bytes([boxes[1][-1] ^ 1])})
    with pytest.raises(PayloadError, match="do not open"):
        clients[2].receive_shares([0], {0: boxes[1]})
    with pytest.raises(PayloadError, match="do not open"):
        clients[2].receive_shares([9], {9: boxes[1]})


LOW_ORDER = [
    bytes(32),
    b"\1" + bytes(31),
    bytes.fromhex("e0eb7a7c3b41b8ae1656e3faf19fc46ada098deb9c32b1fd866205165f49b800"),
    bytes.fromhex("5f9c95bca3508c24b1d0b1559c83ef5b04445cc4581c8e86d8224eddd09f1157"),
    bytes.fromhex("ecffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff7f"),
    bytes.fromhex("edffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff7f"),
    bytes.fromhex("eeffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff7f"),
]


@pytest.mark.parametrize("key", LOW_ORDER, ids=lambda key: key.hex()[:4])
def test_keys_of_low_order_are_refused(key: bytes) -> None:
    private = X25519PrivateKey.generate()
    with pytest.raises(PayloadError, match="low order"):
        KeyAgreements().key(private, private.public_key().public_bytes_raw(), key, b"mask")
    masked = MaskedRound({client: [True] for client in range(3)}, 2)
    good = private.public_key().public_bytes_raw()
    for pair in (key + good, good + key):
        sent = masked.messages.advertised_keys(ROUND).seal(1, [pair + bytes(32)], masked.signing[1])
        with pytest.raises(PayloadError, match="low order"):
            checked_keys(masked.messages, ROUND, EnrolledClients(masked.keys), sent)


def mutated(data: bytes, random: np.random.Generator) -> bytes:
    match int(random.integers(4)):
        case 0:
            return data[: int(random.integers(len(data)))]
        case 1:
            return data + random.bytes(int(random.integers(1, 90)))
        case 2:
            return random.bytes(len(data))
        case _:
            place = int(random.integers(len(data)))
            return data[:place] + bytes([data[place] ^ 1 << int(random.integers(8))]) + data[place + 1 :]


@pytest.mark.slow
def test_two_thousand_mutations_of_each_message_are_refused() -> None:
    masked = MaskedRound({client: [True, client < 4] for client in range(5)}, 4, 3, adversary="active")
    enrolled, random, survivors = EnrolledClients(masked.keys), np.random.default_rng(0), [0, 1, 2, 3]
    clients, advertised = masked.agree()
    everything = [each.advertise_keys() for each in clients.values()]
    shared = clients[1].share_keys(everything, masked.rule)
    signed = [clients[each].sign_survivors(survivors) for each in survivors]
    revealed = clients[1].unmask(survivors, signed)
    others = everything[:1] + everything[2:]
    readers: list[tuple[bytes, Any]] = [
        (everything[1], lambda data: checked_keys(masked.messages, ROUND, enrolled, data)),
        (everything[1], lambda data: clients[0].share_keys([*others, data], masked.rule)),
        (shared, lambda data: sealed_shares(masked.messages, ROUND, enrolled, masked.rule, advertised, data)),
        (signed[1], lambda data: clients[0].unmask(survivors, [signed[0], data, *signed[2:]])),
        (revealed, lambda data: masked.body(1, data)),
    ]
    for good, read in readers:
        read(good)
        for _ in range(2000):
            if (bad := mutated(good, random)) != good:
                with pytest.raises(PayloadError):
                    read(bad)


def test_shares_that_their_owner_signed_and_made_up_are_refused() -> None:
    masked = MaskedRound({client: [True] for client in range(4)}, 3)
    clients, advertised = masked.agree()
    bodies = {each: masked.body(each, clients[each].unmask([0, 1, 2])) for each in (0, 1, 2)}
    random = np.random.default_rng(0)
    for _ in range(200):
        made_up = {**bodies, 1: random.bytes(len(bodies[1]))}
        with pytest.raises(PayloadError, match="do not give the one that it advertised"):
            MaskRecovery.of(ROUND, masked.rule, advertised, [0, 1, 2], made_up)
    enrolled, size = EnrolledClients(masked.keys), int(sealed_bytes(np.array(0)))
    for recipients in ([2, 2], [1, 3], [2, 9], [0, 2]):  # clients 0 and 1 derive their shares
        body = b"".join(each.to_bytes(4, "little") + bytes(size - 4) for each in recipients)
        sent = masked.messages.shares(ROUND, 2, 0).seal(1, [body], masked.signing[1])
        with pytest.raises(PayloadError, match="not for each of the others once"):
            sealed_shares(masked.messages, ROUND, enrolled, masked.rule, advertised, sent)
