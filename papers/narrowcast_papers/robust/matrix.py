"""Robust rules against attackers: the accuracy of 13 rules under eight attacks, and without any.

Softmax regression on 8,000 images of MNIST over 20 clients, of whom 4 attack and know all honest changes; all take
part in each of 30 rounds. The learning rate of a rule is the best on validation images without an attack, of three
seeds that are not test seeds: from three rates to the next ones, until the best is not at the edge of what was tried.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from narrowcast.experiment import Experiment, load_experiment
from narrowcast.platform.rounds.loop import LocalExecutor, rounds
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
_KRUM: Mapping[str, Any] = {"kind": "krum", "byzantine": ATTACKERS}
_TRIMMED: Mapping[str, Any] = {"kind": "trimmed_mean", "share": ATTACKERS / CLIENTS}
_MEDIAN: Mapping[str, Any] = {"kind": "geometric_median", "iterations": 4}


def _mixed(rule: Mapping[str, Any]) -> Mapping[str, Any]:
    return {"kind": "nnm", "byzantine": ATTACKERS, "rule": rule}


MEAN, NONE = "mean", "none"
RULES: Mapping[str, Mapping[str, Any] | None] = {
    MEAN: None,
    "median": {"kind": "median"},
    "trimmed mean": _TRIMMED,
    "geometric median": _MEDIAN,
    "Krum": _KRUM,
    "multi-Krum": {**_KRUM, "selected": CLIENTS - ATTACKERS},
    "Bulyan": {"kind": "bulyan", "byzantine": ATTACKERS},
    "norm clip": {"kind": "norm_clip", "radius": "median"},
    "centred clip": {"kind": "centred_clip", "radius": "median"},
    "bucketing, median": {"kind": "bucketing", "size": 2, "rule": {"kind": "median"}},
    "NNM, trimmed mean": _mixed(_TRIMMED),
    "NNM, geometric median": _mixed(_MEDIAN),
    "NNM, Krum": _mixed(_KRUM),
}
ATTACKS: Mapping[str, Mapping[str, Any] | None] = {
    NONE: None,
    "label flip": {"kind": "label_flip"},
    "-mean": {"kind": "inner_product", "scale": 1.0},
    "omniscient": {"kind": "omniscient"},
    "ALIE, z 1.5": {"kind": "alie", "z": 1.5},
    "-mean / 2": {"kind": "inner_product", "scale": 0.5},
    "-2 mean": {"kind": "inner_product", "scale": 2.0},
    "min-max": {"kind": "min_max"},
    "mimic": {"kind": "mimic"},
}


def experiment_of(split: str, rule: str, attack: str, rate: float, seed: int) -> Experiment:
    """Return the experiment of one cell and seed."""
    attackers = ATTACKS[attack]
    return load_experiment(
        {
            "name": "robust-mnist",
            "seed": seed,
            "data": {
                "kind": "mnist",
                "clients": CLIENTS,
                "partition": SPLITS[split],
                "validation_share": 1 - IMAGES / 60_000,
            },
            "model": "softmax",
            "algorithm": {"kind": "fedavg", "weights": "equal", "aggregator": RULES[rule]},
            "attack": None if attackers is None else {**attackers, "attackers": ATTACKERS},
            "training": {"learning_rate": rate, "batch_size": 32, "epochs": 1},
            **{"rounds": ROUNDS, "clients_per_round": CLIENTS, "evaluate_every": ROUNDS, "backend": "local"},
        }
    )


@lru_cache(maxsize=1)
def _data(split: str, seed: int) -> Any:
    return experiment_of(split, MEAN, NONE, 1.0, seed).data_source.load()


def measure(seed: int, split: str, rule: str, attack: str, rate: float) -> Iterator[Line]:
    """Yield the accuracy after the last round, in percent."""
    of = experiment_of(split, rule, attack, rate, seed)
    run = Run(of, of.algorithm, of.task(_data(split, seed)))
    *_, last = rounds(run, LocalExecutor(run))
    yield {part: 100 * last.metrics[f"{part}.accuracy"] for part in ("validation", "test")}


def planned(lines: Lines) -> Iterator[tuple[int, str, str, str, float]]:
    """Yield the runs that choose the rate of each rule, then those of all cells with it."""
    for split in SPLITS:
        rates = {rule: list(FIRST_RATES) for rule in RULES}
        for rule, tried in rates.items():
            while (best := best_rate(lines, split, rule, tried)) is None or best in (min(tried), max(tried)):
                if best is not None:
                    tried.append(best / FACTOR if best == min(tried) else best * FACTOR)
                for seed in TUNING_SEEDS:
                    yield from ((seed, split, rule, NONE, rate) for rate in tried)
        for seed in TEST_SEEDS:
            for rule, tried in rates.items():
                best = best_rate(lines, split, rule, tried)
                assert best is not None, "its runs were made"
                yield from ((seed, split, rule, attack, best) for attack in ATTACKS)


def best_rate(lines: Lines, split: str, rule: str, rates: list[float]) -> float | None:
    """Return the rate with the best mean on validation images; None before all tuning runs are there."""
    of_rates = {
        rate: [
            float(line["validation"])
            for line in _of(lines, split, rule, NONE)
            if float(line["rate"]) == rate and int(line["seed"]) in TUNING_SEEDS
        ]
        for rate in rates
    }
    if any(len(values) < len(TUNING_SEEDS) for values in of_rates.values()):
        return None
    return max(of_rates, key=lambda rate: float(np.mean(of_rates[rate])))


def _of(lines: Lines, split: str, rule: str, attack: str) -> Lines:
    return [line for line in lines if (line["split"], line["rule"], line["attack"]) == (split, rule, attack)]


def accuracies(lines: Lines, split: str, rule: str, attack: str) -> tuple[float, ...]:
    """Return the test accuracy of each test seed."""
    by_seed = {
        int(line["seed"]): float(line["test"])
        for line in _of(lines, split, rule, attack)
        if int(line["seed"]) in TEST_SEEDS
    }
    return tuple(by_seed[seed] for seed in TEST_SEEDS if seed in by_seed)


def judge(lines: Lines) -> list[PaperVerdict]:
    """Compare each rule with the mean under every attack, seed by seed; p values are corrected over a split's cells."""
    verdicts = []
    for split in SPLITS:
        cells = [
            (rule, attack)
            for rule in RULES
            for attack in ATTACKS
            if len(accuracies(lines, split, rule, attack)) == len(TEST_SEEDS)
        ]
        against = [cell for cell in cells if cell[0] != MEAN and (MEAN, cell[1]) in cells]
        tests = [
            compare_paired(accuracies(lines, split, *cell), accuracies(lines, split, MEAN, cell[1])) for cell in against
        ]
        said, difference = dict[tuple[str, str], str](), dict[tuple[str, str], str]()
        for cell, (test, _, p_zero) in zip(against, corrected(tests), strict=True):
            order = (
                "not told from the mean"
                if p_zero >= 0.05
                else "below the mean"
                if test.interval.mean < 0
                else "above the mean"
            )
            said[cell] = f"{order}, p = {p_zero:.2g}"
            difference[cell] = f"{test.interval.mean:+.1f} {bounds_of(test, 1)}"
        for cell in cells:
            reached = accuracies(lines, split, *cell)
            what = f"{split}: {cell[0]}, {cell[1]}"
            verdicts.append(
                PaperVerdict(
                    what, "", mean_and_spread(reached, 1), said.get(cell, ""), difference.get(cell, ""), reached
                )
            )
    return verdicts


