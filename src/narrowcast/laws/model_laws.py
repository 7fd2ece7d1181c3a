"""Laws of models, on the small data set that a model can be trained on, or on data of the caller."""

from __future__ import annotations

import math
import pickle
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

from narrowcast.laws.law import on_each, require
from narrowcast.laws.small_tasks import (
    N_CLIENTS,
    digest,
    digest_of_updates,
    graph,
    interactions,
    local_call,
    rating_matrix,
    sample_sets,
    task_on,
    trained,
)
from narrowcast.platform.data.dataset import Dataset
from narrowcast.platform.models.model import Model, Split
from narrowcast.platform.models.neural_network import NeuralNetwork
from narrowcast.platform.types import Arrays, IntArray, LocalUpdates

_MEANS = ("loss", "accuracy", "hr@10", "ndcg@10")  # metrics that are means over samples
SPLITS: tuple[Split, ...] = ("validation", "test")
_SEED = 0x9E37_79B9


@dataclass(frozen=True)
class ModelCase:
    """A model, and data that it takes."""

    model: Model
    data: Any

    def metrics(self, split: Split) -> Mapping[str, float]:
        """Evaluate the model as it is before round 1."""
        return self.model.evaluate(self.model.init_server(self.data, 0), self._clients(), self.data, split)

    @property
    def learners(self) -> IntArray:
        """Three clients with samples, or as many as there are; the last has the fewest."""
        examples = self.data.examples
        clients = np.flatnonzero(examples)[-3:]
        return clients[np.argsort(-examples[clients], kind="stable")]

    def trained(self, clients: IntArray) -> LocalUpdates:
        """Train these clients in round 1, as one chunk."""
        task = task_on(self.data, self.model)
        task.training.check(task)
        return trained(local_call(task, self.model.init_server(self.data, 0), clients))

    def _clients(self) -> Arrays:
        return self.model.init_clients(self.data, 0)


def cases(model: Model) -> dict[str, ModelCase]:
    """Return the model on each of the small data sets that it takes; raise `UserError` with its reasons if on none."""
    counts = np.random.default_rng(1).integers(1, 18, N_CLIENTS)
    sets: dict[str, Dataset] = dict(sample_sets(counts))
    if not isinstance(model, NeuralNetwork):
        sets |= {"interactions": interactions(counts), "ratings": rating_matrix(counts), "graph": graph()}
    return on_each(sets, lambda data, name: on_data(model, data, name))


def on_data(model: Model, data: Dataset, name: str = "") -> dict[str, ModelCase]:
    """Return the model on this data set; raise `UserError` if its check refuses that."""
    model.check(data)
    return {name: ModelCase(model, data)}


def initial_parameters_depend_on_the_seed_alone(case: ModelCase) -> str:
    """Initialise the model twice with seed 0 and once with seed 1; return a note if these are the same."""
    first, again, reseeded = (digest(case.model.init_server(case.data, seed)) for seed in (0, 0, 1))
    require(first == again, "seed 0 gives two sets of parameters")
    private = [digest(case.model.init_clients(case.data, 0)) for _ in range(2)]
    require(private[0] == private[1], "seed 0 gives two sets of private parameters")
    if first != reseeded:
        return ""
    with _seeds_of_its_own_replaced():
        drawn = digest(case.model.init_server(case.data, 1))
    require(drawn == reseeded, "seeds 0 and 1 give the same parameters, drawn from a generator that it seeds by itself")
    return "every seed gives the same parameters, and none is drawn"


class _Generator(torch.Generator):
    def manual_seed(self, seed: int) -> torch.Generator:
        del seed
        return super().manual_seed(_SEED)


class _RandomState(np.random.RandomState):
    def __init__(self, *_: Any) -> None:
        super().__init__(_SEED)


class _Random(random.Random):
    def __init__(self, *_: Any) -> None:
        super().__init__(_SEED)


@contextmanager
def _seeds_of_its_own_replaced() -> Iterator[None]:
    """Give generators that code within the block seeds by itself another seed than its own."""
    seeding = ((np.random, "default_rng"), (np.random, "seed"), (random, "seed"), (torch, "manual_seed"))
    classes = ((torch, "Generator", _Generator), (np.random, "RandomState", _RandomState), (random, "Random", _Random))
    with ExitStack() as stack:
        for module, name in seeding:
            stack.enter_context(patch.object(module, name, partial(_seeded, getattr(module, name))))
        for module, name, replacement in classes:
            stack.enter_context(patch.object(module, name, replacement))
        yield


def _seeded(seed: Callable[[int], Any], *_: Any) -> Any:
    return seed(_SEED)


def parameters_are_finite_float32(case: ModelCase) -> None:
    """Look at all initial parameters."""
    server = case.model.init_server(case.data, 0)
    require(server, "there is no global parameter")
    wanted = case.model.held_dtype
    for name, values in server.items():
        require(values.dtype == wanted, f"{name} is {values.dtype}, not {wanted}")
        require(np.isfinite(values).all(), f"{name} is not finite")


def private_parameters_have_a_row_for_each_client(case: ModelCase) -> None:
    """Look at the shapes of what clients keep."""
    for name, values in case.model.init_clients(case.data, 0).items():
        require(len(values) == case.data.n_clients, f"{name} has {len(values)} rows for {case.data.n_clients} clients")


def metrics_are_finite_and_the_same_each_time(case: ModelCase) -> None:
    """Evaluate the initial model twice on each split."""
    names = set()
    for split in SPLITS:
        first, again = case.metrics(split), case.metrics(split)
        require(first == again, f"two evaluations on {split} differ: {dict(first)}, {dict(again)}")
        for name, value in first.items():
            require(math.isfinite(value), f"{name} on {split} is {value!r}")
        names |= set(first)
    require(names, "it reports no metric")


