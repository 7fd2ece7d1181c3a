"""What a table or figure needs to be run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

Measure = Literal["accuracy", "times", "components"]
"""What is taken of an experiment: its result, or what `times` or `components` measure while it is played."""


@dataclass(frozen=True)
class Wanted:
    """One setting, to be run once a seed: a packaged experiment with some values set, as on the command line."""

    label: str
    experiment: str
    overrides: tuple[str, ...] = ()
    measure: Measure = "accuracy"


Results = Mapping[str, Sequence[Mapping[str, Any]]]
"""Label -> the result of each seed."""
