"""Units of fields, for the reference and the JSON Schema: from the end of a field's name, or from its own metadata."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from pydantic.config import JsonDict

BITS: Final[JsonDict] = {"unit": "bit"}
ITERATIONS: Final[JsonDict] = {"unit": "iterations"}
METRES: Final[JsonDict] = {"unit": "m"}
ROUNDS: Final[JsonDict] = {"unit": "rounds"}
SECONDS: Final[JsonDict] = {"unit": "s"}

_BY_ENDING = {
    "mbit_per_second": "Mbit/s",
    "bits_per_second": "bit/s",
    "seconds_per_example": "s/example",
    "seconds": "s",
    "bits": "bit",
    "decibel": "dB",
    "hertz": "Hz",
}


def unit_of(name: str, schema: Mapping[str, Any]) -> str:
    """Return the unit of a field with this JSON Schema, empty for counts, ratios and what is no quantity."""
    if "unit" in schema:
        return str(schema["unit"])
    return next((unit for ending, unit in _BY_ENDING.items() if name == ending or name.endswith(f"_{ending}")), "")
