"""A server that does not follow the protocol: what it asks for beyond one honest list of survivors, clients refuse."""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from masked_round import ROUND, SIZE, MaskedRound
from narrowcast.algorithms.secure.key_store import KeyStore
from narrowcast.algorithms.secure.keys import SHARE_BYTES, combine
from narrowcast.algorithms.secure.masking_client import Step
from narrowcast.algorithms.secure.masks import OpenableGroups, OwnSeeds
from narrowcast.algorithms.secure.schemes import Masked
from narrowcast.platform.types import PayloadError


class Server:
    """Asks a key store's clients, ten of them, for whatever it likes."""

    def __init__(self, adversary: str, groups: Any = None, round_index: int = 1, store: KeyStore | None = None) -> None:
        self.store, self.round = store or KeyStore(Masked(adversary=adversary)), round_index
        self.groups = np.ones((10, 1), dtype=np.uint8) if groups is None else groups
        told = {"clients": np.arange(10), "groups": self.groups, "stops": np.full(10, Step.NEVER)}
        self.began = self.store.call("begin", round_index, told)

    def sign(self, listed: list[int], asked: list[int] | None = None) -> np.ndarray[Any, Any]:
        request = {"clients": np.array(listed), "asked": np.array(asked or listed)}
        return self.store.call("sign", self.round, request)["signed"]

    def reveal(self, listed: list[int], asked: list[int] | None = None, signed: Any = None) -> dict[int, bytes]:
        signed = np.empty((0, 0), dtype=np.uint8) if signed is None else signed
        request = {"clients": np.array(listed), "asked": np.array(asked or listed), "signed": signed}
        return {int(name): data.tobytes() for name, data in self.store.call("reveal", self.round, request).items()}


MOST = list(range(8))
ADVERSARIES = ["honest_but_curious", "active"]


@pytest.mark.parametrize("adversary", ADVERSARIES)
def test_a_second_list_is_refused_and_the_first_gives_the_same_again(adversary: str) -> None:
    server = Server(adversary)
    signed = server.sign(MOST) if adversary == "active" else None
    first = server.reveal(MOST, signed=signed)
    assert server.reveal(MOST, signed=signed) == first
    for other in ([*range(9)], [*range(7)], [1, 2, 3, 4, 5, 6, 7, 8]):
        with pytest.raises(PayloadError, match="reveals nothing: it has answered for another list"):
            server.reveal(other, asked=[3])
        with pytest.raises(PayloadError, match="reveals nothing: it has answered for another list"):
            server.sign(other, asked=[3])


@pytest.mark.parametrize("adversary", ADVERSARIES)
@pytest.mark.parametrize(
    ("listed", "why"),
    [
        ([1, 2, 3, 4], "4 arrived, . are needed"),
        ([0, 1, 2, 3, 4, 5, 6, 77], "the list has clients that shared no keys"),
        ([1, 2, 3, 4, 5, 6, 7, 8], "it is not on the list of those that arrived"),
    ],
)
def test_lists_that_no_honest_server_sends_are_refused(listed: list[int], why: str, adversary: str) -> None:
    for ask in (Server(adversary).sign, Server(adversary).reveal):
        with pytest.raises(PayloadError, match=f"client 0 reveals nothing: {why}"):
            ask(listed, asked=[0])
    with pytest.raises(PayloadError, match="asks clients that shared no keys"):
        Server(adversary).reveal(MOST, asked=[77])


def test_a_list_that_is_split_between_clients_is_not_unmasked() -> None:
    server = Server("active")
    one, other = [0, 1, 2, 3, 4, 5, 6], [0, 1, 2, 3, 7, 8, 9]
    signed = np.concatenate([server.sign(one, asked=[0, 1, 4, 5, 6]), server.sign(other, asked=[2, 3, 7, 8, 9])])
    for listed, asked in ((one, [0, 1, 4]), (other, [2, 3, 7])):
        with pytest.raises(PayloadError, match="5 signed its list of survivors, 7 are needed"):
            server.reveal(listed, asked=asked, signed=signed)
    with pytest.raises(PayloadError, match="5 signed its list"):
        server.reveal(one, asked=[0], signed=np.concatenate([signed[:5]] * 3))  # one signature three times


