"""q-FFL's comparisons: accuracy over clients on three classes of clothes, with AFL, and on synthetic data.

Reference: Li et al., Fair Resource Allocation in Federated Learning, ICLR 2020 (arXiv:1905.10497), Tables 1 and 3; the
clothes are those of Mohri et al., Agnostic Federated Learning, ICML 2019 (arXiv:1902.00146), section 5: shirts,
pullovers and T-shirts of Fashion-MNIST, one class a client, and logistic regression.

Every method has as many tries, chosen with a seed that is not a test seed: on the clothes by the validation accuracy of
the worst client, on synthetic data, where all of q is shown, by the mean over clients.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from narrowcast.platform.tracking.figures import BLACK, BLUE, GREEN, VERMILLION, new_figure
from narrowcast.runs.significance import MeanTest, compare_paired
from narrowcast.studies.comparison import ComparisonVerdicts, FinishedCell, Tested, draw_seed_means
from narrowcast.studies.verdicts import PaperVerdict, mean_and_spread, ordered_differences

_STATISTICS = {"mean": "mean", "worst_10_percent": "worst", "best_10_percent": "best", "variance": "variance"}
_COLOURS = dict(zip(_STATISTICS, (BLACK, VERMILLION, GREEN, BLUE), strict=True))
_PUBLISHED = {
    "q = 0": "80.8, worst 18.8, best 100, variance 724",
    "q = 1": "79.0, worst 31.1, best 100, variance 472",
}
"""Table 1, Synthetic."""


def statistic(tested: FinishedCell, name: str) -> tuple[float, ...]:
    """Return a statistic over clients by seed, accuracies in percent and the variance in percent squared."""
    reached = tested.reached(f"accuracy.{name}")
    return tuple(value / 100 for value in reached) if name == "variance" else reached


def judge_fairness(tested: Tested) -> list[PaperVerdict]:
    """Give the statistics of each method, and its differences from the first one, seed by seed."""
    verdicts = []
    for (method,), found in tested.items():
        each = {name: mean_and_spread(statistic(found, name), 1) for name in _STATISTICS}
        ours = f"{each['mean']}, worst {each['worst_10_percent']}, best {each['best_10_percent']}"
        own = found.values["own"]
        said = f"rate {found.values['rate']:g}" + (
            f", {'mixture rate' if method == 'AFL' else 'q'} {own:g}" if own else ""
        )
        paper, by_seed = _PUBLISHED.get(method, ""), statistic(found, "worst_10_percent")
        verdicts.append(PaperVerdict(method, paper, f"{ours}, variance {each['variance']}", said, by_seed=by_seed))
    for verdict in ordered_differences(_tests(tested), "lower", "higher", digits=1):
        paper = {"worst": "higher", "variance": "lower"}.get(verdict.what.rpartition(": ")[2], "")
        verdicts.append(replace(verdict, paper=paper))
    return verdicts


def _tests(tested: Tested) -> dict[str, MeanTest]:
    """Return the paired tests of every method against the first one, and of q-FFL against AFL."""
    if not tested:
        return {}
    first, *others = tested
    pairs = [(method, first) for method in others]
    pairs += [(("q-FFL",), ("AFL",))] if {("q-FFL",), ("AFL",)} <= tested.keys() else []
    return {
        f"{ours[0]} less {theirs[0]}: {short}": compare_paired(
            statistic(tested[ours], name), statistic(tested[theirs], name)
        )
        for ours, theirs in pairs
        for name, short in _STATISTICS.items()
        if short != "best"
    }


def plot_fairness(tested: Tested, path: Path) -> None:
    """Plot the accuracies of the mean, the worst and the best clients, and the variance over clients, by method."""
    places, study = range(len(tested)), next(iter(tested.values())).cell.study
    figure, (left, right) = new_figure(f"Accuracy over clients, {study.removeprefix('qffl-')}", panels=2)
    for name, label in _STATISTICS.items():
        axes = right if name == "variance" else left
        values = [statistic(found, name) for found in tested.values()]
        draw_seed_means(axes, places, values, color=_COLOURS[name], marker="o", linestyle="", capsize=3, label=label)
    for axes in (left, right):
        axes.set_xticks(places, [found.cell.name for found in tested.values()])
        axes.set_xlim(-0.5, len(tested) - 0.5)
    left.set(ylabel="test accuracy (%)")
    left.legend(fontsize=8, frameon=False, loc="lower center", bbox_to_anchor=(0.5, 1), ncols=3)
    right.set(ylabel="variance over clients (percent squared)", ylim=(0, None))
    figure.savefig(path, dpi=150)


FAIRNESS = ComparisonVerdicts(judge_fairness, plot_fairness)
