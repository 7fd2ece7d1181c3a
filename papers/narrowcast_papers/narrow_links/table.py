"""Federated optimisation methods with equal tuning: through narrow links on MNIST, and on Shakespeare.

Every method has as many tries in every cell: three client rates and two values of its own field, on validation samples
with a seed that is not a test seed. SCAFFOLD's server derives the control variates, so that all send one tensor.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
from matplotlib import colormaps

from narrowcast.platform.tracking.figures import new_figure
from narrowcast.runs.significance import paired_interval
from narrowcast.studies.comparison import ComparisonVerdicts, FinishedCell, Tested, draw_seed_means
from narrowcast.studies.verdicts import PaperVerdict, against, mean_and_spread

FEDAVG, FULL = "FedAvg", "float32"
COHORT = 10
MODELS: Mapping[str, tuple[str, int]] = {
    "narrow-links": ("MNIST, Dirichlet(0.1)", 784 * 64 + 64 + 64 * 10 + 10),
    "server-optimizers": ("Shakespeare, 100 characters", 80 * 8 + 4 * 64 * (8 + 64 + 2) + 64 * 80 + 80),
}
"""The data in words, and the parameters of the model."""


def share_of(tested: FinishedCell) -> float:
    """Return the uplink as a share of updates in float32 over all rounds."""
    dense_bits = tested.runs[0]["rounds"] * COHORT * MODELS[tested.cell.study][1] * 32
    return float(np.mean([run["uplink_bits"] for run in tested.runs])) / dense_bits


def judge_methods(tested: Tested) -> list[PaperVerdict]:
    """Compare each method with FedAvg through the same codec, seed by seed, and with itself in float32.

    p values are corrected over the methods of a codec.
    """
    verdicts = []
    for link in dict.fromkeys(link for link, _ in tested):
        inside = {method: found for (other, method), found in tested.items() if other == link}
        if FEDAVG not in inside:
            continue
        others = {method: found.runs for method, found in inside.items() if method != FEDAVG}
        compared = against(others, inside[FEDAVG].runs, "accuracy")
        for method, found in inside.items():
            difference, said = compared.get(method, ("", "reference"))
            full = tested.get((FULL, method))
            if link != FULL and full is not None:
                own = paired_interval(found.reached(), full.reached())
                said += f"; to its own float32 {own.mean:+.2f} ({own.low:+.2f} to {own.high:+.2f})"
            settings = f"rate {found.values['rate']:g}, {found.text('$fields').rpartition(', ')[2]}"
            words = f"{said}; uplink 1/{1 / share_of(found):.0f}; {settings}"
            ours = mean_and_spread(found.reached())
            verdicts.append(PaperVerdict(found.cell.name, "", ours, words, difference, found.reached()))
    return verdicts


def plot_methods(tested: Tested, path: Path) -> None:
    """Plot the accuracy of each method against its uplink, or method by method if all send the same bits."""
    cell, colours = next(iter(tested.values())).cell, colormaps["tab10"]
    links, methods = cell.of.axes.values()
    figure, (axes,) = new_figure(f"Optimisation methods, equally tuned, {MODELS[cell.study][0]}", panels=1)
    for place, method in enumerate(methods):
        there = [tested[link, method] for link in links if (link, method) in tested]
        if there:
            draw_seed_means(
                axes,
                [place] if len(links) == 1 else [share_of(found) for found in there],
                [found.reached() for found in there],
                color=colours(place),
                marker="osD^v<>pP"[place],
                capsize=3,
                label=method,
            )
    axes.set(ylabel="test accuracy (%)")
    if len(links) == 1:
        axes.set_xticks(range(len(methods)), list(methods))
    else:
        axes.set_xscale("log")
        axes.set(xlabel="uplink, of updates in float32")
        axes.legend(fontsize=8, frameon=False)
    figure.savefig(path, dpi=150)


METHODS = ComparisonVerdicts(judge_methods, plot_methods)
