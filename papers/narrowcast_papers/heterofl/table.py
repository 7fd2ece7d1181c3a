"""Unequal devices on MNIST: slices of the model at the same bits and work, and SCoLR's ranks at the same bits.

A fifth of the clients each can do 1, 1/2, 1/4, 1/8 and 1/16 of the whole model's work, and their links are as unequal.
Slices give every client as much work and as many bits as it affords. SCoLR gives it as many bits, at the work of the
whole model. FedAvg sends the whole model, or the widest that every client affords. All clients take part in each round,
since disjoint slices need it. In the time that slices take, SCoLR and FedAvg with the whole model have two rounds.

Every method has as many tries, three client rates and two values of a field of its own, on validation samples with a
seed that is not a test seed.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from matplotlib import colormaps

from narrowcast.platform.tracking.figures import new_figure
from narrowcast.studies.comparison import ComparisonVerdicts, Tested, draw_seed_means
from narrowcast.studies.verdicts import PaperVerdict, Runs, compared_with_first, megabytes


def judge_slices(tested: Tested) -> list[PaperVerdict]:
    """Compare the methods with the first one, seed by seed; add the simulated time of a round."""
    runs = {found.cell.name: found.runs for found in tested.values()}
    seconds = {what: 60 * _simulated_minutes(each) / each[0]["rounds"] for what, each in runs.items()}
    return [
        replace(verdict, verdict=f"{verdict.verdict}; {seconds[verdict.what]:.0f} s a round")
        for verdict in compared_with_first(runs, "accuracy")
    ]


def plot_slices(tested: Tested, path: Path) -> None:
    """Plot the accuracy of each method against the simulated time of all rounds, and against uplink and downlink."""
    figure, panels = new_figure("Slices of a model for unequal devices, MNIST", panels=2)
    colours = colormaps["tab10"]
    for axes, place_of in zip(panels, (_simulated_minutes, megabytes), strict=True):
        for place, found in enumerate(tested.values()):
            draw_seed_means(
                axes,
                [place_of(found.runs)],
                [found.reached()],
                color=colours(place),
                marker="osD^v<>P"[place],
                linestyle="",
                capsize=3,
                label=found.cell.name,
            )
        axes.set_xscale("log")
        axes.set(ylabel="test accuracy (%)")
    panels[0].set(xlabel="simulated time (minutes)")
    panels[1].set(xlabel="uplink and downlink (MB)")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, fontsize=8, frameon=False)
    figure.savefig(path, dpi=100)


def _simulated_minutes(runs: Runs) -> float:
    return sum(float(run["simulated_seconds"]) for run in runs) / len(runs) / 60


SLICES = ComparisonVerdicts(judge_slices, plot_slices)
