"""The table and the plot of FedMA and data bias."""

from __future__ import annotations

from pathlib import Path

from narrowcast.platform.tracking.run_plots import BLUE, new_figure
from narrowcast.reproduce.against_reference import Runs, accuracies, compared_with_first
from narrowcast.reproduce.fedma_bias import CELLS, METHODS, RATES, TEST_SEEDS
from narrowcast.reproduce.long_studies import tested_so_far
from narrowcast.reproduce.results_csv import Rows
from narrowcast.reproduce.verdict import PaperVerdict


def bias_runs(rows: Rows) -> dict[str, Runs]:
    """Return the test runs of each method, of the seeds that all have."""
    found = zip(METHODS, tested_so_far(rows, CELLS, RATES, TEST_SEEDS), strict=True)
    return {method: runs for method, runs in found if runs}


def judge_bias(rows: Rows) -> list[PaperVerdict]:
    """Compare all methods with FedAvg, seed by seed."""
    return compared_with_first(bias_runs(rows), "accuracy")


def plot_bias(rows: Rows, path: Path) -> None:
    """Plot the accuracy of every method and seed."""
    figure, (axes,) = new_figure("Grey images on one client, coloured ones on the other", panels=1)
    runs = bias_runs(rows)
    for place, each in enumerate(runs.values()):
        reached = accuracies(each, "accuracy")
        axes.plot(reached, [-place] * len(reached), "o", color=BLUE, alpha=0.5)
        axes.plot(sum(reached) / len(reached), -place, "|", color=BLUE, markersize=18)
    axes.set_yticks([-place for place in range(len(runs))], list(runs))
    axes.set(xlabel="test accuracy (%) by seed, and the mean")
    figure.savefig(path, dpi=100)
