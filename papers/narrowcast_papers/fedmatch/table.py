"""FedMatch beside FixMatch and UDA in FedAvg and labels alone: clothes, few labels at the clients or at the server.

As in the paper there are 100 clients, of whom five take part in a round, and about a tenth of a client's images have
labels. Images, network and rounds are fewer: 200 images a client, 64 hidden units and 20 rounds.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from narrowcast.algorithms.federated.dynamic_averaging import squared_norm
from narrowcast.algorithms.federated.fedmatch import PSI
from narrowcast.experiment import load_experiment
from narrowcast.platform.rounds.loop import LocalExecutor, rounds
from narrowcast.platform.rounds.state import Run
from narrowcast.platform.tracking.figures import COLOURS, new_figure
from narrowcast.platform.types import Arrays
from narrowcast.runs.significance import compare_paired
from narrowcast.studies.results import Line, Lines, as_text
from narrowcast.studies.tables import MeasuredTable, Measurements
from narrowcast.studies.tuning import Choice, climbed, one_step_away, tuning_verdict
from narrowcast.studies.verdicts import PaperVerdict, bounds_of, corrected, mean_and_spread

CLIENTS, COHORT, ROUNDS, EVERY, BATCH, RATIO = 100, 5, 20, 4, 5, 3
HELD_OUT = 2 / 3
"""The share of the training images that are for validation."""
TEST_SEEDS, TUNING_SEEDS = tuple(range(5)), (100, 101, 102)
CLIENT, SERVER = "at clients", "at the server"
LABELS: Mapping[str, Mapping[str, Any]] = {
    CLIENT: {"labelled": {"samples": 20}},
    SERVER: {"labelled": {"samples": 0}, "server": {"samples": 500}},
}
EPOCHS = {CLIENT: 4, SERVER: 1}
"""Over 20 labels of a client; over its 200 images without, and the server's 500."""
VIEWS: Mapping[str, Any] = {"shift": 2, "flip": True}
"""The same for every method."""
PULL = 10.0
"""lambda_L2 of FedMatch, whose product with the learning rate is at most 1."""
RATES = tuple(0.000390625 * 2**step for step in range(14))


@dataclass(frozen=True)
class Learner:
    """The fields of an algorithm, and where the search of its learning rate begins, with labels at either place."""

    fields: Mapping[str, Any]
    starts: tuple[float, float]

    @property
    def rates(self) -> tuple[float, ...]:
        """The rates that it may have."""
        return tuple(rate for rate in RATES if rate * self.fields.get("l2", 0) <= 1)

    def searched(self, lines: Lines, labels: str) -> tuple[float | None, list[float]]:
        """Return the rate of the best mean accuracy over the tuning seeds, None before all runs that tell; and all."""

        def mean_accuracy(point: tuple[float, ...]) -> float | None:
            rate = as_text(point[0])
            tuned = [line for line in lines if int(line["seed"]) in TUNING_SEEDS and line["rate"] == rate]
            reached = [float(line["accuracy"]) for line in tuned]
            return float(np.mean(reached)) if len(reached) == len(TUNING_SEEDS) else None

        start: tuple[float, ...] = (self.starts[list(LABELS).index(labels)],)
        best, tried = climbed(start, lambda point: one_step_away(point, (self.rates,)), mean_accuracy)
        return None if best is None else best[0], [rate for (rate,) in tried]

    def choice(self, lines: Lines, labels: str, what: str) -> Choice:
        """Return the rate that was chosen, among those that were tried."""
        best, tried = self.searched(lines, labels)
        assert best is not None
        most = self.rates[-1] if self.rates[-1] < RATES[-1] else np.inf
        return Choice(what, "rate", best, tuple(tried), len(TUNING_SEEDS), most=most)


def _averaged(kind: str, weight: float = 1.0) -> Mapping[str, Any]:
    loss = {"kind": kind, "weight": weight, "ratio": RATIO, "views": VIEWS}
    return {"kind": "semi_supervised", "consistency": loss}


