"""Clients that collude with the server: what a sum leaves of the others, and how many defeat an honest list."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest

from attack_cells import cell_experiment, some_users
from lossy_links import LOSING
from masked_round import MaskedRound
from narrowcast.algorithms.attacks.transcript import Transcript
from narrowcast.algorithms.secure.keys import SHARE_BYTES
from narrowcast.platform.errors import UserError
from narrowcast.platform.types import PayloadError
from narrowcast.runs.attack_trial import record_transcript


def recorded(secure: str) -> Transcript:
    """Return twelve rounds of five clients, of which three or more have to arrive."""
    return record_transcript(cell_experiment("none", 5, 12, LOSING, f"secure={secure}"), *some_users(10))[0]


def test_two_colluders_of_three_survivors_read_the_third() -> None:
    masked, plain = recorded("{kind: masked}"), recorded("{kind: plain}")
    read = 0
    for each, clear in zip(masked.rounds, plain.rounds, strict=True):
        if each.opened is not None and each.arrived.sum() == 3:
            *colluders, victim = clear.readable
            left = each.opened.values.copy()
            for upload in colluders:
                left[upload.rows] -= upload.values
            np.testing.assert_allclose(left[victim.rows], victim.values, atol=1e-6)
            read += 1
    assert read > 0


def test_sums_that_assumed_colluders_could_take_apart_are_not_opened() -> None:
    with pytest.raises(UserError, match=r"besides secure\.colluders = 2: 3 clients of a round are enough"):
        recorded("{kind: masked, colluders: 2}")
    transcript = recorded("{kind: masked, colluders: 2, threshold: 1}")
    assert {int(each.arrived.sum()) for each in transcript.rounds if each.opened is not None} <= {5}
    assert any(each.opened is None for each in transcript.rounds)


def reads_by_split_lists(n: int, threshold: int, colluders: int, adversary: str) -> bool:
    """Return whether a server that shows two lists of survivors gets both secrets of the last client.

    It asks one part of the honest clients with the victim on the list, and the others without.
    """
    masked = MaskedRound({client: [True] for client in range(n)}, threshold, adversary=adversary)
    clients, _ = masked.agree()
    victim, honest = n - 1, list(range(colluders, n))
    for client in range(colluders):  # colluders accept every list
        clients[client]._accept = lambda _: None  # type: ignore[method-assign]
    with_victim = honest[-(threshold - colluders) :]
    without = honest[: len(honest) - len(with_victim)]
    enough = []
    for part, listed in ((with_victim, list(clients)), (without, list(range(n - 1)))):
        signing = [*part, *range(colluders)] if masked.messages.active else []
        signed = [clients[each].sign_survivors(listed) for each in signing]
        shares = colluders
        for each in part:
            with contextlib.suppress(PayloadError):
                body = masked.body(each, clients[each].unmask(listed, signed))
                shares += body[victim * SHARE_BYTES :][:SHARE_BYTES] != bytes(SHARE_BYTES)
        enough.append(shares >= threshold)
    return all(enough)


@pytest.mark.parametrize(
    ("n", "threshold", "needed"),
    [(20, 11, 2), (20, 12, 4), (60, 31, 2), (60, 36, 12)],
)
def test_a_deviating_server_needs_twice_the_threshold_less_the_cohort(n: int, threshold: int, needed: int) -> None:
    assert needed == 2 * threshold - n
    assert reads_by_split_lists(n, threshold, needed, "honest_but_curious")
    assert not reads_by_split_lists(n, threshold, needed - 1, "honest_but_curious")


def test_signed_lists_need_as_many_colluders_at_a_higher_threshold() -> None:
    """`adversary: active` takes t > 2 n / 3, so that more than a third of the cohort has to collude."""
    assert not reads_by_split_lists(20, 14, 7, "active")
    assert reads_by_split_lists(20, 14, 8, "active")
