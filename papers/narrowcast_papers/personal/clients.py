"""Clients with images of their own for training, validation and testing, all of one mixture of classes."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Literal

import numpy as np
from pydantic import Field

from narrowcast.platform.config.files import Section
from narrowcast.platform.data.dataset import DataSource
from narrowcast.platform.data.image_sets import N_CLASSES, FashionMNIST
from narrowcast.platform.data.partition import index_of_owners
from narrowcast.platform.data.samples import Labelled, Samples
from narrowcast.platform.errors import UserError
from narrowcast.platform.seeds import generator
from narrowcast.platform.types import IntArray


class MixedClients(DataSource, Section):
    """Fashion-MNIST over clients whose proportions of classes are drawn from a Dirichlet distribution each.

    A client has `images` training images and 50 for validation, which are training images of the set, and 100 test
    images; no image has two owners. All three parts are draws from the client's proportions.
    """

    kind: Literal["narrowcast_papers.personal.clients:MixedClients"] = "narrowcast_papers.personal.clients:MixedClients"
    clients: int = Field(40, ge=1, description="number of clients")
    alpha: float = Field(0.3, gt=0, description="concentration of a client's proportions of classes")
    images: int = Field(20, ge=1, description="training images of a client")
    validation_images: int = Field(50, ge=1, description="validation images of a client")
    test_images: int = Field(100, ge=1, description="test images of a client")
    seed: int | None = Field(None, ge=0, description="seed of proportions and draws; null: that of the run")

    def load(self) -> Samples:
        """Draw the clients; raise `UserError` if a class has too few images for them."""
        source = FashionMNIST(clients=1, validation_share=0.0).load()
        random = generator(self.seed or 0, "mixtures of classes")
        mixtures = random.dirichlet(np.full(N_CLASSES, self.alpha), self.clients)
        learnt = [random.multinomial(n, mixtures) for n in (self.images, self.validation_images)]
        (train, validation), (test,) = (
            _dealt(part.labels, counts, random)
            for part, counts in (
                (source.train, learnt),
                (source.test, [random.multinomial(self.test_images, mixtures)]),
            )
        )
        return samples_of(
            f"fashion-mnist-dirichlet-{self.alpha:g}",
            source.source,
            [(source.train, *train), (source.train, *validation), (source.test, *test)],
            self.clients,
        )


Dealt = tuple[IntArray, IntArray]
"""Rows and their owners."""


def _dealt(labels: IntArray, counts: Sequence[IntArray], random: np.random.Generator) -> list[Dealt]:
    """Return rows, each once, that give every client so many of each class, counts [clients, classes], in each part."""
    parts: list[list[Dealt]] = [[] for _ in counts]
    for label in range(N_CLASSES):
        of_class = random.permutation(np.flatnonzero(labels == label))
        ends = np.cumsum([0, *(part[:, label].sum() for part in counts)])
        if ends[-1] > len(of_class):
            raise UserError(
                f"class {label}: the clients want {ends[-1]} images of {len(of_class)}; lower clients or images, or "
                "raise alpha"
            )
        for part, of_part, (begin, end) in zip(parts, counts, pairwise(ends.tolist()), strict=True):
            part.append((of_class[begin:end], np.repeat(np.arange(len(of_part)), of_part[:, label])))
    return [
        (np.concatenate([rows for rows, _ in part]), np.concatenate([owners for _, owners in part])) for part in parts
    ]


def samples_of(name: str, source: str, parts: Sequence[tuple[Labelled, IntArray, IntArray]], n_clients: int) -> Samples:
    """Return a data set of three parts: samples, the rows of them that are taken, and their owners."""
    train, validation, test = (samples.take(rows) for samples, rows, _ in parts)
    owners, *held_out = (owners for *_, owners in parts)
    order, indptr = index_of_owners(owners, n_clients)
    users = dict(zip(("validation", "test"), held_out, strict=True))
    return Samples(name, source, N_CLASSES, train, validation, test, order, indptr, users)
