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
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from narrowcast.platform.tracking.figures import BLACK, BLUE, GREEN, ORANGE, VERMILLION, new_figure
from narrowcast.runs.significance import COMPARABLE_SEEDS, MeanTest, compare_paired, holm
from narrowcast.studies.comparison import draw_seed_means
from narrowcast.studies.results import Rows
from narrowcast.studies.spec import RunSpec
from narrowcast.studies.tables import StudyTable
from narrowcast.studies.tuning import Choice, TunedCell, cells_plan, finished_cells, in_turn, tuning_verdict
from narrowcast.studies.verdicts import PaperVerdict, accuracies, describe_order, mean_and_spread

ROUNDS = 50
TEST_SEEDS = 5
TUNING_SEEDS = COMPARABLE_SEEDS
RATE = 0.01
DATA = ("iid", "0", "0.5", "1")
"""Synthetic data without heterogeneity, and with this alpha and beta."""
STRAGGLERS = (0, 50, 90)
FEDAVG, TUNED_FEDAVG = "FedAvg", "FedAvg, tuned rate"
PARTIAL, TUNED_PARTIAL, FEDPROX = "FedProx, mu = 0", "FedProx, mu = 0, tuned rate", "FedProx, best mu"
METHODS = (FEDAVG, TUNED_FEDAVG, PARTIAL, TUNED_PARTIAL, FEDPROX)
TUNED = (TUNED_FEDAVG, TUNED_PARTIAL, FEDPROX)
_RATES, _IID_RATES = (0.0001, 0.0003, 0.001, 0.003, 0.01), (0.3, 1.0, 3.0, 10.0, 30.0)
_MUS, _IID_MUS = (0.5, 1.0, 3.0, 10.0, 30.0), (0.0, 0.001, 0.01, 0.1, 0.5)


@dataclass(frozen=True)
class StragglerCell(TunedCell[float]):
    """A method on a data set of `DATA`, with a percentage of stragglers."""

    data: str
    stragglers: int
    method: str

    def choice(self, tried: Sequence[Mapping[str, Any]]) -> Choice | None:
        """Return what was chosen from the grid, None of a method without one; neither value is below 0."""
        if self.method not in TUNED:
            return None
        name = "mu" if self.method == FEDPROX else "rate"
        return Choice(self.what, name, self.best(tried), self.grid, TUNING_SEEDS, least=0.0)

    @property
    def what(self) -> str:
        """The cell in words."""
        return f"{set_name(self.data)}, {self.stragglers} % stragglers: {self.method}"

    @property
    def grid(self) -> tuple[float, ...]:
        """The learning rates that are tried, and of FedProx the values of mu."""
        if self.method not in TUNED:
            return (RATE,)
        iid = self.data == "iid"
        if self.method == FEDPROX:
            return _IID_MUS if iid else _MUS
        return _IID_RATES if iid else _RATES

    def spec(self, value: float, part: str) -> RunSpec:
        """Return the run at a value of the grid."""
        mu, rate = (value, RATE) if self.method == FEDPROX else (0.0, value)
        drop = self.method in (FEDAVG, TUNED_FEDAVG)
        spread = "iid: true" if self.data == "iid" else f"alpha: {self.data}, beta: {self.data}"
        fields = f"mu: {mu:g}, partial_share: {self.stragglers / 100:g}, partial_draw: number"
        kept = "dropped" if drop else "kept"
        return RunSpec(
            f"fedprox-synthetic-{self.data}-{self.stragglers}-{kept}-mu-{mu:g}-rate-{rate:g}{part}",
            "fedavg-digits",
            (
                f"rounds={ROUNDS}",
                f"evaluate_every={ROUNDS}",
                "checkpoint_seconds=100000",
                "clients_per_round=10",
                "sampling=uniform",
                f"data={{kind: synthetic, {spread}}}",
                "model=softmax",
                f"algorithm={{kind: fedprox, {fields}, drop_partial: {str(drop).lower()}}}",
                f"training={{learning_rate: {rate:g}, batch_size: 10, epochs: 20}}",
            ),
            memory_gib=0.05,
            together=f"fedprox-synthetic-{self.data}{part}",
        )


def cells_by_data() -> dict[str, list[StragglerCell]]:
    """Return the cells of each data set, the most heterogeneous first; FedAvg without stragglers has mu = 0."""
    return {
        data: [
            StragglerCell(data, stragglers, method)
            for stragglers in STRAGGLERS
            for method in METHODS
            if stragglers or method not in (PARTIAL, TUNED_PARTIAL)
        ]
        for data in reversed(DATA)
    }


def set_name(data: str) -> str:
    """Return a data set of `DATA` in words: alpha and beta."""
    return data if data == "iid" else f"({data}, {data})"


