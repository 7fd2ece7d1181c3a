"""The parts of secure aggregation: bit and slot packing, shares, masks, ciphertexts, envelopes, refused settings."""

from __future__ import annotations

import contextlib
import secrets
import sys
from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import tenseal
from hypothesis import given, settings
from hypothesis import strategies as st

from narrowcast.algorithms.federated.sum_layout import Group, Part, SumLayout
from narrowcast.algorithms.secure import ckks, paillier, shamir
from narrowcast.algorithms.secure.bit_packing import pack_elements, packed_bytes, to_ring, to_signed, unpack_elements
from narrowcast.algorithms.secure.ckks_scheme import CKKS
from narrowcast.algorithms.secure.fixed_point import FixedPoint
from narrowcast.algorithms.secure.inbox import Inbox
from narrowcast.algorithms.secure.key_store import KeyStore
from narrowcast.algorithms.secure.mask_recovery import MaskRecovery
from narrowcast.algorithms.secure.masking_client import MaskingClient
from narrowcast.algorithms.secure.masks import MaskLayout
from narrowcast.algorithms.secure.messages import Messages
from narrowcast.algorithms.secure.protection import Masked, Plain, PublicKey
from narrowcast.algorithms.secure.slot_packing import SlotPlan
from narrowcast.experiment import load_experiment
from narrowcast.platform.errors import UserError
from narrowcast.platform.types import PayloadError
from secure_rounds import SCHEMES, experiment, play, prepared

GROUP = Group((Part("sum", None, 50),), (Part("weight", None, 20),))
MESSAGES = [
    Messages(scheme, SumLayout((GROUP, GROUP), {}, 5, 5), 5)
    for scheme in (Plain(), Masked(), CKKS(ring=4096, prime_bits=(48, 60), bits=16))
]


@given(st.integers(1, 64), st.integers(0, 41), st.integers(0, 2**32))
@settings(max_examples=60, deadline=None)
def test_words_of_any_width_come_back(bits: int, count: int, seed: int) -> None:
    words = (
        np.random.default_rng(seed).integers(0, 2**bits, count, dtype=np.uint64, endpoint=False)
        if bits < 64
        else (np.random.default_rng(seed).integers(0, 2**64 - 1, count, dtype=np.uint64))
    )
    data = pack_elements(words, bits)
    assert len(data) == packed_bytes(count, bits)
    assert np.array_equal(unpack_elements(data, count, bits), words)
    with pytest.raises(PayloadError):
        unpack_elements(data + b"\0", count, bits)


@given(st.integers(2, 24), st.integers(1, 90), st.integers(0, 40), st.integers(0, 40), st.integers(0, 2**32))
@settings(max_examples=80, deadline=None)
def test_slots_carry_the_sum_of_what_is_packed(
    bits: int, clients: int, n_values: int, n_counts: int, seed: int
) -> None:
    random, numbers = np.random.default_rng(seed), FixedPoint(1.0, bits, "nearest", clients, clients)
    plan = SlotPlan(n_values, n_counts, numbers.value_bits, numbers.count_bits, 40)
    most = 2 ** (bits - 1)
    all_of_them = [
        np.concatenate([random.choice([-most, most, 0, 1], n_values), random.integers(0, 2, n_counts)])
        for _ in range(clients)
    ]
    total = sum(plan.pack(each) for each in all_of_them)
    assert plan.slots == 0 or np.abs(total).max() < 2**39
    assert np.array_equal(plan.unpack(np.asarray(total, dtype=np.int64)), sum(all_of_them))


def test_rounding_at_random_is_unbiased_and_the_same_for_everyone() -> None:
    layout, partial = SumLayout((GROUP,), {}, 5, 5), {"sum": np.full(50, 0.3), "weight": np.ones(20)}
    numbers = FixedPoint(1.0, 3, "stochastic", 5, 5)
    drawn = [numbers.of_client(partial, layout, np.ones(1, dtype=bool), 7, (r, 3))[0][:50] for r in range(400)]
    assert abs(np.mean(drawn) * numbers.step - 0.3) < 0.01
    assert len(set(np.ravel(drawn))) == 2
    again = numbers.of_client(partial, layout, np.ones(1, dtype=bool), 7, (0, 3))[0][:50]
    assert np.array_equal(drawn[0], again)


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


