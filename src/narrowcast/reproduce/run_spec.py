"""The runs that a table or figure is computed from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

Measure = Literal["accuracy", "times", "components"]
"""`accuracy`: the result of the run. `times`, `components`: a measurement made in place of a recorded run."""


@dataclass(frozen=True)
class RunSpec:
    """One setting, run once per seed: a packaged experiment and overrides as on the command line.

    `label` begins the name of the run's folder.
    """

    label: str
    experiment: str
    overrides: tuple[str, ...] = ()
    measure: Measure = "accuracy"


Results = Mapping[str, Sequence[Mapping[str, Any]]]
"""Label of a `RunSpec` -> the result of each seed, in the order of the seeds."""
