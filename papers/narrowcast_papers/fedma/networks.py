"""FedMA beside FedAvg, FedProx and the ensemble by bytes and by rounds: a LeNet, a VGG-9, an LSTM, and local epochs.

FedMA's pass has a round for each layer, so that the rivals have as many rounds: `passes` times the layers of the model,
all in one run that is measured after each pass. They start from one model, as they are used, and FedMA from models that
clients draw themselves; its matching makes more new units with a larger gamma. The ensemble is of clients that train
alone, from models of their own, with as many steps as a pass has.

Each method has the same client rates on validation samples, with a seed that is no test seed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from narrowcast.platform.tracking.figures import COLOURS, new_figure
from narrowcast.studies.comparison import draw_seed_means
from narrowcast.studies.results import Rows
from narrowcast.studies.spec import ACCURACY, RunSpec, slug
from narrowcast.studies.tables import StudyTable
from narrowcast.studies.tuning import TunedCell, cells_plan, in_turn, tested_so_far
from narrowcast.studies.verdicts import PaperVerdict, Runs, accuracies, compared_with_first, megabytes

TEST_SEEDS = 5
RATES = (0.01, 0.03, 0.1)
MORE, FEWER, ENSEMBLE = "FedMA, more units", "FedMA, fewer units", "ensemble"
METHODS: Mapping[str, str] = {
    "FedAvg": "kind: fedavg",
    "FedProx": "kind: fedprox, mu: 0.001",
    MORE: "kind: fedma",
    FEWER: "kind: fedma",
    ENSEMBLE: "kind: fedma",
}
_DIRICHLET = "partition: {kind: dirichlet, alpha: 0.5, min_examples: 10, capped: false}"


@dataclass(frozen=True)
class Setting:
    """Data, model and clients; `layers` are those with weights, which FedMA matches one a round.

    `fedma` are FedMA's fields besides the gamma of its matching, of which `gammas` has that of `MORE` and of `FEWER`.
    `rates` are those that are tried.
    """

    name: str
    title: str
    data: str
    model: str
    clients: int
    layers: int
    passes: int = 3
    epochs: int = 3
    methods: tuple[str, ...] = tuple(METHODS)
    fedma: str = "head: classes, matching: {unit_mean: posterior, gamma: $}"
    gammas: tuple[float, float] = (7.0, 1.0)
    rates: tuple[float, ...] = RATES

    @property
    def cells(self) -> tuple[NetworkCell, ...]:
        """Every method."""
        return tuple(NetworkCell(self, method) for method in self.methods)


@dataclass(frozen=True)
class NetworkCell(TunedCell[float]):
    """A method of `METHODS` in a setting."""

    setting: Setting
    method: str

    @property
    def grid(self) -> Sequence[float]:
        """The values that are tried."""
        return self.setting.rates

    def spec(self, value: float, part: str) -> RunSpec:
        """Return the run at a rate, with as many passes for tuning as for tests."""
        setting, alone = self.setting, self.method == ENSEMBLE
        algorithm, epochs, rounds = METHODS[self.method], setting.epochs, setting.passes * setting.layers
        if algorithm == METHODS[MORE]:
            algorithm += ", " + setting.fedma.replace("$", f"{setting.gammas[self.method == FEWER]:g}")
        if alone:
            epochs, rounds = epochs * setting.layers, 1
        measured = min(rounds, setting.layers)
        return RunSpec(
            f"{setting.name}-{slug(self.method)}{part}-rate-{value:g}",
            "fedavg-digits",
            (
                f"data={{{setting.data}, clients: {setting.clients}}}",
                f"model={{{setting.model}}}",
                f"algorithm={{{algorithm}}}",
                f"training={{learning_rate: {value:g}, momentum: 0.9, batch_size: 32, epochs: {epochs}}}",
                *(f"clients_per_round={setting.clients}", f"chunk_size={setting.clients}", f"rounds={rounds}"),
                *(f"evaluate_every={measured}", f"checkpoint_every={measured}", "checkpoint_seconds=100000"),
            ),
            measure="narrowcast_papers.fedma.ensemble:ensemble_of_clients" if alone else ACCURACY,
            data_seed=True,
            curve=not alone,
        )


# Public samples are nobody's here: FedMA's rivals do not use them, and clients are to have few images.
_MNIST = f"kind: mnist, validation_share: 0.05, public: {{samples: 55000}}, {_DIRICHLET}"
_LENET = "kind: cnn, channels: [8, 16], hidden: 64"
STUDIES: Mapping[str, tuple[Setting, ...]] = {
    "fedma-mnist": (
        Setting("fedma-mnist-5", "MNIST, 5 clients", _MNIST, _LENET, clients=5, layers=4),
        Setting("fedma-mnist-10", "MNIST, 10 clients", _MNIST, _LENET, clients=10, layers=4),
    ),
    "fedma-cifar": (
        Setting(
            "fedma-cifar",
            "CIFAR-10, a copy of 12,000 JPEG images, 4 clients",
            f"kind: image_folder, path: cifar10-jpeg-12k, {_DIRICHLET}",
            "kind: vgg9, channels: [8, 16, 32, 32, 64, 64], hidden: [64, 64], first_weights: he",
            # With the paper's 16 clients each would have a fifth of the images that it has there.
            clients=4,
            layers=9,
            passes=1,
            epochs=2,
            methods=("FedAvg", "FedProx", MORE, ENSEMBLE),
            rates=(0.005, 0.01, 0.02, 0.04),
        ),
    ),
    "fedma-shakespeare": (
        Setting(
            "fedma-shakespeare",
            "Shakespeare, 8 roles",
            "kind: shakespeare, predict: every, stride: 80, min_examples: 150",
            "kind: char_lstm, hidden: 64, layers: 1",
            clients=8,
            layers=3,
            # As FedMA's code for LSTMs, whose gamma is the smaller one.
            fedma="head: equal, matching: {unit_mean: owners, gamma: $}",
            gammas=(1.0, 0.001),
            rates=(1.0, 3.0, 10.0),
        ),
    ),
    "fedma-epochs": tuple(
        Setting(
            f"fedma-epochs-{epochs}",
            f"MNIST, 5 clients, {epochs} local epoch{'s' * (epochs > 1)}",
            _MNIST,
            _LENET,
            clients=5,
            layers=4,
            passes=1,
            epochs=epochs,
            methods=("FedAvg", MORE),
        )
        for epochs in (1, 3, 10)
    ),
}


def network_runs(rows: Rows, setting: Setting) -> dict[str, list[Runs]]:
    """Return the results of each method by seed after 1, 2, ... passes, of the seeds that all methods have."""
    every = tested_so_far(rows, setting.cells, TEST_SEEDS)
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


def _networks(name: str) -> StudyTable:
    settings = STUDIES[name]
    return StudyTable(
        {name: in_turn([cells_plan(name, each.cells, TEST_SEEDS) for each in settings])},
        lambda rows: judge_networks(settings, rows),
        lambda rows, path: plot_networks(settings, rows, path),
    )


MNIST, CIFAR, SHAKESPEARE, EPOCHS = map(_networks, ("fedma-mnist", "fedma-cifar", "fedma-shakespeare", "fedma-epochs"))