def evaluating_changes_nothing(case: ModelCase) -> None:
    """Evaluate with read-only parameters, as a backend may hand them out."""
    server, clients = case.model.init_server(case.data, 0), case.model.init_clients(case.data, 0)
    frozen = [{name: _read_only(values) for name, values in arrays.items()} for arrays in (server, clients)]
    case.model.evaluate(frozen[0], frozen[1], case.data, "test")
    require(digest(frozen[0]) == digest(server), "the parameters changed")


def each_client_is_measured_on_its_own_samples(case: ModelCase) -> None:
    """Measure all clients at once, and two by two; compare the losses with the evaluation on all held-out samples."""
    model, data = case.model, case.data
    if not model.measures_clients:
        return
    server, state = model.init_server(data, 0), model.init_clients(data, 0)
    shared, all_clients = {name: values[np.newaxis] for name, values in server.items()}, np.arange(data.n_clients)
    for split in SPLITS:
        examples = data.examples_of(split)
        at_once = model.measure_clients(shared, state, data, split, all_clients)
        for clients in np.split(all_clients, range(2, len(all_clients), 2)):
            of_clients = {name: state[name][clients] for name in model.client_parameters or ()}
            for name, values in model.measure_clients(shared, of_clients, data, split, clients).items():
                close = np.allclose(values, at_once[name][clients], rtol=1e-5, atol=1e-6, equal_nan=True)
                require(close, f"{name} of clients {clients} on {split} depends on who else is measured")
        for name, value in case.metrics(split).items():
            require(name in at_once, f"measure_clients lacks {name}")
            require((np.isnan(at_once[name]) == (examples == 0)).all(), f"{name} is not NaN exactly without samples")
            if name in _MEANS and examples.sum() == len(getattr(data, split)):
                mean = float(np.average(np.nan_to_num(at_once[name]), weights=examples))
                require(math.isclose(mean, value, rel_tol=1e-5), f"{name} on {split} is {value!r}, of clients {mean!r}")


def the_order_of_hidden_units_changes_no_metric(case: ModelCase) -> None:
    """Shuffle the units of each hidden layer, if the model declares them, and take half of them.

    Features, whose order is that of the data, stay as they are.
    """
    model, data = case.model, case.data
    if (hidden := model.hidden_units(data)) is None:
        return
    server = model.init_server(data, 0)
    require(model.narrowed(hidden.counts) == model, "narrowed to its own counts of units it is another model")
    draw = np.random.default_rng(0)
    read = [hidden.reads_units and layer == 0 for layer in range(len(hidden.counts))]
    orders = zip(read, hidden.counts, strict=True)
    units = tuple(np.arange(count) if fixed else draw.permutation(count) for fixed, count in orders)
    shuffled = hidden.take(server, units)
    for name, value in case.model.evaluate(shuffled, {}, data, "test").items():
        before = case.metrics("test")[name]
        require(math.isclose(value, before, rel_tol=1e-5, abs_tol=1e-6), f"test.{name} was {before!r} and is {value!r}")
    half = [count if fixed else -(-count // 2) for fixed, count in zip(read, hidden.counts, strict=True)]
    got = {name: values.shape for name, values in hidden.take(server, tuple(map(np.arange, half))).items()}
    wanted = {name: values.shape for name, values in model.narrowed(half).init_server(data, 0).items()}
    require(got == wanted, f"half of its units have the shapes {got}, and the narrower model {wanted}")
    sizes = [sum(map(math.prod, got.values())), hidden.n_values(server, half)]
    require(sizes[0] == sizes[1], f"half of its units have {sizes[0]} values, and n_values says {sizes[1]}")


def training_it_again_gives_the_same_updates(case: ModelCase) -> None:
    """Train three clients twice, and the last of them alone, from a pickled task as another process does."""
    clients = case.learners
    first, again = (case.trained(clients) for _ in range(2))
    require(
        digest_of_updates(first) == digest_of_updates(again), "the same clients learn something else the second time"
    )
    alone = replace(case, model=pickle.loads(pickle.dumps(case.model))).trained(clients[-1:])
    for name, values in first.changes.items():
        require(np.isfinite(values).all(), f"the change of {name} is not finite")
        scale = float(np.abs(values).max(initial=0))
        near = float(np.abs(alone.changes[name][0] - values[-1]).max(initial=0)) <= 1e-4 * scale + 1e-12
        require(near, f"what client {clients[-1]} learns of {name} depends on the clients beside it")


def digest_of(case: ModelCase) -> str:
    """Return the sha256 of the initial parameters, and of what clients learn from them."""
    server, clients = case.model.init_server(case.data, 0), case.model.init_clients(case.data, 0)
    initial = {**{f"server {name}": values for name, values in server.items()}, **clients}
    return digest(initial) + digest_of_updates(case.trained(case.learners))


def _read_only(values: np.ndarray) -> np.ndarray:
    copy = np.array(values)
    copy.flags.writeable = False
    return copy


LAWS = (
    initial_parameters_depend_on_the_seed_alone,
    parameters_are_finite_float32,
    private_parameters_have_a_row_for_each_client,
    metrics_are_finite_and_the_same_each_time,
    evaluating_changes_nothing,
    each_client_is_measured_on_its_own_samples,
    the_order_of_hidden_units_changes_no_metric,
    training_it_again_gives_the_same_updates,
)
