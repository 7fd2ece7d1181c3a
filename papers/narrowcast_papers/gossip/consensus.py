"""Averaging by gossip alone: the error of exact, coded and naive mixing on a ring against bits."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any, Literal

import numpy as np
from pydantic import Field

from narrowcast.experiment import load_experiment
from narrowcast.platform.config.files import Section
from narrowcast.platform.data.dataset import DataSource
from narrowcast.platform.data.samples import Labelled, Samples
from narrowcast.platform.rounds.loop import LocalExecutor, rounds
from narrowcast.platform.rounds.state import Run
from narrowcast.platform.seeds import generator
from narrowcast.platform.tracking.figures import COLOURS, new_figure
from narrowcast.runs.significance import mean_interval
from narrowcast.studies.results import Line, Lines
from narrowcast.studies.tables import MeasuredTable, Measurements
from narrowcast.studies.verdicts import PaperVerdict
from narrowcast_papers.gossip.choco import ONE_BIT

CLIENTS, VALUES, SEEDS, EVERY = 16, 200, 5, 50
SECOND_EIGENVALUE = (1 + 2 * np.cos(2 * np.pi / CLIENTS)) / 3
"""lambda_2 of the Metropolis weights of the ring: the smoothest difference shrinks by it in every round."""


class Vectors(DataSource, Section):
    """A vector of normal values for each client, float64, and their mean, which is every client's test sample.

    The feature is 1, so that a linear layer without bias is an estimate of the vector.
    """

    kind: Literal["narrowcast_papers.gossip.consensus:Vectors"] = "narrowcast_papers.gossip.consensus:Vectors"
    clients: int = Field(CLIENTS, ge=2, description="number of clients")
    values: int = Field(VALUES, ge=1, description="values of a vector")
    seed: int | None = Field(None, ge=0, description="seed of the vectors; null: that of the run")

    def draw(self) -> Any:
        """Return the vectors, [clients, values]."""
        return generator(self.seed or 0, "vectors").standard_normal((self.clients, self.values))

    def load(self) -> Samples:
        """Draw the vectors; there are no validation samples."""
        vectors, every = self.draw(), np.arange(self.clients)
        features, mean = np.ones((self.clients, 1)), vectors.mean(axis=0)
        own, shared = Labelled(features, vectors), Labelled(features, np.tile(mean, (self.clients, 1)))
        none = own.take(every[:0])
        return Samples("vectors", "drawn", 0, own, none, shared, every, np.arange(self.clients + 1), {"test": every})


@dataclass(frozen=True)
class Mixing:
    """A way of mixing: the fields of its algorithm, the rounds, and the error of an earlier program after them."""

    algorithm: Mapping[str, Any]
    rounds: int = 500
    earlier: str = ""


_SIXTEEN: Mapping[str, Any] = {"kind": "quantise", "levels": 16}
WAYS: Mapping[str, Mixing] = {
    "exact": Mixing({"kind": "d_psgd"}, earlier="3e-24"),
    "CHOCO, 16 levels, gamma 0.4": Mixing({"kind": "choco_sgd", "gamma": 0.4, "codec": [_SIXTEEN]}, earlier="1.2e-10"),
    "CHOCO, top 10 %, gamma 0.1": Mixing(
        {"kind": "choco_sgd", "gamma": 0.1, "codec": [{"kind": "top_k", "fraction": 0.1}]}, 2000, "1.5e-10"
    ),
    "CHOCO, 1 bit, gamma 1": Mixing({"kind": "choco_sgd", "gamma": 1.0, "codec": [ONE_BIT]}),
    "naive, 16 levels": Mixing({"kind": "d_psgd", "codec": [_SIXTEEN]}),
}


def measure_mixing(way: str, seed: int) -> Iterator[Line]:
    """Yield the mean squared error of a value of the clients' models, from the mean of the vectors, every 50 rounds.

    In round 1 one step takes each client to its own vector; the steps of later rounds are nothing.
    """
    mixing = WAYS[way]
    settings: dict[str, Any] = {
        "name": "consensus",
        "seed": seed,
        "data": Vectors(seed=seed).model_dump(),
        "model": {
            "kind": "torch",
            "factory": "torch.nn:Linear",
            "arguments": {"in_features": 1, "out_features": VALUES, "bias": False},
            "dtype": "float64",
        },
        "algorithm": dict(mixing.algorithm),
        "training": {
            # The loss is a mean over the values, whose gradient is 2 / VALUES of the difference.
            "learning_rate": VALUES / 2,
            "learning_rate_schedule": {"kind": "milestones", "rounds": [1], "decay": 1e-40},
            "batch_size": "all",
            "execution": "batched",
        },
        "rounds": mixing.rounds,
        "clients_per_round": CLIENTS,
        "chunk_size": CLIENTS,
        "evaluate_every": EVERY,
        "evaluate_clients": "test",
        "checkpoint_seconds": 100000,
        "backend": "local",
    }
    of = load_experiment(settings)
    run = Run(of, of.algorithm, of.task(of.data_source.load()))
    for outcome in rounds(run, LocalExecutor(run)):
        if outcome.metrics:
            kilobits = outcome.record.total_uplink_bits / CLIENTS / 1e3
            error = outcome.metrics["test.loss.mean"]
            yield {"round": outcome.step, "kilobits": kilobits, "error": error}


def _ends(lines: Lines, way: str, after: int | None = None) -> tuple[float, ...]:
    """Return the error of each seed after so many rounds, by default the last."""
    wanted = str(WAYS[way].rounds if after is None else after)
    return tuple(float(line["error"]) for line in lines if (line["way"], line["round"]) == (way, wanted))


def judge_mixing(lines: Lines) -> list[PaperVerdict]:
    """Say the error of every way, geometric mean with its interval, and its share of what exact mixing leaves."""
    verdicts = []
    for way, mixing in WAYS.items():
        errors = _ends(lines, way)
        if len(errors) < SEEDS:
            continue
        interval = mean_interval(np.log(errors))
        mean, low, high = (f"{np.exp(value):.2g}" for value in (interval.mean, interval.low, interval.high))
        sent = next(float(line["kilobits"]) for line in lines if line["way"] == way) / EVERY
        words = f"{sent:.3g} kbit a client and round; {np.mean(_ends(lines, way, 500)):.2g} after 500"
        ours = f"{mean} ({low} to {high})"
        verdicts.append(PaperVerdict(f"{way}: {mixing.rounds} rounds", mixing.earlier, ours, words, "", errors))
    return verdicts


def plot_mixing(*lines_and_path: Any) -> None:
    """Draw the error against rounds, with the rate of the second eigenvalue, and against bits."""
    lines, path = lines_and_path
    assert isinstance(path, Path)
    figure, (by_round, by_bits) = new_figure("Error of averaging on a ring of 16, each with a vector of 200 values", 2)
    for colour, way in zip(COLOURS, WAYS, strict=False):
        if not (measured := sorted({int(line["round"]) for line in lines if line["way"] == way})):
            continue
        errors = [np.exp(np.mean(np.log(_ends(lines, way, after)))) for after in measured]
        sent = next(float(line["kilobits"]) for line in lines if line["way"] == way) / EVERY
        by_round.plot(measured, errors, color=colour, label=way)
        by_bits.plot(np.array(measured) * sent, errors, color=colour, label=way)
    x = np.array([EVERY, 500])
    by_round.plot(x, SECOND_EIGENVALUE ** (2.0 * x), "k:", linewidth=1, label="second eigenvalue, squared")
    by_round.set(xlabel="rounds", ylabel="mean squared error of a value", yscale="log", xlim=(0, 1000))
    by_bits.set(xlabel="kilobits sent by a client", yscale="log", xscale="log")
    by_round.legend(fontsize=7, frameon=False)
    figure.savefig(path, dpi=110)


MIXING = MeasuredTable(
    (
        Measurements(
            "choco-consensus.csv",
            ("way", "seed"),
            ("round", "kilobits", "error"),
            lambda _: product(WAYS, range(SEEDS)),
            measure_mixing,
        ),
    ),
    judge_mixing,
    plot_mixing,
)
