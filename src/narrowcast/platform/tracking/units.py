"""Formatting of bytes, durations, ratios and percentages; apart from `metrics`, as lists of files need no PyArrow."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

NOT_KNOWN = "-"


@dataclass(frozen=True)
class Unit:
    """A symbol and its size in the stored unit (bits or seconds)."""

    symbol: str
    size: float


BYTE_UNITS = tuple(Unit(symbol, 8 * 1000.0**power) for power, symbol in enumerate(("B", "kB", "MB", "GB", "TB")))
TIME_UNITS = (Unit("s", 1), Unit("min", 60), Unit("h", 3600))


def axis_unit(units: Sequence[Unit], largest: float) -> Unit:
    """Return the largest unit of which the largest value of an axis is at least two."""
    return next((unit for unit in reversed(units) if largest >= 2 * unit.size), units[0])


def counted(number: int, noun: str) -> str:
    """Return a number of things: `1 round`, `3 rounds`."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def format_bits(bits: float) -> str:
    """Format bits as decimal bytes with three digits: `12.3 MB`."""
    if not math.isfinite(bits):
        return NOT_KNOWN
    if bits < 999.5 * BYTE_UNITS[0].size:
        return f"{bits / 8:.3g} B"
    unit = next((unit for unit in BYTE_UNITS[1:] if bits < 999.5 * unit.size), BYTE_UNITS[-1])
    value = bits / unit.size
    return f"{value:.{max(0, 3 - len(str(int(value))))}f} {unit.symbol}"


def format_seconds(seconds: float) -> str:
    """Format a duration in its two leading units: `1 h 23 min`."""
    if not math.isfinite(seconds):
        return NOT_KNOWN
    if seconds < 59.95:
        return f"{seconds:.2f} s" if seconds < 0.995 else f"{seconds:.1f} s"
    minutes, seconds_left = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {seconds_left} s"
    hours, minutes = divmod(round(seconds / 60), 60)
    if hours < 24:
        return f"{hours} h {minutes} min"
    days, hours = divmod(round(seconds / 3600), 24)
    return f"{days} d {hours} h"


def format_percent(share: float | None) -> str:
    """Format a share between 0 and 1 in percent: `68.41 %`; a dash if it was not measured."""
    return NOT_KNOWN if share is None or not math.isfinite(share) else f"{100 * share:.2f} %"


def format_compression(bits: float, full_bits: float) -> str:
    """Format how many times smaller a number of bits is than that of the full model: `16.2x`, or `0.80x` if larger."""
    if not (bits > 0 and full_bits > 0):
        return NOT_KNOWN
    factor = full_bits / bits
    return f"{factor:,.1f}x" if factor >= 1 else f"{factor:.2f}x"


def format_short_seconds(seconds: float) -> str:
    """Format a time that may be below a second: `3.21 ms`, or as `format_seconds`."""
    return f"{1000 * seconds:.3g} ms" if seconds < 1 else format_seconds(seconds)
