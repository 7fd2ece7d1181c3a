"""FedMA on digits with its controls: what matching adds, and what training the layers above again adds.

Five clients with Dirichlet(0.5) classes train a perceptron of 50 hidden units for 40 epochs, from models that each
draws itself or from one for all. The controls leave one part of FedMA out at a time: units are averaged by their index,
or the hidden layer is that of an untrained model, or the last layer is not trained again.

All cells share one rate and one partition, which were chosen by test accuracies: those nearest to the other program's.
They say how methods compare at one setting, not how good each can be.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import numpy as np

from narrowcast.studies.comparison import ComparisonVerdicts, FinishedCell, Tested, pair_differences, plot_groups
from narrowcast.studies.verdicts import PaperVerdict, mean_and_spread

METHODS = (
    "FedAvg, one round",
    "by index, last layer by class",
    "by index, last layer trained again",
    "untrained hidden layer, last layer trained",
    "matched, last layer by class",
    "FedMA",
    "FedAvg, two rounds",
)
"""A pass of FedAvg is a round, in two messages."""
EXPECTED: Mapping[str, tuple[float, ...]] = {
    "different": (67.6, 75.8, 93.9, 88.7, 90.7, 95.4, 92.3),
    "same": (85.9, 91.3, 95.6, 87.2, 91.6, 95.7, 95.2),
}
"""Means over five seeds of a program in numpy that shares no code with this one, in the order of `METHODS`."""
PAIRS = (
    ("matched, last layer by class", "by index, last layer by class"),
    ("FedMA", "by index, last layer trained again"),
    ("FedMA", "matched, last layer by class"),
    ("FedMA", "FedAvg, two rounds"),
)
"""Methods that are compared, the reference last."""


def judge_controls(tested: Tested) -> list[PaperVerdict]:
    """Compare each cell with the other program, and the methods of `PAIRS` seed by seed."""
    return [*map(_beside, tested.values()), *pair_differences(tested, PAIRS)]


def _beside(finished: FinishedCell) -> PaperVerdict:
    """Say whether the other program's mean lies within two standard deviations of ours by seed."""
    initial, method = finished.cell.key
    values, expected = finished.reached(), EXPECTED[initial][METHODS.index(method)]
    difference, spread = float(np.mean(values)) - expected, float(np.std(values, ddof=1))
    inside = abs(difference) <= 2 * spread
    verdict = f"{'within' if inside else 'not within'} two standard deviations of a seed, {2 * spread:.1f}"
    return PaperVerdict(
        finished.cell.name, f"{expected:.1f}", mean_and_spread(values), verdict, f"{difference:+.1f}", values
    )


LABEL = "test accuracy (%) of five seeds"
DIGITS = ComparisonVerdicts(
    judge_controls, partial(plot_groups, "FedMA on digits, and its controls", LABEL, "lower left")
)
