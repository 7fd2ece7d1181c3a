"""Channels: the distribution of their draws, which depend on the client alone, and refused settings."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import pytest
from pydantic import BaseModel, ValidationError

from narrowcast.algorithms.channel.fading import MultipleAccess, RateTable, Rayleigh, SingleUser
from narrowcast.algorithms.channel.given import Fixed, LogNormalRates, Trace
from narrowcast.algorithms.channel.links import Channel, Links, block_of, exponentials, normals, uniforms
from narrowcast.algorithms.channel.radio import BroadcastLink, Unicast
from narrowcast.algorithms.channel.regions import GaussianRegion, Independent, TableRegion
from narrowcast.platform.config.catalog import ALLOCATIONS, CHANNELS, DOWNLINKS
from narrowcast.platform.errors import UserError
from narrowcast.platform.types import IntArray, Profiles
from regions_by_hand import Array

HEADER = "round,client,uplink_mbit_per_second,downlink_mbit_per_second\n"
PAIR = [{"clients": [0], "bits_per_second": 3}, {"clients": [1], "bits_per_second": 2}]
BOTH = {"clients": [0, 1], "bits_per_second": 4}


def profiles(clients: IntArray, uplink: Array | None = None) -> Profiles:
    ones = np.ones(len(clients))
    uplink = 1e6 * (1 + np.arange(len(clients))) if uplink is None else uplink
    return Profiles(clients, ones.astype(np.int64), uplink, 3 * uplink, ones)


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace.csv"
    rows = [
        f"{round_},{client},{round_ + client},{10 * round_ + client}" for round_ in (1, 2, 3) for client in range(1000)
    ]
    path.write_text(HEADER + "\n".join(rows) + "\n")
    return path


def drawing(trace: Path) -> list[Channel]:
    """Return a channel of each kind that serves any client, in both modes if it has two."""
    return [
        Fixed(),
        LogNormalRates(),
        Rayleigh(shadowing_decibel=6),
        Rayleigh(access="shared", outage_probability=0.2),
        Trace(path=trace),
        MultipleAccess(),
        SingleUser(dimension=10),
    ]


def same(one: Links, other: Links) -> bool:
    names = ("uplink_bits_per_second", "downlink_bits_per_second", "lost")
    return all(np.array_equal(getattr(one, name), getattr(other, name)) for name in names)


@pytest.mark.parametrize("which", range(7))
def test_a_link_follows_seed_round_and_client_alone(which: int, trace: Path) -> None:
    channel = drawing(trace)[which]
    clients = np.array([5, 900, 17, 3])
    cohort = profiles(clients)
    together = channel.draw(cohort, 1, 2)
    assert same(together, channel.draw(cohort, 1, 2))
    for place in range(4):
        alone = channel.draw(cohort.take(np.array([place])), 1, 2)
        assert alone.uplink_bits_per_second[0] == together.uplink_bits_per_second[place]
        assert alone.downlink_bits_per_second[0] == together.downlink_bits_per_second[place]
        assert alone.lost[0] == together.lost[place]
    assert len(together.region) == 4
    assert np.allclose(together.region.single_rates(), together.uplink_bits_per_second, rtol=1e-12)


@pytest.mark.parametrize("which", range(7))
def test_an_empty_cohort_is_refused(which: int, trace: Path) -> None:
    with pytest.raises(UserError, match="the cohort is empty"):
        drawing(trace)[which].draw(profiles(np.empty(0, dtype=np.int64)), 0, 1)


@pytest.mark.parametrize("rate", [np.nan, np.inf, 0.0, -1.0])
def test_a_rate_that_is_none_is_refused(rate: float) -> None:
    for channel in (Fixed(), LogNormalRates(), MultipleAccess()):
        with pytest.raises(UserError, match="client 7: uplink of"):
            channel.draw(profiles(np.array([2, 7]), np.array([1e6, rate])), 0, 1)


def test_every_kind_reads_from_its_name_and_prints_itself(trace: Path) -> None:
    path = {"path": str(trace)}
    values = {
        "trace": path,
        "located_rayleigh": path,
        "table": {"capacities": [*PAIR, BOTH]},
        "single_user": {"dimension": 5},
    }
    for kinds in (CHANNELS, DOWNLINKS, ALLOCATIONS):

        class Holder(BaseModel):
            part: Annotated[Any, kinds]

        for kind, model in kinds.items():
            read = Holder.model_validate({"part": {"kind": kind, **values.get(kind, {})}}).part
            assert type(read) is model
            assert model.model_validate(read.model_dump()) == read
            with pytest.raises(ValidationError, match="bandwith"):
                model.model_validate({**values.get(kind, {}), "bandwith": 1})


def test_what_draws_are_made_of() -> None:
    clients = np.arange(200_000)
    u, z, e = (draw(3, "test", 1, clients) for draw in (uniforms, normals, exponentials))
    assert 0 < u.min() < u.max() < 1
    assert abs(z.mean()) < 0.01
    assert abs(z.std() - 1) < 0.01
    assert abs((z**4).mean() - 3) < 0.1
    assert abs(e.mean() - 1) < 0.01
    assert abs((e < np.log(2)).mean() - 0.5) < 0.005
    others = [normals(3, "test", 2, clients), normals(4, "test", 1, clients), normals(3, "text", 1, clients)]
    assert all(abs(np.corrcoef(z, other)[0, 1]) < 0.01 for other in others)
    assert [block_of(round_index, 3) for round_index in (1, 2, 3, 4, 6, 7)] == [1, 1, 1, 2, 2, 3]


@pytest.mark.parametrize("channel", [LogNormalRates(coherence=3), Rayleigh(coherence=3)])
def test_a_block_lasts_as_long_as_its_coherence(channel: Channel) -> None:
    cohort = profiles(np.arange(20))
    rates = [channel.draw(cohort, 0, round_index).uplink_bits_per_second for round_index in range(1, 8)]
    same_as_before = [np.array_equal(one, other) for one, other in pairwise(rates)]
    assert same_as_before == [True, True, False, True, True, False]


def test_lognormal_rates_have_their_median_and_sigma() -> None:
    cohort = profiles(np.arange(50_000), np.full(50_000, 2e6))
    links = LogNormalRates(uplink_sigma=0.7, downlink_sigma=0.0).draw(cohort, 0, 1)
    logs = np.log(links.uplink_bits_per_second / 2e6)
    assert abs(np.median(logs)) < 0.02
    assert abs(logs.std() - 0.7) < 0.01
    assert np.array_equal(links.downlink_bits_per_second, cohort.downlink_bits_per_second)


def test_path_loss_and_shadowing_make_the_mean_snr() -> None:
    cohort = profiles(np.arange(50_000))
    ring = Rayleigh(nearest=20, farthest=20, exponent=3.5, reference_snr_decibel=60)
    assert np.allclose(10 * np.log10(ring.mean_snr(cohort, 0)), 60 - 35 * np.log10(20), atol=1e-9)
    shadowed = ring.model_copy(update={"shadowing_decibel": 8.0})
    assert abs(np.std(10 * np.log10(shadowed.mean_snr(cohort, 0))) - 8) < 0.1
    # uniform over the disc: half of the clients within 1 / sqrt(2) of the radius
    disc = Rayleigh(nearest=1e-3, farthest=100, exponent=2, reference_snr_decibel=0)
    distance = 1 / np.sqrt(disc.mean_snr(cohort, 0))
    assert abs((distance < 100 / np.sqrt(2)).mean() - 0.5) < 0.01
    assert distance.max() <= 100 * (1 + 1e-9)
    # positions are constant within a run and depend on the seed
    assert np.array_equal(disc.mean_snr(cohort, 0), disc.mean_snr(cohort, 0))
    assert not np.array_equal(disc.mean_snr(cohort, 0), disc.mean_snr(cohort, 1))


def test_rayleigh_capacity_is_that_of_its_fade() -> None:
    cohort = profiles(np.arange(50_000))
    ring = Rayleigh(nearest=20, farthest=20, bandwidth_hertz=2e6, reference_snr_decibel=50, downlink_gain_decibel=10)
    links = ring.draw(cohort, 0, 1)
    mean = ring.mean_snr(cohort, 0)
    gain = (2 ** (links.uplink_bits_per_second / 2e6) - 1) / mean
    assert abs(gain.mean() - 1) < 0.02
    assert abs((gain < 0.1).mean() - (1 - np.exp(-0.1))) < 0.005
    downlink = (2 ** (links.downlink_bits_per_second / 2e6) - 1) / (10 * mean)
    assert abs(downlink.mean() - 1) < 0.02
    assert abs(np.corrcoef(gain, downlink)[0, 1]) < 0.02
    assert not links.lost.any()
    assert isinstance(links.region, Independent)
    shared = ring.model_copy(update={"access": "shared"}).draw(cohort, 0, 1)
    assert isinstance(shared.region, GaussianRegion)
    assert np.allclose(shared.region.snr, gain * mean)
    assert np.array_equal(shared.uplink_bits_per_second, links.uplink_bits_per_second)


@pytest.mark.parametrize(
    ("fields", "probability", "planned"),
    [
        ({"outage_probability": 0.25}, 0.25, -np.log(0.75)),
        ({"margin_decibel": 10.0}, 1 - np.exp(-0.1), 0.1),
        ({"margin_decibel": 0.0}, 1 - np.exp(-1.0), 1.0),
    ],
)
def test_an_upload_is_lost_where_the_fade_is_deeper_than_planned(
    fields: dict[str, float], probability: float, planned: float
) -> None:
    cohort = profiles(np.arange(50_000))
    channel = Rayleigh(**fields)
    links, informed = channel.draw(cohort, 0, 1), Rayleigh().draw(cohort, 0, 1)
    assert abs(links.lost.mean() - probability) < 0.01
    snr = channel.mean_snr(cohort, 0) * planned
    assert np.allclose(links.uplink_bits_per_second, channel.bandwidth_hertz * np.log2(1 + snr))
    # lost exactly if the planned rate exceeds the capacity of this round's fade
    assert np.array_equal(links.lost, links.uplink_bits_per_second > informed.uplink_bits_per_second)
    assert np.array_equal(links.lost_at(np.zeros(50_000)), links.lost)


def test_a_shared_band_carries_what_each_could_alone_but_not_together() -> None:
    cohort = profiles(np.arange(3), np.array([1e6, 2e6, 3e6]))
    region = MultipleAccess(bandwidth_hertz=1e6).draw(cohort, 0, 1).region
    assert np.allclose(region.single_rates(), [1e6, 2e6, 3e6])
    assert region.capacity_of(np.arange(3)) == pytest.approx(1e6 * np.log2(1 + 1 + 3 + 7))
    with pytest.raises(UserError, match=r"client 2: 3e\+06 bits per second in a band of 5000 Hz"):
        MultipleAccess(bandwidth_hertz=5000).draw(cohort, 0, 1)


def test_a_table_gives_a_cohort_its_part() -> None:
    channel = RateTable.model_validate({"capacities": [*PAIR, BOTH]})
    swapped = channel.draw(profiles(np.array([1, 0])), 0, 1)
    assert swapped.uplink_bits_per_second.tolist() == [2, 3]
    assert isinstance(swapped.region, TableRegion)
    assert swapped.region.capacity_of(np.arange(2)) == 4
    assert channel.draw(profiles(np.array([1])), 0, 1).uplink_bits_per_second.tolist() == [2]
    with pytest.raises(UserError, match="client 2 is not in the K"):
        channel.draw(profiles(np.array([0, 2])), 0, 1)


@pytest.mark.parametrize(
    ("model", "values", "message"),
    [
        (RateTable, {"capacities": PAIR}, r"no number for \{0, 1\}"),
        (RateTable, {"capacities": [*PAIR, BOTH | {"bits_per_second": 6}]}, "not submodular"),
        (RateTable, {"capacities": [*PAIR, BOTH | {"bits_per_second": 1}]}, "not monotone"),
        (RateTable, {"capacities": [*PAIR, *PAIR]}, r"the set \(0,\) is given twice"),
        (RateTable, {"capacities": [PAIR[0] | {"bits_per_second": float("nan")}]}, "bits_per_second"),
        (Rayleigh, {"margin_decibel": 3, "outage_probability": 0.1}, "set the same gain"),
        (Rayleigh, {"nearest": 5, "farthest": 4}, "beyond farthest"),
        (Rayleigh, {"bandwidth_hertz": -1}, "bandwidth_hertz"),
        (Rayleigh, {"outage_probability": 0}, "outage_probability"),
        (SingleUser, {"dimension": 0}, "dimension"),
        (SingleUser, {"dimension": 5, "uplink_levels": 1}, "uplink_levels"),
        (Trace, {"path": "/nowhere/at.csv"}, "no file /nowhere/at.csv"),
        (BroadcastLink, {"groups": 0}, "groups"),
    ],
)
def test_fields_that_make_no_channel_are_refused(
    model: type[BaseModel], values: dict[str, object], message: str
) -> None:
    with pytest.raises(ValidationError, match=message):
        model.model_validate(values)


def test_a_trace_of_rounds_goes_on_from_its_beginning(trace: Path) -> None:
    cohort = profiles(np.array([7, 2]))
    rates = [Trace(path=trace).draw(cohort, 0, round_index) for round_index in (1, 2, 3, 4)]
    assert [links.uplink_bits_per_second.tolist() for links in rates] == [
        [8e6, 3e6],
        [9e6, 4e6],
        [10e6, 5e6],
        [8e6, 3e6],
    ]
    assert rates[1].downlink_bits_per_second.tolist() == [27e6, 22e6]
    with pytest.raises(UserError, match="no row of client 1000; it has 1000 clients"):
        Trace(path=trace).draw(profiles(np.array([1000])), 0, 1)


def test_a_trace_of_times_holds_each_row_until_the_next(tmp_path: Path) -> None:
    path = tmp_path / "times.csv"
    path.write_text("client,time,uplink_mbit_per_second,downlink_mbit_per_second\n0,0,1,1\n0,25,2,1\n0,60,3,1\n")
    channel = Trace(path=path, round_seconds=20)
    rates = [
        channel.draw(profiles(np.array([0])), 0, round_index).uplink_bits_per_second[0] for round_index in range(1, 8)
    ]
    assert rates == [1e6, 1e6, 2e6, 3e6, 1e6, 1e6, 2e6]


def test_a_trace_that_was_changed_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(HEADER + "1,0,1,1\n")
    assert Trace(path=path).draw(profiles(np.array([0])), 0, 1).uplink_bits_per_second[0] == 1e6
    path.write_text(HEADER + "1,0,2.5,1\n")
    assert Trace(path=path).draw(profiles(np.array([0])), 0, 1).uplink_bits_per_second[0] == 2.5e6


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("client,uplink_mbit_per_second\n", "no column round, or no column time"),
        ("round,client,uplink_mbit_per_second\n", "no column downlink_mbit_per_second; needed: round or time"),
        (HEADER.replace("round", "round,time"), "or both of them"),
        (HEADER + "1,0,1,1\n3,0,1,1\n", "line 3: client 0 has round 3 where round 2 is due"),
        (HEADER + "1,0,1,1\n2,0,1,1\n2,0,1,1\n", "line 4: client 0 has round 2 where round 3 is due"),
        (HEADER + "2,0,1,1\n", "line 2: client 0 has round 2 where round 1 is due"),
        (HEADER + "1,0,,1\n", "line 2: .*every column must hold a number"),
        (HEADER + "1,0,1\n", "line 2: .*every column must hold a number"),
        (HEADER + "1,0,0,1\n", "line 2: client 0 with rates"),
        (HEADER + "1,0,nan,1\n", "line 2: client 0 with rates"),
        (HEADER + "1,-1,1,1\n", "clients count from 0"),
        (HEADER.replace("round", "time") + "5,0,1,1\n", "has time 5; it must be 0"),
        (
            HEADER.replace("round", "time") + "0,0,1,1\n9,0,1,1\n4,0,1,1\n",
            "line 4: client 0 has time 4; it must be above 9",
        ),
        (HEADER.replace("round", "time") + "0,0,1,1\nnan,0,1,1\n", "has time nan; it must be above 0"),
        (HEADER + "1,0,1,\udcff\n", "cannot be read as a CSV file"),
    ],
)
def test_a_trace_with_holes_or_out_of_order_is_refused(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(UserError, match=message) as error:
        Trace(path=path).draw(profiles(np.array([0])), 0, 1)
    assert str(path) in str(error.value)
    assert "\n" not in str(error.value)


def test_a_budget_of_levels_is_a_rate() -> None:
    links = SingleUser(dimension=100, uplink_levels=2**8, downlink_levels=2**4, seconds=2).draw(
        profiles(np.arange(2)), 0, 1
    )
    assert links.uplink_bits_per_second.tolist() == [400, 400]
    assert links.downlink_bits_per_second.tolist() == [200, 200]


def test_a_broadcast_waits_for_the_weakest_that_is_waited_for() -> None:
    rates, bits = np.array([10.0, 2.0, 5.0, 1.0]), np.array([100, 100, 100, 100])
    everybody = np.ones(4, dtype=bool)
    assert Unicast().seconds(bits, rates, everybody).tolist() == [10, 50, 20, 100]
    assert BroadcastLink().seconds(bits, rates, everybody).tolist() == [100] * 4
    patient = np.array([True, True, True, False])
    assert BroadcastLink().seconds(bits, rates, patient).tolist() == [50, 50, 50, np.inf]
    assert Unicast().seconds(bits, rates, patient).tolist() == [10, 50, 20, np.inf]
    # groups: (10, 5) at 5, then (2, 1) at 1
    assert BroadcastLink(groups=2).seconds(bits, rates, everybody).tolist() == [20, 120, 20, 120]
    # as many groups as clients: one after the other
    assert BroadcastLink(groups=9).seconds(bits, rates, everybody).tolist() == [10, 80, 30, 180]
    # the longest download of a group is sent to all of it
    assert BroadcastLink().seconds(np.array([1, 7, 3, 2]), rates, patient).tolist() == [3.5, 3.5, 3.5, np.inf]
    assert BroadcastLink().seconds(bits, rates, ~everybody).tolist() == [np.inf] * 4
    for downlink in (Unicast(), BroadcastLink()):
        with pytest.raises(UserError, match=r"place 1 of the cohort: downlink of 0.0"):
            downlink.seconds(bits[:2], np.array([1.0, 0.0]), everybody[:2])
        with pytest.raises(UserError, match="the cohort is empty"):
            downlink.seconds(bits[:0], rates[:0], everybody[:0])
