"""Laws of data sets: of interactions, of labelled samples, and of any other `Dataset`."""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from narrowcast.laws.law import hold
from narrowcast.platform.contracts import Dataset, DataSource
from narrowcast.platform.data.interactions import NO_ITEM, Interactions
from narrowcast.platform.data.node_graph import UNKNOWN, NodeGraph
from narrowcast.platform.data.rating_matrix import RatingMatrix
from narrowcast.platform.data.samples import Labelled, Samples


@dataclass(frozen=True)
class Loaded:
    """A data source, and what it loads."""

    source: DataSource

    @cached_property
    def data(self) -> Any:
        """The data set."""
        return self.source.load()


def cases(source: DataSource) -> dict[str, Loaded]:
    """Return the only case."""
    return {"": Loaded(source)}


def loading_again_gives_the_same_digest(case: Loaded) -> None:
    """Load the set again, from a pickled source."""
    again: Dataset = pickle.loads(pickle.dumps(case.source)).load()
    hold(len(case.data.digest) == 64, f"the digest {case.data.digest!r} is not a sha256")
    hold(again.digest == case.data.digest, "the digests differ")


def every_client_has_examples_that_are_counted(case: Loaded) -> None:
    """Look at the number of clients and their examples."""
    examples = np.asarray(case.data.examples)
    hold(case.data.n_clients >= 1, "there is no client")
    hold(examples.shape == (case.data.n_clients,), f"examples has the shape {examples.shape}, not [n_clients]")
    hold(np.issubdtype(examples.dtype, np.integer), f"examples is {examples.dtype}, not whole numbers")
    hold((examples >= 0).all(), "a client has fewer than no examples")
    hold(examples.sum() > 0, "nobody has an example")
    hold(all(isinstance(size, int) for size in case.data.sizes.values()), "sizes are not whole numbers")


def it_reaches_other_processes_unchanged(case: Loaded) -> None:
    """Pickle and unpickle the set."""
    hold(pickle.loads(pickle.dumps(case.data)).digest == case.data.digest, "its digest is another")


def training_examples_match_their_owners(case: Loaded) -> None:
    """Follow the index from clients to examples."""
    data = case.data
    if isinstance(data, RatingMatrix):
        hold((np.diff(data.users) >= 0).all(), "the entries are not in the order of users")
        hold(((data.items >= 0) & (data.items < data.n_items)).all(), "items has numbers of no item")
        hold(np.isfinite(data.values).all(), "a value is not finite")
        hold(len(data.owners) == data.n_users, f"owners has {len(data.owners)} columns of {data.n_users}")
    if isinstance(data, NodeGraph):
        owners = np.repeat(np.arange(data.n_nodes), np.diff(data.indptr))
        there, back = owners * data.n_nodes + data.indices, data.indices * data.n_nodes + owners
        hold((np.diff(there) > 0).all(), "the neighbours of a node do not ascend, or repeat")
        hold(np.array_equal(there, np.sort(back)), "an edge goes one way")
        hold((owners != data.indices).all(), "a node is its own neighbour")
    if not isinstance(data, Interactions | Samples):
        return
    hold(data.indptr[0] == 0, f"indptr begins with {data.indptr[0]}")
    hold((np.diff(data.indptr) >= 0).all(), "indptr falls")
    held = len(data.items) if isinstance(data, Interactions) else len(data.order)
    hold(data.indptr[-1] == held, f"indptr ends at {data.indptr[-1]}, and there are {held} examples")
    hold((np.diff(data.indptr) == data.examples).all(), "examples and indptr differ")
    if isinstance(data, Samples):
        hold(len(np.unique(data.order)) == held, "two clients train on one sample")
        hold(((data.order >= 0) & (data.order < len(data.train))).all(), "order names samples that do not exist")
        return
    hold(((data.items >= 0) & (data.items < data.n_items)).all(), "items has numbers of no item")
    inside = np.diff(data.items) > 0
    inside[data.indptr[1:-1][(data.indptr[1:-1] > 0) & (data.indptr[1:-1] < held)] - 1] = True
    hold(inside.all(), "the items of a user do not ascend, or repeat")


def held_out_examples_are_not_trained_on(case: Loaded) -> None:
    """Look for validation and test examples among those of the clients."""
    data = case.data
    if isinstance(data, NodeGraph):
        nodes = np.concatenate([data.train, data.validation, data.test])
        hold(len(np.unique(nodes)) == len(nodes), "a node is in two splits")
        hold((data.labels[nodes] != UNKNOWN).all(), "a node of a split has no class")
    elif isinstance(data, RatingMatrix):
        pairs = data.users * data.n_items + data.items
        hold(len(np.unique(pairs)) == len(pairs), "an entry occurs twice")
    elif isinstance(data, Samples):
        for name in ("validation", "test"):
            part: Labelled = getattr(data, name)
            hold(len(part.features) == len(part.labels), f"{name} has as many labels as features")
            shares = len(part) and np.shares_memory(part.features, data.train.features)
            hold(not shares, f"{name} and train are the same samples")
            owners = data.held_out_users.get(name, np.full(len(part), -1))
            hold(len(owners) == len(part), f"held_out_users has {len(owners)} {name} samples of {len(part)}")
            hold(((owners >= -1) & (owners < data.n_clients)).all(), f"held_out_users of {name} names no client")
        for part in (data.train, data.validation, data.test):
            if data.targets == "numbers":
                hold(np.isfinite(part.labels).all(), "a target is not finite")
                hold(part.labels.shape[1:] == data.train.labels.shape[1:], "samples have other numbers of targets")
                continue
            inside = (part.labels >= 0) & (part.labels < data.n_classes)
            hold(inside.all(), f"labels are not 0 to {data.n_classes - 1}")
    elif isinstance(data, Interactions):
        users = np.repeat(np.arange(data.n_users), data.examples)
        for name in ("validation", "test"):
            item = getattr(data, name)
            hold(item.shape == (data.n_users,), f"{name} has the shape {item.shape}, not [n_clients]")
            hold(not (data.items == item[users]).any(), f"a user trains on its {name} item")
        both = (data.validation == data.test) & (data.validation != NO_ITEM)
        hold(not both.any(), "an item is held out for validation and for test")
        hold(not (data.negatives == data.test[:, None]).any(), "a negative is the test item")


LAWS = (
    loading_again_gives_the_same_digest,
    every_client_has_examples_that_are_counted,
    it_reaches_other_processes_unchanged,
    training_examples_match_their_owners,
    held_out_examples_are_not_trained_on,
)
