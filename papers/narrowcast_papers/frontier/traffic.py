"""Total traffic: accuracy against uplink plus downlink, with downloads on a grid of several steps.

Noise of a coarse grid regularises, so that part of what a cell gains over float32 both ways is not its codec's: uploads
in float32 from the same downloads are the control. Every cell has the same tries of the server's rate on validation
users or samples, with a seed that is not a test seed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from narrowcast.studies.execution import Plan
from narrowcast.studies.results import Rows
from narrowcast.studies.spec import RunSpec, best_place
from narrowcast.studies.tables import StudyTable
from narrowcast.studies.tuning import TEST_SEEDS, TunedCell, cells_plan, tested
from narrowcast.studies.verdicts import PaperVerdict, compared_with_first
from narrowcast_papers.frontier import decay
from narrowcast_papers.frontier.tuning_study import read_tuning_study


@dataclass(frozen=True)
class Traffic:
    """A data set, the ways up and down, by name, and the pairs of them that run.

    `dense_from`: the study of the frontier whose dense uploads are the unit of traffic. `tuning`: what a run on
    validation users differs in. A way up is the stages of a codec before the entropy coder; empty: float32.
    """

    name: str
    dense_from: str
    metric: str
    experiment: str
    overrides: tuple[str, ...]
    rates: tuple[float, ...]
    uplinks: Mapping[str, str]
    downlinks: Mapping[str, str]
    pairs: tuple[tuple[str, str], ...]
    tuning: tuple[str, ...] = ()
    data_seed: bool = False

    @property
    def cells(self) -> dict[str, TrafficCell]:
        """The cells of the table by their names."""
        return {f"{uplink} up, {downlink} down": TrafficCell(self, uplink, downlink) for uplink, downlink in self.pairs}


@dataclass(frozen=True)
class TrafficCell(TunedCell[float]):
    """A way up and a way down."""

    of: Traffic
    uplink: str
    downlink: str

    @property
    def grid(self) -> tuple[float, ...]:
        """Rates of the server."""
        return self.of.rates

    def best(self, results: Sequence[Mapping[str, Any]]) -> float:
        """Return the best rate, from the results in the order of the grid."""
        return self.grid[best_place(results, f"validation.{self.of.metric}")]

    def spec(self, value: float, part: str) -> RunSpec:
        """Return the run at a rate of the server."""
        label = f"{self.of.name}-{self.uplink}-{self.downlink}" + (f"{part}-{value:g}" if part else "")
        codec, download = self.of.uplinks[self.uplink], self.of.downlinks[self.downlink]
        return RunSpec(
            label,
            self.of.experiment,
            (
                *self.of.overrides,
                *([f"algorithm.codec=[{codec}, entropy]"] if codec else []),
                *([f"algorithm.download={download}"] if download else []),
                f"algorithm.server_learning_rate={value:g}",
                *(self.of.tuning if part else ()),
            ),
            data_seed=self.of.data_seed,
        )


ML1M = Traffic(
    name="total-ml1m",
    dense_from="ml1m",
    metric="hr@10",
    experiment="fedmf-ml1m",
    overrides=(
        *("evaluate_every=1000", "checkpoint_every=1000", "checkpoint_seconds=100000"),
        *("algorithm.rows=touched", "training.item_weight_decay=0", "downlink=catch_up"),
    ),
    rates=(1.0, 1.5, 2.0),
    uplinks={
        "float32": "",
        "svd": "{kind: svd, rank: 1}, {kind: quantise, levels: 64, norms: column, rounding: dithered, "
        "norm_type: bfloat16}",
    },
    downlinks={
        "catch-up": "",
        "1.5": "{rows: touched, step: 1.5}",
        "2.5": "{rows: touched, step: 2.5}",
        "4": "{rows: touched, step: 4}",
    },
    pairs=(("float32", "catch-up"), ("svd", "2.5"), ("float32", "2.5"), ("svd", "4"), ("svd", "1.5")),
    tuning=("data.validation=random",),
)
"""A download has the whole matrix in float32, or the rows that a client asks for on a grid of a step."""

ML1M_3000 = replace(
    ML1M,
    name="total-ml1m-3000",
    overrides=(*ML1M.overrides, "rounds=3000", "evaluate_every=3000", "checkpoint_every=3000"),
    rates=(0.125, 0.25, 0.5),
    pairs=(("float32", "2.5"),),
)
"""The best step after 1000 rounds, for 3000; more rounds need a smaller rate of the server."""

MNIST = Traffic(
    name="total-mnist",
    dense_from="mnist",
    metric="accuracy",
    experiment="scolr-mnist",
    overrides=(
        *("rounds=30", "evaluate_every=30", "checkpoint_every=30", "checkpoint_seconds=100000"),
        *("algorithm=fedavg", "model={kind: cnn, channels: [8, 16], hidden: 64}"),
        *("training.batch_size=20", "training.learning_rate=0.173", "downlink=catch_up"),
    ),
    rates=(0.8, 1.2, 1.7),
    uplinks={"float32": "", "eden": "{kind: eden, levels: 2}"},
    downlinks={
        "whole": "",
        "changes-0.01": "{step: 0.01, rounding: nearest, history: 30}",
        "changes-0.02": "{step: 0.02, rounding: nearest, history: 30}",
        "model-0.05": "{step: 0.05}",
    },
    pairs=(
        *(("float32", "whole"), ("eden", "whole"), ("eden", "changes-0.01"), ("float32", "changes-0.01")),
        *(("eden", "changes-0.02"), ("eden", "model-0.05")),
    ),
    data_seed=True,
)
"""A download has the model in float32, the changes since the client's last one on a grid, or the model on a grid."""


def _plan(traffic: Traffic) -> Plan:
    return cells_plan(traffic.name, list(traffic.cells.values()), TEST_SEEDS)


def _total(traffic: Traffic, reference: decay.Cell | None = None) -> StudyTable:
    """Return the table of a study of traffic; `reference` is a cell of another one, with which its are compared."""
    known = {} if reference is None else {reference.codec: reference}

    def judge(rows: Rows) -> list[PaperVerdict]:
        runs = tested(rows, {**known, **traffic.cells}, TEST_SEEDS)
        return compared_with_first(runs, traffic.metric, read_tuning_study(traffic.dense_from).dense_bits)

    others = {"decay-ml1m-3000": decay.PLANS["decay-ml1m-3000"]} if known else {}
    return StudyTable({traffic.name: _plan(traffic), **others}, judge)


TOTAL_ML1M, TOTAL_MNIST = _total(ML1M), _total(MNIST)
TOTAL_ML1M_3000 = _total(ML1M_3000, decay.Cell("FedMF, float32", "5e-4", 3000))
