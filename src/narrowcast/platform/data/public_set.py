"""Public samples: held by all clients besides their own, as distillation between models needs them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

import numpy as np
from pydantic import Field

from narrowcast.platform.config.files import Section
from narrowcast.platform.config.kinds import Registry
from narrowcast.platform.data.dataset import DataSource
from narrowcast.platform.data.samples import Features, Labelled, Samples, described
from narrowcast.platform.errors import UserError
from narrowcast.platform.seeds import generator
from narrowcast.platform.types import IntArray

Set = Literal["mnist", "fashion-mnist", "cifar-10"]
_SETS = Registry(
    "data",
    DataSource,
    {
        "mnist": "platform.data.image_sets:MNIST",
        "fashion-mnist": "platform.data.image_sets:FashionMNIST",
        "cifar-10": "platform.data.image_sets:CIFAR10",
    },
)
"""By name, as they extend a class that has a field of this one."""


class PublicSet(Section):
    """Samples that all clients hold: held out of the training samples before these are partitioned, or another set's.

    They are drawn by the seed of the data set and are in no client's own samples, in no validation and in no test set.
    """

    samples: int = Field(200, ge=1, description="number of public samples")
    set: Set | None = Field(
        None, description="data set whose training samples they are; null: held out of those of this data set"
    )

    def drawn(self, train: Labelled, n_classes: int, seed: int) -> tuple[Labelled, IntArray]:
        """Return the public samples, and the rows of `train` that remain the clients', ascending.

        Raise `UserError` if there are too few samples, or if those of another set are of another shape.
        """
        source = train if self.set is None else _other_set(self.set, train, n_classes)
        most = len(source) - (self.set is None)
        if self.samples > most:
            raise UserError(f"data.public.samples = {self.samples}: there are {len(source)}; use at most {most}")
        rows = generator(seed, "public samples").permutation(len(source))
        kept = np.arange(len(train)) if self.set else np.sort(rows[self.samples :])
        return source.take(np.sort(rows[: self.samples])), kept


def held_by(clients: IntArray, data: Samples, samples: Labelled) -> Samples:
    """Return a data set in which each of these clients has all of the samples, and the others have none."""
    counts = np.zeros(data.n_clients, dtype=np.int64)
    counts[clients] = len(samples)
    return replace(
        data,
        train=samples,
        order=np.tile(np.arange(len(samples)), len(clients)),
        indptr=np.concatenate([[0], np.cumsum(counts)]),
    )


def _other_set(name: Set, train: Labelled, n_classes: int) -> Labelled:
    source: Any = _SETS[name](clients=1, validation_share=0.0)
    other: Samples = source.load()

    def of(features: Features, classes: int) -> str:
        return f"{described(features)} in {classes} classes"

    got, wanted = of(other.train.features, other.n_classes), of(train.features, n_classes)
    if got != wanted:
        raise UserError(f"data.public.set = {name}: its samples are {got}, those of the clients {wanted}; use another")
    return other.train
