"""Samples with their targets, stored once, and the index that partitions them across clients.

Inputs of samples are one array, or several by name, which a module takes as keyword arguments.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray

from narrowcast.platform.data.dataset import Dataset
from narrowcast.platform.data.partition import ClientIndex, index_of_owners, split_like_training
from narrowcast.platform.rounds.client_contracts import ClientSplit
from narrowcast.platform.types import IntArray

Features = NDArray[Any] | Mapping[str, NDArray[Any]]
"""One array [n, ...], or arrays [n, ...] by the name of the module's argument, in ascending order of names."""

Each = TypeVar("Each")
Result = TypeVar("Result")


def each_input(function: Callable[[Each], Result], inputs: Each | Mapping[str, Each]) -> Result | dict[str, Result]:
    """Return the function of the one input, or of each input by its name."""
    if isinstance(inputs, Mapping):
        return {name: function(values) for name, values in inputs.items()}
    return function(inputs)


def by_name(features: Features) -> Mapping[str, NDArray[Any]]:
    """Return the arrays by name; that of one array alone is empty."""
    return features if isinstance(features, Mapping) else {"": features}


def rows_of_inputs(features: Features, rows: Any) -> Features:
    """Return the samples at these rows of each array."""
    return each_input(lambda values: values[rows], features)


def joined(parts: Sequence[Features]) -> Features:
    """Return the samples of all parts, which have the same names, one after the other."""
    if not isinstance(first := parts[0], Mapping):
        return np.concatenate([values for part in parts for values in by_name(part).values()])
    return {name: np.concatenate([by_name(part)[name] for part in parts]) for name in first}


def one_array(features: Features) -> NDArray[Any]:
    """Return the one array of data sets that have no names; raise `TypeError` for others."""
    if isinstance(features, Mapping):
        raise TypeError(f"the inputs {', '.join(features)} are several arrays")
    return features


def signature(features: Features) -> tuple[tuple[str, tuple[int, ...], str], ...]:
    """Return the name, the shape of a sample and the type of each array, which data of one kind have in common."""
    return tuple((name, values.shape[1:], values.dtype.str) for name, values in by_name(features).items())


def described(features: Features) -> str:
    """Return the shapes and types in words: `[n, 1, 28, 28] uint8`, or `input_ids [n, 16] int64, ...`."""
    return ", ".join(
        f"{name} [{', '.join(['n', *map(str, values.shape[1:])])}] {values.dtype}".lstrip()
        for name, values in by_name(features).items()
    )


Targets = Literal["classes", "tokens", "numbers"]
"""Classes are predicted in classification, tokens in next-token prediction, numbers in regression."""


@dataclass(frozen=True)
class Labelled:
    """n samples with their targets.

    Features are one array [n, ...], or a mapping of them by the names of the module's arguments. A module gets uint8 (0
    to 255) scaled to 0 to 1, numbers with fractions in the type of its parameters, and other whole numbers and bool as
    they are. Labels are classes [n] int64, the tokens that follow each position [n, length] int64, or numbers [n, k]
    float32.
    """

    features: Features
    labels: NDArray[Any]

    def __post_init__(self) -> None:
        if isinstance(self.features, Mapping):  # of an order, and of no caller's
            object.__setattr__(self, "features", dict(sorted(self.features.items())))

    def __len__(self) -> int:
        return len(self.labels)

    def take(self, rows: IntArray) -> Labelled:
        """Return a copy of the samples at `rows`."""
        return Labelled(rows_of_inputs(self.features, rows), self.labels[rows])


@dataclass(frozen=True, eq=False)
class Unlabelled:
    """Clients' samples whose targets are not known to anybody.

    Client u has the samples `order[indptr[u]:indptr[u + 1]]` of `features`; shapes: features [m, ...], indptr [U + 1].
    """

    features: Features
    order: IntArray
    indptr: IntArray

    @cached_property
    def examples(self) -> IntArray:
        """Number of these samples of every client, [U]."""
        return np.diff(self.indptr)

    def of_clients(self, clients: IntArray) -> Unlabelled:
        """Return those of these clients, as the only ones and in that order; features are shared."""
        rows, counts = ClientIndex(self.order, self.indptr).rows(clients)
        return Unlabelled(self.features, rows, np.concatenate([[0], np.cumsum(counts)]))


