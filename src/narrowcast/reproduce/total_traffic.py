"""Total traffic on MovieLens-1M: accuracy against uplink plus downlink, with downloads on a grid of several steps.

Noise of a coarse grid regularises, so that part of what a cell gains over float32 both ways is not its codec's: uploads
in float32 from the same downloads are the control. Every cell has the same tries of the server's rate on validation
users, with a seed that is not a test seed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from narrowcast.reproduce.run_spec import RunSpec

TUNING_SEED = 100
RATES = (1.0, 1.5, 2.0)
"""Server rates tried."""
_LEVELS = "{kind: quantise, levels: %d, norms: column, rounding: dithered, norm_type: bfloat16}"
UPLINKS = {"float32": "", "svd": f"{{kind: svd, rank: 1}}, {_LEVELS % 64}"}
DOWNLINKS = {
    "catch-up": "",
    "rows": "{rows: touched}",
    "1.5": "{rows: touched, step: 1.5}",
    "2.5": "{rows: touched, step: 2.5}",
    "4": "{rows: touched, step: 4}",
}
"""A download has the whole matrix in float32, or the rows that a client asks for, in float32 or on a grid of a step."""


@dataclass(frozen=True)
class TrafficCell:
    """A way up and a way down."""

    uplink: str
    downlink: str

    def tuning(self, rate: float) -> RunSpec:
        """Return the run on validation users at a rate of the server."""
        spec = self._spec(f"{self._label}-tuning-{rate:g}", rate, ("data.validation=random",))
        return RunSpec(spec.label, spec.experiment, spec.overrides, first_seed=TUNING_SEED)

    def test(self, tried: Sequence[Mapping[str, Any]]) -> RunSpec:
        """Return the run on test users at the best of the rates tried; the results are in the order of `RATES`."""
        reached = [result["final"].get("validation.hr@10", 0.0) for result in tried]
        return self._spec(self._label, RATES[reached.index(max(reached))], ())

    @property
    def _label(self) -> str:
        return f"total-ml1m-{self.uplink}-{self.downlink}"

    def _spec(self, label: str, rate: float, overrides: tuple[str, ...]) -> RunSpec:
        codec, download = UPLINKS[self.uplink], DOWNLINKS[self.downlink]
        return RunSpec(
            label,
            "fedmf-ml1m",
            (
                *("evaluate_every=1000", "checkpoint_every=1000", "checkpoint_seconds=100000"),
                *("algorithm.rows=touched", "training.item_weight_decay=0", "downlink=catch_up"),
                *([f"algorithm.codec=[{codec}, entropy]"] if codec else []),
                *([f"algorithm.download={download}"] if download else []),
                f"algorithm.server_learning_rate={rate:g}",
                *overrides,
            ),
        )


CELLS = (
    TrafficCell("float32", "catch-up"),
    TrafficCell("svd", "2.5"),
    TrafficCell("float32", "2.5"),
    TrafficCell("svd", "4"),
    TrafficCell("svd", "1.5"),
)
