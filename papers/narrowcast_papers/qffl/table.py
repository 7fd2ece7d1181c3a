"""q-FFL's comparisons: accuracy over clients on three classes of clothes, with AFL, and on synthetic data.

Reference: Li et al., Fair Resource Allocation in Federated Learning, ICLR 2020 (arXiv:1905.10497), Tables 1 and 3; the
clothes are those of Mohri et al., Agnostic Federated Learning, ICML 2019 (arXiv:1902.00146), section 5: shirts,
pullovers and T-shirts of Fashion-MNIST, one class a client, and logistic regression.

Every method has as many tries, chosen with a seed that is not a test seed: on the clothes by the validation accuracy of
the worst client, on synthetic data, where all of q is shown, by the mean over clients.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from narrowcast.platform.tracking.figures import BLACK, BLUE, GREEN, VERMILLION, new_figure
from narrowcast.runs.significance import MeanTest, compare_paired, holm
from narrowcast.studies.comparison import draw_seed_means
from narrowcast.studies.results import Rows
from narrowcast.studies.spec import RunSpec, best_place
from narrowcast.studies.tables import StudyTable
from narrowcast.studies.tuning import TunedCell, cells_plan, finished_cells
from narrowcast.studies.verdicts import PaperVerdict, describe_order, mean_and_spread

TEST_SEEDS = 5
FASHION, SYNTHETIC = "fashion", "synthetic"
ROUNDS = {FASHION: 100, SYNTHETIC: 1000}
FEDAVG, AFL, QFFL = "FedAvg", "AFL", "q-FFL"
QS = (0.0, 0.1, 1.0, 5.0)
"""q on synthetic data."""
_COUPLED = (0.003, 0.01, 0.03)
_SETTINGS = {
    FASHION: (
        "data={kind: fashion-mnist, classes: [0, 2, 6], clients: 3, partition: {kind: shards, classes_per_client: 1}}",
        "clients_per_round=3",
        200,
    ),
    SYNTHETIC: ("data={kind: synthetic, alpha: 1, beta: 1, clients: 100}", "clients_per_round=10", 64),
}
"""Data, cohort and batch size."""
METHODS = {FASHION: (FEDAVG, AFL, QFFL), SYNTHETIC: tuple(f"q = {q:g}" for q in QS)}


@dataclass(frozen=True)
class FairCell(TunedCell[tuple[float, float]]):
    """A method of `METHODS` on one of the two data sets."""

    data: str
    method: str

    @property
    def grid(self) -> tuple[tuple[float, float], ...]:
        """The pairs tried: a learning rate, and the method's own field, 0 if it has none."""
        if self.data == SYNTHETIC:
            return tuple((rate, float(self.method.removeprefix("q = "))) for rate in (0.03, 0.1, 0.3, 1.0))
        own = {AFL: (0.01, 0.1), QFFL: (1.0, 5.0)}.get(self.method)
        if own is None:
            return tuple((rate, 0.0) for rate in (0.001, *_COUPLED, 0.1, 0.3))
        return tuple(product(_COUPLED, own))

    def best(self, results: Sequence[Mapping[str, Any]]) -> tuple[float, float]:
        """Return the best pair of the grid, from the results in its order."""
        metric = "worst_10_percent" if self.data == FASHION else "mean"
        return self.grid[best_place(results, f"validation.accuracy.{metric}")]

    def spec(self, value: tuple[float, float], part: str) -> RunSpec:
        """Return the run at a pair of the grid."""
        data, cohort, batch = _SETTINGS[self.data]
        rate, own = value
        algorithm = {
            FEDAVG: "fedavg",
            AFL: f"{{kind: afl, mixture_learning_rate: {own:g}}}",
        }.get(self.method, f"{{kind: qffl, q: {own:g}, weights: examples}}")
        name = self.method.replace(" ", "").replace("=", "")
        return RunSpec(
            f"qffl-{self.data}-{name}-{rate:g}-{own:g}{part}",
            "fedavg-digits",
            (
                data,
                cohort,
                "sampling=uniform",
                f"rounds={ROUNDS[self.data]}",
                f"evaluate_every={ROUNDS[self.data]}",
                "evaluate_clients=[validation, test]",
                "checkpoint_seconds=100000",
                "model=softmax",
                f"algorithm={algorithm}",
                f"training={{learning_rate: {rate:g}, batch_size: {batch}, epochs: 1}}",
            ),
            data_seed=True,
            memory_gib=0.2,
            together=f"qffl-{self.data}{part}",
        )


def cells(data: str) -> list[FairCell]:
    """Return the cells of a data set, the one that minimises the mean loss first."""
    return [FairCell(data, method) for method in METHODS[data]]