_MATCHED: Mapping[str, Any] = {"kind": "fedmatch", "l2": PULL, "ratio": RATIO, "views": VIEWS}
_UNUSED = {"agreement": 0, "inter_client": 0, "helpers": 0}
ALONE, FIXMATCH, UDA, FEDMATCH = "labels alone", "FixMatch", "UDA", "FedMatch"
UNUSED = "FedMatch, images unused"
METHODS: Mapping[str, Learner] = {
    ALONE: Learner(_averaged("fixmatch", 0), (RATES[8], RATES[7])),
    FIXMATCH: Learner(_averaged("fixmatch"), (RATES[8], RATES[7])),
    UDA: Learner(_averaged("uda"), (RATES[8], RATES[7])),
    FEDMATCH: Learner(_MATCHED, (RATES[4], RATES[4])),
    UNUSED: Learner({**_MATCHED, **_UNUSED}, (RATES[4], RATES[3])),
}
"""Labels alone takes the supervised steps of the others in FedAvg; where labels are at the server, it is its training.

FedMatch's factors are those of its released code, 10 for labels and 0.01 for images without, and helpers are there in
every tenth round. Without the terms of images without labels, psi follows sigma alone.
"""
CASES = tuple((labels, name) for labels in LABELS for name in METHODS)
"""Where labels are, and the methods there."""
PAIRS = (
    *((method, ALONE) for method in METHODS if method != ALONE),
    *((FEDMATCH, rival) for rival in METHODS if rival not in (ALONE, FEDMATCH)),
)
"""Methods that are compared, the reference last."""


@lru_cache(maxsize=4)
def _data(labels: str, seed: int) -> Any:
    return _experiment(seed, labels, ALONE, RATES[0]).data_source.load()


def _experiment(seed: int, labels: str, method: str, rate: float) -> Any:
    every = ROUNDS if seed in TUNING_SEEDS else EVERY
    return load_experiment(
        {
            "name": "fedmatch-fashion",
            "seed": seed,
            "data": {
                **{"kind": "fashion-mnist", "clients": CLIENTS, "partition": "iid", "validation_share": HELD_OUT},
                **{"seed": seed, **LABELS[labels]},
            },
            "model": {"kind": "mlp", "hidden": [64]},
            "algorithm": METHODS[method].fields,
            "training": {"learning_rate": rate, "batch_size": BATCH, "epochs": EPOCHS[labels]},
            **{"rounds": ROUNDS, "clients_per_round": COHORT, "chunk_size": COHORT, "sampling": "uniform"},
            **{"evaluate_every": every, "checkpoint_seconds": 100000, "backend": "local"},
        }
    )


def measure(seed: int, labels: str, method: str, rate: float) -> Iterator[Line]:
    """Yield the evaluations of a run, of one with a tuning seed the last alone, on validation images.

    `apart` is the distance of psi from sigma at the end, as a share of sigma.
    """
    of = _experiment(seed, labels, method, rate)
    run, split = Run(of, of.algorithm, of.task(_data(labels, seed))), "validation" if seed in TUNING_SEEDS else "test"
    for outcome in rounds(run, LocalExecutor(run)):
        if outcome.metrics:
            loss = outcome.metrics[f"{split}.loss"]
            yield {
                "round": outcome.step,
                "up": outcome.record.total_uplink_bits / 8e6,
                "down": outcome.record.total_downlink_bits / 8e6,
                "apart": None if outcome.state is None else _apart(outcome.state.server),
                "loss": loss if np.isfinite(loss) else float("inf"),
                "accuracy": 100 * outcome.metrics[f"{split}.accuracy"],
            }


def _apart(server: Arrays) -> float | None:
    psi = PSI.of(server)
    if not psi:
        return None
    sigma = {name: server[name] for name in psi}
    distance = squared_norm({name: psi[name] - values for name, values in sigma.items()})
    return float(np.sqrt(distance / squared_norm(sigma)))


def of_method(lines: Lines, labels: str, method: str) -> Lines:
    """Return the lines of a method where labels are."""
    return [line for line in lines if (line["labels"], line["method"]) == (labels, method)]