def plot(lines: Lines, path: Path) -> None:
    """Draw the mean accuracy of every cell, a panel for each split."""
    figure, panels = new_figure(
        "Test accuracy (%) of 13 rules under eight attacks, 4 of 20 clients attack", len(SPLITS)
    )
    for axes, split in zip(panels, SPLITS, strict=True):
        means = np.full((len(RULES), len(ATTACKS)), np.nan)
        for row, rule in enumerate(RULES):
            for column, attack in enumerate(ATTACKS):
                if reached := accuracies(lines, split, rule, attack):
                    means[row, column] = np.mean(reached)
                    axes.text(column, row, f"{means[row, column]:.0f}", ha="center", va="center", fontsize=7)
        axes.imshow(means, cmap="RdYlGn", vmin=40, vmax=90, aspect="auto")
        axes.grid(visible=False)
        axes.set_xticks(range(len(ATTACKS)), list(ATTACKS), rotation=40, ha="right", fontsize=8)
        axes.set_yticks(range(len(RULES)), list(RULES), fontsize=8)
        axes.set_title(split, fontsize=9)
    figure.savefig(path, dpi=100)


ROBUST = MeasuredTable(
    (
        Measurements(
            "robust-mnist.csv",
            ("seed", "split", "rule", "attack", "rate"),
            ("validation", "test"),
            planned,
            measure,
            digits=6,
        ),
    ),
    judge,
    plot,
)
