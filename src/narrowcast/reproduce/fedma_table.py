"""The table and the plot of FedMA's controls on digits."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from narrowcast.platform.tracking.run_plots import new_figure
from narrowcast.reproduce.against_reference import Runs, accuracies, paired_differences
from narrowcast.reproduce.fedma_digits import CELLS, INITIAL, METHODS, PAIRS, SEEDS, DigitsCell
from narrowcast.reproduce.long_studies import finished
from narrowcast.reproduce.results_csv import Rows
from narrowcast.reproduce.seed_means import draw_groups
from narrowcast.reproduce.verdict import PaperVerdict, mean_and_spread


def digits_runs(rows: Rows) -> dict[DigitsCell, Runs]:
    """Return the runs of the cells that are all finished."""
    found = {cell: finished(rows, cell.run, SEEDS) for cell in CELLS}
    return {cell: runs for cell, runs in found.items() if runs}


def judge_controls(rows: Rows) -> list[PaperVerdict]:
    """Compare each cell with the other program, and the methods of `PAIRS` seed by seed."""
    runs = digits_runs(rows)
    ours = {cell: accuracies(each, "accuracy") for cell, each in runs.items()}
    verdicts = [_beside(cell, values) for cell, values in ours.items()]
    pairs = [
        (first, second)
        for initial in INITIAL
        for first, second in ((DigitsCell(a, initial), DigitsCell(b, initial)) for a, b in PAIRS)
        if first in ours and second in ours
    ]
    return verdicts + paired_differences(
        [
            (f"{first.method} less {second.method}, {INITIAL[first.initial]}", ours[first], ours[second])
            for first, second in pairs
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
