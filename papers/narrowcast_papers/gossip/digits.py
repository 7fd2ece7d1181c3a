"""The digits over clients who are all measured on all test images, and runs of softmax regression on them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Any, Literal

import numpy as np
from pydantic import Field

from narrowcast.experiment import load_experiment
from narrowcast.platform.config.files import Section
from narrowcast.platform.data.dataset import DataSource
from narrowcast.platform.data.partition import IID, Shards
from narrowcast.platform.data.samples import Labelled, Samples
from narrowcast.platform.data.scikit_learn import Digits
from narrowcast.platform.rounds.loop import LocalExecutor, rounds
from narrowcast.platform.rounds.outcome import Outcome
from narrowcast.platform.rounds.state import Run
from narrowcast.platform.types import IntArray
from narrowcast.studies.results import Line

TEST_SEEDS, TUNING_SEEDS = tuple(range(5)), (100, 101, 102)
VALIDATION_SHARE = 0.2
REACHED = ("loss", "accuracy", "mean_loss", "mean_accuracy")
"""Of each client's own model on all images, the mean over the clients; and of the mean of the models."""


class AllImages(DataSource, Section):
    """The digits over clients who learn from their own images, and all hold all validation images and all test images.

    So `evaluate_clients` measures what the model of each client is worth for everybody's images, and not for those of
    its own classes alone.
    """

    kind: Literal["narrowcast_papers.gossip.digits:AllImages"] = "narrowcast_papers.gossip.digits:AllImages"
    clients: int = Field(16, ge=5, description="number of clients")
    classes: int = Field(2, ge=1, le=10, description="most classes of a client; 10: images are dealt at random")
    seed: int | None = Field(None, ge=0, description="seed of the partition; null: that of the run")

    def load(self) -> Samples:
        """Return the digits, with validation and test images once for each client."""
        partition = IID() if self.classes == 10 else Shards(classes_per_client=self.classes)
        of = Digits(clients=self.clients, partition=partition, validation_share=VALIDATION_SHARE, seed=self.seed)
        data = of.load()
        (validation, holders), (test, others) = (_of_all(part, self.clients) for part in (data.validation, data.test))
        users = {"validation": holders, "test": others}
        return replace(data, validation=validation, test=test, held_out_users=users)


def _of_all(samples: Labelled, clients: int) -> tuple[Labelled, IntArray]:
    """Return samples once for each client, and whose they are."""
    rows = np.tile(np.arange(len(samples)), clients)
    return samples.take(rows), np.repeat(np.arange(clients), len(samples))


@lru_cache(maxsize=16)
def _data(clients: int, classes: int, seed: int) -> Samples:
    return AllImages(clients=clients, classes=classes, seed=seed).load()


def outcomes(
    seed: int, clients: int, algorithm: Mapping[str, Any], rate: float, n_rounds: int, every: int, **fields: Any
) -> Iterator[Outcome]:
    """Yield the outcome of every round of softmax regression, in which a client takes one step on all its images.

    Evaluations are on validation images if the seed is one of tuning, else on test images. `classes` among the fields
    are the most of a client, two by default; the others are those of an experiment.
    """
    classes = fields.pop("classes", 2)
    settings = {
        "name": "gossip",
        "seed": seed,
        "data": AllImages(clients=clients, classes=classes, seed=seed).model_dump(),
        "model": "softmax",
        "algorithm": algorithm,
        "training": {"learning_rate": rate, "batch_size": "all", "epochs": 1},
        **{"rounds": n_rounds, "clients_per_round": clients, "chunk_size": clients, "checkpoint_seconds": 100000},
        **{"evaluate_every": every, "evaluate_clients": [split_of(seed)], "backend": "local"},
        **fields,
    }
    of = load_experiment(settings)
    run = Run(of, of.algorithm, of.task(_data(clients, classes, seed)))
    return rounds(run, LocalExecutor(run))


def split_of(seed: int) -> str:
    """Return the images on which runs of a seed are measured."""
    return "validation" if seed in TUNING_SEEDS else "test"


def measured(outcome: Outcome, seed: int, clients: int) -> Line:
    """Return an evaluation: round, megabits of a client, seconds, and losses, infinite for models that are not finite.

    Megabits are means over all clients. The mean of the models is infinite where the server is sent none.
    """
    split, record = split_of(seed), outcome.record
    names = (f"{split}.loss.mean", f"{split}.accuracy.mean", f"{split}.loss", f"{split}.accuracy")
    values = (outcome.metrics.get(name, np.inf) for name in names)
    megabit = 1e6 * clients
    return {
        "round": outcome.step,
        "megabits": record.total_uplink_bits / megabit,
        "megabits_down": record.total_downlink_bits / megabit,
        "seconds": record.simulated_seconds,
        **{name: value if np.isfinite(value) else float("inf") for name, value in zip(REACHED, values, strict=True)},
    }
