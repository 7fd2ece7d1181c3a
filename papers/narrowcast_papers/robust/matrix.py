"""A matrix of methods and attacks: each method at its best rate, all of them on the same clients and seeds.

If nothing else is said, a network on 8,000 images of MNIST over 20 clients, of whom 4 attack and know all honest
changes; all take part in each of 30 rounds. The learning rate of a method is the best on validation images without an
attack, of three seeds that are not test seeds: from three rates to the next ones, until the best is not at the edge of
what was tried.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from narrowcast.experiment import Experiment, load_experiment
from narrowcast.platform.contracts import Task
from narrowcast.platform.rounds.loop import LocalExecutor, rounds
from narrowcast.platform.rounds.outcome import Outcome
from narrowcast.platform.rounds.state import Run
from narrowcast.platform.tracking.figures import new_figure
from narrowcast.runs.significance import compare_paired
from narrowcast.studies.results import Line, Lines
from narrowcast.studies.tables import MeasuredTable, Measurements
from narrowcast.studies.verdicts import PaperVerdict, bounds_of, corrected, mean_and_spread

CLIENTS, ATTACKERS, ROUNDS, IMAGES = 20, 4, 30, 8_000
TEST_SEEDS, TUNING_SEEDS = tuple(range(5)), (100, 101, 102)
FIRST_RATES, FACTOR = (0.1, 0.2, 0.4), 2.0
SPLITS: Mapping[str, Any] = {"Dirichlet 0.3": {"kind": "dirichlet", "alpha": 0.3}, "iid": "iid"}
NONE = "none"
SIGNIFICANT = 0.05

Settings = Mapping[str, Mapping[str, Any]]
Cell = tuple[str, str, str]
"""Split, method and attack."""


@dataclass(frozen=True)
class Setting:
    """Data, model and rounds of all cells of a matrix, in which all clients take part in every round.

    `server` samples are the server's own, which no client has. The model is measured after every `every` rounds.
    """

    data: Mapping[str, Any]
    model: Any = "softmax"
    clients: int = CLIENTS
    attackers: int = ATTACKERS
    rounds: int = ROUNDS
    every: int = ROUNDS
    server: int = 0

    def experiment(
        self, split: str, algorithm: Mapping[str, Any], attack: Mapping[str, Any], rate: float, seed: int
    ) -> Experiment:
        """Return the experiment of one cell and seed, whose empty attack is none."""
        return load_experiment(
            {
                "name": "attacked",
                "seed": seed,
                "data": {
                    **self.data,
                    "clients": self.clients,
                    "partition": SPLITS[split],
                    "server": {"samples": self.server} if self.server else None,
                },
                "model": self.model,
                "algorithm": algorithm,
                "attack": {"attackers": self.attackers, **attack} if attack else None,
                "training": {"learning_rate": rate, "batch_size": 32, "epochs": 1},
                **{"rounds": self.rounds, "clients_per_round": self.clients, "evaluate_every": self.every},
                "backend": "local",
            }
        )


MNIST = Setting({"kind": "mnist", "validation_share": 1 - IMAGES / 60_000})


@dataclass(frozen=True)
class Matrix:
    """Methods under attacks on some of the splits; each method is compared with the one that is the `reference`.

    The measurements are in the CSV file `file`, those of an outcome in `columns` besides validation and test accuracy.
    A column `round` says that there is a line for every evaluation; cells are judged after the last round, by the
    column `judged`.
    """

    title: str
    file: str
    splits: tuple[str, ...]
    methods: Settings
    attacks: Settings
    reference: str
    columns: tuple[str, ...] = ()
    judged: str = "test"
    setting: Setting = MNIST
    test_seeds: tuple[int, ...] = TEST_SEEDS
    first_rates: tuple[float, ...] = FIRST_RATES

    @property
    def table(self) -> MeasuredTable:
        """The table of the matrix."""
        key, values = ("seed", "split", "method", "attack", "rate"), ("validation", *self.columns, "test")
        return MeasuredTable((Measurements(self.file, key, values, self.planned, self.measure),), self.judge, self.plot)

    def experiment(self, seed: int, split: str, method: str, attack: str, rate: float) -> Experiment:
        """Return the experiment of a cell and seed."""
        return self.setting.experiment(split, self.methods[method], self.attacks[attack], rate, seed)

    def measure(self, seed: int, split: str, method: str, attack: str, rate: float) -> Iterator[Line]:
        """Yield the accuracy, in percent, and what the matrix measures besides, of each round that is evaluated."""
        of = self.experiment(seed, split, method, attack, rate)
        run = Run(of, of.algorithm, self.task(of))
        for outcome in rounds(run, LocalExecutor(run)):
            if outcome.metrics:
                reached = {part: 100 * outcome.metrics[f"{part}.accuracy"] for part in ("validation", "test")}
                yield {**reached, **{column: measured(outcome, column) for column in self.columns}}

    def task(self, of: Experiment) -> Task:
        """Return the task of an experiment."""
        return of.task(data_of(of.data_source))

    def last(self, lines: Lines) -> Lines:
        """Return the lines of the last round."""
        final = str(self.setting.rounds)
        return [line for line in lines if line["round"] == final] if "round" in self.columns else lines

    def planned(self, lines: Lines) -> Iterator[tuple[int, str, str, str, float]]:
        """Yield the runs that choose the rate of a method, then those of all its cells with it; so for each method."""
        for split, method in product(self.splits, self.methods):
            tried = list(self.first_rates)
            while (best := best_rate(self.last(lines), split, method, tried)) in (None, min(tried), max(tried)):
                if best is not None:
                    tried.append(best / FACTOR if best == min(tried) else best * FACTOR)
                for seed in TUNING_SEEDS:
                    yield from ((seed, split, method, NONE, rate) for rate in tried)
            assert best is not None, "its runs were made"
            for seed in self.test_seeds:
                yield from ((seed, split, method, attack, best) for attack in self.attacks)

    def judge(self, lines: Lines) -> list[PaperVerdict]:
        """Compare each method with the reference under every attack, seed by seed.

        p values are corrected over the cells of a split.
        """
        verdicts, lines = [], self.last(lines)
        for split in self.splits:
            reached = {
                cell: values
                for cell in product((split,), self.methods, self.attacks)
                if len(values := by_seed(lines, cell, self.judged)) == len(self.test_seeds)
            }
            against = {
                cell: (split, self.reference, cell[2])
                for cell in reached
                if cell[1] != self.reference and (split, self.reference, cell[2]) in reached
            }
            tests = [compare_paired(reached[cell], reached[other]) for cell, other in against.items()]
            said, difference = dict[Cell, str](), dict[Cell, str]()
            for cell, (test, _, p_zero) in zip(against, corrected(tests), strict=True):
                order = "below" if test.interval.mean < 0 else "above"
                order = "not told from" if p_zero >= SIGNIFICANT else order
                said[cell] = f"{order} {self.reference}, p = {p_zero:.2g}"
                difference[cell] = f"{test.interval.mean:+.1f} {bounds_of(test, 1)}"
            for cell, values in reached.items():
                others = [column for column in (*self.columns, "test") if column != self.judged]
                besides = [f"{column} {np.mean(by_seed(lines, cell, column)):.3g}" for column in others]
                verdicts.append(
                    PaperVerdict(
                        f"{split}: {cell[1]}, {cell[2]}",
                        "",
                        mean_and_spread(values, 1),
                        "; ".join(filter(None, [said.get(cell, ""), *besides])),
                        difference.get(cell, ""),
                        values,
                    )
                )
        return verdicts

    def plot(self, lines: Lines, path: Path) -> None:
        """Draw the mean of every cell, a panel for each split that was measured; red is what attackers want."""
        lines = self.last(lines)
        splits = [split for split in self.splits if by_seed(lines, (split, self.reference, NONE), self.judged)]
        figure, panels = new_figure(self.title, len(splits))
        for axes, split in zip(panels, splits, strict=True):
            means = np.full((len(self.methods), len(self.attacks)), np.nan)
            for (row, method), (column, attack) in product(enumerate(self.methods), enumerate(self.attacks)):
                if reached := by_seed(lines, (split, method, attack), self.judged):
                    means[row, column] = np.mean(reached)
                    axes.text(column, row, f"{means[row, column]:.0f}", ha="center", va="center", fontsize=7)
            accuracy = self.judged == "test"
            colours, low, high = ("RdYlGn", 40, 90) if accuracy else ("RdYlGn_r", 0, 100)
            axes.imshow(means, cmap=colours, vmin=low, vmax=high, aspect="auto")
            axes.grid(visible=False)
            axes.set_xticks(range(len(self.attacks)), list(self.attacks), rotation=40, ha="right", fontsize=8)
            axes.set_yticks(range(len(self.methods)), list(self.methods), fontsize=8)
            axes.set_title(split, fontsize=9)
        figure.savefig(path, dpi=100)


@lru_cache(maxsize=len(TUNING_SEEDS))
def data_of(source: Any) -> Any:
    """Return a data set, of which those of as many seeds as tune stay in memory."""
    return source.load()


def measured(outcome: Outcome, column: str) -> float:
    """Return the total uplink in megabytes, the round, or the success of a backdoor in percent; 0 without one."""
    if column == "megabytes":
        return outcome.record.total_uplink_bits / 8e6
    if column == "round":
        return outcome.record.round
    return 100 * outcome.metrics.get("attack.success", 0.0)


def _of(lines: Lines, cell: Cell) -> Lines:
    return [line for line in lines if (line["split"], line["method"], line["attack"]) == cell]


def best_rate(lines: Lines, split: str, method: str, rates: list[float]) -> float | None:
    """Return the rate with the best mean on validation images; None before all tuning runs are there."""
    of_method = [line for line in _of(lines, (split, method, NONE)) if int(line["seed"]) in TUNING_SEEDS]
    of_rates = {
        rate: [float(line["validation"]) for line in of_method if np.isclose(float(line["rate"]), rate)]
        for rate in rates
    }
    if any(len(values) < len(TUNING_SEEDS) for values in of_rates.values()):
        return None
    return max(of_rates, key=lambda rate: float(np.mean(of_rates[rate])))


def by_seed(lines: Lines, cell: Cell, column: str = "test") -> tuple[float, ...]:
    """Return a column of each test seed, of those that there are."""
    found = {int(line["seed"]): float(line[column]) for line in _of(lines, cell) if int(line["seed"]) in TEST_SEEDS}
    return tuple(found[seed] for seed in TEST_SEEDS if seed in found)
