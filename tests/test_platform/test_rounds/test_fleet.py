"""Fleets: shares, distributions, and traces good and bad."""

from pathlib import Path

import numpy as np
import pytest
from pydantic import BaseModel, ValidationError

from narrowcast.platform.errors import UserError
from narrowcast.platform.rounds.fleet import LogNormal, LogNormalFleet, Tier, Tiers, TraceFleet

HEADER = "client,uplink_mbit_per_second,downlink_mbit_per_second,compute_speed\n"
COLUMNS = ("uplink_bits_per_second", "downlink_bits_per_second", "compute_speed")


def examples(n_clients: int) -> np.ndarray:
    return np.arange(1, n_clients + 1)


def tiers(*shares: float) -> Tiers:
    return Tiers(
        tiers=tuple(
            Tier(
                name=f"tier-{place}",
                share=share,
                uplink_mbit_per_second=place,
                downlink_mbit_per_second=10 * place,
                compute_speed=place / 2,
            )
            for place, share in enumerate(shares, start=1)
        )
    )


@pytest.mark.parametrize(
    ("shares", "n_clients", "counts"),
    [
        ((1, 1), 10, [5, 5]),
        ((0.2, 0.3, 0.5), 10, [2, 3, 5]),
        ((20, 30, 50), 1000, [200, 300, 500]),
        ((1,), 7, [7]),
        ((1, 2), 943, [314, 629]),
        ((1, 1000), 3, [0, 3]),
    ],
    ids=str,
)
def test_tiers_are_dealt_in_their_exact_shares(shares: tuple[float, ...], n_clients: int, counts: list[int]) -> None:
    profiles = tiers(*shares).profiles(examples(n_clients), seed=3)
    tier = np.rint(profiles.uplink_bits_per_second / 1e6).astype(int)
    assert np.bincount(tier, minlength=len(shares) + 1)[1:].tolist() == counts
    assert np.array_equal(profiles.downlink_bits_per_second, 10e6 * tier)  # a client's columns are of one tier
    assert np.array_equal(profiles.compute_speed, tier / 2)
    assert np.array_equal(profiles.client, np.arange(n_clients))
    assert np.array_equal(profiles.examples, examples(n_clients))


def test_tiers_are_dealt_at_random() -> None:
    uplink = tiers(1, 1).profiles(examples(1000), seed=0).uplink_bits_per_second / 1e6
    assert 0.45 < np.mean(uplink[:500] == 1) < 0.55


@pytest.mark.parametrize("fleet", [tiers(1, 1, 1), LogNormalFleet()], ids=lambda fleet: fleet.kind)
def test_a_fleet_follows_its_seed(fleet: Tiers | LogNormalFleet) -> None:
    first, again, other = (fleet.profiles(examples(300), seed) for seed in (0, 0, 1))
    for column in COLUMNS:
        assert np.array_equal(getattr(first, column), getattr(again, column))
        assert not np.array_equal(getattr(first, column), getattr(other, column))


def test_lognormal_median_and_sigma() -> None:
    wanted = {"uplink": (3.0, 0.8), "downlink": (20.0, 0.0), "speed": (0.5, 1.2)}
    quantity = {name: LogNormal(median=median, sigma=sigma) for name, (median, sigma) in wanted.items()}
    fleet = LogNormalFleet(
        uplink_mbit_per_second=quantity["uplink"],
        downlink_mbit_per_second=quantity["downlink"],
        compute_speed=quantity["speed"],
    )
    n_clients = 40_000
    profiles = fleet.profiles(examples(n_clients), seed=1)
    units = (1e6, 1e6, 1.0)
    logs = []
    for column, unit, (median, sigma) in zip(COLUMNS, units, wanted.values(), strict=True):
        log = np.log(getattr(profiles, column) / unit)
        assert np.median(log) == pytest.approx(np.log(median), abs=1e-12 + 5 * 1.26 * sigma / n_clients**0.5)
        assert log.std() == pytest.approx(sigma, abs=1e-9 + 5 * sigma / (2 * n_clients) ** 0.5)
        logs.append(log)
    assert abs(np.corrcoef(logs[0], logs[2])[0, 1]) < 5 / n_clients**0.5


