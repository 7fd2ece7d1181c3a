"""FedProx's comparison on synthetic data: FedAvg drops stragglers, FedProx keeps their partial work, with mu.

Reference: Li et al., Federated Optimization in Heterogeneous Networks, MLSys 2020 (arXiv:1812.06127), section 5.2 and
Figure 1. Its settings: 30 devices, 10 a round, 20 epochs of batches of 10 at the rate 0.01, stragglers that do 1 to 20
epochs, mu the best of five; FedAvg, and FedProx with mu = 0, have the same rate.

Here FedAvg, which drops partial work, and FedProx with mu = 0, which keeps it, also have as many tries of their rate as
FedProx has of mu at the paper's rate, in every cell: by mean validation accuracy over seeds that are not test seeds.
The first is no control for mu, since it drops work; the second is. Grids go on below and above the paper's as far as
best values need it. The same clients are stragglers under every method of a seed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from narrowcast.platform.tracking.figures import BLACK, BLUE, GREEN, ORANGE, VERMILLION, new_figure
from narrowcast.runs.significance import MeanTest, compare_paired
from narrowcast.studies.comparison import ComparisonVerdicts, Tested, choices_of, draw_seed_means
from narrowcast.studies.tuning import tuning_verdict
from narrowcast.studies.verdicts import PaperVerdict, bounds_of, mean_and_spread, ordered_differences

DATA = ("iid", "0", "0.5", "1")
"""Synthetic data without heterogeneity, and with this alpha and beta."""
STRAGGLERS = ("0", "50", "90")
FEDAVG, TUNED_FEDAVG = "FedAvg", "FedAvg, tuned rate"
PARTIAL, TUNED_PARTIAL, BEST_MU = "FedProx, mu = 0", "FedProx, mu = 0, tuned rate", "FedProx, best mu"
METHODS = (FEDAVG, TUNED_FEDAVG, PARTIAL, TUNED_PARTIAL, BEST_MU)
ORDER = ((PARTIAL, FEDAVG), (BEST_MU, PARTIAL), (BEST_MU, FEDAVG))
"""Pairs of which the paper has the first above the second."""
CONTROLS = ((TUNED_PARTIAL, TUNED_FEDAVG), (BEST_MU, TUNED_PARTIAL), (BEST_MU, TUNED_FEDAVG))
"""Pairs of equal tries: what keeping partial work adds, what mu adds, and both."""
_COLOURS = dict(zip(METHODS, (BLACK, BLUE, ORANGE, GREEN, VERMILLION), strict=True))
_PUBLISHED_GAIN = "+22, on other sets too"


def judge_fedprox(tested: Tested) -> list[PaperVerdict]:
    """Give the accuracy of each cell and the differences that the paper states and of the controls, seed by seed.

    p values are those of the means over the heterogeneous sets, corrected over all of them. The last row says how the
    values were tuned.
    """
    verdicts = []
    for finished in tested.values():
        choices = ", ".join(choice.words for choice in finished.choices)
        verdicts.append(
            PaperVerdict(finished.cell.name, "", mean_and_spread(finished.reached()), choices, "", finished.reached())
        )
    for data in DATA:
        verdicts += [
            PaperVerdict(what, _published(what), f"{test.interval.mean:+.2f}", bounds_of(test))
            for what, test in _tests([data], set_name(data), tested).items()
        ]
    for verdict in ordered_differences(_tests(DATA[1:], "mean of the heterogeneous sets", tested), "below", "above"):
        gain = verdict.what.endswith(f"90 %: {BEST_MU} less {FEDAVG}")
        verdicts.append(replace(verdict, paper=_PUBLISHED_GAIN if gain else _published(verdict.what)))
    return [*verdicts, tuning_verdict(choices_of(tested))] if verdicts else []


def set_name(data: str) -> str:
    """Return a data set of `DATA` in words: alpha and beta."""
    return data if data == "iid" else f"({data}, {data})"


def _published(what: str) -> str:
    return "above" if any(what.endswith(f": {first} less {second}") for first, second in ORDER) else ""


def _tests(sets: Sequence[str], name: str, tested: Tested) -> Mapping[str, MeanTest]:
    """Return the paired tests on the mean over some data sets; without stragglers nothing is dropped or kept."""
    tests = {}
    for stragglers in STRAGGLERS:
        for pair in (*ORDER, *CONTROLS):
            keys = [[(data, stragglers, method) for data in sets] for method in pair]
            if all(key in tested for of_method in keys for key in of_method):
                first, second = (
                    np.mean(np.array([tested[key].reached() for key in of_method]), axis=0) for of_method in keys
                )
                tests[f"{name}, {stragglers} %: {pair[0]} less {pair[1]}"] = compare_paired(first, second)
    return tests


def plot_fedprox(tested: Tested, path: Path) -> None:
    """Plot accuracies by data set, a panel for each share of stragglers."""
    figure, panels = new_figure("Stragglers dropped or kept, synthetic data, 50 rounds", panels=len(STRAGGLERS))
    for axes, stragglers in zip(panels, STRAGGLERS, strict=True):
        for shift, method in enumerate(METHODS):
            drawn = [
                (position + 0.12 * (shift - 2), tested[key].reached())
                for position, data in enumerate(DATA)
                if (key := (data, stragglers, method)) in tested
            ]
            draw_seed_means(
                axes,
                [position for position, _ in drawn],
                [reached for _, reached in drawn],
                color=_COLOURS[method],
                linestyle="none",
                marker="o",
                markersize=4,
                capsize=3,
                label=method,
            )
        axes.set_xticks(range(len(DATA)), [set_name(data) for data in DATA], fontsize=8)
        axes.set(title=f"{stragglers} % stragglers", xlabel="data set", ylim=(40, 100))
    panels[0].set(ylabel="test accuracy (%)")
    handles, labels = panels[1].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(METHODS), fontsize=8, frameon=False)
    figure.savefig(path, dpi=150)


STRAGGLERS_TABLE = ComparisonVerdicts(judge_fedprox, plot_fedprox)
