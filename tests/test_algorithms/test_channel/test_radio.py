"""The radio in the round loop: rates, budgets and losses as the channel draws them, in bits and in time."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from digits import digits
from digits import make_task as make_network
from narrowcast.algorithms.channel.allocation import Equal, MinError
from narrowcast.algorithms.channel.fading import MultipleAccess, Rayleigh
from narrowcast.algorithms.channel.given import Fixed, LogNormalRates
from narrowcast.algorithms.channel.radio import BroadcastLink, CellRadio
from narrowcast.algorithms.channel.regions import contains
from narrowcast.algorithms.codecs.entropy import Entropy
from narrowcast.algorithms.codecs.quantise import Quantise
from narrowcast.algorithms.federated.fedmf import FedMF
from narrowcast.algorithms.federated.low_rank import CoLR, SCoLR
from narrowcast.algorithms.federated.rank_policy import ChannelRank
from narrowcast.experiment import build_experiment
from narrowcast.platform.contracts import Task
from narrowcast.platform.errors import UserError
from narrowcast.platform.rounds.closing import CHANNEL_STATE_BITS, EXAMPLES_BITS, GRANT_BITS
from narrowcast.platform.rounds.evaluation import model_sha256
from narrowcast.platform.rounds.fleet import Clock
from narrowcast.platform.rounds.loop import rounds
from narrowcast.platform.rounds.outcome import Outcome
from narrowcast.platform.rounds.plan import Plan
from narrowcast.platform.rounds.state import Run
from per_client import make_task, synthetic
from running import local

CODEC = (Quantise(levels=8, norms="column", rounding="dithered", norm_type="bfloat16"), Entropy())
ADAPTIVE = SCoLR(rank=8, rank_policy=ChannelRank(), aggregation="per_component_mean", codec=CODEC)
SHARED = Rayleigh(access="shared", bandwidth_hertz=1e5)


def task_of(clients: int = 12) -> Task:
    return make_task(synthetic([20 + 3 * client for client in range(clients)], n_items=400))


def play(algorithm: Any, radio: CellRadio | None, **settings: Any) -> list[Outcome]:
    task = task_of()
    algorithm.check(task)
    clock = Clock(compute_overhead_seconds=0, seconds_per_example=0)
    plan = Plan(**{"rounds": 4, "clients_per_round": 8, "chunk_size": 3, "radio": radio, "clock": clock, **settings})
    return list(rounds(Run(plan, algorithm, task), local(algorithm, task)))


def test_links_that_are_those_of_the_fleet_change_nothing() -> None:
    plain, fixed = play(SCoLR(rank=4), None), play(SCoLR(rank=4), CellRadio())
    assert [each.record for each in fixed] == [each.record for each in plain]
    assert plain[-1].state is not None and fixed[-1].state is not None
    assert model_sha256(SCoLR(rank=4), plain[-1].state) == model_sha256(SCoLR(rank=4), fixed[-1].state)


def test_a_round_takes_its_slowest_clients_time_on_the_links_drawn() -> None:
    channel = LogNormalRates(uplink_sigma=1.0)
    for outcome in play(FedMF(), CellRadio(channel=channel)):
        ledger = outcome.ledger
        links = channel.draw(task_of().profiles.take(ledger.client), 0, outcome.record.round)
        seconds = ledger.downlink_bits / links.downlink_bits_per_second
        seconds = seconds + ledger.uplink_bits / links.uplink_bits_per_second
        assert ledger.seconds == pytest.approx(seconds)
        assert outcome.record.round_simulated_seconds == pytest.approx(seconds.max())


def test_a_broadcast_ends_for_all_with_its_weakest_client() -> None:
    radio = CellRadio(channel=LogNormalRates(), downlink=BroadcastLink(groups=1))
    ledger = play(FedMF(), radio)[0].ledger
    links = radio.channel.draw(task_of().profiles.take(ledger.client), 0, 1)
    download = ledger.downlink_bits.max() / links.downlink_bits_per_second.min()
    assert ledger.seconds - ledger.uplink_bits / links.uplink_bits_per_second == pytest.approx(np.full(8, download))


@pytest.mark.parametrize("algorithm", [ADAPTIVE, CoLR(rank=3, codec=CODEC), FedMF(codec=CODEC), FedMF()], ids=str)
@pytest.mark.parametrize("allocation", ["max_min", "min_error", "proportional", "equal"])
def test_uploads_stay_inside_the_rate_region(algorithm: Any, allocation: str) -> None:
    values = {"channel": SHARED, "allocation": allocation, "upload_seconds": 0.05}
    radio = CellRadio.model_validate(values)
    if allocation == "min_error" and algorithm is not ADAPTIVE:
        with pytest.raises(UserError, match="min_error needs the clients' errors; use max_min"):
            play(algorithm, radio)
        return
    outcomes = play(algorithm, radio)
    for outcome in outcomes:
        ledger = outcome.ledger
        links = SHARED.draw(task_of().profiles.take(ledger.client), 0, outcome.record.round)
        assert contains(links.region, ledger.uplink_bits / 0.05)
        assert (ledger.uplink_bits / 0.05 <= links.uplink_bits_per_second * (1 + 1e-9)).all()
        assert np.array_equal(ledger.delivered, ledger.uplink_bits > 0)
        upload = ledger.seconds - ledger.downlink_bits / links.downlink_bits_per_second
        assert (upload <= 0.05 * (1 + 1e-9)).all()
    if algorithm is ADAPTIVE:
        ranks = np.concatenate([outcome.ledger.rank for outcome in outcomes])
        assert len(np.unique(ranks)) > 2  # unequal links, unequal ranks


def test_who_cannot_send_its_least_leaves_its_share_to_others() -> None:
    tight = CellRadio(channel=SHARED, allocation=MinError(), upload_seconds=0.002)
    outcomes = play(ADAPTIVE, tight)
    sent = np.concatenate([outcome.ledger.uplink_bits for outcome in outcomes])
    ranks = np.concatenate([outcome.ledger.rank for outcome in outcomes])
    assert 0 < (sent > 0).sum() < len(sent)
    assert (ranks[sent == 0] == 0).all() and (ranks[sent > 0] > 0).all()


def test_outages_are_paid_for() -> None:
    radio = CellRadio(channel=Rayleigh(outage_probability=0.4))
    outcomes = play(FedMF(), radio)
    ledgers = [outcome.ledger for outcome in outcomes]
    delivered = np.concatenate([ledger.delivered for ledger in ledgers])
    assert 0 < delivered.sum() < len(delivered)
    assert (np.concatenate([ledger.uplink_bits for ledger in ledgers]) > 0).all()
    assert [outcome.record.delivered for outcome in outcomes] == [ledger.delivered.sum() for ledger in ledgers]


def test_nobody_may_send_and_the_round_goes_on() -> None:
    radio = CellRadio(channel=SHARED, allocation=Equal(), upload_seconds=1e-9)
    outcomes = play(ADAPTIVE, radio)
    assert not any(outcome.ledger.uplink_bits.any() for outcome in outcomes)
    met: set[int] = set()
    for outcome in outcomes:  # who may send nothing has reported its channel, and is told so
        cohort = set(outcome.ledger.client.tolist())
        reports = CHANNEL_STATE_BITS * len(cohort) + EXAMPLES_BITS * len(cohort - met)
        assert outcome.record.uplink_bits == reports
        assert outcome.record.downlink_bits == outcome.ledger.downlink_bits.sum() + GRANT_BITS * len(cohort)
        assert outcome.record.allocation_bits == reports + GRANT_BITS * len(cohort)
        met |= cohort
    assert all(outcome.record.delivered == 0 for outcome in outcomes)


def test_a_link_does_not_depend_on_the_chunks() -> None:
    radio = CellRadio(channel=SHARED, allocation=MinError(), upload_seconds=0.02)
    bits = [[each.record.uplink_bits for each in play(ADAPTIVE, radio, chunk_size=size)] for size in (1, 3, 8)]
    assert bits[0][0] == bits[1][0] == bits[2][0]  # from round 2 on, float sums differ in rounding


@pytest.mark.parametrize(
    ("radio", "wanted"),
    [
        ({"allocation": "equal"}, "allocation divides the upload time; give upload_seconds too"),
        ({"channel": "rayligh"}, 'radio.channel.kind = "rayligh" is unknown'),
        ({"upload_seconds": 0}, "radio.upload_seconds = 0"),
        ({"channel": {"kind": "rayleigh", "nearest": 50, "farthest": 5}}, "nearest = 50 m is beyond farthest = 5 m"),
    ],
)
def test_what_a_radio_cannot_be(radio: dict[str, Any], wanted: str) -> None:
    with pytest.raises(UserError, match=wanted.replace("(", r"\(")):
        build_experiment({"data": "ml-100k", "algorithm": "scolr", "radio": radio}, "test.yaml")


@pytest.mark.parametrize("channel", [MultipleAccess(), SHARED])
def test_a_shared_band_needs_an_upload_time(channel: Any) -> None:
    with pytest.raises(UserError, match=r"is one band for all; set its time per round with radio\.upload_seconds"):
        play(FedMF(), CellRadio(channel=channel))
    assert CellRadio(channel=Fixed()).upload_seconds is None


@pytest.mark.parametrize("codec", [(), CODEC], ids=["float32", "quantised"])
def test_a_networks_clients_fit_their_ranks_to_their_links(codec: Any) -> None:
    algorithm = SCoLR(rank=16, rank_policy=ChannelRank(), codec=codec)
    task = make_network(digits([30] * 12))
    radio = CellRadio(channel=SHARED, upload_seconds=0.04 if codec else 2.0)
    plan = Plan(rounds=3, clients_per_round=12, chunk_size=5, radio=radio)
    ranks, bits = [], []
    for outcome in rounds(Run(plan, algorithm, task), local(algorithm, task)):
        links = SHARED.draw(task.profiles.take(outcome.ledger.client), 0, outcome.record.round)
        assert contains(links.region, outcome.ledger.uplink_bits / (radio.upload_seconds or 1))
        ranks.append(outcome.ledger.rank)
        bits.append(outcome.ledger.uplink_bits)
    all_ranks, all_bits = np.concatenate(ranks), np.concatenate(bits)
    assert len(np.unique(all_ranks[all_bits > 0])) > 2
    by_bits = all_ranks[np.argsort(all_bits)]
    assert by_bits[-9:].mean() > by_bits[:9].mean() + 1
