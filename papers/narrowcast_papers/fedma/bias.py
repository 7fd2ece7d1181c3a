"""Data bias: one client has grey images and the other coloured ones, of classes that are mostly one of the two.

FedMA and its rivals have as many rounds and the same epochs. The controls train one model on all images, biased as they
are, or with half of each class in grey, which is the bias removed. Every method has the same three rates, on validation
images with a seed that is no test seed.
"""

from __future__ import annotations

from pathlib import Path

from narrowcast.platform.tracking.figures import BLUE, new_figure
from narrowcast.studies.comparison import ComparisonVerdicts, Tested
from narrowcast.studies.verdicts import PaperVerdict, compared_with_first


def judge_bias(tested: Tested) -> list[PaperVerdict]:
    """Compare all methods with FedAvg, seed by seed."""
    return compared_with_first({finished.cell.name: finished.runs for finished in tested.values()}, "accuracy")


def plot_bias(tested: Tested, path: Path) -> None:
    """Plot the accuracy of every method and seed."""
    figure, (axes,) = new_figure("Grey images on one client, coloured ones on the other", panels=1)
    for row, finished in enumerate(tested.values()):
        reached = finished.reached()
        axes.plot(reached, [-row] * len(reached), "o", color=BLUE, alpha=0.5)
        axes.plot(sum(reached) / len(reached), -row, "|", color=BLUE, markersize=18)
    axes.set_yticks([-row for row in range(len(tested))], [finished.cell.name for finished in tested.values()])
    axes.set(xlabel="test accuracy (%) by seed, and the mean")
    figure.savefig(path, dpi=100)


BIAS = ComparisonVerdicts(judge_bias, plot_bias)
