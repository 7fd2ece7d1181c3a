"""The virtual clock against the paper's Table 2 and against sums done by hand."""

import numpy as np
import pytest

from narrowcast.algorithms.codecs.messages import RowsPayload, rows_wire_bits
from narrowcast.platform.errors import UserError
from narrowcast.platform.rounds.fleet import Clock, Tiers
from narrowcast.platform.types import FloatArray, IntArray, Profiles

N_ITEMS, ROUNDS = 3706, 1000


def link(clients: int = 1) -> Profiles:
    """The paper's link, the default of every fleet."""
    return Tiers().profiles(np.full(clients, 165), seed=0)


def minutes(clock: Clock, bits: int, examples: int = 0) -> float:
    each = np.array([bits])
    return (
        ROUNDS
        * clock.round_seconds(clock.client_seconds(link(), np.array([examples]), *seconds_of(link(), each, each)))
        / 60
    )


def seconds_of(profiles: Profiles, downlink_bits: IntArray, uplink_bits: IntArray) -> tuple[FloatArray, FloatArray]:
    """How long the links take."""
    return downlink_bits / profiles.downlink_bits_per_second, uplink_bits / profiles.uplink_bits_per_second


@pytest.mark.parametrize(
    ("rank", "wanted"), [(64, 80.43), (32, 40.21), (16, 20.11), (8, 10.05), (4, 5.03), (2, 2.51), (1, 1.26)]
)
def test_communication_of_table_2(rank: int, wanted: float) -> None:
    clock = Clock(compute_overhead_seconds=0, seconds_per_example=0)
    assert minutes(clock, N_ITEMS * rank * 32) == pytest.approx(wanted, abs=0.006)
    # Our payload of all rows has a header besides; it costs less than a tenth of a minute.
    payload = RowsPayload(N_ITEMS, np.arange(N_ITEMS), np.zeros((N_ITEMS, rank), np.float32), "all", mask=False)
    bits = rows_wire_bits(n_rows=N_ITEMS, sent_rows=N_ITEMS, rank=rank, layout="all", mask=False)
    assert bits == 8 * len(payload.to_bytes())
    assert minutes(clock, bits) == pytest.approx(wanted, abs=0.1)


def test_the_constants_are_the_papers() -> None:
    # 1000 participations of 10 s, and a client whose simulation takes 19.89 ms, 7 times that on its device: 169 min.
    clock = Clock(seconds_per_example=19.89e-3 / 2000, compute_overhead_seconds=10)
    assert minutes(clock, 0, examples=2000) == pytest.approx((10_000 + 139.2) / 60, abs=0.01)


def test_fewer_bits_are_less_time_by_default() -> None:
    # The paper's overhead of 10 s hides the link of a network of 5,000 parameters.
    dense, coded = 5000 * 32, 5000
    assert minutes(Clock(), coded) < minutes(Clock(), dense) / 20
    papers = Clock(compute_overhead_seconds=10)
    assert minutes(papers, coded) > 0.98 * minutes(papers, dense)


def test_client_seconds_by_hand() -> None:
    profiles = Profiles(
        client=np.arange(3),
        examples=np.array([9, 9, 9]),
        uplink_bits_per_second=np.array([10.0, 20.0, 40.0]),
        downlink_bits_per_second=np.array([100.0, 50.0, 25.0]),
        compute_speed=np.array([1.0, 2.0, 0.5]),
    )
    clock = Clock(seconds_per_example=0.5, compute_slowdown=4, compute_overhead_seconds=3, server_seconds=1.5)
    link_seconds = seconds_of(profiles, np.array([1000, 0, 50]), np.array([20, 60, 0]))
    seconds = clock.client_seconds(profiles, np.array([10, 10, 0]), *link_seconds)
    assert seconds.tolist() == [10 + 20 + 3 + 2, 0 + 10 + 3 + 3, 2 + 0 + 3 + 0]
    assert clock.round_seconds(seconds) == 35 + 1.5
    assert clock.round_seconds(seconds[1:]) == 16 + 1.5


def test_a_round_without_clients_takes_the_servers_time() -> None:
    assert Clock(server_seconds=2.5).round_seconds(np.empty(0)) == 2.5


@pytest.mark.parametrize("field", [name for name in Clock.model_fields if name != "uploads"])
def test_negative_times_are_refused(field: str) -> None:
    with pytest.raises(UserError, match="greater than or equal to 0"):
        Clock(**{field: -1.0})