@pytest.mark.parametrize(("ring", "prime_bits"), [(4096, (48, 60)), (8192, (60, 60))])
def test_sums_of_ciphertexts_are_tenseals_and_come_back_exact(ring: int, prime_bits: tuple[int, int]) -> None:
    scheme = CKKS(ring=ring, prime_bits=prime_bits)
    secret = ckks.make_context(ring, prime_bits)
    public = ckks.read_public(ckks.public_part(secret))
    assert not public.has_secret_key()
    prime, scale = ckks.modulus(public), scheme.noise_scale_bits(60)
    assert prime.bit_length() == prime_bits[0]
    most = 2 ** (scheme.slot_bits(60) - 1) // 60
    slots = np.random.default_rng(0).integers(-most, most, (60, ring // 2 + 3))
    total = ckks.encrypt(public, slots[0], scale, ring)
    for each in slots[1:]:
        data = ckks.write_residues(ckks.encrypt(public, each, scale, ring), prime_bits[0])
        total = ckks.add_residues(total, ckks.read_residues(data, len(total), prime_bits[0], prime), prime)
    assert np.array_equal(ckks.decrypt(secret, total, slots.shape[1], scale, ring), slots.sum(axis=0))
    two = [tenseal.ckks_vector(public, [float(x)] * (ring // 2), 2.0**scale) for x in (3, 4)]
    ours = ckks.add_residues(*(ckks._residues(each.serialize(), ring) for each in two), prime)
    assert np.array_equal(ours, ckks._residues((two[0] + two[1]).serialize(), ring))


def sealed(messages: Messages) -> tuple[KeyStore, PublicKey, dict[int, bytes], dict[int, bytes]]:
    """Return a round of five clients: key store, public key, verification keys, an envelope of each client."""
    key_store = KeyStore(messages.scheme)
    public, clients = PublicKey.of(key_store.call("public", 0, {})), np.arange(5)
    keys = dict(enumerate(map(bytes, key_store.call("begin", 1, {"clients": clients})["verify"])))
    held = key_store.call("secrets", 1, {"clients": clients})
    envelopes = {}
    for client in range(5):
        integers = np.concatenate([np.arange(50) - client, np.full(20, client % 2)])
        masks: list[Any] = [None, None]
        if "own" in held:
            pairs = {peer: held["pairs"][client, peer].tobytes() for peer in range(5) if peer != client}
            groups = dict.fromkeys(range(5), np.ones(2, dtype=bool))
            masks = messages.mask_layout().of_client(client, held["own"][client].tobytes(), pairs, groups)
        bodies = [messages.scheme.encode(GROUP, integers, messages.fixed_point, public, mask) for mask in masks]
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
    key_store, public, _, _ = sealed(MESSAGES[2])
    numbers = MESSAGES[2].fixed_point
    plan = np.array([0, 50, 20, numbers.max_weight, numbers.max_clients])
    words = np.zeros(2 * 4096, dtype=np.uint64)
    assert not key_store.call("open", 1, {"group": plan, "elements": words})["integers"].any()
    with pytest.raises(PayloadError, match="has been opened before"):
        key_store.call("open", 1, {"group": plan, "elements": words})
    with pytest.raises(PayloadError, match="do not answer"):
        key_store.call("secret_key", 1, {})
    assert public.key


@pytest.mark.parametrize(
    ("secure", "settings_", "message"),
    [
        ("{kind: ckks, ring: 4096}", (), r"prime_bits = \[60, 60\]: 120 bits on a ring of 4096 are below 128-bit"),
        ("{kind: ckks, scale_bits: 9}", (), r"scale_bits = 9: the noise of 10 ciphertexts .* at least 17"),
        ("{kind: ckks, ring: 4096, prime_bits: [40, 60], bits: 24}", (), r"needs 28 bits of a slot, .* at most 18"),
        ("{kind: ckks, prime_bits: [58, 60]}", (), r"secure.prime_bits = .* 32, 36, "),
        ("{kind: masked, threshold: 0.4}", (), r"secure.threshold = 0.4: .*greater than 0.5"),
        ("{kind: cks}", (), r'secure.kind = "cks" is unknown; .* Did you mean "ckks"'),
        (
            "masked",
            ("algorithm={kind: fedmf, codec: [{kind: quantise}]}",),
            r"algorithm.codec \(quantise\) sends cannot",
        ),
        ("ckks", ("clients_per_round=3",), r"smallest_group = 3: 2 clients of a round are enough"),
        ("ckks", ("schedule={kind: buffered, concurrency: 4, buffer_size: 2}",), r"use schedule = synchronous"),
    ],
)
def test_what_cannot_work_is_said_before_anything_is_trained(
    secure: str, settings_: tuple[str, ...], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        prepared(experiment(secure, *settings_))


@pytest.mark.parametrize("algorithm", ["median", "scaffold"])
def test_what_is_no_sum_of_updates_is_refused(algorithm: str) -> None:
    chosen = load_experiment("fedavg-digits", [f"algorithm={algorithm}", "secure=ckks"])
    with pytest.raises(
        UserError, match=f"secure: {algorithm} on mlp needs more than the weighted sum .* use fedavg, fedprox"
    ):
        prepared(chosen)


@pytest.mark.parametrize(("secure", "missing"), [("ckks", "tenseal"), ("masked", "cryptography")])
def test_a_missing_extra_is_one_line(secure: str, missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(UserError, match=rf"secure.kind = {secure} needs {missing}; pip install 'narrowcast\[he\]'"):
        prepared(experiment(secure))


def test_security_levels_are_those_of_the_standard() -> None:
    levels = {(4096, (48, 60)): 128, (8192, (60, 60)): 192, (8192, (56, 60)): 256, (4096, (60, 60)): 0}
    assert {each: ckks.security_bits(*each) for each in levels} == levels
    with pytest.raises(UserError, match="below 128-bit security"):
        paillier.make_keys(2048)


def test_paillier_adds_value_by_value() -> None:
    public, secret = paillier.make_keys()
    first, second = ([5, -7, 0, 2**40], [-6, 7, 1, 1])
    total = paillier.encrypt(public, first) + paillier.encrypt(public, second)
    data = total.to_bytes()
    assert total.wire_bits() == 8 * len(data) == 8 * 4 * 768
    assert paillier.decrypt(secret, paillier.Ciphertexts.from_bytes(data, public)) == [-1, 0, 1, 2**40 + 1]
    for bad in (data[:-1], bytes(768), b"\xff" * 768):
        with pytest.raises(PayloadError):
            paillier.Ciphertexts.from_bytes(bad, public)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_what_overflows_the_clip_is_cut_and_not_wrapped(scheme: str) -> None:
    chosen = experiment(scheme, "secure.clip=0.001", "rounds=1")
    state = play(chosen)[-1].state
    assert state is not None
    assert 0 < np.abs(state.server["update"]).max() <= 0.001 + 1e-9
