"""Unequal devices on MNIST: slices of the model at the same bits and work, and SCoLR's ranks at the same bits.

A fifth of the clients each can do 1, 1/2, 1/4, 1/8 and 1/16 of the whole model's work, and their links are as unequal.
Slices give every client as much work and as many bits as it affords. SCoLR gives it as many bits, at the work of the
whole model. FedAvg sends the whole model, or the widest that every client affords. All clients take part in each round,
since disjoint slices need it. In the time that slices take, SCoLR and FedAvg with the whole model have two rounds.

Every method has as many tries, three client rates and two values of a field of its own, on validation samples with a
seed that is not a test seed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

from matplotlib import colormaps

from narrowcast.platform.tracking.figures import new_figure
from narrowcast.studies.comparison import draw_seed_means
from narrowcast.studies.results import Rows
from narrowcast.studies.spec import RunSpec, slug
from narrowcast.studies.tables import StudyTable
from narrowcast.studies.tuning import TunedCell, cells_plan, tested
from narrowcast.studies.verdicts import PaperVerdict, Runs, accuracies, compared_with_first, megabytes

STUDY = "heterofl-mnist"
TEST_SEEDS = 5
ROUNDS = 20
WIDTHS = (1.0, 0.5, 0.25, 0.125, 0.0625)
"""The levels a to e of HeteroFL."""
RATES = (0.1, 0.3, 0.6)
UNITS = 64
_WHOLE_MBIT = 32e-6 * (784 * UNITS + UNITS + UNITS * 10 + 10)
_SLICES = f"kind: submodel, widths: [{', '.join(map(str, WIDTHS))}], assignment: compute, weights: $"
_WEIGHTS, _AGGREGATIONS = ("examples", "equal"), ("per_component_mean", "weighted")
_SCOLR = (
    f"kind: scolr, rank: {UNITS - 4}, rank_policy: {{kind: bandwidth, upload_seconds: {_WHOLE_MBIT:.4f}}}, "
    "aggregation: $"
)
_FEDAVG = "kind: fedavg, weights: $"
METHODS: Mapping[str, tuple[str, tuple[str, str], int]] = {
    "HeteroFL, the first units": (f"{_SLICES}, slices: prefix", _WEIGHTS, ROUNDS),
    "FedRolex, a rolling window": (f"{_SLICES}, slices: rolling", _WEIGHTS, ROUNDS),
    "IST, disjoint units": (f"{_SLICES}, slices: disjoint", _WEIGHTS, ROUNDS),
    "SCoLR, ranks of the same bits": (_SCOLR, _AGGREGATIONS, ROUNDS),
    "FedAvg, the whole model": (_FEDAVG, _WEIGHTS, ROUNDS),
    "FedAvg, what all clients afford": (f"kind: submodel, widths: [{WIDTHS[-1]}], weights: $", _WEIGHTS, ROUNDS),
    "SCoLR, two rounds": (_SCOLR, _AGGREGATIONS, 2),
    "FedAvg, two rounds": (_FEDAVG, _WEIGHTS, 2),
}
"""The fields of each method, the values that are tried in the place of $, and the rounds."""
_TIERS = ", ".join(
    f"{{name: x{width:g}, share: 1, uplink_mbit_per_second: {width:g}, downlink_mbit_per_second: {4 * width:g}, "
    f"compute_speed: {width:g}}}"
    for width in WIDTHS
)


@dataclass(frozen=True)
class SliceCell(TunedCell[tuple[str, float]]):
    """A method of `METHODS`."""

    method: str

    @property
    def grid(self) -> tuple[tuple[str, float], ...]:
        """The method's own field and the client rates."""
        return tuple(product(METHODS[self.method][1], RATES))

    def spec(self, value: tuple[str, float], part: str) -> RunSpec:
        """Return the run at a value of the method's own field and a rate."""
        fields, _, rounds = METHODS[self.method]
        own, rate = value
        group = f"{STUDY}-{slug(self.method)}-{own}{part}"
        return RunSpec(
            f"{group}-rate-{rate:g}",
            "fedavg-digits",
            (
                *(f"rounds={rounds}", f"evaluate_every={rounds}", "checkpoint_seconds=100000"),
                *("clients_per_round=20", "chunk_size=20", "clock.seconds_per_example=1e-3"),
                "data={kind: mnist, clients: 20, partition: {kind: dirichlet, alpha: 0.5}}",
                f"model={{kind: mlp, hidden: [{UNITS}]}}",
                f"fleet={{kind: tiers, tiers: [{_TIERS}]}}",
                f"algorithm={{{fields.replace('$', own)}}}",
                f"training={{learning_rate: {rate:g}, batch_size: 32, epochs: 1}}",
            ),
            data_seed=True,
            memory_gib=0.5,
            together=group,
        )


CELLS = tuple(map(SliceCell, METHODS))


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


def _runs(rows: Rows) -> dict[str, Runs]:
    return tested(rows, {cell.method: cell for cell in CELLS}, TEST_SEEDS)


SLICES = StudyTable(
    {STUDY: cells_plan(STUDY, CELLS, TEST_SEEDS)},
    lambda rows: judge_slices(_runs(rows)),
    lambda rows, path: plot_slices(_runs(rows), path),
)
