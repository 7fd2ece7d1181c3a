"""The central counterpart of FedMAvg's items: the same ratings, split and rank, solved in one place.

The weight decay is the best of four on the same validation ratings, as that of every federated cell.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from narrowcast.reproduce.fedmavg_items import STUDY, TUNING_SEED
from narrowcast.reproduce.run_spec import RunSpec

DECAYS = (0.05, 0.1, 0.2, 0.3)
"""Of an entry, in both factors; those of FedMAvg are of a user in H, and have other sizes."""
ITERATIONS = 20


@dataclass(frozen=True)
class CentralCell:
    """Alternating least squares on all ratings."""

    name: str = "central, alternating least squares"

    def tuning(self, decay: float) -> RunSpec:
        """Return the solve measured on validation ratings at a weight decay."""
        return self._spec(decay, "-tuning")

    def best(self, tried: Sequence[Mapping[str, Any]]) -> float:
        """Return the best weight decay, from the results in the order of `DECAYS`."""
        reached = [result["final"]["validation.rmse"] for result in tried]
        return DECAYS[reached.index(min(reached))]

    def test(self, tried: Sequence[Mapping[str, Any]]) -> RunSpec:
        """Return the solve measured on test ratings at the best weight decay."""
        return self._spec(self.best(tried), "")

    def _spec(self, decay: float, tuning: str) -> RunSpec:
        return RunSpec(
            f"{STUDY}-central-{decay:g}{tuning}",
            "completion-ill-conditioned",
            (
                "problem={kind: rating_completion, ratings: {set: ml-latest-small, validation_share: 0.1}}",
                f"solver={{kind: als, rank: 10, weight_decay: {decay:g}}}",
                f"iterations={ITERATIONS}",
                f"evaluate_every={ITERATIONS}",
                "tolerance=null",
                "targets={}",
            ),
            first_seed=TUNING_SEED if tuning else 0,
            memory_gib=0.3,
        )


CENTRAL = CentralCell()
