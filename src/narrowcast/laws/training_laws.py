"""Laws of local training, on each small task that a training accepts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from narrowcast.laws.algorithm_cases import MODELS
from narrowcast.laws.law import require
from narrowcast.laws.small_tasks import N_CLIENTS, digest, digest_of_updates, local_call, task_of, trained
from narrowcast.platform.contracts import LocalCall, Task
from narrowcast.platform.errors import UserError
from narrowcast.platform.models.graph import GCN
from narrowcast.platform.types import Arrays, LocalTerms, LocalUpdates


@dataclass(frozen=True)
class TrainingCase:
    """A task with the training in it."""

    task: Task

    @cached_property
    def server(self) -> Arrays:
        """The global parameters before round 1."""
        return self.task.model.init_server(self.task.data, 0)

    def call(self, clients: Any) -> LocalCall:
        """Return the training of these clients as a chunk of round 1."""
        return local_call(self.task, self.server, clients)

    def train(self, clients: Any) -> LocalUpdates:
        """Train these clients as a chunk."""
        return trained(self.call(clients))


def cases(training: Any) -> dict[str, TrainingCase]:
    """Return the training on each model that it fits."""
    cases = {}
    for name, model in {**MODELS, "gcn": GCN(hidden=(6,))}.items():
        task = task_of(model, training=training)
        try:
            training.check(task)
        except UserError:
            continue
        cases[name] = TrainingCase(task)
    return cases


def training_again_gives_the_same_updates(case: TrainingCase) -> None:
    """Train all clients twice."""
    first, again = (case.train(range(N_CLIENTS)) for _ in range(2))
    require(digest(first.changes) == digest(again.changes), "the updates differ")
    require(digest(first.state) == digest(again.state), "the private parameters differ")


def updates_have_a_row_for_each_client_and_are_finite(case: TrainingCase) -> None:
    """Look at what eleven clients learnt."""
    updates = case.train(range(N_CLIENTS))
    columns: Mapping[str, np.ndarray] = {**updates.changes, **updates.state, "loss": updates.loss}
    for name, values in columns.items():
        require(len(values) == N_CLIENTS, f"{name} has {len(values)} rows for {N_CLIENTS} clients")
        require(np.isfinite(values).all(), f"{name} is not finite")
    require(any(values.any() for values in updates.changes.values()), "no client learnt anything")


def a_client_learns_the_same_in_any_company(case: TrainingCase) -> None:
    """Train clients 2, 5 and 7 alone, together and among all."""
    everyone, partial = case.train(range(N_CLIENTS)), case.train([7, 2, 5])
    for name, values in partial.changes.items():
        wanted = everyone.changes[name][[7, 2, 5]]
        scale = float(np.abs(everyone.changes[name]).max())
        require(float(np.abs(values - wanted).max()) <= 1e-5 * scale + 1e-12, f"{name} differs by more than rounding")
    require(
        np.array_equal(partial.examples, everyone.examples[[7, 2, 5]]), "clients train on other numbers of examples"
    )


def samples_are_those_that_it_trains_on(case: TrainingCase) -> None:
    """Compare the samples foretold with those counted."""
    foretold = case.task.training.samples(case.task, np.arange(N_CLIENTS)) * case.task.training.epochs
    counted = case.train(range(N_CLIENTS)).examples
    require((foretold == counted).all(), f"foretold {foretold.tolist()}, trained {counted.tolist()}")


def several_calls_together_give_what_they_give_alone(case: TrainingCase) -> None:
    """Train two chunks by one call of `train_together`."""
    chunks = [[0, 3], [4, 8]]
    calls = [case.call(clients) for clients in chunks]
    together = case.task.training.train_together(calls)
    for clients, updates in zip(chunks, together, strict=True):
        alone = case.train(clients)
        for name, values in alone.changes.items():
            scale = float(np.abs(values).max())
            near = float(np.abs(values - updates.changes[name]).max()) <= 1e-5 * scale + 1e-12
            require(near, f"{name} of clients {clients} differs by more than rounding")


def parameters_that_do_not_train_have_no_change(case: TrainingCase) -> str | None:
    """Train the first parameter alone, and the others from other values; a training may refuse either.

    None of the values is zero, as an adapter's second factor is at first, which stops the gradient of the other one.
    """
    name, *others = case.server
    call = replace(case.call(range(N_CLIENTS)), terms=LocalTerms(trained=(name,)))
    random = np.random.default_rng(0)
    near = {
        other: (values + 0.1 * random.standard_normal(values.shape)).astype(values.dtype)
        for other, values in case.server.items()
    }
    doubled = {**near, **{other: 2 * near[other] for other in others}}
    try:
        updates, at_others = (trained(replace(call, server=server)) for server in (near, doubled))
    except UserError as error:
        return f"frozen parameters are refused ({error})"
    require(set(updates.changes) == {name}, f"{name} alone is to train, and {', '.join(updates.changes)} change")
    require(updates.changes[name].any(), f"{name} is to train, and has not changed")
    if others:
        same = np.array_equal(updates.changes[name], at_others.changes[name])
        require(not same, f"{name} changes alike whatever the parameters are that do not train")
    return None


def digest_of(case: TrainingCase) -> str:
    """Return the sha256 of what all clients learnt."""
    return digest_of_updates(case.train(range(N_CLIENTS)))


LAWS = (
    training_again_gives_the_same_updates,
    updates_have_a_row_for_each_client_and_are_finite,
    a_client_learns_the_same_in_any_company,
    samples_are_those_that_it_trains_on,
    several_calls_together_give_what_they_give_alone,
    parameters_that_do_not_train_have_no_change,
)
