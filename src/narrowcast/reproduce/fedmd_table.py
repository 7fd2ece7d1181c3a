"""The table and the plot of FedMD's controls on digits."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from narrowcast.platform.tracking.run_plots import BLUE, ORANGE, new_figure
from narrowcast.reproduce.against_reference import Runs, accuracies
from narrowcast.reproduce.fedmd_digits import CELLS, METHODS, PAIRS, PARTITIONS, SEEDS, DistilledCell
from narrowcast.reproduce.long_studies import finished
from narrowcast.reproduce.results_csv import Rows
from narrowcast.reproduce.significance import compare_paired, holm
from narrowcast.reproduce.verdict import PaperVerdict, describe, mean_and_spread

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
    tests = [compare_paired(ours[first], ours[second]) for first, second in pairs]
    level, zero = (holm([getattr(test, name) for test in tests]) for name in ("p_level", "p_zero"))
    for (first, second), test, p_level, p_zero in zip(pairs, tests, level, zero, strict=True):
        what = f"{first.method} less {second.method}, {PARTITIONS[first.partition][1]}"
        each = tuple(a - b for a, b in zip(ours[first], ours[second], strict=True))
        said = describe(test, p_level, p_zero, len(each))
        verdicts.append(PaperVerdict(what, "", mean_and_spread(each), said, f"{test.interval.mean:+.2f}", each))
    return verdicts


def _traffic(cell: DistilledCell, runs: Runs) -> str:
    if not cell.exchanges:
        return "nothing that is sent is used"
    up, down = (np.mean([run[column] for run in runs]) / 8e3 for column in ("uplink_bits", "downlink_bits"))
    return f"{up:.0f} kB up and {down:.0f} kB down in all"


def plot_distillation(rows: Rows, path: Path) -> None:
    """Plot the clients' mean accuracy of each method on both partitions."""
    runs = distilled_runs(rows)
    figure, (axes,) = new_figure("FedMD on digits, and its controls", panels=1)
    names = list(METHODS)[::-1]
    for shift, (partition, colour) in zip((0.12, -0.12), zip(PARTITIONS, (BLUE, ORANGE), strict=True), strict=True):
        cells = [cell for cell in runs if cell.partition == partition]
        for cell in cells:
            values = accuracies(runs[cell], MEASURED)
            axes.errorbar(
                np.mean(values),
                names.index(cell.method) + shift,
                xerr=np.std(values, ddof=1),
                fmt="o",
                color=colour,
                capsize=3,
                label=PARTITIONS[partition][1] if cell is cells[0] else None,
            )
    axes.set_yticks(range(len(names)), names)
    axes.set(xlabel="mean test accuracy of ten clients (%), five seeds")
    axes.legend(frameon=False, loc="upper left")
    figure.savefig(path, dpi=100)
