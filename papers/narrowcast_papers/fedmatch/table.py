"""FedMatch beside FixMatch and UDA in FedAvg and labels alone, few labels at the clients or at the server.

The paper has CIFAR-10, 100 clients of whom five take part in each of 200 rounds, 50 labels of each among its 540
images, or 1,000 at the server, and ResNet-9. Here a run takes seconds. `FASHION`: Fashion-MNIST, 100 clients, 20
rounds, 20 labels of 200 images. `CIFAR`: CIFAR-10 (JPEG copy, 12k) scaled to 16 x 16 pixels, 40 clients, 25 rounds, 40
labels of 200 images. Both have a perceptron with 64 hidden units: on the small images, at equal processor time, two
convolutions take a quarter of its steps and learn no more (one seed).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from narrowcast.algorithms.federated.dynamic_averaging import squared_norm
from narrowcast.algorithms.federated.fedmatch import PSI
from narrowcast.experiment import Experiment, load_experiment
from narrowcast.platform.rounds.loop import LocalExecutor, rounds
from narrowcast.platform.rounds.state import Run
from narrowcast.platform.tracking.figures import COLOURS, new_figure
from narrowcast.platform.types import Arrays
from narrowcast.runs.significance import compare_paired
from narrowcast.studies.results import Line, Lines, as_text
from narrowcast.studies.tables import MeasuredTable, Measurements
from narrowcast.studies.tuning import Choice, climbed_on, tuning_verdict
from narrowcast.studies.verdicts import PaperVerdict, bounds_of, corrected, mean_and_spread

COHORT, BATCH, RATIO = 5, 5, 3
TEST_SEEDS, TUNING_SEEDS = tuple(range(5)), (100, 101, 102)
CLIENT, SERVER = "at clients", "at the server"
PLACES = (CLIENT, SERVER)
"""Where labels are."""
EPOCHS = {CLIENT: 4, SERVER: 1}
"""Over a client's images with labels; over its images without, and over the server's."""
PULL = 10.0
"""lambda_L2 of FedMatch, whose product with the learning rate is at most 1."""
RATES = tuple(0.1 * 2.0**step for step in range(-10, 6))


@dataclass(frozen=True)
class Learner:
    """The fields of an algorithm, and where the search of its learning rate begins, with labels at either place.

    It runs for so many `rounds`; None: for those of its comparison.
    """

    fields: Mapping[str, Any]
    starts: tuple[float, float]
    rounds: int | None = None

    @property
    def rates(self) -> tuple[float, ...]:
        """The rates that it may have."""
        return tuple(rate for rate in RATES if rate * self.fields.get("l2", 0) <= 1)

    def searched(self, lines: Lines, labels: str) -> tuple[float | None, list[float]]:
        """Return the rate of the best mean accuracy over the tuning seeds, None before all runs that tell; and all."""
        start = (self.starts[PLACES.index(labels)],)
        best, tried = climbed_on(lines, start, {"rate": self.rates}, "accuracy", TUNING_SEEDS)
        return None if best is None else best[0], [rate for (rate,) in tried]

    def choice(self, lines: Lines, labels: str, what: str) -> Choice:
        """Return the rate that was chosen, among those that were tried."""
        best, tried = self.searched(lines, labels)
        assert best is not None
        most = self.rates[-1] if self.rates[-1] < RATES[-1] else np.inf
        return Choice(what, "rate", best, tuple(tried), len(TUNING_SEEDS), most=most)


ALONE, FIXMATCH, UDA, FEDMATCH = "labels alone", "FixMatch", "UDA", "FedMatch"
UNUSED = "FedMatch, images unused"
LONGER = "labels alone, twice the rounds"
"""At FedMatch's bits, with labels at the clients; where they are at the server, labels alone needs none."""
METHODS = (ALONE, FIXMATCH, UDA, FEDMATCH, UNUSED)
PAIRS = (
    *((method, ALONE) for method in METHODS if method != ALONE),
    *((FEDMATCH, rival) for rival in (*METHODS, LONGER) if rival not in (ALONE, FEDMATCH)),
)
"""Methods that are compared, the reference last."""


