from __future__ import annotations

import math

import pytest

from narrowcast.platform.tracking.units import (
    BYTE_UNITS,
    NOT_KNOWN,
    TIME_UNITS,
    axis_unit,
    format_bits,
    format_compression,
    format_percent,
    format_seconds,
)


@pytest.mark.parametrize(
    ("bits", "text"),
    [
        (0, "0 B"),
        (8, "1 B"),
        (999 * 8, "999 B"),
        (1000 * 8, "1.00 kB"),
        (12_345 * 8, "12.3 kB"),
        (999_499 * 8, "999 kB"),
        (999_500 * 8, "1.00 MB"),
        (98_400_000, "12.3 MB"),
        (56_900_000_000 * 8, "56.9 GB"),
        (2.5e12 * 8, "2.50 TB"),
        (1234e12 * 8, "1234 TB"),
        (math.nan, NOT_KNOWN),
        (math.inf, NOT_KNOWN),
    ],
)
def test_bits_read_as_decimal_bytes(bits: float, text: str) -> None:
    assert format_bits(bits) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0.00 s"),
        (0.42, "0.42 s"),
        (0.996, "1.0 s"),
        (19.24, "19.2 s"),
        (59.94, "59.9 s"),
        (59.96, "1 min 0 s"),
        (83, "1 min 23 s"),
        (3599.6, "1 h 0 min"),
        (4980, "1 h 23 min"),
        (86_399, "1 d 0 h"),
        (183_600, "2 d 3 h"),
        (math.nan, NOT_KNOWN),
    ],
)
def test_seconds_read_in_their_two_leading_units(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text


@pytest.mark.parametrize(
    ("share", "text"),
    [(0.0, "0.00 %"), (0.68407, "68.41 %"), (1.0, "100.00 %"), (None, NOT_KNOWN), (math.nan, NOT_KNOWN)],
)
def test_shares_read_in_percent(share: float | None, text: str) -> None:
    assert format_percent(share) == text


@pytest.mark.parametrize(
    ("bits", "full_bits", "text"),
    [
        (10, 162, "16.2x"),
        (5, 5, "1.0x"),
        (1, 12_345, "12,345.0x"),
        (125, 100, "0.80x"),
        (0, 100, NOT_KNOWN),
        (3, 0, NOT_KNOWN),
    ],
)
def test_compression_is_relative_to_the_full_model(bits: float, full_bits: float, text: str) -> None:
    assert format_compression(bits, full_bits) == text


@pytest.mark.parametrize(
    ("largest_bits", "symbol"),
    [(0, "B"), (1.9e3 * 8, "B"), (2e3 * 8, "kB"), (204e6 * 8, "MB"), (10e9 * 8, "GB"), (9e15 * 8, "TB")],
)
def test_an_uplink_axis_takes_the_coarsest_unit_that_fits(largest_bits: float, symbol: str) -> None:
    assert axis_unit(BYTE_UNITS, largest_bits).symbol == symbol


@pytest.mark.parametrize(("largest", "symbol"), [(0, "s"), (119, "s"), (120, "min"), (7199, "min"), (7200, "h")])
def test_a_time_axis_takes_the_coarsest_unit_that_fits(largest: float, symbol: str) -> None:
    assert axis_unit(TIME_UNITS, largest).symbol == symbol
