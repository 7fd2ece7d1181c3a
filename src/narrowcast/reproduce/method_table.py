"""The table and plot of a comparison of methods: each against FedAvg, and against itself in float32."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import colormaps

from narrowcast.platform.tracking.run_plots import new_figure
from narrowcast.reproduce.against_reference import accuracies, against
from narrowcast.reproduce.long_studies import finished, tried
from narrowcast.reproduce.method_comparison import FEDAVG, FULL, TEST_SEEDS, TRIES, Cell, Comparison
from narrowcast.reproduce.results_csv import Rows
from narrowcast.reproduce.seed_means import draw_seed_means
from narrowcast.reproduce.verdict import PaperVerdict, mean_and_spread
from narrowcast.runs.significance import paired_interval


@dataclass(frozen=True)
class TestedMethod:
    """A finished cell: the settings that were best on validation samples, and its test runs by seed."""

    cell: Cell
    settings: str
    runs: tuple[Any, ...]

    @property
    def accuracies(self) -> tuple[float, ...]:
        """The test accuracy of each seed in percent."""
        return accuracies(self.runs, "accuracy")

    @property
    def share(self) -> float:
        """The uplink as a share of updates in float32 over all rounds."""
        return float(np.mean([run["uplink_bits"] for run in self.runs])) / self.cell.of.dense_bits


def tested_methods(comparison: Comparison, rows: Rows) -> dict[tuple[str, str], TestedMethod]:
    """Return the cells whose runs are all finished, by codec and method."""
    found = {}
    for cell in comparison.cells:
        results = tried(rows, cell, TRIES)
        if results and (runs := finished(rows, cell.test(results), TEST_SEEDS)):
            found[cell.codec, cell.method] = TestedMethod(cell, cell.settings(cell.best(results)), tuple(runs))
    return found


def judge_methods(comparison: Comparison, rows: Rows) -> list[PaperVerdict]:
    """Compare each method with FedAvg through the same codec, seed by seed, and with itself in float32.

    p values are corrected over the methods of a codec.
    """
    tested, verdicts = tested_methods(comparison, rows), []
    for codec in comparison.codecs:
        inside = {method: tested[codec, method] for method in comparison.methods if (codec, method) in tested}
        if FEDAVG not in inside:
            continue
        others = {method: each.runs for method, each in inside.items() if method != FEDAVG}
        compared = against(others, inside[FEDAVG].runs, "accuracy")
        for method, each in inside.items():
            difference, said = compared.get(method, ("", "reference"))
            full = tested.get((FULL, method))
            if codec != FULL and full is not None:
                own = paired_interval(each.accuracies, full.accuracies)
                said += f"; to its own float32 {own.mean:+.2f} ({own.low:+.2f} to {own.high:+.2f})"
            words = f"{said}; uplink 1/{1 / each.share:.0f}; {each.settings}"
            ours = mean_and_spread(each.accuracies)
            verdicts.append(PaperVerdict(f"{codec}: {method}", "", ours, words, difference, each.accuracies))
    return verdicts


def plot_methods(comparison: Comparison, rows: Rows, path: Path) -> None:
    """Plot the accuracy of each method against its uplink, or method by method if all send the same bits."""
    tested, colours = tested_methods(comparison, rows), colormaps["tab10"]
    figure, (axes,) = new_figure(f"Optimisation methods, equally tuned, {comparison.data}", panels=1)
    one_codec = len(comparison.codecs) == 1
    for place, method in enumerate(comparison.methods):
        there = [tested[codec, method] for codec in comparison.codecs if (codec, method) in tested]
        if there:
            draw_seed_means(
                axes,
                [place] if one_codec else [each.share for each in there],
                [each.accuracies for each in there],
                color=colours(place),
                marker="osD^v<>pP"[place],
                capsize=3,
                label=method,
            )
    axes.set(ylabel="test accuracy (%)")
    if one_codec:
        axes.set_xticks(range(len(comparison.methods)), comparison.methods)
    else:
        axes.set_xscale("log")
        axes.set(xlabel="uplink, of updates in float32")
        axes.legend(fontsize=8, frameon=False)
    figure.savefig(path, dpi=150)
