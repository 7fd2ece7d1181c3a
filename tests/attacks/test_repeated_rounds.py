"""A round is answered once: what a server reads that has it answered again, and what it gets if it was interrupted."""

from __future__ import annotations

import logging
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from narrowcast.experiment import load_experiment
from narrowcast.platform.errors import RunFailed
from narrowcast.platform.rounds.state import Run
from repeated_rounds import Crash, CrashingStore, RepeatAttacks, RepeatingServer
from secure_rounds import SMALL_CKKS

COHORT = 6
SCHEMES = {
    "masked": "{kind: masked, bits: 16}",
    "masked, active": "{kind: masked, bits: 16, adversary: active}",
    "ckks": SMALL_CKKS,
}
CALLS = {"masked": 4, "masked, active": 5, "ckks": 4}
"""Requests of a round: begin, the secrets of two chunks, sign the list, and reveal shares or open the sum."""


@cache
def run_of(scheme: str) -> Run:
    settings = ["model.hidden=[4]", "rounds=3", f"clients_per_round={COHORT}", f"secure={SCHEMES[scheme]}"]
    experiment = load_experiment("fedavg-digits", [*settings, "data={kind: digits, clients: 6, partition: iid}"])
    return Run(experiment, experiment.secured_algorithm, experiment.task(experiment.data.load()))


@pytest.mark.slow
@pytest.mark.parametrize("scheme", SCHEMES)
def test_clients_that_write_down_what_they_answer_are_not_read(scheme: str, tmp_path: Path) -> None:
    results = list(RepeatAttacks(run_of(scheme), COHORT, tmp_path).results())
    assert len({each.attack for each in results}) == 8
    assert [each.read for each in results] == [0] * 8
    assert all(each.values > 30 for each in results)


@pytest.mark.slow
@pytest.mark.parametrize("scheme", SCHEMES)
def test_clients_that_forget_it_are_read_to_the_bit(scheme: str) -> None:
    for each in RepeatAttacks(run_of(scheme), COHORT, None).results():
        signed = scheme == "masked, active" and each.attack.startswith("another model")  # with the survivors
        refused = signed or each.attack == "two lists of survivors"  # by each client, as long as it lives
        assert each.read == (0 if refused else each.values), each


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_round_that_is_repeated_after_any_crash_opens_the_same_sum(scheme: str, after: bool, tmp_path: Path) -> None:
    run, everyone = run_of(scheme), list(range(COHORT))
    wanted = RepeatingServer(run, None).sum_of(RepeatingServer(run, None).clients(), 1, everyone)
    assert wanted is not None
    for calls in range(1, CALLS[scheme] + 1):
        server = RepeatingServer(run, tmp_path / f"{calls}.jsonl")
        with pytest.raises(Crash):
            server.sum_of(CrashingStore(server.clients(), calls, after), 1, everyone)
        for _ in range(2):  # after a second crash, too
            again = server.sum_of(server.clients(), 1, everyone)
            assert again is not None
            assert all(np.array_equal(again[name], values) for name, values in wanted.items())


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_round_whose_sum_was_opened_without_a_client_is_repeated_without_it(
    scheme: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As after `on_failure: drop`, where the host that failed is back."""
    server, everyone = RepeatingServer(run_of(scheme), tmp_path / "answered.jsonl"), list(range(COHORT))
    first = server.sum_of(server.clients(), 1, everyone, last_is_lost=True)
    with caplog.at_level(logging.WARNING):
        second = server.sum_of(server.clients(), 1, everyone)
    assert first is not None
    assert second is not None
    assert all(np.array_equal(second[name], values) for name, values in first.items())
    assert caplog.messages == [
        "round 1 is repeated over the 5 clients whose sum was opened before the interruption; uploads of 1 others do "
        "not count"
    ]


def test_a_refusal_is_one_line_that_says_what_to_do(tmp_path: Path) -> None:
    server, everyone = RepeatingServer(run_of("masked"), tmp_path / "answered.jsonl"), list(range(COHORT))
    assert server.sum_of(server.clients(), 1, everyone) is not None
    store = server.clients()
    opener = run_of("masked").algorithm.secure_sums.rounds(store, run_of("masked").task)  # type: ignore[union-attr]
    with pytest.raises(
        RunFailed,
        match=r"^round 1: clients have begun round 1 in another cohort, or with other groups; resume the run as it was "
        r"interrupted, with its files and on a processor of the same kind, or start a new one$",
    ):
        opener.distribute_keys([server._chunk(1, everyone[:-1])])
