"""Checks of a loaded data set of any class: its clients, the index to their examples, targets and held-out examples."""

from __future__ import annotations

from contextlib import AbstractContextManager

import numpy as np

from narrowcast.platform.config.plugins import is_own
from narrowcast.platform.data.dataset import Dataset, DataSource
from narrowcast.platform.data.graph import UNKNOWN, NodeGraph
from narrowcast.platform.data.interactions import NO_ITEM, Interactions
from narrowcast.platform.data.rating_matrix import RatingMatrix
from narrowcast.platform.data.samples import Labelled, Samples, by_name, described
from narrowcast.platform.errors import UserError
from narrowcast.platform.rounds.contract_checks import method_of, naming, noun
from narrowcast.platform.seeds import generator, isolated
from narrowcast.platform.types import IntArray

_NEEDED = ("digest", "examples", "n_clients", "name", "sizes", "source")
"""Members of every data set, as fields or properties."""


class UnsoundDataError(ValueError):
    """A data set that contradicts itself; the text is a clause that says how."""


def seeded_loading(seed: int | None) -> AbstractContextManager[None]:
    """Let code of others that loads data draw from generators that are seeded by `data.seed`."""
    return isolated(int(generator(seed or 0, "loading").integers(2**63)))


def load_checked(source: DataSource) -> Dataset:
    """Load a data set; raise `UserError` if the source is a class of others that raises, or returns an unsound one."""
    if is_own(source):
        return source.load()
    method = method_of(source, "load")
    with naming(source, "load"):
        with seeded_loading(source.own_seed):
            data = source.load()
        if not isinstance(data, Dataset):
            raise UserError(
                f"{method} returned {noun(data)}, which is not a data set; return one, such as Samples of "
                "narrowcast.extend, or extend Dataset"
            )
        if missing := sorted(name for name in _NEEDED if not hasattr(data, name)):
            raise UserError(f"{method} returned {noun(data)}, which lacks {', '.join(missing)}; give them")
        try:
            for check in (check_counts, check_ownership, check_held_out):
                check(data)
        except UnsoundDataError as fault:
            raise UserError(f"{method} returned a data set in which {fault}") from fault
    return data


def check_counts(data: Dataset) -> None:
    """Raise `UnsoundDataError` unless there are clients, with a number of examples each."""
    _require(data.n_clients >= 1, "there is no client")
    examples = np.asarray(data.examples)
    _require(
        examples.shape == (data.n_clients,),
        f"examples has the shape {list(examples.shape)}, not [{data.n_clients}], a number for each client",
    )
    _require(np.issubdtype(examples.dtype, np.integer), f"examples is {examples.dtype}, not whole numbers")
    _require(all(isinstance(size, int) for size in data.sizes.values()), "sizes are not whole numbers")


def check_ownership(data: Dataset) -> None:
    """Raise `UnsoundDataError` unless the index leads from each client to training examples of its own."""
    if isinstance(data, RatingMatrix):
        _require((np.diff(data.users) >= 0).all(), "the entries are not in the order of users")
        _require_numbers("items", data.items, data.n_items)
        _require(np.isfinite(data.values).all(), "a value is not finite")
        _require(len(data.owners) == data.n_users, f"owners has {len(data.owners)} columns of {data.n_users}")
    if isinstance(data, NodeGraph):
        owners = np.repeat(np.arange(data.n_nodes), np.diff(data.indptr))
        edges, reverse = owners * data.n_nodes + data.indices, data.indices * data.n_nodes + owners
        _require((np.diff(edges) > 0).all(), "the neighbours of a node do not ascend, or repeat")
        _require(np.array_equal(edges, np.sort(reverse)), "an edge goes one way")
        _require((owners != data.indices).all(), "a node is its own neighbour")
    if isinstance(data, Interactions):
        _require_index(data.indptr, "items", len(data.items))
        _require_numbers("items", data.items, data.n_items)
        ascending = np.diff(data.items) > 0
        first_of_users = data.indptr[1:-1]
        ascending[first_of_users[(first_of_users > 0) & (first_of_users < len(data.items))] - 1] = True
        _require(ascending.all(), "the items of a user do not ascend, or repeat")
    if isinstance(data, Samples):
        _require_index(data.indptr, "order", len(data.order))
        _require_numbers("the samples of order", data.order, len(data.train))
        _require(len(np.unique(data.order)) == len(data.order), "two clients train on one sample")
    examples = np.asarray(data.examples)
    _require((examples >= 0).all(), "a client has fewer than no examples")
    _require(examples.sum() > 0, "no client has an example")


