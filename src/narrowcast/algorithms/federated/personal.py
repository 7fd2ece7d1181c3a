"""Models of clients' own beside the global one: their state, and the averaging around it.

Letters: x the server's model, y_u client u's copy of it, v_u its own model.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from narrowcast.algorithms.client.client_pass import Arrived, Contribution
from narrowcast.algorithms.client.uploads import Message, where_client, zeros_of_clients
from narrowcast.algorithms.federated.fedavg import Averaging, model_of
from narrowcast.algorithms.federated.server_optimizer import SERVER_ONLY
from narrowcast.algorithms.local_training.rules import only_gradient_descent
from narrowcast.platform.contracts import LocalCall, Task
from narrowcast.platform.errors import UserError
from narrowcast.platform.models.neural_network import NeuralNetwork
from narrowcast.platform.types import Arrays, Chunk, LocalRule, LocalTerms, LocalUpdates, PrefixedArrays


@dataclass(frozen=True)
class PersonalState:
    """Tensors that each client keeps, [U, ...], which begin as the global ones before round 1.

    The state has their differences from `start`, the tensors before round 1: zeros, which take no memory until a client
    takes part.
    """

    prefix: str = "personal/"

    @property
    def _arrays(self) -> PrefixedArrays:
        return PrefixedArrays(self.prefix)

    def init(self, start: Arrays, n_clients: int) -> dict[str, NDArray[Any]]:
        """Return the state of all clients before round 1, under its full names."""
        return self._arrays.add(zeros_of_clients(start, n_clients))

    def of(self, chunk: Chunk, start: Arrays) -> dict[str, NDArray[Any]]:
        """Return the tensors of a chunk's clients, [C, ...]."""
        return {name: values + start[name] for name, values in self._arrays.of(chunk.state).items()}

    def kept(self, chunk: Chunk, start: Arrays, values: Mapping[str, Any]) -> dict[str, NDArray[Any]]:
        """Return the state after clients learnt these tensors [C, ...]; as it was where they are not finite."""
        before = self.of(chunk, start)
        return self.moved(chunk, start, {name: np.asarray(learnt) - before[name] for name, learnt in values.items()})

    def moved(self, chunk: Chunk, start: Arrays, changes: Mapping[str, Any]) -> dict[str, NDArray[Any]]:
        """Return the state after these changes of a round [C, ...]; as it was where they are not finite.

        All that clients keep is added up so, whatever trained it: equal steps give equal bits.
        """
        before, state = self.of(chunk, start), {}
        for name, change in changes.items():
            finite = np.asarray(np.isfinite(change).reshape(len(change), -1).all(axis=1))
            kept = np.asarray(chunk.state[self._arrays.name(name)])
            state[name] = where_client(finite, before[name] + change - start[name], kept)
        return self._arrays.add(state)


OWN = PersonalState()


def check_adapted(task: Task, asked: str) -> None:
    """Raise `UserError` if clients' copies of the model cannot be trained for an evaluation, which `asked` wants."""
    model = task.model
    if not isinstance(model, NeuralNetwork):
        raise UserError(f"{asked} trains networks before clients are measured, not {model.kind}")
    if layers := model.own_layers(task.data):
        raise UserError(
            f"{asked}: {next(iter(layers))} is a layer that each client keeps, and stays as it is; leave it out"
        )


def adapted(
    model: Arrays,
    chunk: Chunk,
    task: Task,
    epochs: int,
    *,
    rule: LocalRule | None = None,
    learning_rate: float | None = None,
    of_each: bool = False,
) -> Arrays:
    """Return each client's parameters [C, ...] after local epochs from `model`, or [C, ...] `of_each`, as it trains.

    The batches are of training samples alone, and drawn from private streams apart from those of the rounds; nothing
    is kept. `rule` takes the steps in place of the training's, and `learning_rate` is in place of its own.
    """
    each = model if of_each else {name: values[np.newaxis] for name, values in model.items()}
    if not epochs:
        return each
    terms = LocalTerms(epochs=np.full(len(chunk.clients), epochs), rule=rule, start=model if of_each else None)
    training = task.training
    if learning_rate is not None:
        training = training.model_copy(update={"learning_rate": learning_rate})
    apart = replace(task, training=training, private_seed=task.private_seed.successor())
    changes = training.train({} if of_each else model, replace(chunk, epochs=None), apart, terms).changes
    return {name: values + changes[name] if name in changes else values for name, values in each.items()}


