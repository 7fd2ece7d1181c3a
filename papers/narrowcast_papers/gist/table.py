"""GIST's settings on citation graphs, and their runs as rows of a CSV file that a later call goes on with.

Source: the report Distributed Graph Convolutional Networks with Independent Subnet Training, tables 2 and 3, and the
code released with it (wolfecameron/GIST): 400 epochs divided by the number of sub-networks, features projected to a
multiple of it, one mean and variance for the whole graph, learning rates divided by ten after half and three quarters
of the epochs, Adam anew at each synchronisation, and an output bias that is never merged.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np

from narrowcast.experiment import Experiment, build_experiment
from narrowcast.platform.rounds.evaluation import model_sha256
from narrowcast.platform.rounds.loop import LocalExecutor, rounds
from narrowcast.platform.rounds.state import Run
from narrowcast.studies.results import Lines
from narrowcast.studies.tables import MeasuredTable, Measurements
from narrowcast.studies.verdicts import PaperVerdict, mean_and_spread

SEEDS, EPOCHS = 5, 400
WORDS = {"cora": 1433, "citeseer": 3703}
SLICED = {"features": [0], "hidden": [1], "both": [0, 1]}
"""The layers that sub-networks divide: the report's rows, its variant by columns, and both of its layers."""
Sliced = Literal["features", "hidden", "both"]
Rows = dict[tuple[str, str], Lines]
"""The rows of each data set and setting, by seed."""


