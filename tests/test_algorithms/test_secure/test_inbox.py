"""The inbox and the key holder: altered, foreign and repeated messages are refused and leave the sum unchanged."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from narrowcast.algorithms.client.sums import MaskGroup, SumBlock, SumLayout
from narrowcast.algorithms.secure.aggregation import masked
from narrowcast.algorithms.secure.ckks import CKKS
from narrowcast.algorithms.secure.key_store import KeyStore
from narrowcast.algorithms.secure.masking_client import Step
from narrowcast.algorithms.secure.masks import OpenableGroups
from narrowcast.algorithms.secure.messages import Messages
from narrowcast.algorithms.secure.schemes import Masked, Plain, PublicKey
from narrowcast.algorithms.secure.unmasking import Inbox
from narrowcast.platform.types import PayloadError

GROUP = MaskGroup((SumBlock("sum", None, 50),), (SumBlock("weight", None, 20),))
MESSAGES = [
    Messages(scheme, SumLayout((GROUP, GROUP), {}, 5, 5), 5)
    for scheme in (Plain(), Masked(), CKKS(ring=4096, prime_bits=(48, 60), bits=16))
]


def sealed(messages: Messages) -> tuple[KeyStore, PublicKey, dict[int, bytes], dict[int, bytes]]:
    """Return a round of five clients: key store, public key, verification keys, an envelope of each client."""
    key_store = KeyStore(messages.scheme)
    public, clients = PublicKey.of(key_store.call("public", 0, {})), np.arange(5)
    begin = {"clients": clients, "groups": np.ones((5, 2), dtype=np.uint8), "stops": np.full(5, Step.NEVER)}
    keys = dict(enumerate(map(bytes, key_store.call("begin", 1, begin)["verify"])))
    rule = OpenableGroups(tuple(range(5)), np.ones((5, 2), dtype=bool), 3, 3)
    held = key_store.call("secrets", 1, {"clients": clients, "model": np.zeros(32, dtype=np.uint8)})
    envelopes = {}
    for client in range(5):
        integers = np.concatenate([np.arange(50) - client, np.full(20, client % 2)])
        masks: list[Any] = [None, None]
        if "own" in held:
            pairs = {peer: held["pairs"][client, peer].tobytes() for peer in range(5) if peer != client}
            masks = messages.mask_layout().of_client(client, held["own"][client].tobytes(), pairs, rule)
        bodies = [messages.scheme.encode(GROUP, masked(integers, mask), messages.fixed_point, public) for mask in masks]
        envelopes[client] = messages.update(1, public).seal(client, bodies, held["signing"][client].tobytes())
    return key_store, public, keys, envelopes


@pytest.mark.parametrize("messages", MESSAGES, ids=lambda each: each.scheme.kind)
def test_two_thousand_hostile_payloads_are_refused_and_leave_the_sum_alone(messages: Messages) -> None:
    _, public, keys, envelopes = sealed(messages)
    foreign = sealed(messages)[3]
    inbox, random = Inbox(messages, 1, public, keys), np.random.default_rng(0)
    inbox.receive(envelopes[0])
    before = [words.copy() for words in inbox.sums if words is not None]
    why: Counter[str] = Counter()
    for trial in range(2000):
        good = bytearray(envelopes[1 + trial % 4])
        match trial % 8:
            case 0:
                bad = bytes(good[: random.integers(0, len(good))])
            case 1:
                bad = bytes(good) + random.bytes(int(random.integers(1, 90)))
            case 2:
                good[int(random.integers(0, len(good)))] ^= 1 << int(random.integers(0, 8))
                bad = bytes(good)
            case 3:
                start, size = int(random.integers(0, len(good) - 60)), int(random.integers(1, 60))
                good[start : start + size] = bytes(255 - byte for byte in good[start : start + size])
                bad = bytes(good)
            case 4:
                bad = random.bytes(int(random.integers(0, 300)))
            case 5:
                bad = foreign[1 + trial % 4]
            case 6:
                bad = envelopes[0]
            case _:
                bad = (
                    bytes(good[:7]) + envelopes[2 + trial % 3][7:] if trial % 4 != 3 else bytes(good[:-64]) + bytes(64)
                )
        with pytest.raises(PayloadError) as refused:
            inbox.receive(bad)
        why[" ".join(str(refused.value).split()[-3:])] += 1
    assert inbox.received == {0}
    for words, kept in zip([each for each in inbox.sums if each is not None], before, strict=True):
        assert np.array_equal(words, kept)
    assert len(why) > 5
    assert inbox.receive(envelopes[1]) == 1


@pytest.mark.parametrize("messages", MESSAGES, ids=lambda each: each.scheme.kind)
def test_an_envelope_of_another_round_or_client_is_refused(messages: Messages) -> None:
    _, public, keys, envelopes = sealed(messages)
    later = Inbox(messages, 2, public, keys)
    with pytest.raises(PayloadError, match="client 1 is of round 1, not 2"):
        later.receive(envelopes[1])
    with pytest.raises(PayloadError, match="client 1 was not asked in round 1"):
        Inbox(messages, 1, public, {0: keys[0]}).receive(envelopes[1])
    with pytest.raises(PayloadError, match="another context"):
        Inbox(messages, 1, replace(public, key=b"another"), keys).receive(envelopes[1])
    with pytest.raises(PayloadError, match="another context"):  # another run with the same keys
        Inbox(replace(messages, run=bytes(16)), 1, public, keys).receive(envelopes[1])


def test_a_signed_ciphertext_beyond_its_modulus_is_refused() -> None:
    messages = MESSAGES[2]
    key_store, public, keys, _ = sealed(messages)
    signing = key_store.call("secrets", 1, {"clients": np.arange(5)})["signing"][1].tobytes()
    size = messages.scheme.group_bytes(GROUP, messages.fixed_point)
    with pytest.raises(PayloadError, match="residues that are not below its modulus"):
        Inbox(messages, 1, public, keys).receive(messages.update(1, public).seal(1, [b"\xff" * size] * 2, signing))


def test_a_key_holder_opens_a_sum_once() -> None:
    messages = MESSAGES[2]
    key_store, public, keys, envelopes = sealed(messages)
    numbers = messages.fixed_point
    plan = np.array([0, 50, 20, numbers.max_weight, numbers.max_clients, 0])

    def opened(clients: list[int], place: int = 0) -> Any:
        inbox = Inbox(messages, 1, public, keys)
        for client in clients:
            inbox.receive(envelopes[client])
        request = {"group": np.r_[place, plan[1:]], "elements": inbox.sums[0], "clients": np.array(clients)}
        return key_store.call("open", 1, request)["integers"]

    first = opened([0, 1, 2, 3, 4])
    assert np.array_equal(first[:50], 5 * np.arange(50) - 10)
    assert np.array_equal(opened([0, 1, 2, 3, 4]), first), "an answer that was lost is given again"
    for others in ([0, 1, 2, 3], [1], [0, 0, 1, 2, 3]):
        with pytest.raises(PayloadError, match="group 0 in round 1 has been opened before, and was another one"):
            opened(list(dict.fromkeys(others)))
    for place in (-1, 2, 10**6):
        with pytest.raises(PayloadError, match=f"round 1 has no group {place}"):
            opened([1], place)
    with pytest.raises(PayloadError, match="do not answer"):
        key_store.call("secret_key", 1, {})
    assert public.key