@dataclass(frozen=True, eq=False)
class Samples(Dataset):
    """A data set of samples partitioned across U clients by index, without copying samples.

    `n_classes` is the number of classes, or of different tokens; 0 if the targets are numbers.

    Shapes: client u trains on the samples `order[indptr[u]:indptr[u + 1]]` of `train`; indptr [U + 1]. `validation` and
    `test` belong to the server; either may be empty.

    `held_out_users` has the client of each sample of `validation` and `test`, [n], if these come from the clients' own
    users. Otherwise `of_clients` deals these samples to the clients, by `seed`. `public` samples are held by all
    clients and belong to no client; those of `server` are held by the server alone, which may train on them.

    `unlabelled` are the clients' samples without targets; None: there are none. They may be all that clients have, with
    an empty `order`: `train` then is `server`.

    `n_items` is the number of items whose numbers the features are; 0 if they are something else.
    """

    name: str
    source: str
    n_classes: int
    train: Labelled
    validation: Labelled
    test: Labelled
    order: IntArray
    indptr: IntArray
    held_out_users: Mapping[str, IntArray] = field(default_factory=dict)
    seed: int = 0
    public: Labelled | None = None
    server: Labelled | None = None
    unlabelled: Unlabelled | None = None
    n_items: int = 0

    @property
    def targets(self) -> Targets:
        """The kind of the predicted values, by the type and shape of the labels."""
        labels = self.train.labels
        if np.issubdtype(labels.dtype, np.floating):
            return "numbers"
        return "classes" if labels.ndim == 1 else "tokens"

    @property
    def n_outputs(self) -> int:
        """Number of classes, of different tokens, or of numbers to predict for a sample."""
        return int(self.train.labels.shape[1]) if self.targets == "numbers" else self.n_classes

    @property
    def n_clients(self) -> int:
        """Number of clients, U."""
        return len(self.indptr) - 1

    @property
    def labels_at_clients(self) -> bool:
        """Return whether clients have samples with targets."""
        return self.unlabelled is None or len(self.order) > 0

    @cached_property
    def examples(self) -> IntArray:
        """Number of samples that every client trains on, [U]: with targets, or without if no client has any with."""
        if self.unlabelled is not None and not self.labels_at_clients:
            return self.unlabelled.examples
        return np.diff(self.indptr)

    @property
    def owners(self) -> IntArray:
        """The client of each entry of `order`, [n]."""
        return np.repeat(np.arange(self.n_clients), np.diff(self.indptr))

    def of_clients(self, split: ClientSplit) -> ClientIndex:
        """Return each client's own samples of a split: of users their own, else those of `split_like_training`.

        Classes are those of the labels, the tenths of the first number to predict, or one class for tokens.
        """
        if split not in self._client_indices:
            self._client_indices[split] = self._client_index(split)
        return self._client_indices[split]

    def examples_of(self, split: ClientSplit) -> IntArray:
        """Return the number of each client's own samples of a split, [U]."""
        return np.diff(self.of_clients(split).indptr)

    def client_of_each(self, split: ClientSplit) -> IntArray:
        """Return the client of each sample of a split, [n]; -1 for those of none."""
        owners = np.full(len(getattr(self, split)), -1)
        if len(owners):
            index = self.of_clients(split)
            owners[index.order] = np.repeat(np.arange(self.n_clients), np.diff(index.indptr))
        return owners

    @cached_property
    def _client_indices(self) -> dict[ClientSplit, ClientIndex]:
        return {"train": ClientIndex(self.order, self.indptr)}

    def _client_index(self, split: ClientSplit) -> ClientIndex:
        held_out = self.validation if split == "validation" else self.test
        if split in self.held_out_users:
            return index_of_owners(self.held_out_users[split], self.n_clients)
        classes = self._classes(self.train.labels[self.order])
        return split_like_training(
            classes, self.owners, self._classes(held_out.labels), self.n_clients, self.seed, split
        )

    def _classes(self, labels: NDArray[Any]) -> IntArray:
        if self.targets == "tokens":
            return np.zeros(len(labels), dtype=np.int64)
        return tenths(labels[:, 0], self.train.labels[:, 0]) if self.targets == "numbers" else labels

    @cached_property
    def of_server(self) -> Samples | None:
        """The samples of the server's own as the data set of one client; None without any."""
        if self.server is None:
            return None
        rows, none = np.arange(len(self.server)), self.server.take(np.arange(0))
        return Samples(
            name=self.name,
            source=self.source,
            n_classes=self.n_classes,
            n_items=self.n_items,
            train=self.server,
            validation=none,
            test=none,
            order=rows,
            indptr=np.array([0, len(rows)]),
        )

    @property
    def inputs(self) -> Mapping[str, NDArray[Any]]:
        """The inputs of the training samples by name; one array alone is called `features`."""
        features = self.train.features
        return features if isinstance(features, Mapping) else {"features": features}

    @property
    def sizes(self) -> Mapping[str, int]:
        """Sizes shown in reports."""
        return {
            "clients": self.n_clients,
            self.targets: self.n_outputs,
            "training_samples": len(self.train) if self.labels_at_clients else 0,
            "validation_samples": len(self.validation),
            "test_samples": len(self.test),
            **({} if self.public is None else {"public_samples": len(self.public)}),
            **({} if self.server is None else {"server_samples": len(self.server)}),
            **({} if self.unlabelled is None else {"unlabelled_samples": len(self.unlabelled.order)}),
        }

    @cached_property
    def digest(self) -> str:
        """The sha256 of all content that a run can observe."""
        hasher = hashlib.sha256(f"{self.name}\0{self.n_classes}".encode())
        arrays = [("", self.order), ("", self.indptr)]
        parts = (self.train, self.validation, self.test)
        for part in parts if self.public is None else (*parts, self.public):
            arrays += [*by_name(part.features).items(), ("", part.labels)]
        if self.server is not None:
            arrays += [*by_name(self.server.features).items(), ("server", self.server.labels)]
        if self.unlabelled is not None:
            arrays += by_name(self.unlabelled.features).items()
            arrays += [("unlabelled", self.unlabelled.order), ("unlabelled", self.unlabelled.indptr)]
        for name, array in arrays:
            hasher.update(f"{name}\0{array.dtype.str}\0{array.shape}".encode())
            hasher.update(np.ascontiguousarray(array).data)
        return hasher.hexdigest()


def tenths(numbers: NDArray[Any], among: NDArray[Any] | None = None) -> IntArray:
    """Return the tenth of all numbers, or of those `among`, that each number belongs to, 0 to 9."""
    edges = np.quantile(numbers if among is None else among, np.arange(0.1, 0.95, 0.1))
    return np.searchsorted(edges, numbers).astype(np.int64)


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