_STATISTICS = {"mean": "mean", "worst_10_percent": "worst", "best_10_percent": "best", "variance": "variance"}
_COLOURS = dict(zip(_STATISTICS, (BLACK, VERMILLION, GREEN, BLUE), strict=True))
_PUBLISHED = {
    "q = 0": "80.8, worst 18.8, best 100, variance 724",
    "q = 1": "79.0, worst 31.1, best 100, variance 472",
}
"""Table 1, Synthetic."""


@dataclass(frozen=True)
class FairRuns:
    """A finished cell: the learning rate and the method's own field, and each statistic over clients by seed."""

    chosen: tuple[float, float]
    statistics: Mapping[str, tuple[float, ...]]


def fair_runs(data: str, rows: Rows) -> dict[FairCell, FairRuns]:
    """Return the cells of a data set whose runs are all finished; accuracies are in percent."""
    found = {}
    for cell, results, runs in finished_cells(rows, cells(data), TEST_SEEDS):
        of_seeds = {
            name: tuple(
                float(run["final"].get(f"test.accuracy.{name}", 0.0)) * (1 if name == "variance" else 100)
                for run in runs
            )
            for name in _STATISTICS
        }
        found[cell] = FairRuns(cell.best(results), of_seeds)
    return found


def judge_fairness(data: str, rows: Rows) -> list[PaperVerdict]:
    """Give the statistics of each method, and its differences from the first one, seed by seed."""
    found = fair_runs(data, rows)
    verdicts = []
    for cell, runs in found.items():
        each = {name: mean_and_spread(values, 1) for name, values in runs.statistics.items()}
        ours = f"{each['mean']}, worst {each['worst_10_percent']}, best {each['best_10_percent']}"
        rate, own = runs.chosen
        said = f"rate {rate:g}" + (f", {'mixture rate' if cell.method == 'AFL' else 'q'} {own:g}" if own else "")
        paper = "" if data == FASHION else _PUBLISHED.get(cell.method, "")
        by_seed = runs.statistics["worst_10_percent"]
        verdicts.append(PaperVerdict(cell.method, paper, f"{ours}, variance {each['variance']}", said, by_seed=by_seed))
    tests = _tests(found)
    for (what, test), p in zip(tests.items(), holm([test.p_zero for test in tests.values()]), strict=True):
        interval = test.interval
        order = describe_order(test, p, "lower", "higher")
        said = f"{order} ({interval.low:+.1f} to {interval.high:+.1f}), p = {p:.2g}"
        paper = {"worst": "higher", "variance": "lower"}.get(what.rpartition(": ")[2], "")
        verdicts.append(PaperVerdict(what, paper, f"{interval.mean:+.1f}", said))
    return verdicts


def _tests(found: Mapping[FairCell, FairRuns]) -> dict[str, MeanTest]:
    """Return the paired tests of every method against the first one, and on the clothes of q-FFL against AFL."""
    if not found:
        return {}
    first, *others = found
    pairs = [(each, first) for each in others]
    if first.data == FASHION and len(others) > 1:
        pairs.append((others[-1], others[0]))
    return {
        f"{ours.method} less {theirs.method}: {short}": compare_paired(
            found[ours].statistics[name], found[theirs].statistics[name]
        )
        for ours, theirs in pairs
        for name, short in _STATISTICS.items()
        if short != "best"
    }


def plot_fairness(data: str, rows: Rows, path: Path) -> None:
    """Plot the accuracies of the mean, the worst and the best clients, and the variance over clients, by method."""
    found = fair_runs(data, rows)
    places = range(len(found))
    figure, (left, right) = new_figure(f"Accuracy over clients, {data}", panels=2)
    for name, label in _STATISTICS.items():
        axes = right if name == "variance" else left
        values = [runs.statistics[name] for runs in found.values()]
        draw_seed_means(axes, places, values, color=_COLOURS[name], marker="o", linestyle="", capsize=3, label=label)
    for axes in (left, right):
        axes.set_xticks(places, [cell.method for cell in found])
        axes.set_xlim(-0.5, len(found) - 0.5)
    left.set(ylabel="test accuracy (%)")
    left.legend(fontsize=8, frameon=False, loc="lower center", bbox_to_anchor=(0.5, 1), ncols=3)
    right.set(ylabel="variance over clients (percent squared)", ylim=(0, None))
    figure.savefig(path, dpi=150)


def _fairness(data: str) -> StudyTable:
    name, of_data = f"qffl-{data}", cells(data)
    return StudyTable(
        {name: cells_plan(name, of_data, TEST_SEEDS)},
        lambda rows: judge_fairness(data, rows),
        lambda rows, path: plot_fairness(data, rows, path),
    )


FASHION_TABLE, SYNTHETIC_TABLE = _fairness("fashion"), _fairness("synthetic")
