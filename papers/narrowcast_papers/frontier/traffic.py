"""Total traffic: accuracy against uplink plus downlink, with downloads on a grid of several steps.

Noise of a coarse grid regularises, so that part of what a cell gains over float32 both ways is not its codec's: uploads
in float32 from the same downloads are the control. Every cell has the same tries of the server's rate on validation
users or samples, with a seed that is not a test seed.

A download has the whole model in float32, or the rows that a client asks for, the model or its changes on a grid.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from narrowcast.studies.comparison import ComparisonVerdicts, Tested
from narrowcast.studies.results import Rows
from narrowcast.studies.spec import RunSpec, best_place
from narrowcast.studies.tables import StudyTable
from narrowcast.studies.tuning import TEST_SEEDS, TunedCell, cells_plan, tested
from narrowcast.studies.verdicts import PaperVerdict, Runs, compared_with_first
from narrowcast_papers.frontier import decay
from narrowcast_papers.frontier.tuning_study import read_tuning_study

FRONTIERS: Mapping[str, str] = {"total-ml1m": "ml1m", "total-mnist": "mnist"}
"""The frontier of each study, whose dense uploads are the unit of traffic."""


def judge_total(tested: Tested) -> list[PaperVerdict]:
    """Compare each way with float32 both ways, seed by seed; traffic is in multiples of dense uploads."""
    if not tested:
        return []
    cell = next(iter(tested.values())).cell
    dense_bits = read_tuning_study(FRONTIERS[cell.study]).dense_bits
    return compared_with_first(
        {finished.cell.name: finished.runs for finished in tested.values()}, cell.of.metric, dense_bits
    )


TOTAL = ComparisonVerdicts(judge_total)


@dataclass(frozen=True)
class LongCell(TunedCell[float]):
    """Uploads in float32 over 3000 rounds, which need a smaller rate of the server than 1000 do.

    The step of the downloads is the best one of 1000 rounds.
    """

    @property
    def grid(self) -> tuple[float, ...]:
        """Rates of the server."""
        return (0.125, 0.25, 0.5)

    def best(self, results: Runs) -> float:
        """Return the best rate, from the results in the order of the grid."""
        return self.grid[best_place(results, "validation.hr@10")]

    def spec(self, value: float, part: str) -> RunSpec:
        """Return the run at a rate of the server."""
        return RunSpec(
            "total-ml1m-3000-float32-2.5" + (f"{part}-{value:g}" if part else ""),
            "fedmf-ml1m",
            (
                *("evaluate_every=1000", "checkpoint_every=1000", "checkpoint_seconds=100000"),
                *("algorithm.rows=touched", "training.item_weight_decay=0", "downlink=catch_up"),
                *("rounds=3000", "evaluate_every=3000", "checkpoint_every=3000"),
                *("algorithm.download={rows: touched, step: 2.5}", f"algorithm.server_learning_rate={value:g}"),
                *(("data.validation=random",) if part else ()),
            ),
        )


_REFERENCE, _LONG = decay.Cell("FedMF, float32", "5e-4", 3000), LongCell()


def judge_long(rows: Rows) -> list[PaperVerdict]:
    """Compare the long runs with those of another study that are sent the whole model."""
    cells: Mapping[str, TunedCell[Any]] = {_REFERENCE.codec: _REFERENCE, "float32 up, 2.5 down": _LONG}
    return compared_with_first(tested(rows, cells, TEST_SEEDS), "hr@10", read_tuning_study("ml1m").dense_bits)


TOTAL_ML1M_3000 = StudyTable(
    {
        "total-ml1m-3000": cells_plan("total-ml1m-3000", [_LONG], TEST_SEEDS),
        "decay-ml1m-3000": decay.PLANS["decay-ml1m-3000"],
    },
    judge_long,
)