def learners(
    views: Mapping[str, Any],
    averaged: tuple[float, float],
    matched: tuple[float, float],
    unused: tuple[float, float],
) -> Mapping[str, Learner]:
    """Return the methods with the same views; the searches of FedAvg's three begin at the rates `averaged`.

    Labels alone takes the supervised steps of the others in FedAvg; where labels are at the server, it is its training.
    FedMatch's factors are those of its released code, 10 for labels and 0.01 for images without, and helpers are there
    in every tenth round. Without the terms of images without labels, psi follows sigma alone.
    """
    shared = {"ratio": RATIO, "views": views}

    def with_loss(kind: str, weight: float) -> Learner:
        return Learner({"kind": "semi_supervised", "consistency": {"kind": kind, "weight": weight, **shared}}, averaged)

    fedmatch: Mapping[str, Any] = {"kind": "fedmatch", "l2": PULL, **shared}
    return {
        ALONE: with_loss("fixmatch", 0),
        FIXMATCH: with_loss("fixmatch", 1),
        UDA: with_loss("uda", 1),
        FEDMATCH: Learner(fedmatch, matched),
        UNUSED: Learner({**fedmatch, "agreement": 0, "inter_client": 0, "helpers": 0}, unused),
    }


@dataclass(frozen=True, eq=False)
class Comparison:
    """The methods on one data set, with labels at either place; test runs are evaluated every `every` rounds."""

    name: str
    title: str
    data: Mapping[str, Any]
    labels: Mapping[str, Mapping[str, Any]]
    rounds: int
    every: int
    methods: Mapping[str, Learner]

    @property
    def cases(self) -> tuple[tuple[str, str], ...]:
        """Where labels are, and the methods there."""
        return tuple((labels, name) for labels in PLACES for name in self.methods if (labels, name) != (SERVER, LONGER))

    @property
    def table(self) -> MeasuredTable:
        """The table of the comparison."""
        key, values = ("seed", "labels", "method", "rate"), ("round", "up", "down", "apart", "loss", "accuracy")
        measured = Measurements(f"{self.name}.csv", key, values, self.planned, self.measure)
        return MeasuredTable((measured,), self.judge, self.plot)

    def experiment(self, seed: int, labels: str, method: str, rate: float, **more: Any) -> Experiment:
        """Return the experiment of a run, whose algorithm may have fields besides those of the method."""
        count = self.methods[method].rounds or self.rounds
        every = count if seed in TUNING_SEEDS else self.every
        return load_experiment(
            {
                "name": self.name,
                "seed": seed,
                "data": {**self.data, "partition": "iid", "seed": seed, **self.labels[labels]},
                "model": {"kind": "mlp", "hidden": [64]},
                "algorithm": {**self.methods[method].fields, **more},
                "training": {"learning_rate": rate, "batch_size": BATCH, "epochs": EPOCHS[labels]},
                **{"rounds": count, "clients_per_round": COHORT, "chunk_size": COHORT, "sampling": "uniform"},
                **{"evaluate_every": every, "checkpoint_seconds": 100000, "backend": "local"},
            }
        )

    def measure(self, seed: int, labels: str, method: str, rate: float, **more: Any) -> Iterator[Line]:
        """Yield the evaluations of a run, of one with a tuning seed the last alone, on validation images.

        `apart` is the distance of psi from sigma at the end, as a share of sigma.
        """
        of = self.experiment(seed, labels, method, rate, **more)
        run = Run(of, of.algorithm, of.task(_samples(self, labels, seed)))
        split = "validation" if seed in TUNING_SEEDS else "test"
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

    def planned(self, lines: Lines) -> Iterator[tuple[Any, ...]]:
        """Yield the runs that tune each method where labels are, and then its tests."""
        for labels, name in self.cases:
            best: float | None = None
            while best is None:
                best, tried = self.methods[name].searched(of_method(lines, labels, name), labels)
                yield from ((seed, labels, name, rate) for rate in tried for seed in TUNING_SEEDS)
            yield from ((seed, labels, name, best) for seed in TEST_SEEDS)

    def curve(self, lines: Lines, labels: str, method: str, column: str) -> list[list[float]]:
        """Return a column at the evaluations of the test runs at the chosen rate, [seeds, evaluations]."""
        there = of_method(lines, labels, method)
        best, _ = self.methods[method].searched(there, labels)
        tested = [line for line in there if best is not None and line["rate"] == as_text(best)]
        of_seeds = [[float(line[column]) for line in tested if line["seed"] == str(seed)] for seed in TEST_SEEDS]
        return of_seeds if all(of_seeds) else []

    def last(self, lines: Lines, labels: str, method: str, column: str) -> tuple[float, ...]:
        """Return a column at the end of each test run."""
        return tuple(of_seed[-1] for of_seed in self.curve(lines, labels, method, column))

    def judge(self, lines: Lines) -> list[PaperVerdict]:
        """Compare the pairs of methods seed by seed; p values are corrected over all pairs with labels at one place."""
        verdicts, choices = [], []
        for labels in PLACES:
            found = {name: values for name in self.methods if (values := self.last(lines, labels, name, "accuracy"))}
            for name, values in found.items():
                up, down = (np.mean(self.last(lines, labels, name, column)) for column in ("up", "down"))
                loss, there, what = (
                    self.last(lines, labels, name, "loss"),
                    of_method(lines, labels, name),
                    f"labels {labels}: {name}",
                )
                words = [f"loss {np.mean(loss):.3f}", f"{up:.3g} MB up, {down:.3g} MB down"]
                if apart := [line["apart"] for line in there if line["apart"]]:
                    words += [f"psi {np.mean([float(each) for each in apart[-len(TEST_SEEDS) :]]):.2g} from sigma"]
                choices.append(self.methods[name].choice(there, labels, what))
                words.append(choices[-1].words)
                verdicts.append(PaperVerdict(what, "", mean_and_spread(values), "; ".join(words), "", values))
            pairs = [pair for pair in PAIRS if set(pair) <= set(found)]
            tests = corrected([compare_paired(found[ours], found[theirs]) for ours, theirs in pairs])
            for (ours, theirs), (test, _, p_zero) in zip(pairs, tests, strict=True):
                difference = f"{test.interval.mean:+.2f} {bounds_of(test)}"
                what = f"labels {labels}: {ours} less {theirs}"
                verdicts.append(PaperVerdict(what, "", "", f"p = {p_zero:.2g}", difference))
        return [*verdicts, tuning_verdict(choices)] if verdicts else []

    def plot(self, lines: Lines, path: Path) -> None:
        """Draw the accuracy against megabytes both ways, a panel for each place of the labels."""
        figure, panels = new_figure(self.title, 2)
        for axes, labels in zip(panels, PLACES, strict=True):
            for colour, method in zip(COLOURS, self.methods, strict=False):
                if of_seeds := self.curve(lines, labels, method, "accuracy"):
                    up, down = (np.mean(self.curve(lines, labels, method, column), axis=0) for column in ("up", "down"))
                    axes.plot(up + down, np.mean(of_seeds, axis=0), color=colour, label=method)
            axes.set(xlabel="uplink and downlink (MB)", title=f"labels {labels}")
        panels[0].set(ylabel="test accuracy (%)")
        panels[0].legend(fontsize=8, frameon=False)
        figure.savefig(path, dpi=110)


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