@pytest.mark.parametrize(
    ("model", "values"),
    [
        (Tier, {"share": 0}),
        (Tier, {"uplink_mbit_per_second": 0}),
        (Tier, {"downlink_mbit_per_second": -1}),
        (Tier, {"compute_speed": 0}),
        (Tiers, {"tiers": ()}),
        (LogNormal, {"median": 0, "sigma": 1}),
        (LogNormal, {"median": 1, "sigma": -0.1}),
        (TraceFleet, {"path": "no/such/file.csv"}),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else "-".join(value),
)
def test_what_cannot_be_is_refused(model: type[BaseModel], values: dict[str, object]) -> None:
    good = {"name": "a", "share": 1, "uplink_mbit_per_second": 1, "downlink_mbit_per_second": 1}
    with pytest.raises(ValidationError) as caught:
        model.model_validate({**good, **values} if model is Tier else values)
    (problem,) = caught.value.errors()
    assert "\n" not in problem["msg"]
    assert not problem["loc"] or problem["loc"][-1] in values


def trace(folder: Path, text: str) -> TraceFleet:
    path = folder / "fleet.csv"
    path.write_text(text)
    return TraceFleet(path=path)


def test_a_trace_is_read_in_any_order_of_lines_and_columns(tmp_path: Path) -> None:
    text = "compute_speed,note,client,downlink_mbit_per_second,uplink_mbit_per_second\n0.5,x,1,4,2\n1,y,0,1e1,2.5\n"
    for tail in ("", "9,z,7,1,1\n"):  # a client that the data set does not have is passed over
        profiles = trace(tmp_path, text + tail).profiles(examples(2), seed=0)
        assert profiles.uplink_bits_per_second.tolist() == [2.5e6, 2e6]
        assert profiles.downlink_bits_per_second.tolist() == [10e6, 4e6]
        assert profiles.compute_speed.tolist() == [1, 0.5]
        assert profiles.examples.tolist() == [1, 2]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("client,uplink_mbit_per_second,compute_speed\n0,1,1\n", r"has no column downlink_mbit_per_second; needed: cl"),
        ("", r"has no column client, compute_speed, downlink"),
        (HEADER, r"lacks 2 of 2 clients, first 0; add them"),
        (HEADER + "0,1,1,1\n", r"lacks 1 of 2 clients, first 1; add them"),
        (HEADER + "0,1,1,1\n1,1,1,1\n0,2,2,2\n", r"line 4: client 0 is listed twice; keep one line per client"),
        (HEADER + "0,1,1,1\n1,fast,1,1\n", r"line 3: .*'fast'; every column must be a number"),
        (HEADER + "0,1,1,1\n1.5,1,1,1\n", r"line 3: .*'1.5'; every column must be a number"),
        (HEADER + "0,1,1,1\n1,1,1\n", r"line 3: .*; every column must be a number"),
        (HEADER + "0,1,1,1\n1,,1,1\n", r"line 3: .*; every column must be a number"),
        (HEADER + "0,1,-1,1\n1,1,1,1\n", r"line 2: .*rates are above 0"),
        (HEADER + "0,1,1,0\n1,1,1,1\n", r"line 2: .*rates are above 0"),
        (HEADER + "0,inf,1,1\n1,1,1,1\n", r"line 2: .*rates are above 0"),
        (HEADER + "0,nan,1,1\n1,1,1,1\n", r"line 2: .*rates are above 0"),
        (HEADER + "0,1e999,1,1\n1,1,1,1\n", r"line 2: .*rates are above 0"),
        (HEADER + "-1,1,1,1\n0,1,1,1\n1,1,1,1\n", r"line 2: .*clients count from 0"),
    ],
    ids=[
        "missing-column", "empty-file", "no-clients", "missing-client", "twice", "not-a-number", "half-a-client",
        "short-line", "empty-field", "negative", "zero", "infinite", "nan", "overflow", "negative-client",
    ],
)  # fmt: skip
def test_a_bad_trace_is_a_user_error_of_one_line(tmp_path: Path, text: str, message: str) -> None:
    fleet = trace(tmp_path, text)
    with pytest.raises(UserError, match=message) as caught:
        fleet.profiles(examples(2), seed=0)
    assert "\n" not in str(caught.value)
    assert str(tmp_path / "fleet.csv") in str(caught.value)


@pytest.mark.parametrize(
    "tail",
    [b"\xff,1,1,1\n", b"1,\x00,1,1\n", b"1," + b"9" * 200_000 + b",1,1\n"],
    ids=["not-utf-8", "nul", "endless-field"],
)
def test_a_trace_of_strange_bytes_is_a_user_error_of_one_line(tmp_path: Path, tail: bytes) -> None:
    path = tmp_path / "fleet.csv"
    path.write_bytes(HEADER.encode() + b"0,1,1,1\n" + tail)
    with pytest.raises(UserError) as caught:
        TraceFleet(path=path).profiles(examples(2), seed=0)
    assert "\n" not in str(caught.value)