def test_signatures_of_other_rounds_runs_ranks_and_clients_do_not_count() -> None:
    server = Server("active")
    signed = server.sign(MOST)
    later = Server("active", round_index=2, store=server.store)
    with pytest.raises(PayloadError, match=r"of round 1, not 2|another context"):
        later.reveal(MOST, signed=signed)
    with pytest.raises(PayloadError, match="another context"):
        Server("active").reveal(MOST, signed=signed)
    with pytest.raises(PayloadError, match="asked for round 1, and are in round 2"):
        server.reveal(MOST, signed=signed)
    fresh = later.sign(MOST)
    for place in range(0, fresh.shape[1], 9):
        forged = fresh.copy()
        forged[2, place] ^= 1
        with pytest.raises(PayloadError):
            later.reveal(MOST, asked=[0], signed=forged)
    foreign = np.array([np.frombuffer(np.random.default_rng(0).bytes(fresh.shape[1]), dtype=np.uint8)])
    with pytest.raises(PayloadError):
        later.reveal(MOST, asked=[0], signed=np.concatenate([fresh[:6], foreign]))
    assert set(later.reveal(MOST, signed=fresh)) == set(MOST)


def test_clients_that_were_told_different_groups_do_not_unmask() -> None:
    """A server that tells one client of many senders of its group, and the others of few."""
    groups = {client: [True, client < 4] for client in range(7)}
    masked = MaskedRound(groups, 5, 3, adversary="active")
    clients, _ = masked.agree()
    alone = {client: [True, client == 3] for client in range(7)}
    clients[3]._rule = masked.told(alone)
    signed = [each.sign_survivors(range(7)) for each in clients.values()]
    for client in (0, 3):
        with pytest.raises(PayloadError, match="another context"):
            clients[client].unmask(range(7), signed)


@pytest.mark.parametrize("adversary", ADVERSARIES)
def test_groups_that_shrink_to_few_senders_stay_hidden_whatever_is_asked(adversary: str) -> None:
    groups = np.array([[1, client < 3] for client in range(10)], dtype=np.uint8)
    server = Server(adversary, groups)
    listed = [1, 2, *range(3, 10)]  # client 0 sent the group and is said to have dropped out
    signed = server.sign(listed) if adversary == "active" else None
    revealed = server.reveal(listed, signed=signed)
    rule = OpenableGroups(tuple(range(10)), groups.astype(bool), 6 if adversary != "active" else 7, 3)
    assert rule.at_risk.tolist() == [False, True]
    for client in (1, 2):
        state = server.store._round[client]
        own = OwnSeeds.of(state._own_secret, [1])
        shown = b"".join(revealed.values())
        assert own.of_group[1] not in shown
        points = listed[: rule.threshold]
        shares = {each + 1: revealed[each][20 + SHARE_BYTES * client :][:SHARE_BYTES] for each in points}
        assert combine(shares) == own.shared, "the shares are of the seed of the other group"


def test_no_client_gives_both_shares_of_another() -> None:
    server = Server("honest_but_curious")
    halves = [0, 1, 2, 3, 4, 5], [4, 5, 6, 7, 8, 9]
    server.reveal(halves[0], asked=[0, 1, 2, 3, 4])
    server.reveal(halves[1], asked=[5, 6, 7, 8, 9])
    for listed, asked in ((halves[1], 4), (halves[0], 5)):
        with pytest.raises(PayloadError, match="it has answered for another list"):
            server.reveal(listed, asked=[asked])