def planned(lines: Lines) -> Iterator[tuple[Any, ...]]:
    """Yield the runs that tune each method where labels are, and then its tests."""
    for labels, name in CASES:
        best: float | None = None
        while best is None:
            best, tried = METHODS[name].searched(of_method(lines, labels, name), labels)
            yield from ((seed, labels, name, rate) for rate in tried for seed in TUNING_SEEDS)
        yield from ((seed, labels, name, best) for seed in TEST_SEEDS)


def curve(lines: Lines, labels: str, method: str, column: str) -> list[list[float]]:
    """Return a column at each evaluation of each test run at the chosen rate, [seeds, evaluations]; empty without."""
    there = of_method(lines, labels, method)
    best, _ = METHODS[method].searched(there, labels)
    tested = [line for line in there if best is not None and line["rate"] == as_text(best)]
    of_seeds = [[float(line[column]) for line in tested if line["seed"] == str(seed)] for seed in TEST_SEEDS]
    return of_seeds if all(of_seeds) else []


def last(lines: Lines, labels: str, method: str, column: str) -> tuple[float, ...]:
    """Return a column at the end of each test run."""
    return tuple(of_seed[-1] for of_seed in curve(lines, labels, method, column))


def judge(lines: Lines) -> list[PaperVerdict]:
    """Compare the pairs of methods seed by seed; p values are corrected over all pairs with labels at one place."""
    verdicts, choices = [], []
    for labels in LABELS:
        found = {name: values for name in METHODS if (values := last(lines, labels, name, "accuracy"))}
        for name, values in found.items():
            up, down = (np.mean(last(lines, labels, name, column)) for column in ("up", "down"))
            words = [f"loss {np.mean(last(lines, labels, name, 'loss')):.3f}", f"{up:.3g} MB up, {down:.3g} MB down"]
            if apart := [line["apart"] for line in of_method(lines, labels, name) if line["apart"]]:
                words += [f"psi {np.mean([float(each) for each in apart[-len(TEST_SEEDS) :]]):.2g} from sigma"]
            choices.append(METHODS[name].choice(of_method(lines, labels, name), labels, f"labels {labels}: {name}"))
            words.append(choices[-1].words)
            what, ours = f"labels {labels}: {name}", mean_and_spread(values)
            verdicts.append(PaperVerdict(what, "", ours, "; ".join(words), "", values))
        pairs = [pair for pair in PAIRS if set(pair) <= set(found)]
        tests = corrected([compare_paired(found[ours], found[theirs]) for ours, theirs in pairs])
        for (ours, theirs), (test, _, p_zero) in zip(pairs, tests, strict=True):
            difference = f"{test.interval.mean:+.2f} {bounds_of(test)}"
            what = f"labels {labels}: {ours} less {theirs}"
            verdicts.append(PaperVerdict(what, "", "", f"p = {p_zero:.2g}", difference))
    return [*verdicts, tuning_verdict(choices)] if verdicts else []


def plot(lines: Lines, path: Path) -> None:
    """Draw the accuracy against megabytes both ways, a panel for each place of the labels."""
    figure, panels = new_figure("Fashion-MNIST, 20 labels of each of 100 clients, or 500 at the server", 2)
    for axes, labels in zip(panels, LABELS, strict=True):
        for colour, method in zip(COLOURS, METHODS, strict=False):
            if of_seeds := curve(lines, labels, method, "accuracy"):
                up, down = (np.mean(curve(lines, labels, method, column), axis=0) for column in ("up", "down"))
                axes.plot(up + down, np.mean(of_seeds, axis=0), color=colour, label=method)
        axes.set(xlabel="uplink and downlink (MB)", title=f"labels {labels}")
    panels[0].set(ylabel="test accuracy (%)")
    panels[0].legend(fontsize=8, frameon=False)
    figure.savefig(path, dpi=110)


FASHION = MeasuredTable(
    (
        Measurements(
            "fedmatch-fashion.csv",
            ("seed", "labels", "method", "rate"),
            ("round", "up", "down", "apart", "loss", "accuracy"),
            planned,
            measure,
        ),
    ),
    judge,
    plot,
)
