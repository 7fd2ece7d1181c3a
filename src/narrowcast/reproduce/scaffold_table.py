"""The table and plot of SCAFFOLD's comparison: rounds to the target, and the order of the methods."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from narrowcast.platform.tracking.run_plots import BLACK, BLUE, ORANGE, VERMILLION, new_figure
from narrowcast.platform.tracking.units import format_bits
from narrowcast.reproduce.long_studies import finished, tried
from narrowcast.reproduce.results_csv import Rows
from narrowcast.reproduce.scaffold_similarity import (
    EPOCHS,
    METHODS,
    MOST_ROUNDS,
    RATES,
    SGD,
    SIMILARITIES,
    TARGET,
    TEST_SEEDS,
    TUNING_SEEDS,
    SimilarityCell,
    cells,
)
from narrowcast.reproduce.seed_means import draw_seed_means
from narrowcast.reproduce.tuning_rule import Choice, tuning_verdict
from narrowcast.reproduce.verdict import PaperVerdict, describe_order, mean_and_spread
from narrowcast.runs.significance import MeanTest, compare_paired, holm

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
    for cell in cells():
        results = tried(rows, cell, RATES, TUNING_SEEDS)
        if results and (runs := finished(rows, cell.test(results), TEST_SEEDS)):
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