def test_peers_refuse_keys_that_their_owner_did_not_sign() -> None:
    masked = MaskedRound({client: [True] for client in range(4)}, 3)
    clients, _ = masked.agree()
    sent = [each.advertise_keys() for each in clients.values()]
    own = X25519PrivateKey.generate().public_key().public_bytes_raw()
    forged = masked.messages.advertised_keys(ROUND).seal(2, [own * 2 + bytes(32)], masked.signing[1])
    with pytest.raises(PayloadError, match="client 2 was changed, or is not signed by it"):
        clients[0].share_keys([*sent[:2], forged, sent[3]], masked.rule)
    stale = masked.messages.advertised_keys(ROUND - 1).seal(2, [own * 2 + bytes(32)], masked.signing[2])
    with pytest.raises(PayloadError, match="round 2, not 3"):
        clients[0].share_keys([*sent[:2], stale, sent[3]], masked.rule)
    for few in (sent[:2], sent[1:]):
        with pytest.raises(PayloadError, match="client 0 shares nothing"):
            clients[0].share_keys(few, masked.rule)


def left_by_colluders(masked: MaskedRound, colluders: set[int]) -> tuple[Any, bool]:
    """Return the second group's sum without the masks that a server and its colluders know, and whether it is open."""
    clients, advertised = masked.agree()
    recovery = masked.recovery(clients, advertised, list(clients))
    senders = [client for client in clients if masked.groups[client][1]]
    left = sum((masked.upload(clients[client])[1] for client in senders), np.zeros(SIZE, np.uint64))
    left -= recovery.masks(masked.layout, advertised)[1]
    known, opened = masked.layout.zeros(), bool(recovery.opened[1])
    for client in colluders & set(senders) if not opened else ():
        seed = OwnSeeds.of(clients[client]._own_secret, [1]).of_group[1]
        masked.layout.add(known, seed, np.array([False, True]))
    for client in colluders:
        left -= masked.values(client, 1)
    return (left - known[1]) % 2**32, opened


def test_twelve_of_sixty_colluders_read_no_group_of_fewer_than_the_bound() -> None:
    """A group of twelve colluders and two others; the control does not count colluders, and reads the two."""
    colluders, honest = set(range(12)), [12, 13]
    groups = {client: [True, client in colluders or client in honest] for client in range(60)}
    for least, reads in ((3 + 12, False), (3, True)):
        left, opened = left_by_colluders(MaskedRound(groups, 36, least), colluders)
        assert opened == reads
        assert np.array_equal(left, (sum(MaskedRound.values(client, 1) for client in honest)) % 2**32) == reads


def gets_both_secrets(masked: MaskedRound, clients: Any, colluders: list[int], victim: int) -> bool:
    """Return whether a server that shows each half of the honest clients another list gets both secrets of one."""
    honest, enough, at = [each for each in clients if each not in colluders], [], victim * SHARE_BYTES
    lists = [each for each in clients if each != victim], list(clients)
    for half, listed in zip((honest[:24], honest[24:]), lists, strict=True):
        signed = [clients[each].sign_survivors(listed) for each in [*half, *colluders] if each in listed]
        of_victim = slice(SHARE_BYTES, None) if victim in listed else slice(0, SHARE_BYTES)
        shares = {each + 1: clients[each]._shares[victim][of_victim] for each in colluders}
        for each in half:
            with contextlib.suppress(PayloadError):
                body = masked.body(each, clients[each].unmask(listed, signed))
                shares[each + 1] = body[at : at + SHARE_BYTES]
        enough.append(len(shares) >= masked.threshold)
    return all(enough)


@pytest.mark.parametrize(("adversary", "threshold", "reads"), [("honest_but_curious", 36, True), ("active", 42, False)])
def test_a_split_list_and_twelve_colluders_read_an_update_unless_lists_are_signed(
    adversary: str, threshold: int, reads: bool
) -> None:
    """2 t - n colluders hold the missing shares: 12 of 60 at a threshold of .6; .7 needs 24, and signatures."""
    masked = MaskedRound({client: [True] for client in range(60)}, threshold, adversary=adversary)
    clients, _ = masked.agree()
    for each in range(12):  # colluders sign whatever they are asked to
        clients[each]._accept = lambda _: None
    assert gets_both_secrets(masked, clients, list(range(12)), victim=59) == reads
