"""SCAFFOLD's comparison: rounds to a target accuracy when a share of the clients' data is similar.

Reference: Karimireddy et al., SCAFFOLD, ICML 2020 (arXiv:1910.06378), section 7 and Table 3: logistic regression on
EMNIST, 100 clients, a fifth of them a round, local batches of a fifth of a client's data, step sizes tuned for each.

Here: scikit-learn's digits in place of EMNIST, 20 clients, 4 of them a round, batches of 13 of about 65 samples. Each
method has the step size of one grid with the fewest rounds on validation samples, a mean over seeds that are not test
seeds: from rate 3 on rounds depend on the last bits of a run's arithmetic, so that one seed does not settle a choice.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from narrowcast.platform.tracking.figures import BLACK, BLUE, ORANGE, VERMILLION, new_figure
from narrowcast.platform.tracking.units import format_bits
from narrowcast.runs.significance import COMPARABLE_SEEDS, MeanTest, compare_paired, holm
from narrowcast.studies.comparison import draw_seed_means
from narrowcast.studies.results import Rows
from narrowcast.studies.spec import RunSpec
from narrowcast.studies.tables import StudyTable
from narrowcast.studies.tuning import Choice, TunedCell, cells_plan, finished_cells, tuning_verdict
from narrowcast.studies.verdicts import PaperVerdict, describe_order, mean_and_spread

TARGET = 0.9
MOST_ROUNDS = 300
TEST_SEEDS = 10
TUNING_SEEDS = COMPARABLE_SEEDS
SIMILARITIES = (0, 10, 100)
EPOCHS = (1, 5, 20)
RATES = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0, 3000.0)
METHODS = {"FedAvg": "fedavg", "FedProx": "{kind: fedprox, mu: 1}", "SCAFFOLD": "scaffold"}
"""FedProx has the mu of the paper."""
SGD = "SGD"


@dataclass(frozen=True)
class SimilarityCell(TunedCell[float]):
    """A method with its local epochs at a percentage of similar data; `SGD` takes one step with all of its data."""

    method: str
    epochs: int
    similarity: int

    @property
    def grid(self) -> Sequence[float]:
        """The values that are tried."""
        return RATES

    def best(self, results: Sequence[Mapping[str, Any]]) -> float:
        """Return the step size with the fewest rounds, of these the most accurate one; results are means, as `RATES`.

        A run that does not reach the target has `MOST_ROUNDS`; a step size of which a run failed is the last choice.
        """

        def order(place: int) -> tuple[float, float]:
            result = results[place]
            accuracy = result["final"].get("validation.accuracy")
            return (math.inf, 0.0) if accuracy is None else (result["rounds"], -accuracy)

        return RATES[min(range(len(RATES)), key=order)]

    def choice(self, tried: Sequence[Mapping[str, Any]]) -> Choice:
        """Return what was chosen from the grid."""
        return Choice(f"{self.similarity} % similar: {self.what}", "step size", self.best(tried), RATES, TUNING_SEEDS)

    @property
    def what(self) -> str:
        """The method in words."""
        return SGD if self.method == SGD else f"{self.method}, E = {self.epochs}"

    def spec(self, value: float, part: str) -> RunSpec:
        """Return the run at a step size, which ends at the target on its own split."""
        split = "validation" if part else "test"
        batch = "all" if self.method == SGD else 13
        partition = f"{{kind: similarity, share: {self.similarity / 100:g}}}"
        return RunSpec(
            f"scaffold-similarity-{self.similarity}-{self.method}-{self.epochs}-{value:g}{part}",
            "fedavg-digits",
            (
                f"rounds={MOST_ROUNDS}",
                "evaluate_every=1",
                "checkpoint_seconds=100000",
                "clients_per_round=4",
                "sampling=uniform",
                f"data={{kind: digits, clients: 20, partition: {partition}}}",
                "model=softmax",
                f"algorithm={METHODS.get(self.method, 'fedavg')}",
                f"training={{learning_rate: {value:g}, batch_size: {batch}, epochs: {self.epochs}}}",
            ),
            data_seed=True,
            memory_gib=0.05,
            together=f"scaffold-similarity-{self.epochs}{part}",
            target=(f"{split}.accuracy", TARGET),
        )


def cells() -> list[SimilarityCell]:
    """Return the cells, those of SGD first."""
    methods = [(SGD, 1), *((method, epochs) for epochs in EPOCHS for method in METHODS)]
    return [SimilarityCell(*each, similarity) for each in methods for similarity in SIMILARITIES]


_COLOURS = {SGD: BLACK, "FedAvg": BLUE, "FedProx": ORANGE, "SCAFFOLD": VERMILLION}
_TICKS = (1, 2, 5, 10, 20, 50, 100)


@dataclass(frozen=True)
class CellRounds:
    """A finished cell: what was chosen, and the rounds and the uplink until the target by seed."""

    choice: Choice
    rounds: tuple[float, ...]
    uplink_bits: tuple[int, ...]


def tested_cells(rows: Rows) -> dict[SimilarityCell, CellRounds]:
    """Return the cells whose runs are all finished."""
    found = {}
    for cell, results, runs in finished_cells(rows, cells(), TEST_SEEDS, TUNING_SEEDS):
        rounds, bits = zip(*((float(run["rounds"]), int(run["uplink_bits"])) for run in runs), strict=True)
        found[cell] = CellRounds(cell.choice(results), rounds, bits)
    return found


def judge_rounds(rows: Rows) -> list[PaperVerdict]:
    """Give the rounds of each cell, and compare SCAFFOLD with the others of as many epochs, seed by seed.

    The last row says how the step sizes were tuned.
    """
    found = tested_cells(rows)
    verdicts = []
    for each in found.values():
        missed = sum(rounds >= MOST_ROUNDS for rounds in each.rounds)
        said = f"{each.choice.words}, uplink {format_bits(float(np.mean(each.uplink_bits)))}"
        said += f", {missed} of {len(each.rounds)} above {MOST_ROUNDS}" if missed else ""
        verdicts.append(PaperVerdict(each.choice.what, "", mean_and_spread(each.rounds, 1), said, "", each.rounds))
    by_cell = {cell: each.rounds for cell, each in found.items()}
    tests = dict(_tests(by_cell))
    for (what, test), p in zip(tests.items(), holm([test.p_zero for test in tests.values()]), strict=True):
        interval = test.interval
        order = describe_order(test, p, "fewer", "more")
        bounds = f"({interval.low:+.1f} to {interval.high:+.1f}), p = {p:.2g}"
        verdicts.append(PaperVerdict(what, "fewer", f"{interval.mean:+.1f} rounds", f"{order} {bounds}"))
    choices = [each.choice for each in found.values()]
    return [*verdicts, tuning_verdict(choices)] if choices else verdicts


def _tests(by_cell: Mapping[SimilarityCell, tuple[float, ...]]) -> Iterable[tuple[str, MeanTest]]:
    for similarity in SIMILARITIES:
        for epochs in EPOCHS:
            ours = by_cell.get(SimilarityCell("SCAFFOLD", epochs, similarity))
            for rival in (SimilarityCell("FedAvg", epochs, similarity), SimilarityCell("FedProx", epochs, similarity)):
                if ours and (theirs := by_cell.get(rival)):
                    yield f"{similarity} %: SCAFFOLD less {rival.what}", compare_paired(ours, theirs)
        first, sgd = (
            by_cell.get(SimilarityCell("SCAFFOLD", 1, similarity)),
            by_cell.get(SimilarityCell(SGD, 1, similarity)),
        )
        if first and sgd:
            yield f"{similarity} %: SCAFFOLD, E = 1, less SGD", compare_paired(first, sgd)


def plot_rounds(rows: Rows, path: Path) -> None:
    """Plot rounds to the target against similarity, a panel for each number of epochs."""
    title = f"Rounds to {TARGET:.0%} test accuracy, digits, logistic regression, tuned step sizes"
    figure, panels = new_figure(title, panels=len(EPOCHS))
    by_cell = {cell: each.rounds for cell, each in tested_cells(rows).items()}
    for axes, epochs in zip(panels, EPOCHS, strict=True):
        for shift, method in enumerate((SGD, *METHODS)):
            drawn = [
                (place + 0.05 * (shift - 1.5), by_cell[cell])
                for place, similarity in enumerate(SIMILARITIES)
                if (cell := SimilarityCell(method, 1 if method == SGD else epochs, similarity)) in by_cell
            ]
            draw_seed_means(
                axes,
                [place for place, _ in drawn],
                [rounds for _, rounds in drawn],
                color=_COLOURS[method],
                marker="o",
                markersize=4,
                capsize=3,
                label=method,
            )
        axes.set_xticks(range(len(SIMILARITIES)), [f"{each} %" for each in SIMILARITIES])
        axes.set(title=f"local epochs E = {epochs}", xlabel="similar data", yscale="log", ylim=(0.8, 150))
        axes.set_yticks(_TICKS, map(str, _TICKS))
    panels[0].set(ylabel="rounds")
    panels[0].legend(fontsize=8, frameon=False)
    figure.savefig(path, dpi=150)


SCAFFOLD = StudyTable(
    {"scaffold-similarity": cells_plan("scaffold-similarity", cells(), TEST_SEEDS, TUNING_SEEDS)},
    judge_rounds,
    plot_rounds,
)
