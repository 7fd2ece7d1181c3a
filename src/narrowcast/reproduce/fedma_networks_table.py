"""The tables and the plots of FedMA beside FedAvg, FedProx and the ensemble."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from narrowcast.platform.tracking.run_plots import COLOURS, new_figure
from narrowcast.reproduce.against_reference import Runs, accuracies, compared_with_first, megabytes
from narrowcast.reproduce.fedma_networks import ENSEMBLE, METHODS, TEST_SEEDS, Setting
from narrowcast.reproduce.long_studies import tested_so_far
from narrowcast.reproduce.results_csv import Rows
from narrowcast.reproduce.seed_means import draw_seed_means
from narrowcast.reproduce.verdict import PaperVerdict


def network_runs(rows: Rows, setting: Setting) -> dict[str, list[Runs]]:
    """Return the results of each method by seed after 1, 2, ... passes, of the seeds that all methods have."""
    every = tested_so_far(rows, setting.cells, setting.rates, TEST_SEEDS)
    curves = {
        cell.method: [[run] for run in runs] if cell.method == ENSEMBLE else [run["curve"] for run in runs]
        for cell, runs in zip(setting.cells, every, strict=True)
        if runs
    }
    return {method: [list(after) for after in zip(*of_seeds, strict=True)] for method, of_seeds in curves.items()}


def judge_networks(settings: Sequence[Setting], rows: Rows) -> list[PaperVerdict]:
    """Compare the methods with the first one after as many rounds, seed by seed; add rounds, megabytes and growth.

    The ensemble is sent once, and stands beside the first pass.
    """
    verdicts = []
    for setting in settings:
        runs = network_runs(rows, setting)
        for place in range(setting.passes):
            after = {method: each[place] for method, each in runs.items() if place < len(each)}
            for verdict in compared_with_first(after, "accuracy"):
                each = after[verdict.what]
                n_rounds = each[0]["rounds"]
                parts = [setting.title, verdict.what, f"{n_rounds} round{'s' * (n_rounds > 1)}"]
                parts += [f"{megabytes(each):.3g} MB", *_growth(each, runs, len(each))]
                verdicts.append(replace(verdict, what=", ".join(parts)))
    return verdicts


def _growth(runs: Runs, every: Mapping[str, list[Runs]], seeds: int) -> list[str]:
    """Return how many times the values of FedAvg's model a larger one has; the ensemble keeps those of all clients."""
    own = every["FedAvg"][0][0]["model_values"]
    values = [run["model_values"] for run in runs if "model_values" in run]
    return [f"model x{np.mean(values) / own:.2f}"] if len(values) == seeds and max(values) > own else []


def plot_networks(settings: Sequence[Setting], rows: Rows, path: Path) -> None:
    """Plot the accuracy of each method against the rounds, and against uplink and downlink, of settings with runs."""
    found = [(setting, runs) for setting in settings if (runs := network_runs(rows, setting))]
    if not found:
        return
    figure, panels = new_figure("FedMA beside FedAvg and FedProx", panels=2 * len(found))
    for at, (setting, runs) in enumerate(found):
        for axes, by_rounds in zip(panels[2 * at : 2 * at + 2], (True, False), strict=True):
            for method, after in runs.items():
                place = list(METHODS).index(method)
                draw_seed_means(
                    axes,
                    [each[0]["rounds"] if by_rounds else megabytes(each) for each in after],
                    [accuracies(each, "accuracy") for each in after],
                    color=COLOURS[place],
                    marker="osD^v"[place],
                    capsize=3,
                    label=method,
                )
            label = "rounds" if by_rounds else "uplink and downlink (MB)"
            axes.set(xlabel=label, ylabel="test accuracy (%)", title=setting.title)
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=5, fontsize=8, frameon=False)
    figure.savefig(path, dpi=100)
