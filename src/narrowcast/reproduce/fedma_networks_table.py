"""The tables and the plots of FedMA beside FedAvg and FedProx."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from narrowcast.platform.tracking.run_plots import COLOURS, new_figure
from narrowcast.reproduce.against_reference import Runs, accuracies, compared_with_first, megabytes
from narrowcast.reproduce.fedma_networks import METHODS, RATES, TEST_SEEDS, NetworkCell, Setting
from narrowcast.reproduce.long_studies import tested
from narrowcast.reproduce.results_csv import Rows
from narrowcast.reproduce.seed_means import draw_seed_means
from narrowcast.reproduce.verdict import PaperVerdict


def network_runs(rows: Rows, setting: Setting) -> dict[NetworkCell, Runs]:
    """Return the test runs of the cells that are all finished."""
    return tested(rows, {cell: cell for cell in setting.cells}, RATES, TEST_SEEDS)


def judge_networks(settings: Sequence[Setting], rows: Rows) -> list[PaperVerdict]:
    """Compare the methods with the first one after as many rounds, seed by seed; add rounds and megabytes."""
    verdicts = []
    for setting in settings:
        runs = network_runs(rows, setting)
        for passes in setting.passes:
            of_methods = {cell.method: each for cell, each in runs.items() if cell.passes == passes}
            for verdict in compared_with_first(of_methods, "accuracy"):
                traffic = f"{passes * setting.layers} rounds, {megabytes(of_methods[verdict.what]):.3g} MB"
                verdicts.append(replace(verdict, what=f"{setting.title}, {verdict.what}, {traffic}"))
    return verdicts


def plot_networks(settings: Sequence[Setting], rows: Rows, path: Path) -> None:
    """Plot the accuracy of each method against the rounds, and against uplink and downlink."""
    figure, panels = new_figure("FedMA beside FedAvg and FedProx", panels=2 * len(settings))
    for at, setting in enumerate(settings):
        runs = network_runs(rows, setting)
        for axes, by_rounds in zip(panels[2 * at : 2 * at + 2], (True, False), strict=True):
            for place, method in enumerate(METHODS):
                cells: Mapping[NetworkCell, Runs] = {cell: each for cell, each in runs.items() if cell.method == method}
                if cells:
                    draw_seed_means(
                        axes,
                        [
                            cell.passes * setting.layers if by_rounds else megabytes(each)
                            for cell, each in cells.items()
                        ],
                        [accuracies(each, "accuracy") for each in cells.values()],
                        color=COLOURS[place],
                        marker="osD^"[place],
                        capsize=3,
                        label=method,
                    )
            label = "rounds" if by_rounds else "uplink and downlink (MB)"
            axes.set(xlabel=label, ylabel="test accuracy (%)", title=setting.title)
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, fontsize=8, frameon=False)
    figure.savefig(path, dpi=100)
