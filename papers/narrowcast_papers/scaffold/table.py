"""SCAFFOLD's comparison: rounds to a target accuracy when a share of the clients' data is similar.

Reference: Karimireddy et al., SCAFFOLD, ICML 2020 (arXiv:1910.06378), section 7 and Table 3: logistic regression on
EMNIST, 100 clients, a fifth of them a round, local batches of a fifth of a client's data, step sizes tuned for each.

Here: scikit-learn's digits in place of EMNIST, 20 clients, 4 of them a round, batches of 13 of about 65 samples. Each
method has the step size of one grid with the fewest rounds on validation samples, a mean over seeds that are not test
seeds: from rate 3 on rounds depend on the last bits of a run's arithmetic, so that one seed does not settle a choice.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np

from narrowcast.platform.tracking.figures import BLACK, BLUE, ORANGE, VERMILLION, new_figure
from narrowcast.platform.tracking.units import format_bits
from narrowcast.runs.significance import MeanTest, compare_paired
from narrowcast.studies.comparison import ComparisonVerdicts, FinishedCell, Tested, choices_of, draw_seed_means
from narrowcast.studies.tuning import tuning_verdict
from narrowcast.studies.verdicts import PaperVerdict, mean_and_spread, ordered_differences

TARGET = 0.9
MOST_ROUNDS = 300
SIMILARITIES = ("0", "10", "100")
EPOCHS = ("1", "5", "20")
_COLOURS = {"SGD": BLACK, "FedAvg": BLUE, "FedProx": ORANGE, "SCAFFOLD": VERMILLION}
_TICKS = (1, 2, 5, 10, 20, 50, 100)


def rounds_of(tested: FinishedCell) -> tuple[float, ...]:
    """Return the rounds until the target by seed."""
    return tuple(float(run["rounds"]) for run in tested.runs)


def judge_rounds(tested: Tested) -> list[PaperVerdict]:
    """Give the rounds of each cell, and compare SCAFFOLD with the others of as many epochs, seed by seed.

    The last row says how the step sizes were tuned.
    """
    verdicts = []
    for found in tested.values():
        rounds, (choice,) = rounds_of(found), found.choices
        missed = sum(count >= MOST_ROUNDS for count in rounds)
        uplink = float(np.mean([int(run["uplink_bits"]) for run in found.runs]))
        said = f"{choice.words}, uplink {format_bits(uplink)}"
        said += f", {missed} of {len(rounds)} above {MOST_ROUNDS}" if missed else ""
        verdicts.append(PaperVerdict(found.cell.name, "", mean_and_spread(rounds, 1), said, "", rounds))
    differences = ordered_differences(dict(_tests(tested)), "fewer", "more", digits=1, unit=" rounds")
    verdicts += [replace(verdict, paper="fewer") for verdict in differences]
    return [*verdicts, tuning_verdict(choices_of(tested))] if verdicts else []


def _tests(tested: Tested) -> Iterator[tuple[str, MeanTest]]:
    for similarity in SIMILARITIES:
        pairs = [
            (epochs, rival, f"SCAFFOLD less {rival}, E = {epochs}")
            for epochs in EPOCHS
            for rival in ("FedAvg", "FedProx")
        ]
        for epochs, rival, what in [*pairs, ("1", "SGD", "SCAFFOLD, E = 1, less SGD")]:
            keys = [(epochs, method, similarity) for method in ("SCAFFOLD", rival)]
            if all(key in tested for key in keys):
                yield f"{similarity} %: {what}", compare_paired(*(rounds_of(tested[key]) for key in keys))


def plot_rounds(tested: Tested, path: Path) -> None:
    """Plot rounds to the target against similarity, a panel for each number of epochs."""
    title = f"Rounds to {TARGET:.0%} test accuracy, digits, logistic regression, tuned step sizes"
    figure, panels = new_figure(title, panels=len(EPOCHS))
    for axes, epochs in zip(panels, EPOCHS, strict=True):
        for shift, method in enumerate(_COLOURS):
            drawn = [
                (place + 0.05 * (shift - 1.5), rounds_of(tested[key]))
                for place, similarity in enumerate(SIMILARITIES)
                if (key := ("1" if method == "SGD" else epochs, method, similarity)) in tested
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


SIMILARITY = ComparisonVerdicts(judge_rounds, plot_rounds)
