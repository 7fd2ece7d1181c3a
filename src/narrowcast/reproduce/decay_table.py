"""The table and plot of the decay ablation: each cell against the best float32 of as many rounds."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from narrowcast.platform.tracking.run_plots import BLACK, BLUE, ORANGE, VERMILLION, new_figure
from narrowcast.reproduce.against_reference import accuracies, against
from narrowcast.reproduce.decay import CODECS, ITEM_DECAYS, RATES, Cell, cells
from narrowcast.reproduce.long_studies import TEST_SEEDS, finished, tried
from narrowcast.reproduce.results_csv import Rows
from narrowcast.reproduce.seed_means import draw_seed_means
from narrowcast.reproduce.verdict import PaperVerdict, mean_and_spread

_USERS = 6040
_DENSE_BITS = 60 * 3706 * 64 * 32
_FULL = next(iter(CODECS))
_COLOURS = dict(zip(CODECS, (BLACK, BLUE, ORANGE, VERMILLION), strict=True))


@dataclass(frozen=True)
class TestedCell:
    """A finished cell: its rates, its validation metric and its test runs by seed."""

    cell: Cell
    rates: tuple[float, float]
    validation: float
    runs: tuple[Any, ...]

    @property
    def accuracies(self) -> tuple[float, ...]:
        """The test accuracy of each seed in percent."""
        return accuracies(self.runs, "hr@10")

    @property
    def what(self) -> str:
        """The cell in words."""
        return f"{self.cell.rounds} rounds, decay of Q {self.cell.item_decay}: {self.cell.codec}"

    @property
    def settings(self) -> str:
        """The rates that were best, and the uplink as a fraction of updates in float32."""
        bits = float(np.mean([run["uplink_bits"] / run["rounds"] for run in self.runs]))
        return f"rates {self.rates[0]:g} and {self.rates[1]:g}, 1/{_DENSE_BITS / bits:.0f}"


def tested_cells(rows: Rows, rounds: int) -> list[TestedCell]:
    """Return the cells whose runs are all finished."""
    found = []
    for cell in cells(rounds):
        results = tried(rows, cell, RATES[rounds])
        if results and (runs := finished(rows, cell.test(results), TEST_SEEDS)):
            reached = max(100 * each["final"].get("validation.hr@10", 0.0) for each in results)
            found.append(TestedCell(cell, cell.best_rates(results), reached, tuple(runs)))
    return found


def judge_decay(rows: Rows) -> list[PaperVerdict]:
    """Compare each cell with the float32 cell that is best on validation users, seed by seed.

    p values are corrected over all cells of as many rounds.
    """
    verdicts = []
    for rounds in RATES:
        every = tested_cells(rows, rounds)
        full = max((each for each in every if each.cell.codec == _FULL), key=lambda each: each.validation, default=None)
        if full is None:
            continue
        others = {each.what: each for each in every if each is not full}
        compared = against({what: each.runs for what, each in others.items()}, full.runs, "hr@10", _USERS)
        said = f"best float32 on validation users; {full.settings}"
        verdicts.append(PaperVerdict(full.what, "", mean_and_spread(full.accuracies), said, "", full.accuracies))
        for what, each in others.items():
            difference, words = compared[what]
            ours = mean_and_spread(each.accuracies)
            verdicts.append(PaperVerdict(what, "", ours, f"{words}; {each.settings}", difference, each.accuracies))
    return verdicts


def plot_decay(rows: Rows, path: Path) -> None:
    """Plot accuracy against the decay of Q, a line for each method and a panel for each number of rounds."""
    figure, panels = new_figure("Decay of the item matrix, MovieLens-1M, tuned rates", panels=2)
    for axes, rounds in zip(panels, RATES, strict=True):
        every = {(each.cell.codec, each.cell.item_decay): each.accuracies for each in tested_cells(rows, rounds)}
        for shift, codec in enumerate(CODECS):
            there = [place for place, decay in enumerate(ITEM_DECAYS) if (codec, decay) in every]
            values = [every[codec, ITEM_DECAYS[place]] for place in there]
            draw_seed_means(
                axes,
                [place + 0.05 * (shift - 1.5) for place in there],
                values,
                color=_COLOURS[codec],
                marker=".",
                capsize=3,
                label=codec,
            )
        axes.set_xticks(range(len(ITEM_DECAYS)), ITEM_DECAYS)
        axes.set(title=f"{rounds} rounds", xlabel="decay of Q", ylabel="test HR@10 (%)")
    panels[0].legend(fontsize=8, frameon=False)
    figure.savefig(path, dpi=150)
