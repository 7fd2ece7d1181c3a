"""Data bias: one client has grey images and the other coloured ones, of classes that are mostly one of the two.

FedMA and its rivals have as many rounds and the same epochs. The controls train one model on all images, biased as they
are, or with half of each class in grey, which is the bias removed. Every method has the same three rates, on validation
images with a seed that is no test seed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from narrowcast.platform.tracking.figures import BLUE, new_figure
from narrowcast.studies.results import Rows
from narrowcast.studies.spec import RunSpec, slug
from narrowcast.studies.tables import StudyTable
from narrowcast.studies.tuning import TunedCell, cells_plan, tested_so_far
from narrowcast.studies.verdicts import PaperVerdict, Runs, accuracies, compared_with_first

STUDY = "fedma-bias"
TEST_SEEDS = 5
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
class BiasCell(TunedCell[float]):
    """A method of `METHODS`."""

    method: str

    @property
    def grid(self) -> Sequence[float]:
        """The values that are tried."""
        return RATES

    def spec(self, value: float, part: str) -> RunSpec:
        """Return the run at a rate."""
        clients, data, algorithm = METHODS[self.method]
        return RunSpec(
            f"{STUDY}-{slug(self.method)}{part}-rate-{value:g}",
            "fedavg-digits",
            (
                "data={kind: narrowcast_papers.fedma.grey_images:GreyImages, path: cifar10-jpeg-12k, "
                f"clients: {clients}{data}}}",
                "model={kind: cnn, channels: [8, 16], hidden: 64}",
                f"algorithm={{{algorithm}}}",
                f"training={{learning_rate: {value:g}, momentum: 0.9, batch_size: 32, epochs: {EPOCHS}}}",
                *(f"clients_per_round={clients}", "chunk_size=2", "checkpoint_seconds=100000"),
                *(f"rounds={PASSES * LAYERS}", f"evaluate_every={LAYERS}", f"checkpoint_every={LAYERS}"),
            ),
            data_seed=True,
            curve=True,
        )


CELLS = tuple(map(BiasCell, METHODS))


def bias_runs(rows: Rows) -> dict[str, Runs]:
    """Return the test runs of each method, of the seeds that all have."""
    found = zip(METHODS, tested_so_far(rows, CELLS, TEST_SEEDS), strict=True)
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


BIAS = StudyTable({STUDY: cells_plan(STUDY, CELLS, TEST_SEEDS)}, judge_bias, plot_bias)
