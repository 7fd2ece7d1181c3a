"""FedMA on digits with its controls: what matching adds, and what training the layers above again adds.

Five clients with Dirichlet(0.5) classes train a perceptron of 50 hidden units for 40 epochs, from models that each
draws itself or from one for all. The controls leave one part of FedMA out at a time: units are averaged by their index,
or the hidden layer is that of an untrained model, or the last layer is not trained again.

All cells share one rate and one partition, which were chosen by test accuracies: those nearest to the other program's.
They say how methods compare at one setting, not how good each can be.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from narrowcast.platform.tracking.figures import new_figure
from narrowcast.studies.comparison import draw_groups
from narrowcast.studies.results import Rows
from narrowcast.studies.spec import RunSpec, slug
from narrowcast.studies.tables import StudyTable
from narrowcast.studies.tuning import finished, untuned_plan
from narrowcast.studies.verdicts import PaperVerdict, Runs, accuracies, mean_and_spread, paired_differences

STUDY = "fedma-digits"
SEEDS = 5
INITIAL = {"different": "different starts", "same": "one start"}
FEDAVG = "units: by_index}, head: examples, retrain_epochs: 0"
METHODS: Mapping[str, tuple[str, int]] = {
    "FedAvg, one round": (FEDAVG, 1),
    "by index, last layer by class": ("units: by_index}, retrain_epochs: 0", 1),
    "by index, last layer trained again": ("units: by_index}", 1),
    "untrained hidden layer, last layer trained": ("units: untrained}", 1),
    "matched, last layer by class": ("units: bbp_map}, retrain_epochs: 0", 1),
    "FedMA": ("units: bbp_map}", 1),
    "FedAvg, two rounds": (FEDAVG, 2),
}
"""The fields of each method, and its passes; a pass of FedAvg is a round, in two messages."""
EXPECTED: Mapping[str, tuple[float, ...]] = {
    "different": (67.6, 75.8, 93.9, 88.7, 90.7, 95.4, 92.3),
    "same": (85.9, 91.3, 95.6, 87.2, 91.6, 95.7, 95.2),
}
"""Means over five seeds of a program in numpy that shares no code with this one, in the order of `METHODS`."""


@dataclass(frozen=True)
class DigitsCell:
    """A method of `METHODS`, from starts of `INITIAL`."""

    method: str
    initial: str

    @property
    def name(self) -> str:
        """The cell in words."""
        return f"{self.method}, {INITIAL[self.initial]}"

    @property
    def expected(self) -> float:
        """The accuracy of the other program, in percent."""
        return EXPECTED[self.initial][list(METHODS).index(self.method)]

    @property
    def run(self) -> RunSpec:
        """The run of this cell."""
        fields, passes = METHODS[self.method]
        label = f"{STUDY}-{self.initial}-{slug(self.method)}"
        return RunSpec(
            label,
            "fedavg-digits",
            (
                "data={kind: digits, clients: 5, "
                "partition: {kind: dirichlet, alpha: 0.5, min_examples: 10, capped: false}}",
                "model={kind: mlp, hidden: [50]}",
                f"algorithm={{kind: fedma, initial: {self.initial}, matching: {{{fields}}}",
                "training={learning_rate: 0.1, momentum: 0.9, batch_size: 32, epochs: 40}",
                *("clients_per_round=5", "chunk_size=5", "checkpoint_seconds=100000"),
                *(f"rounds={2 * passes}", f"evaluate_every={2 * passes}"),
            ),
            data_seed=True,
            memory_gib=0.3,
            together=label,
        )


CELLS = tuple(DigitsCell(method, initial) for initial in INITIAL for method in METHODS)
PAIRS = (
    ("matched, last layer by class", "by index, last layer by class"),
    ("FedMA", "by index, last layer trained again"),
    ("FedMA", "matched, last layer by class"),
    ("FedMA", "FedAvg, two rounds"),
)
"""Methods that are compared, the reference last."""


def digits_runs(rows: Rows) -> dict[DigitsCell, Runs]:
    """Return the runs of the cells that are all finished."""
    found = {cell: finished(rows, cell.run, SEEDS) for cell in CELLS}
    return {cell: runs for cell, runs in found.items() if runs}


def judge_controls(rows: Rows) -> list[PaperVerdict]:
    """Compare each cell with the other program, and the methods of `PAIRS` seed by seed."""
    runs = digits_runs(rows)
    ours = {cell: accuracies(each, "accuracy") for cell, each in runs.items()}
    verdicts = [_beside(cell, values) for cell, values in ours.items()]
    return verdicts + paired_differences(
        [
            (f"{one} less {other}, {words}", ours[first], ours[second])
            for initial, words in INITIAL.items()
            for one, other in PAIRS
            if (first := DigitsCell(one, initial)) in ours and (second := DigitsCell(other, initial)) in ours
        ]
    )


def _beside(cell: DigitsCell, values: tuple[float, ...]) -> PaperVerdict:
    """Say whether the other program's mean lies within two standard deviations of ours by seed."""
    difference, spread = float(np.mean(values)) - cell.expected, float(np.std(values, ddof=1))
    inside = abs(difference) <= 2 * spread
    said = f"{'within' if inside else 'not within'} two standard deviations of a seed, {2 * spread:.1f}"
    return PaperVerdict(cell.name, f"{cell.expected:.1f}", mean_and_spread(values), said, f"{difference:+.1f}", values)


def plot_controls(rows: Rows, path: Path) -> None:
    """Plot the accuracy of each method from both kinds of starts."""
    runs = digits_runs(rows)
    figure, (axes,) = new_figure("FedMA on digits, and its controls", panels=1)
    groups = {
        INITIAL[initial]: {
            cell.method: accuracies(each, "accuracy") for cell, each in runs.items() if cell.initial == initial
        }
        for initial in INITIAL
    }
    draw_groups(axes, list(METHODS), groups)
    axes.set(xlabel="test accuracy (%) of five seeds")
    axes.legend(frameon=False, loc="lower left")
    figure.savefig(path, dpi=100)


DIGITS = StudyTable({STUDY: untuned_plan(STUDY, [cell.run for cell in CELLS], SEEDS)}, judge_controls, plot_controls)
