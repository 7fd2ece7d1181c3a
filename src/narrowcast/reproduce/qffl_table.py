"""The tables and plots of q-FFL's comparisons: the mean, the worst and the best clients, and the variance."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from narrowcast.platform.tracking.run_plots import BLACK, BLUE, GREEN, VERMILLION, new_figure
from narrowcast.reproduce.long_studies import finished, tried
from narrowcast.reproduce.qffl_fairness import FASHION, TEST_SEEDS, FairCell, cells
from narrowcast.reproduce.results_csv import Rows
from narrowcast.reproduce.seed_means import draw_seed_means
from narrowcast.reproduce.verdict import PaperVerdict, describe_order, mean_and_spread
from narrowcast.runs.significance import MeanTest, compare_paired, holm

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
    for cell in cells(data):
        results = tried(rows, cell, range(len(cell.grid)))
        if results and (runs := finished(rows, cell.test(results), TEST_SEEDS)):
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