@lru_cache(maxsize=len(TUNING_SEEDS + TEST_SEEDS))
def _samples(of: Comparison, labels: str, seed: int) -> Any:
    return of.experiment(seed, labels, ALONE, RATES[0]).data_source.load()


_AT_SERVER: Mapping[str, Any] = {"labelled": {"samples": 0}, "server": {"samples": 500}}
FASHION = Comparison(
    "fedmatch-fashion",
    "Fashion-MNIST, 20 labels of each of 100 clients, or 500 at the server",
    {"kind": "fashion-mnist", "clients": 100, "validation_share": 2 / 3},
    {CLIENT: {"labelled": {"samples": 20}}, SERVER: _AT_SERVER},
    rounds=20,
    every=4,
    methods=learners(
        {"shift": 2, "flip": True},
        averaged=(0.1, 0.05),
        matched=(0.00625, 0.00625),
        unused=(0.00625, 0.003125),
    ),
)
_ON_CIFAR = learners(
    {"shift": 1, "flip": True},
    averaged=(0.05, 0.025),
    matched=(0.003125, 0.0015625),
    unused=(0.003125, 0.0015625),
)
CIFAR = Comparison(
    "fedmatch-cifar",
    "CIFAR-10 (JPEG copy, 12k), 40 labels of each of 40 clients, or 500 at the server",
    {"kind": "image_folder", "path": "cifar10-jpeg-12k", "size": 16, "clients": 40, "validation_share": 0.2},
    {CLIENT: {"labelled": {"samples": 40}}, SERVER: _AT_SERVER},
    rounds=25,
    every=5,
    methods={**_ON_CIFAR, LONGER: replace(_ON_CIFAR[ALONE], rounds=50)},
)
FASHION_TABLE, CIFAR_TABLE = FASHION.table, CIFAR.table
