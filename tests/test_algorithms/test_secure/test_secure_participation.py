"""Participation under secure aggregation: the largest cohort whose members can afford their messages, and its ranks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from narrowcast.algorithms.secure.messages import Messages
from narrowcast.algorithms.secure.participation import ParticipationPolicy
from narrowcast.platform.rounds.opening import allocate_links
from narrowcast.platform.rounds.outcome import Outcome
from narrowcast.platform.rounds.state import Run
from narrowcast.platform.types import IntArray
from secure_rounds import SCHEMES, SMALL_CKKS, experiment, prepared, run_rounds, sha256

MASKED = SCHEMES[1]
CHANNEL = "algorithm={kind: scolr, rank: 6, rank_policy: channel, aggregation: per_component_mean}"
FADING = (
    "radio={channel: {kind: rayleigh, access: shared, outage_probability: 0.1}, upload_seconds: 0.4, allocation: %s}"
)


def cohort_budgets(chosen: Any, outcome: Outcome) -> IntArray:
    algorithm, task = prepared(chosen)
    budgets = allocate_links(Run(chosen, algorithm, task), outcome.ledger.client, outcome.record.round).budget_bits
    assert budgets is not None
    return budgets


@given(st.lists(st.integers(0, 200_000), min_size=1, max_size=40), st.sampled_from(["channel", "uniform"]))
@settings(max_examples=60, deadline=None)
def test_the_largest_cohort_that_can_pay_for_its_keys_takes_part(budgets: list[int], policy: str) -> None:
    rule = f"algorithm={{kind: scolr, rank: 6, rank_policy: {policy}}}"
    algorithm, task = prepared(experiment(MASKED, rule, "clients_per_round=40", "secure.smallest_group=1"))
    messages, cohort = algorithm.messages(task), np.arange(len(budgets))
    participation = ParticipationPolicy(messages, algorithm.algorithm.rank_policy).of(
        task, cohort, 1, np.array(budgets)
    )
    given_bits, n = np.array(budgets)[participation.clients], len(participation.clients)
    assert (participation.uplink_bits <= given_bits).all()
    update = messages.most_bits_at_rank()
    least = np.ones(len(cohort), dtype=np.int64)
    if policy == "uniform":
        least = algorithm.algorithm.rank_policy.draw(cohort, 6, task.seed, 1)
    for more in range(n + 1, len(cohort) + 1):
        assert (update[least] + messages.most_protocol_bits(more) <= budgets).sum() < more
    beside = messages.most_protocol_bits(n) if n else 0
    spared = update[participation.ranks] + beside - participation.uplink_bits
    safe = ~(participation.rule.sends & participation.rule.at_risk).any(axis=1)
    needed = messages.scheme.survivors_needed(n) if n else 0
    sealed = 8 * (4 + 33 * 3 + 16)
    fewer = sealed * (np.arange(n) >= needed - 1)  # to itself, by a client that derives no shares
    seeds = 256 * (participation.rule.sends & ~participation.rule.at_risk).sum(axis=1)
    third = 8 * 33 * safe * (n - needed + (np.arange(n) < needed - 1))
    assert np.array_equal(spared, seeds + third + fewer), "what no risk calls for"
    if policy == "channel":
        assert all(
            rank == 6 or update[rank + 1] + beside > bits
            for rank, bits in zip(participation.ranks, given_bits, strict=True)
        )
    else:
        assert np.array_equal(participation.ranks, least[participation.clients])


LOSSY = "radio={channel: {kind: rayleigh, outage_probability: 0.15}}"
BANDWIDTH = CHANNEL.replace("channel", "{kind: bandwidth, upload_seconds: 0.06}", 1)


@pytest.mark.parametrize(
    "links",
    [(CHANNEL, FADING % "max_min"), (CHANNEL, FADING % "min_error"), (BANDWIDTH, LOSSY)],
    ids=["max_min", "min_error", "bandwidth"],
)
def test_ranks_follow_the_links_under_masks(links: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    settings_ = (*links, "clients_per_round=16", "secure.threshold=0.51", "fleet=lognormal")
    masked, plain = experiment(MASKED, *settings_), experiment(SCHEMES[0], *settings_)
    played = run_rounds(masked)
    algorithm, task = prepared(masked)
    for outcome in played:
        ledger, part = outcome.ledger, outcome.ledger.rank > 0
        if "bandwidth" in links[0]:
            assert (ledger.uplink_bits <= 0.06 * task.profiles.uplink_bits_per_second[ledger.client]).all()
        else:
            assert (ledger.uplink_bits <= cohort_budgets(masked, outcome)).all()
        assert np.array_equal(part, ledger.uplink_bits > 0)
        assert (ledger.downlink_bits[~part] < ledger.downlink_bits[part].min()).all(), "keys and shares are for these"
    ranks = np.concatenate([outcome.ledger.rank for outcome in played])
    assert len(set(ranks.tolist())) > 3
    assert (ranks == 0).any()
    lost = np.concatenate([(outcome.ledger.rank > 0) & ~outcome.ledger.delivered for outcome in played])
    assert lost.any(), "outage takes uploads whose masks are agreed"
    # The same integers without masks, of clients that reserve the bits of keys and shares.
    messages = algorithm.messages(task)
    beside, update = {n: messages.most_protocol_bits(n) for n in range(17)}, messages.most_bits_at_rank()
    monkeypatch.setattr(Messages, "most_protocol_bits", lambda _, n: beside[n])
    monkeypatch.setattr(Messages, "most_bits_at_rank", lambda _: update)
    assert sha256(plain, run_rounds(plain)) == sha256(masked, played)


def test_ciphertexts_are_as_many_as_a_link_carries() -> None:
    fading = FADING.replace("0.4", "3.0") % "max_min"
    chosen = experiment(SMALL_CKKS, CHANNEL, fading, "clients_per_round=16", "secure.threshold=0.3")
    played = run_rounds(chosen)
    assert all((each.ledger.uplink_bits <= cohort_budgets(chosen, each)).all() for each in played)
    assert len({rank for each in played for rank in each.ledger.rank.tolist()}) > 2


def test_where_too_few_can_pay_nobody_sends_and_the_model_stays(caplog: pytest.LogCaptureFixture) -> None:
    chosen = experiment(MASKED, CHANNEL, FADING.replace("0.4", "0.01") % "max_min", "rounds=1")
    outcome = run_rounds(chosen)[-1]
    assert not outcome.ledger.uplink_bits.any()
    assert outcome.record.delivered == 0
    assert "0 of 0 clients (of 10 asked) arrived" in caplog.text


@pytest.mark.parametrize("secure", SCHEMES[:2])
def test_a_budget_that_is_too_small_for_the_rank_drawn_sends_nothing(secure: str) -> None:
    chosen = experiment(secure, FADING % "equal", "clients_per_round=16", "secure.threshold=0.51")
    for outcome in run_rounds(chosen):
        ledger = outcome.ledger
        assert (ledger.uplink_bits <= cohort_budgets(chosen, outcome)).all()
        assert (ledger.uplink_bits > 0).sum() > 0


NETWORKS = {
    "scolr": "{kind: scolr, rank: 4, rank_policy: uniform}",
    "weighted": "{kind: scolr, rank: 4, rank_policy: uniform, aggregation: weighted}",
    "by bandwidth": "{kind: scolr, rank: 4, rank_policy: {kind: bandwidth, upload_seconds: 5}}",
    "colr": "{kind: colr, rank: 4}",
}
DIGITS = ("clients_per_round=6", "rounds=2", "model.hidden=[16]")


@pytest.mark.parametrize("algorithm", list(NETWORKS.values()), ids=list(NETWORKS))
def test_networks_of_low_rank_are_summed(algorithm: str) -> None:
    settings_ = (*DIGITS, f"algorithm={algorithm}")
    schemes = SCHEMES if "colr" in algorithm and "bandwidth" not in algorithm else SCHEMES[:2]
    runs = [experiment(scheme, *settings_, name="fedavg-digits") for scheme in schemes]
    assert len({sha256(run, run_rounds(run)) for run in runs}) == 1


@pytest.mark.parametrize("algorithm", [NETWORKS["scolr"], NETWORKS["weighted"], NETWORKS["colr"]])
def test_a_finely_rounded_network_is_the_plain_one(algorithm: str) -> None:
    models = []
    for secure in ("none", "{kind: masked, bits: 28, smallest_group: 1}"):
        chosen = experiment(secure, *DIGITS, f"algorithm={algorithm}", name="fedavg-digits")
        state = run_rounds(chosen)[-1].state
        assert state is not None
        models.append(np.concatenate([np.ravel(values) for values in state.server.values()]))
    assert np.abs(models[0] - models[1]).max() < 1e-5
    assert np.abs(models[0]).max() > 0.1
