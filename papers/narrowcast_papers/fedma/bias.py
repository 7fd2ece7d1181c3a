"""Data bias: one client has grey images and the other coloured ones, of classes that are mostly one of the two.

FedMA and its rivals have as many rounds and the same epochs. The controls train one model on all images, biased as they
are, or with half of each class in grey, which is the bias removed. Every method has the same three rates, on validation
images with a seed that is no test seed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from narrowcast.platform.tracking.figures import BLUE, new_figure
from narrowcast.studies.results import Rows
from narrowcast.studies.spec import RunSpec, best_place, slug
from narrowcast.studies.tables import StudyTable
from narrowcast.studies.tuning import cells_plan, tested_so_far
from narrowcast.studies.verdicts import PaperVerdict, Runs, accuracies, compared_with_first

STUDY = "fedma-bias"
TEST_SEEDS = 5
TUNING_SEED = 100
RATES = (0.003, 0.01, 0.03)
LAYERS, PASSES, EPOCHS = 4, 2, 3
METHODS: Mapping[str, tuple[int, str, str]] = {
    "FedAvg": (2, "", "kind: fedavg"),
    "FedProx": (2, "", "kind: fedprox, mu: 0.001"),
    "FedMA": (2, "", "kind: fedma"),
    "one model of all images": (1, "", "kind: fedavg"),
    "one model, half of each class in grey": (1, ", grey: 0.5", "kind: fedavg"),
}
"""The clients, other fields of the data, and those of the algorithm."""


@dataclass(frozen=True)
class BiasCell:
    """A method of `METHODS`."""

    method: str

    def tuning(self, rate: float) -> RunSpec:
        """Return the run on validation samples at a rate."""
        return self._spec(rate, "-tuning")

    def test(self, tried: Sequence[Mapping[str, Any]]) -> RunSpec:
        """Return the run on test samples at the best rate, from the results in the order of the rates."""
        return self._spec(RATES[best_place(tried)], "")

    def _spec(self, rate: float, part: str) -> RunSpec:
        clients, data, algorithm = METHODS[self.method]
        return RunSpec(
            f"{STUDY}-{slug(self.method)}{part}-rate-{rate:g}",
            "fedavg-digits",
            (
                "data={kind: narrowcast_papers.fedma.grey_images:GreyImages, path: cifar10-jpeg-12k, "
                f"clients: {clients}{data}}}",
                "model={kind: cnn, channels: [8, 16], hidden: 64}",
                f"algorithm={{{algorithm}}}",
                f"training={{learning_rate: {rate:g}, momentum: 0.9, batch_size: 32, epochs: {EPOCHS}}}",
                *(f"clients_per_round={clients}", "chunk_size=2", "checkpoint_seconds=100000"),
                *(f"rounds={PASSES * LAYERS}", f"evaluate_every={LAYERS}", f"checkpoint_every={LAYERS}"),
            ),
            first_seed=TUNING_SEED if part else 0,
            data_seed=True,
            curve=True,
        )


CELLS = tuple(map(BiasCell, METHODS))


def bias_runs(rows: Rows) -> dict[str, Runs]:
    """Return the test runs of each method, of the seeds that all have."""
    found = zip(METHODS, tested_so_far(rows, CELLS, RATES, TEST_SEEDS), strict=True)
    return {method: runs for method, runs in found if runs}


def judge_bias(rows: Rows) -> list[PaperVerdict]:
    """Compare all methods with FedAvg, seed by seed."""
    return compared_with_first(bias_runs(rows), "accuracy")


def plot_bias(rows: Rows, path: Path) -> None:
    """Plot the accuracy of every method and seed."""
    figure, (axes,) = new_figure("Grey images on one client, coloured ones on the other", panels=1)
    runs = bias_runs(rows)
    for place, each in enumerate(runs.values()):
        reached = accuracies(each, "accuracy")
        axes.plot(reached, [-place] * len(reached), "o", color=BLUE, alpha=0.5)
        axes.plot(sum(reached) / len(reached), -place, "|", color=BLUE, markersize=18)
    axes.set_yticks([-place for place in range(len(runs))], list(runs))
    axes.set(xlabel="test accuracy (%) by seed, and the mean")
    figure.savefig(path, dpi=100)


BIAS = StudyTable({STUDY: cells_plan(STUDY, CELLS, RATES, TEST_SEEDS)}, judge_bias, plot_bias)