class Personal(Averaging):
    """Averaging whose clients train a model of their own, v_u, beside the copy of the global one that they send.

    v_u never leaves the client, which sends and receives what FedAvg's does. A subclass says the steps of both in
    `rule`, and what a client uses in `personal`: v_u, unless it is overridden. `evaluate_clients` measures that; other
    evaluations are those of x.
    """

    @abstractmethod
    def rule(self) -> LocalRule | None:
        """Return the local steps: `own` has v_u, and slots of the parameters' names the next v_u; None: v_u stays."""

    def check(self, task: Task) -> None:
        """Raise `UserError` for models other than networks, whose training takes no steps of an algorithm's own."""
        super().check(task)
        if not isinstance(task.model, NeuralNetwork):
            raise UserError(
                f"algorithm.kind = {self.kind} trains networks, not {task.model.kind}, whose clients keep factors of "
                "their own anyway; use fedmf"
            )
        only_gradient_descent(task, f"algorithm.kind = {self.kind} trains two models by steps along their gradients")
        if momentum := task.training.traits.momentum:
            raise UserError(f"training.momentum = {momentum:g}: the steps of {self.kind} have no momentum; set 0")

    def init_clients(self, task: Task) -> Arrays:
        """Return the clients' private parameters, v_u, and the codec's state."""
        return {**super().init_clients(task), **OWN.init(self.parameters(task), task.data.n_clients)}

    def terms(self, chunk: Chunk, task: Task) -> LocalTerms:
        """Return the steps of y_u and v_u; plain SGD without a rule."""
        if (rule := self.rule()) is None:
            return LocalTerms()
        return LocalTerms(rule=rule, own=OWN.of(chunk, self.parameters(task)))

    def contribution(self, broadcast: Arrays, chunk: Chunk, task: Task, arrived: Arrived) -> Contribution:
        """Return y_u - x as FedAvg does, and v_u unless it left the finite numbers."""
        start, slots = self.parameters(task), arrived.updates.slots
        own = OWN.kept(chunk, start, {name: slots[name] for name in start if name in slots})
        return replace(super().contribution(broadcast, chunk, task, arrived), state=own)

    def joined(self, broadcast: Arrays, chunk: Chunk, task: Task) -> Arrays:
        """Return the state in which v_u is x."""
        model, n_clients = self.final(model_of(broadcast)), len(chunk.clients)
        start = self.parameters(task)
        received = {name: np.broadcast_to(model[name], (n_clients, *values.shape)) for name, values in start.items()}
        return {**chunk.state, **OWN.kept(chunk, start, received)}

    def personal(self, broadcast: Arrays, chunk: Chunk, task: Task) -> Arrays:
        """Return v_u of each client, [C, ...]."""
        del broadcast
        return OWN.of(chunk, self.parameters(task))


_UNSHARED = PrefixedArrays(SERVER_ONLY.name("unshared/"))
"""The tensors that clients keep, as they were before round 1: they complete the global model, and are never sent."""


class PartlyShared(Averaging):
    """Averaging of a part of the model; the tensors that `keeps` names stay with each client.

    Clients send, receive and pay for the shared tensors alone, and are measured by `evaluate_clients` with both. The
    global model has the kept tensors of before round 1.
    """

    def keeps(self, name: str) -> bool:
        """Return whether each client keeps the tensor of this name for itself."""
        raise NotImplementedError(f"{type(self).__name__} has no keeps, and no kept_names of its own")

    def kept_names(self, task: Task) -> frozenset[str]:
        """Return the names of the tensors that clients keep: those that `keeps` says."""
        return frozenset(name for name in task.initial_parameters() if self.keeps(name))

    def _split(self, tensors: Arrays, task: Task) -> tuple[dict[str, NDArray[Any]], dict[str, NDArray[Any]]]:
        """Return the shared tensors and the kept ones."""
        kept = self.kept_names(task)
        return (
            {name: values for name, values in tensors.items() if name not in kept},
            {name: values for name, values in tensors.items() if name in kept},
        )

    def check(self, task: Task) -> None:
        """Raise `UserError` for models other than networks, and unless some tensors are shared."""
        super().check(task)
        if not isinstance(task.model, NeuralNetwork):
            raise UserError(f"algorithm.kind = {self.kind} shares a part of a network, not of {task.model.kind}")
        if not self.parameters(task):
            raise UserError(
                f"algorithm.kind = {self.kind}: clients keep all of {task.model.kind}; share some of it, or use local"
            )

    def init(self, task: Task) -> Arrays:
        """Return x, and the tensors that complete it."""
        return {**super().init(task), **_UNSHARED.add(self._split(task.initial_parameters(), task)[1])}

    def parameters(self, task: Task) -> Arrays:
        """Return the shared tensors before round 1."""
        return self._split(super().parameters(task), task)[0]

    def init_clients(self, task: Task) -> Arrays:
        """Return the clients' private parameters, their kept tensors, and the codec's state."""
        kept = self._split(task.initial_parameters(), task)[1]
        return {**super().init_clients(task), **OWN.init(kept, task.data.n_clients)}

    def local_calls(self, broadcast: Arrays, chunk: Chunk, task: Task) -> list[LocalCall]:
        """Train the whole model, from x and each client's own tensors."""
        (call,) = super().local_calls(broadcast, chunk, task)
        server = {**task.initial_parameters(), **call.server}
        return [replace(call, server=server, terms=replace(call.terms, start=self.personal(broadcast, chunk, task)))]

    def message(self, broadcast: Arrays, chunk: Chunk, task: Task, updates: LocalUpdates) -> Message:
        """Return the changes of the shared tensors."""
        message = super().message(broadcast, chunk, task, updates)
        return replace(message, tensors=self._split(message.tensors, task)[0])

    def contribution(self, broadcast: Arrays, chunk: Chunk, task: Task, arrived: Arrived) -> Contribution:
        """Return y_u - x of the shared tensors, and keep the others unless they left the finite numbers."""
        kept = OWN.moved(chunk, task.initial_parameters(), self._split(arrived.updates.changes, task)[1])
        return replace(super().contribution(broadcast, chunk, task, arrived), state=kept)

    def moved(self, server: Arrays, broadcast: Arrays, changes: Arrays) -> Arrays:
        """Return the state after a step along the changes of x."""
        return {**super().moved(server, broadcast, changes), **_UNSHARED.add(_UNSHARED.of(server))}

    def final(self, server: Arrays) -> Arrays:
        """Return x, with the other tensors as they were before round 1."""
        return {**super().final(server), **_UNSHARED.of(server)}

    def personal(self, broadcast: Arrays, chunk: Chunk, task: Task) -> Arrays:
        """Return x with the kept tensors of each client, [C, ...]."""
        n_clients, own = len(chunk.clients), OWN.of(chunk, task.initial_parameters())
        shared = {
            name: np.broadcast_to(values, (n_clients, *values.shape)) for name, values in model_of(broadcast).items()
        }
        return {name: own[name] if name in own else shared[name] for name in task.initial_parameters()}
