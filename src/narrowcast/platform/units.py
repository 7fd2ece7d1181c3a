"""Units of fields, for the reference and the JSON Schema: from the end of a field's name, or from its own metadata."""

from __future__ import annotations

from typing import Final

from pydantic.config import JsonDict
from pydantic.fields import FieldInfo

BITS: Final[JsonDict] = {"unit": "bit"}
METRES: Final[JsonDict] = {"unit": "m"}
ROUNDS: Final[JsonDict] = {"unit": "rounds"}
SECONDS: Final[JsonDict] = {"unit": "s"}

_BY_ENDING = {
    "mbit_per_second": "Mbit/s",
    "bits_per_second": "bit/s",
    "seconds_per_example": "s",
    "seconds": "s",
    "bits": "bit",
    "decibel": "dB",
    "hertz": "Hz",
}


def unit_of(name: str, field: FieldInfo) -> str:
    """Return the unit of a field, empty for counts, ratios and everything that is no quantity."""
    extra = field.json_schema_extra
    if isinstance(extra, dict) and "unit" in extra:
        return str(extra["unit"])
    return next((unit for ending, unit in _BY_ENDING.items() if name == ending or name.endswith(f"_{ending}")), "")