@dataclass(frozen=True)
class GistCell:
    """Sub-networks that divide the features, the hidden units, or both; `published` are last and best test accuracy.

    `iterations` are the steps between synchronisations. `clusters` divides the graph, two parts of which make a step.
    """

    data: str
    sliced: Sliced
    networks: int
    learning_rate: float
    hidden: int = 16
    iterations: int = 1
    slices: str = "disjoint"
    clusters: int = 1
    published: tuple[float, float] | None = None

    @property
    def name(self) -> str:
        """The setting in words."""
        parts = [f"{self.sliced} m={self.networks}", f"units={self.hidden}"]
        parts += [f"iterations={self.iterations}"] * (self.iterations > 1)
        parts += [self.slices] * (self.slices != "disjoint") + [f"clusters={self.clusters}"] * (self.clusters > 1)
        return " ".join([*parts, f"lr={self.learning_rate:g}"])

    @cached_property
    def values(self) -> dict[str, Any]:
        """The experiment, without its seed."""
        epochs = EPOCHS // self.networks
        count = epochs // self.iterations
        # A rate changes at the first synchronisation at or after an epoch, as in the released code.
        changes = [-(-int(epochs * share) // self.iterations) for share in (0.5, 0.75)]
        return {
            "rounds": count,
            "clients_per_round": self.networks,
            "data": {
                "kind": self.data,
                "clients": self.networks,
                "projected_features": WORDS[self.data] // self.networks * self.networks,
                "clusters": self.clusters,
            },
            "model": {"kind": "gcn", "hidden": [self.hidden], "layer_norm": "graph"},
            "algorithm": {
                "kind": "submodel",
                "widths": [1 / self.networks],
                "slices": self.slices,
                "sliced_layers": SLICED[self.sliced],
                "weights": "equal",
                "output_bias": "kept",
            },
            "training": {
                "kind": "graph",
                "learning_rate": self.learning_rate,
                "epochs": self.iterations,
                "clusters_per_step": 2 if self.clusters > 1 else None,
                "learning_rate_schedule": {"kind": "milestones", "rounds": changes, "decay": 0.1},
            },
        }


@dataclass(frozen=True)
class CentralCell:
    """One network on one machine, with Adam that goes on from step to step: the control of the others."""

    data: str
    normalised: bool
    epochs: int
    learning_rate: float = 0.01
    published: tuple[float, float] | None = None

    @property
    def name(self) -> str:
        """The setting in words."""
        return f"one network, {'projection and layer norm' if self.normalised else 'plain'} lr={self.learning_rate:g}"

    @cached_property
    def values(self) -> dict[str, Any]:
        """The experiment, without its seed: the server's Adam takes the gradients of one client."""
        return {
            "rounds": self.epochs,
            "clients_per_round": 1,
            "data": {"kind": self.data, "projected_features": WORDS[self.data] if self.normalised else None},
            "model": {"kind": "gcn", "layer_norm": "graph" if self.normalised else "none"},
            "algorithm": {
                "kind": "fedavg",
                "server_learning_rate": self.learning_rate,
                "server_optimizer": {"kind": "adam", "bias_correction": True, "beta2": 0.999, "tau": 1e-8},
            },
            "training": {"kind": "graph", "optimizer": "sgd", "learning_rate": 1.0},
        }


Cell = GistCell | CentralCell


def experiment(cell: Cell, seed: int) -> Experiment:
    """Return the experiment of a cell."""
    common = {"name": "gist", "seed": seed, "chunk_size": 1, "evaluate_every": 1, "backend": {"kind": "local"}}
    return build_experiment({**common, **cell.values}, cell.name)


def measured(cell: Cell, seed: int) -> dict[str, Any]:
    """Run a cell and return its row: test accuracy in percent, last, at its best, and at the best validation."""
    began, built = time.perf_counter(), experiment(cell, seed)
    run = Run(built, built.secured_algorithm, built.task(built.data_source.load()))
    run.check()
    outcomes = rounds(run, LocalExecutor(run))
    curve, bits, sha256 = [], 0, ""
    for outcome in outcomes:
        curve.append((outcome.metrics["validation.accuracy"], 100 * outcome.metrics["test.accuracy"]))
        bits = outcome.record.total_uplink_bits
        if outcome.state is not None:
            sha256 = model_sha256(run.algorithm, outcome.state)
    chosen = max(range(len(curve)), key=lambda place: (curve[place][0], -place))
    return {
        "last": round(curve[-1][1], 2),
        "best": round(max(test for _, test in curve), 2),
        "at_best_validation": round(curve[chosen][1], 2),
        "uplink_bits": bits,
        "model_sha256": sha256,
        "seconds": round(time.perf_counter() - began, 1),
    }


def rows_of(lines: Lines) -> Rows:
    """Return the lines of each data set and setting."""
    found: Rows = {}
    for line in lines:
        found.setdefault((line["data"], line["setting"]), []).append(line)
    return found


CORA: tuple[Cell, ...] = (
    GistCell("cora", "features", 8, 0.05, published=(75.64, 79.40)),
    GistCell("cora", "features", 4, 0.05, published=(76.28, 79.80)),
    GistCell("cora", "features", 4, 0.01, published=(76.28, 79.80)),
    GistCell("cora", "features", 2, 0.05, published=(76.26, 79.32)),
    GistCell("cora", "both", 8, 0.01, 64, published=(69.98, 76.34)),
    GistCell("cora", "both", 2, 0.05, 64, published=(76.64, 80.24)),
    GistCell("cora", "both", 2, 0.1, 64, published=(76.64, 80.24)),
    CentralCell("cora", False, 200),
    CentralCell("cora", True, 400),
    CentralCell("cora", True, 400, 0.05),
    GistCell("cora", "features", 4, 0.01, 64),
    GistCell("cora", "hidden", 4, 0.01, 64),
    GistCell("cora", "both", 4, 0.01, 64, published=(78.34, 80.56)),
    GistCell("cora", "both", 4, 0.01, 64, slices="stratified"),
    GistCell("cora", "both", 4, 0.01, 64, slices="important"),
    GistCell("cora", "both", 4, 0.01, 64, clusters=10),
    GistCell("cora", "features", 8, 0.005, iterations=10, published=(77.44, 77.66)),
)
CITESEER: tuple[Cell, ...] = (
    GistCell("citeseer", "features", 8, 0.05, published=(71.85, 75.93)),
    GistCell("citeseer", "features", 4, 0.1, published=(68.35, 75.89)),
    GistCell("citeseer", "features", 2, 0.05, published=(69.32, 75.38)),
    CentralCell("citeseer", False, 200),
    CentralCell("citeseer", True, 200),
)


MARGIN = 2.0
"""Points within which a mean counts as reproduced."""
_MEASURES = {"last": "last epoch", "best": "best epoch by test", "at_best_validation": "at the best validation"}


def judge_gist(cells: Sequence[Cell], rows: Rows) -> list[PaperVerdict]:
    """Return a verdict for each setting and measure: a published mean is reproduced if ours is within `MARGIN`."""
    verdicts = []
    for cell in cells:
        of_seeds = rows.get((cell.data, cell.name), [])
        for place, (measure, words) in enumerate(_MEASURES.items() if of_seeds else ()):
            ours = [float(row[measure]) for row in of_seeds]
            published = cell.published[place] if cell.published and place < len(cell.published) else None
            verdict, difference = "no published number", ""
            if published is not None:
                gap = float(np.mean(ours)) - published
                agrees = abs(gap) <= MARGIN
                verdict = f"reproduced, within {MARGIN:g}" if agrees else f"differs by more than {MARGIN:g}"
                difference = f"{gap:+.2f}"
            what = f"{cell.name}: {words}, {len(ours)} seeds"
            paper = "" if published is None else f"{published:.2f}"
            verdicts.append(PaperVerdict(what, paper, mean_and_spread(ours), verdict, difference, tuple(ours)))
    return verdicts


def plot_gist(title: str, cells: Sequence[Cell], rows: Rows, path: Path) -> None:
    """Draw the measures of each setting, with the seeds' standard deviations, and the published numbers."""
    from matplotlib.figure import Figure  # takes half a second

    shown = [cell for cell in cells if (cell.data, cell.name) in rows]
    figure = Figure(figsize=(9, 1.2 + 0.42 * len(shown)), layout="constrained")
    axes = figure.subplots()
    for offset, (measure, words) in zip((0.22, 0.0, -0.22), _MEASURES.items(), strict=True):
        values = [[float(row[measure]) for row in rows[cell.data, cell.name]] for cell in shown]
        places = np.arange(len(shown))[::-1] + offset
        spread = [float(np.std(each, ddof=1)) if len(each) > 1 else 0.0 for each in values]
        axes.errorbar([float(np.mean(each)) for each in values], places, xerr=spread, fmt="o", label=words)
        if measure == "at_best_validation":
            continue
        index = list(_MEASURES).index(measure)
        known = [(cell.published[index], place) for cell, place in zip(shown, places, strict=True) if cell.published]
        label = "published" if index == 0 else None
        axes.plot([each for each, _ in known], [place for _, place in known], "kx", label=label)
    axes.set_yticks(np.arange(len(shown))[::-1], [cell.name for cell in shown])
    axes.set_xlabel("test accuracy, %")
    axes.set_title(title)
    axes.grid(axis="x", alpha=0.3)
    axes.legend(fontsize=8)
    figure.savefig(path, dpi=110)


def measurements(name: str, cells: Sequence[Cell]) -> Measurements:
    """Return the runs of these cells, seed by seed."""
    by_name = {(cell.data, cell.name): cell for cell in cells}
    return Measurements(
        f"{name}.csv",
        ("data", "setting", "seed"),
        ("last", "best", "at_best_validation", "uplink_bits", "model_sha256", "seconds"),
        lambda _: ((*key, seed) for seed in range(SEEDS) for key in by_name),
        lambda data, setting, seed: [measured(by_name[data, setting], seed)],
        digits=10,
    )


def _table(what: str, name: str, cells: tuple[Cell, ...]) -> MeasuredTable:
    return MeasuredTable(
        (measurements(name, cells),),
        lambda lines: judge_gist(cells, rows_of(lines)),
        lambda lines, path: plot_gist(what, cells, rows_of(lines), path),
    )


GIST_CORA = _table("GIST on Cora: sub-networks of a GCN", "gist-cora", CORA)
GIST_CITESEER = _table("GIST on CiteSeer: the trend alone", "gist-citeseer", CITESEER)
