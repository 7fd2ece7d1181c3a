"""The table and the plot of slices of a model for unequal devices."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from matplotlib import colormaps

from narrowcast.platform.tracking.run_plots import new_figure
from narrowcast.reproduce.against_reference import Runs, accuracies, compared_with_first, megabytes
from narrowcast.reproduce.seed_means import draw_seed_means
from narrowcast.reproduce.verdict import PaperVerdict


def judge_slices(runs: Mapping[str, Runs]) -> list[PaperVerdict]:
    """Compare the methods with the first one, seed by seed; add the simulated time of a round."""
    seconds = {what: 60 * _simulated_minutes(each) / each[0]["rounds"] for what, each in runs.items()}
    return [
        replace(each, verdict=f"{each.verdict}; {seconds[each.what]:.0f} s a round")
        for each in compared_with_first(runs, "accuracy")
    ]


def plot_slices(runs: Mapping[str, Runs], path: Path) -> None:
    """Plot the accuracy of each method against the simulated time of all rounds, and against uplink and downlink."""
    figure, panels = new_figure("Slices of a model for unequal devices, MNIST", panels=2)
    colours = colormaps["tab10"]
    for axes, place_of in zip(panels, (_simulated_minutes, megabytes), strict=True):
        for place, (what, each) in enumerate(runs.items()):
            draw_seed_means(
                axes,
                [place_of(each)],
                [accuracies(each, "accuracy")],
                color=colours(place),
                marker="osD^v<>P"[place],
                linestyle="",
                capsize=3,
                label=what,
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
