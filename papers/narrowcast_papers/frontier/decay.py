"""The decay ablation on MovieLens-1M: how much of a truncation's gain over float32 is weight decay that it discards.

Every local step pulls the touched rows of Q by 2 wd q. A truncation to rank 1 leaves most of that pull out, so float32
is run with less decay of Q too: {5e-4, 1e-4, 0} for Q, 5e-4 for the user factors. Every cell has the same tries of
client and server rate on validation users, at its own number of rounds, with a seed that is not a test seed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from narrowcast.platform.tracking.figures import BLACK, BLUE, ORANGE, VERMILLION, new_figure
from narrowcast.studies.comparison import draw_seed_means
from narrowcast.studies.results import Rows
from narrowcast.studies.spec import RunSpec, best_place
from narrowcast.studies.tables import StudyTable
from narrowcast.studies.tuning import TEST_SEEDS, TunedCell, cells_plan, finished_cells
from narrowcast.studies.verdicts import PaperVerdict, accuracies, against, mean_and_spread

Rates = tuple[float, float]
_RATES = ((0.5, 1.0), (0.5, 2.0), (1.0, 1.0), (1.0, 2.0))
RATES = {1000: _RATES, 3000: (*_RATES, (0.25, 1.0), (0.5, 0.5), (0.25, 0.5))}
"""Client and server rates tried for each number of rounds; with more rounds, smaller rates are better."""
ITEM_DECAYS = ("5e-4", "1e-4", "0")
_LEVELS = "{kind: quantise, levels: %d, norms: column, rounding: dithered, norm_type: bfloat16}"
CODECS = {
    "FedMF, float32": "",
    "SVD of rank 1, k = 16": f"{{kind: svd, rank: 1}}, {_LEVELS % 16}",
    "FedMF, quantised, k = 12": _LEVELS % 12,
    "FedMF, EDEN, 2 levels": "{kind: eden, levels: 2}",
}
_SHORT = dict(zip(CODECS, ("float32", "svd", "quantised", "eden"), strict=True))


@dataclass(frozen=True)
class Cell(TunedCell[Rates]):
    """A method with a decay of Q, for so many rounds."""

    codec: str
    item_decay: str
    rounds: int

    @property
    def grid(self) -> tuple[Rates, ...]:
        """Client and server rates."""
        return RATES[self.rounds]

    def best(self, results: Sequence[Mapping[str, Any]]) -> Rates:
        """Return the best rates on validation users, from the results in the order of the grid."""
        return self.grid[best_place(results, "validation.hr@10")]

    def spec(self, value: Rates, part: str) -> RunSpec:
        """Return the run at a client and a server rate."""
        label = f"decay-ml1m-{_SHORT[self.codec]}-{self.item_decay}-{self.rounds}"
        tuning = (f"{label}{part}-{value[0]:g}-{value[1]:g}", ("data.validation=random",))
        label, overrides = tuning if part else (label, ())
        codec = (f"algorithm.codec=[{CODECS[self.codec]}, entropy]",) if CODECS[self.codec] else ()
        return RunSpec(
            label,
            "fedmf-ml1m",
            (
                f"rounds={self.rounds}",
                f"evaluate_every={self.rounds}",
                f"checkpoint_every={self.rounds}",
                "checkpoint_seconds=100000",
                "algorithm.rows=touched",
                *codec,
                f"training.item_weight_decay={self.item_decay}",
                f"training.learning_rate={value[0]:g}",
                f"algorithm.server_learning_rate={value[1]:g}",
                *overrides,
            ),
        )


def cells(rounds: int) -> list[Cell]:
    """Return the cells of a number of rounds, for each decay float32 first."""
    return [Cell(codec, item_decay, rounds) for item_decay in ITEM_DECAYS for codec in CODECS]


_USERS = 6040
_DENSE_BITS = 60 * 3706 * 64 * 32
_FULL = next(iter(CODECS))
_COLOURS = dict(zip(CODECS, (BLACK, BLUE, ORANGE, VERMILLION), strict=True))


@dataclass(frozen=True)
class FinishedCell:
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


def tested_cells(rows: Rows, rounds: int) -> list[FinishedCell]:
    """Return the cells whose runs are all finished."""
    tested = []
    for cell, results, runs in finished_cells(rows, cells(rounds), TEST_SEEDS):
        reached = max(100 * result["final"].get("validation.hr@10", 0.0) for result in results)
        tested.append(FinishedCell(cell, cell.best(results), reached, tuple(runs)))
    return tested


def judge_decay(rows: Rows) -> list[PaperVerdict]:
    """Compare each cell with the float32 cell that is best on validation users, seed by seed.

    p values are corrected over all cells of as many rounds.
    """
    verdicts = []
    for rounds in RATES:
        every = tested_cells(rows, rounds)
        full = max(
            (tested for tested in every if tested.cell.codec == _FULL),
            key=lambda tested: tested.validation,
            default=None,
        )
        if full is None:
            continue
        rivals = {tested.what: tested for tested in every if tested is not full}
        compared = against({what: tested.runs for what, tested in rivals.items()}, full.runs, "hr@10", _USERS)
        said = f"best float32 on validation users; {full.settings}"
        verdicts.append(PaperVerdict(full.what, "", mean_and_spread(full.accuracies), said, "", full.accuracies))
        for what, tested in rivals.items():
            difference, words = compared[what]
            ours = mean_and_spread(tested.accuracies)
            verdicts.append(PaperVerdict(what, "", ours, f"{words}; {tested.settings}", difference, tested.accuracies))
    return verdicts


def plot_decay(rows: Rows, path: Path) -> None:
    """Plot accuracy against the decay of Q, a line for each method and a panel for each number of rounds."""
    figure, panels = new_figure("Decay of the item matrix, MovieLens-1M, tuned rates", panels=2)
    for axes, rounds in zip(panels, RATES, strict=True):
        every = {
            (tested.cell.codec, tested.cell.item_decay): tested.accuracies for tested in tested_cells(rows, rounds)
        }
        for shift, codec in enumerate(CODECS):
            there = [index for index, decay in enumerate(ITEM_DECAYS) if (codec, decay) in every]
            values = [every[codec, ITEM_DECAYS[index]] for index in there]
            draw_seed_means(
                axes,
                [index + 0.05 * (shift - 1.5) for index in there],
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


PLANS = {
    "decay-ml1m": cells_plan("decay-ml1m", cells(1000), TEST_SEEDS),
    "decay-ml1m-3000": cells_plan("decay-ml1m-3000", cells(3000), TEST_SEEDS),
}
DECAY = StudyTable(PLANS, judge_decay, plot_decay)
