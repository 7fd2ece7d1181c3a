"""Federated optimisation methods with equal tuning: through narrow links on MNIST, and on Shakespeare.

Every method has as many tries in every cell: three client rates and two values of its own field, on validation samples
with a seed that is not a test seed. SCAFFOLD's server derives the control variates, so that all send one tensor.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import colormaps

from narrowcast.platform.tracking.figures import new_figure
from narrowcast.runs.significance import paired_interval
from narrowcast.studies.comparison import draw_seed_means
from narrowcast.studies.results import Rows
from narrowcast.studies.spec import RunSpec, slug
from narrowcast.studies.tables import StudyTable
from narrowcast.studies.tuning import TunedCell, cells_plan, finished_cells
from narrowcast.studies.verdicts import PaperVerdict, accuracies, against, mean_and_spread

TEST_SEEDS = 5
FEDAVG, FEDAVG_FAST = "FedAvg", "FedAvg-fast"
METHODS: Mapping[str, tuple[str, tuple[float, float]]] = {
    FEDAVG: ("kind: fedavg, server_learning_rate: $", (0.5, 1.0)),
    FEDAVG_FAST: ("kind: fedavg, server_learning_rate: $", (1.5, 2.0)),
    "FedProx": ("kind: fedprox, mu: $", (0.01, 0.1)),
    "FedNova": ("kind: fednova, server_learning_rate: $", (0.5, 1.0)),
    "FedAvgM": ("kind: fedavg, server_optimizer: momentum, server_learning_rate: $", (0.1, 0.3)),
    "FedAdam": ("kind: fedavg, server_optimizer: adam, server_learning_rate: $", (0.03, 0.1)),
    "FedYogi": ("kind: fedavg, server_optimizer: yogi, server_learning_rate: $", (0.03, 0.1)),
    "FedAdagrad": ("kind: fedavg, server_optimizer: adagrad, server_learning_rate: $", (0.1, 0.3)),
    "FedDyn": ("kind: feddyn, alpha: $", (0.01, 0.1)),
    "SCAFFOLD": ("kind: scaffold, server_learning_rate: $", (0.5, 1.0)),
    "q-FFL": ("kind: qffl, q: $", (0.1, 1.0)),
}
"""The fields of each method, and the values that are tried in the place of $."""
FULL = "float32"
_LEVELS = "norms: column, rounding: dithered, norm_type: bfloat16"
CODECS: Mapping[str, str] = {
    FULL: "[]",
    "quantised": f"[{{kind: quantise, levels: 3, {_LEVELS}}}, entropy]",
    "a tenth of the entries, EDEN": "[{kind: random_k, fraction: 0.1}, {kind: eden, levels: 2}, entropy]",
    "rank 2, quantised": f"[{{kind: svd, rank: 2}}, {{kind: quantise, levels: 16, {_LEVELS}}}, entropy]",
}
"""The codec of the uploads, widest first."""


@dataclass(frozen=True)
class Comparison:
    """Methods on a data set through codecs; `rates` are the client rates tried, `parameters` those of the model."""

    name: str
    data: str
    rounds: int
    parameters: int
    rates: tuple[float, float, float]
    overrides: tuple[str, str]
    training: str
    methods: tuple[str, ...]
    codecs: tuple[str, ...]

    @property
    def dense_bits(self) -> int:
        """The uplink of all rounds in float32, of 10 clients each."""
        return self.rounds * 10 * self.parameters * 32

    @property
    def cells(self) -> list[Cell]:
        """The cells, those of the widest link first."""
        return [Cell(self, method, codec) for codec in self.codecs for method in self.methods]


NARROW_LINKS = Comparison(
    "narrow-links",
    "MNIST, Dirichlet(0.1)",
    60,
    784 * 64 + 64 + 64 * 10 + 10,
    (0.1, 0.3, 0.6),
    ("data={kind: mnist, clients: 100, partition: {kind: dirichlet, alpha: 0.1}}", "model={kind: mlp, hidden: [64]}"),
    "batch_size: 32, epochs: 2",
    tuple(method for method in METHODS if method not in (FEDAVG_FAST, "FedAdagrad")),
    tuple(CODECS),
)
SERVER_OPTIMIZERS = Comparison(
    "server-optimizers",
    "Shakespeare, 100 characters",
    60,
    80 * 8 + 4 * 64 * (8 + 64 + 2) + 64 * 80 + 80,
    (1.0, 3.0, 10.0),
    (
        "data={kind: shakespeare, clients: 100, min_examples: 20, stride: 80, predict: every}",
        "model={kind: char_lstm, hidden: 64, layers: 1}",
    ),
    "batch_size: 4, epochs: 1",
    (FEDAVG, FEDAVG_FAST, "FedAvgM", "FedAdam", "FedYogi", "FedAdagrad"),
    (FULL,),
)


@dataclass(frozen=True)
class Cell(TunedCell[tuple[float, float]]):
    """A method of a comparison through a codec of `CODECS`."""

    of: Comparison
    method: str
    codec: str

    @property
    def grid(self) -> tuple[tuple[float, float], ...]:
        """The client rates, and for each the two values of the method's own field."""
        return tuple(product(self.of.rates, METHODS[self.method][1]))

    def settings(self, value: tuple[float, float]) -> str:
        """Return a rate and the value of the method's own field in words."""
        rate, own = value
        return f"rate {rate:g}, {METHODS[self.method][0].rpartition(', ')[2].strip('}').replace('$', f'{own:g}')}"

    def spec(self, value: tuple[float, float], part: str) -> RunSpec:
        """Return the run at a rate and a value of the method's own field."""
        rate, own = value
        fields = METHODS[self.method][0].replace("$", f"{own:g}")
        group = f"{self.of.name}-{slug(self.codec)}-{self.method}".lower()
        return RunSpec(
            f"{group}-{own:g}-rate-{rate:g}{part}",
            "fedavg-digits",
            (
                f"rounds={self.of.rounds}",
                f"evaluate_every={self.of.rounds}",
                "checkpoint_seconds=100000",
                "clients_per_round=10",
                "sampling=uniform",
                "chunk_size=10",
                *self.of.overrides,
                f"algorithm={{{fields}, codec: {CODECS[self.codec]}}}",
                f"training={{learning_rate: {rate:g}, {self.of.training}}}",
            ),
            data_seed=True,
            memory_gib=0.2,
            together=f"{group}{part}" if part else "",
        )


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
    return {
        (cell.codec, cell.method): TestedMethod(cell, cell.settings(cell.best(results)), tuple(runs))
        for cell, results, runs in finished_cells(rows, comparison.cells, TEST_SEEDS)
    }


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


def _methods(comparison: Comparison) -> StudyTable:
    return StudyTable(
        {comparison.name: cells_plan(comparison.name, comparison.cells, TEST_SEEDS)},
        lambda rows: judge_methods(comparison, rows),
        lambda rows, path: plot_methods(comparison, rows, path),
    )


NARROW_LINKS_TABLE, SERVER_OPTIMIZERS_TABLE = _methods(NARROW_LINKS), _methods(SERVER_OPTIMIZERS)
