"""The table and the plot of FedMD's controls on digits."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from narrowcast.platform.tracking.run_plots import new_figure
from narrowcast.reproduce.against_reference import Runs, accuracies, paired_differences
from narrowcast.reproduce.fedmd_digits import CELLS, METHODS, PAIRS, PARTITIONS, SEEDS, DistilledCell
from narrowcast.reproduce.long_studies import finished
from narrowcast.reproduce.results_csv import Rows
from narrowcast.reproduce.seed_means import draw_groups
from narrowcast.reproduce.verdict import PaperVerdict, mean_and_spread

MEASURED = "accuracy.mean"


def distilled_runs(rows: Rows) -> dict[DistilledCell, Runs]:
    """Return the runs of the cells that are all finished."""
    found = {cell: finished(rows, cell.run, SEEDS) for cell in CELLS}
    return {cell: runs for cell, runs in found.items() if runs}


def judge_distillation(rows: Rows) -> list[PaperVerdict]:
    """Return the accuracy and the traffic of each cell, and the differences of `PAIRS`, paired by seed."""
    runs = distilled_runs(rows)
    ours = {cell: accuracies(each, MEASURED) for cell, each in runs.items()}
    verdicts = [
        PaperVerdict(cell.name, "", mean_and_spread(values), _traffic(cell, runs[cell]), "", values)
        for cell, values in ours.items()
    ]
    pairs = [
        (first, second)
        for partition in PARTITIONS
        for first, second in ((DistilledCell(a, partition), DistilledCell(b, partition)) for a, b in PAIRS)
        if first in ours and second in ours
    ]
    return verdicts + paired_differences(
        [
            (f"{first.method} less {second.method}, {PARTITIONS[first.partition][1]}", ours[first], ours[second])
            for first, second in pairs
        ]
    )


def _traffic(cell: DistilledCell, runs: Runs) -> str:
    if not cell.exchanges:
        return "nothing that is sent is used"
    up, down = (np.mean([run[column] for run in runs]) / 8e3 for column in ("uplink_bits", "downlink_bits"))
    return f"{up:.0f} kB up and {down:.0f} kB down in all"


def plot_distillation(rows: Rows, path: Path) -> None:
    """Plot the clients' mean accuracy of each method on both partitions."""
    runs = distilled_runs(rows)
    figure, (axes,) = new_figure("FedMD on digits, and its controls", panels=1)
    groups = {
        PARTITIONS[partition][1]: {
            cell.method: accuracies(each, MEASURED) for cell, each in runs.items() if cell.partition == partition
        }
        for partition in PARTITIONS
    }
    draw_groups(axes, list(METHODS), groups)
    axes.set(xlabel=f"mean test accuracy of ten clients (%), {SEEDS} seeds")
    axes.legend(frameon=False, loc="upper left")
    figure.savefig(path, dpi=100)
