"""The central counterparts of FedMAvg's items: the same ratings and split in one place, and what takes no factors.

The setting of every solver is the best of four on the same validation ratings, as that of every federated cell.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from narrowcast.platform.models.rating_baselines import BIASES, USER_MEAN
from narrowcast.studies.spec import RunSpec, slug
from narrowcast.studies.tuning import TunedCell
from narrowcast_papers.fedmavg.items import STUDY

RATINGS = "ratings: {set: ml-latest-small, validation_share: 0.1}"


@dataclass(frozen=True)
class CentralCell(TunedCell[float]):
    """A solver of all ratings; the solver's field is tried at each of the values."""

    name: str
    label: str
    problem: str
    solver: str
    values: tuple[float, ...]
    iterations: int

    @property
    def grid(self) -> Sequence[float]:
        """The values that are tried."""
        return self.values

    def best(self, results: Sequence[Mapping[str, Any]]) -> float:
        """Return the best value, from the results in the order of `values`."""
        reached = [result["final"]["validation.rmse"] for result in results]
        return self.values[reached.index(min(reached))]

    def spec(self, value: float, part: str) -> RunSpec:
        """Return the solve with the field at a value."""
        return RunSpec(
            f"{STUDY}-{self.label}-{value:g}{part}",
            "completion-ill-conditioned",
            (
                f"problem={{kind: rating_completion, {self.problem}}}",
                f"solver={{{self.solver}: {value:g}}}",
                f"iterations={self.iterations}",
                f"evaluate_every={self.iterations}",
                "tolerance=null",
                "targets={}",
            ),
            memory_gib=0.3,
        )


LEAST_SQUARES = CentralCell(
    "central, alternating least squares",
    "central",
    RATINGS,
    "kind: als, rank: 10, weight_decay",
    (0.05, 0.1, 0.2, 0.3),
    20,
)
"""Of the rank of the federated cells. The decay is of an entry, in both factors; those of FedMAvg are of a user in H,
and have other sizes."""
SOFT_IMPUTE = CentralCell(
    "central, biases and Soft-Impute",
    "central-soft-impute",
    f"{RATINGS}, bias_decay: 5",
    "kind: soft_impute, rank: 40, penalty",
    (0.3, 0.45, 0.65, 0.95),
    100,
)
CENTRAL = (LEAST_SQUARES, SOFT_IMPUTE)


@dataclass(frozen=True)
class BaselineCell:
    """Predictions that take no factors and no tuning."""

    name: str
    measure: str

    @property
    def run(self) -> RunSpec:
        """The measurement of this cell."""
        problem = (f"problem={{kind: rating_completion, {RATINGS}}}",)
        label = f"{STUDY}-{slug(self.name)}"
        return RunSpec(label, "completion-ill-conditioned", problem, self.measure, memory_gib=0.3)


BASELINES = (BaselineCell(USER_MEAN, "user_mean"), BaselineCell(BIASES, "biases"))