ORDER = ((PARTIAL, FEDAVG), (FEDPROX, PARTIAL), (FEDPROX, FEDAVG))
"""Pairs of which the paper has the first above the second."""
CONTROLS = ((TUNED_PARTIAL, TUNED_FEDAVG), (FEDPROX, TUNED_PARTIAL), (FEDPROX, TUNED_FEDAVG))
"""Pairs of equal tries: what keeping partial work adds, what mu adds, and both."""
_COLOURS = dict(zip(METHODS, (BLACK, BLUE, ORANGE, GREEN, VERMILLION), strict=True))
_PUBLISHED_GAIN = "+22, on other sets too"


@dataclass(frozen=True)
class TestedCell:
    """A cell whose runs are all finished: what was chosen, if it has a grid, and the accuracies of each seed."""

    choice: Choice | None
    reached: tuple[float, ...]


def tested(rows: Rows) -> dict[StragglerCell, TestedCell]:
    """Return the finished cells."""
    every = chain.from_iterable(cells_by_data().values())
    return {
        cell: TestedCell(cell.choice(results), accuracies(runs, "accuracy"))
        for cell, results, runs in finished_cells(rows, every, TEST_SEEDS, TUNING_SEEDS)
    }


def judge_fedprox(rows: Rows) -> list[PaperVerdict]:
    """Give the accuracy of each cell and the differences that the paper states and of the controls, seed by seed.

    p values are those of the means over the heterogeneous sets, corrected over all of them. The last row says how the
    values were tuned.
    """
    found = tested(rows)
    verdicts = []
    for data in DATA:
        for stragglers in STRAGGLERS:
            for method in METHODS:
                if (cell := StragglerCell(data, stragglers, method)) in found:
                    choice, reached = found[cell].choice, found[cell].reached
                    said = "" if choice is None else choice.words
                    verdicts.append(PaperVerdict(cell.what, "", mean_and_spread(reached), said, "", reached))
    by_cell = {cell: each.reached for cell, each in found.items()}
    for data in DATA:
        verdicts += [
            PaperVerdict(what, _published(what), f"{test.interval.mean:+.2f}", _bounds(test))
            for what, test in _tests([data], set_name(data), by_cell).items()
        ]
    pooled = _tests(DATA[1:], "mean of the heterogeneous sets", by_cell)
    for (what, test), p in zip(pooled.items(), holm([test.p_zero for test in pooled.values()]), strict=True):
        order = describe_order(test, p, "below", "above")
        paper = _PUBLISHED_GAIN if what.endswith(f"90 %: {FEDPROX} less {FEDAVG}") else _published(what)
        verdicts.append(
            PaperVerdict(what, paper, f"{test.interval.mean:+.2f}", f"{order} {_bounds(test)}, p = {p:.2g}")
        )
    choices = [each.choice for each in found.values() if each.choice is not None]
    return [*verdicts, tuning_verdict(choices)] if choices else verdicts


def _published(what: str) -> str:
    return "above" if any(what.endswith(f": {first} less {second}") for first, second in ORDER) else ""


def _tests(sets: Sequence[str], name: str, by_cell: Mapping[StragglerCell, tuple[float, ...]]) -> dict[str, MeanTest]:
    """Return the paired tests on the mean over some data sets; without stragglers nothing is dropped or kept."""
    tests = {}
    for stragglers in STRAGGLERS:
        for pair in (*ORDER, *CONTROLS):
            of_sets = [[by_cell.get(StragglerCell(data, stragglers, method)) for data in sets] for method in pair]
            if all(all(reached) for reached in of_sets):
                first, second = (np.mean(np.array(reached, dtype=np.float64), axis=0) for reached in of_sets)
                tests[f"{name}, {stragglers} %: {pair[0]} less {pair[1]}"] = compare_paired(first, second)
    return tests


def _bounds(test: MeanTest) -> str:
    return f"({test.interval.low:+.2f} to {test.interval.high:+.2f})"


def plot_fedprox(rows: Rows, path: Path) -> None:
    """Plot accuracies by data set, a panel for each share of stragglers."""
    figure, panels = new_figure("Stragglers dropped or kept, synthetic data, 50 rounds", panels=len(STRAGGLERS))
    found = tested(rows)
    for axes, stragglers in zip(panels, STRAGGLERS, strict=True):
        for shift, method in enumerate(METHODS):
            drawn = [
                (place + 0.12 * (shift - 2), found[cell].reached)
                for place, data in enumerate(DATA)
                if (cell := StragglerCell(data, stragglers, method)) in found
            ]
            draw_seed_means(
                axes,
                [place for place, _ in drawn],
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


FEDPROX_TABLE = StudyTable(
    {
        "fedprox-synthetic": in_turn(
            [cells_plan("fedprox-synthetic", cells, TEST_SEEDS, TUNING_SEEDS) for cells in cells_by_data().values()]
        )
    },
    judge_fedprox,
    plot_fedprox,
)