def check_held_out(data: Dataset) -> None:
    """Raise `UnsoundDataError` unless targets are right, and held-out examples are not those of the training."""
    if isinstance(data, NodeGraph):
        nodes = np.concatenate([data.train, data.validation, data.test])
        _require(len(np.unique(nodes)) == len(nodes), "a node is in two splits")
        _require((data.labels[nodes] != UNKNOWN).all(), "a node of a split has no class")
    elif isinstance(data, RatingMatrix):
        pairs = data.users * data.n_items + data.items
        _require(len(np.unique(pairs)) == len(pairs), "an entry occurs twice")
    elif isinstance(data, Samples):
        for name in ("train", "validation", "test"):
            _check_samples(data, name)
    elif isinstance(data, Interactions):
        users = np.repeat(np.arange(data.n_users), data.examples)
        for name in ("validation", "test"):
            item = getattr(data, name)
            _require(item.shape == (data.n_users,), f"{name} has the shape {list(item.shape)}, not [{data.n_users}]")
            _require(not (data.items == item[users]).any(), f"a user trains on its {name} item")
        held_out_twice = (data.validation == data.test) & (data.validation != NO_ITEM)
        _require(not held_out_twice.any(), "an item is held out for validation and for test")
        _require(not (data.negatives == data.test[:, None]).any(), "a negative is the test item")


def _check_samples(data: Samples, split: str) -> None:
    part: Labelled = getattr(data, split)
    arrays, trained, n_labels = by_name(part.features), by_name(data.train.features), len(part.labels)
    for name, values in arrays.items():
        named = f"features {name}".rstrip()
        _require(len(values) == n_labels, f"{split} has {len(values)} {named} and {n_labels} labels")
    if split != "train":
        shapes = [{name: values.shape[1:] for name, values in state.items()} for state in (arrays, trained)]
        _require(
            shapes[0] == shapes[1],
            f"{split} has features {described(part.features)} and train {described(data.train.features)}",
        )
        same = n_labels and any(np.shares_memory(values, trained[name]) for name, values in arrays.items())
        _require(not same, f"{split} and train are the same samples")
        owners = data.held_out_users.get(split, np.full(n_labels, -1))
        _require(len(owners) == n_labels, f"held_out_users has {len(owners)} {split} samples of {n_labels}")
        _require(((owners >= -1) & (owners < data.n_clients)).all(), f"held_out_users of {split} names no client")
    if data.targets == "numbers":
        _require(np.isfinite(part.labels).all(), "a target is not finite")
        alike = part.labels.shape[1:] == data.train.labels.shape[1:]
        _require(alike, f"{split} has labels [n, ...] of {list(part.labels.shape[1:])} numbers and train of others")
    else:
        _require_numbers(f"labels of {split}", part.labels, data.n_classes)


def _require(condition: object, fault: str) -> None:
    if not condition:
        raise UnsoundDataError(fault)


def _require_index(indptr: IntArray, of: str, n_examples: int) -> None:
    _require(indptr[0] == 0, f"indptr begins with {indptr[0]}, not with 0")
    falls = np.flatnonzero(np.diff(indptr) < 0)
    _require(not falls.size, f"indptr falls after place {falls[:1].sum()}, and should ascend")
    _require(indptr[-1] == n_examples, f"indptr ends at {indptr[-1]}, and {of} has {n_examples} examples")


def _require_numbers(name: str, numbers: IntArray, count: int) -> None:
    """Require that all numbers are from 0 to below the count."""
    outside = numbers[(numbers < 0) | (numbers >= count)]
    _require(not outside.size, f"{name} are not 0 to {count - 1}, such as {outside[:1].sum()}")
