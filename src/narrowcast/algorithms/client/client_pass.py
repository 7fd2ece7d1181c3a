"""The clients' half of a round, written once: train, send within the budget, weigh, add up, account.

A method says what is its own: which local training (`local_calls`), what clients send of it (`message`), and what each
client adds to the round's sums and keeps (`contribution`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict

from narrowcast.algorithms.client.claims import claimed_updates
from narrowcast.algorithms.client.sums import (
    EACH,
    TENSORS,
    WEIGHT,
    Summand,
    add_up,
    sum_of_rows,
    tensor_weights,
    weighted_sums,
)
from narrowcast.algorithms.client.uploads import (
    Columns,
    Message,
    Uploads,
    chunk_result,
    finite_clients,
    send_messages,
    where_client,
)
from narrowcast.algorithms.codecs.chain import Stages
from narrowcast.platform.contracts import Algorithm, Task
from narrowcast.platform.rounds.ledger import ChunkResult, Weighted
from narrowcast.platform.types import Arrays, BoolArray, Chunk, FloatArray, LocalUpdates, RowChanges


@dataclass(frozen=True)
class Arrived:
    """The training of a chunk's clients as they claim it, `updates`, and their messages as the server has them.

    Shapes: tensors [C, ...] as the server decodes them and numbers [C], of clients that delivered; delivered [C], whose
    messages arrived and count; finite [C], whose training stayed finite. `rows` are the changes of some rows of
    tensors, as the server decodes them; NaN where a client left one out. `columns` are those of the message.
    """

    updates: LocalUpdates
    tensors: Arrays
    numbers: Arrays
    delivered: BoolArray
    finite: BoolArray
    rows: Mapping[str, RowChanges] = field(default_factory=dict)
    columns: Columns | None = None


@dataclass(frozen=True)
class Contribution:
    """The part of each client of a chunk in the sums of the round if it delivered, and its next state.

    Shapes: tensors [C, ...], or changes of their rows, are added up with `weight` [C], or those that `weights` names
    with a weight [C] of their own; clients that did not deliver, or of weight 0, may hold anything. divisor [C] is what
    the server divides by, None for the weight; sums [C, ...], or rows, are added up as they are; each [C, ...] is not
    added up: the server is given the rows of the clients that delivered. state [C, ...] is the clients' next state,
    besides what they learnt for themselves. metrics [C] are columns of the round, their weighted means over the clients
    that delivered: measured by the simulation, as the loss is, and neither sent nor known to the server.
    """

    tensors: Mapping[str, Summand] = field(default_factory=dict)
    weight: NDArray[Any] | None = None
    weights: Mapping[str, FloatArray] = field(default_factory=dict)
    divisor: FloatArray | None = None
    sums: Mapping[str, Summand] = field(default_factory=dict)
    each: Arrays = field(default_factory=dict)
    state: Arrays = field(default_factory=dict)
    metrics: Mapping[str, Weighted] = field(default_factory=dict)

    def apart(self) -> Contribution:
        """Return the contribution with tensors and weights of each client in place of their sum."""
        assert self.weight is not None, "tensors have a weight"
        tensors = {
            name: values.dense() if isinstance(values, RowChanges) else values for name, values in self.tensors.items()
        }
        each = {**self.each, **TENSORS.add(tensors), WEIGHT: self.weight}
        return replace(self, tensors={}, weight=None, each=each)

    def partial(self, delivered: BoolArray) -> Arrays:
        """Return the partial sum of the clients of the chunk that delivered, [C]."""
        partial = {
            **{name: _sum(delivered, values) for name, values in self.sums.items()},
            **EACH.add({name: values[delivered] for name, values in self.each.items()}),
        }
        if self.weight is None:
            return partial
        whole, weight = {}, np.where(delivered, self.weight, 0)
        total: dict[str, NDArray[Any]] = {}
        for name, values in self.tensors.items():
            if isinstance(values, RowChanges):
                total[name] = sum_of_rows(values, self.weight, delivered)
            elif name in self.weights:
                total |= weighted_sums({name: values}, np.where(delivered, self.weights[name], 0))
            else:
                whole[name] = values
        total |= weighted_sums(whole, weight)
        divisor = weight if self.divisor is None else np.where(delivered, self.divisor, 0)
        return {**TENSORS.add(total), WEIGHT: np.array(divisor.sum()), **partial}


def _sum(delivered: BoolArray, values: Summand) -> NDArray[Any]:
    """Return the sum of the values, or rows, of clients that delivered."""
    if isinstance(values, RowChanges):
        return sum_of_rows(values, np.ones(len(delivered), dtype=values.values.dtype), delivered)
    return np.asarray(where_client(delivered, values, np.zeros(())).sum(axis=0))


class ClientPass(Algorithm, BaseModel, ABC):
    """An algorithm whose clients train, send tensors and numbers, and are added up.

    A subclass overrides `local_calls` and `contribution`, and `message` if clients send other than their changes.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    codec: Stages = ()

    def message(self, broadcast: Arrays, chunk: Chunk, task: Task, updates: LocalUpdates) -> Message:
        """Return what the clients of a chunk send: their changes."""
        del broadcast, chunk, task
        return Message(updates.changes, rows=updates.rows)

    def tamper(self, broadcast: Arrays, chunk: Chunk, task: Task, updates: LocalUpdates) -> LocalUpdates:
        """Return what clients claim to have learnt, from which their messages are made: what they have learnt.

        Attackers change it here. They pay for what they send as all do; losses and models of their own stay true.
        """
        if task.adversary is None or not task.adversary.attack.tampers:
            return updates
        weights = self.weights_in_mean(chunk, task)
        watched = [
            (self.each_update(broadcast, other, task), self.weights_in_mean(other, task)) for other in chunk.watched
        ]
        return claimed_updates(task.adversary, chunk, updates, weights, watched)

    def claims_otherwise(self, task: Task) -> bool:
        """Return whether some clients may claim other changes than they have learnt."""
        tampers = task.adversary is not None and task.adversary.attack.tampers
        return tampers or type(self).tamper is not ClientPass.tamper

    def weights_in_mean(self, chunk: Chunk, task: Task) -> FloatArray:
        """Return the weight of each client in the mean of all, [C], as attackers know it: its examples."""
        return tensor_weights("examples", task, chunk)

    @property
    def sums_up(self) -> bool:
        """Return whether tensors are added up; False: the server is given those of each client, under `EACH`."""
        return True

    @abstractmethod
    def contribution(self, broadcast: Arrays, chunk: Chunk, task: Task, arrived: Arrived) -> Contribution:
        """Return the part of each client in the sums if its message arrived, and its next state."""

    def each_update(self, broadcast: Arrays, chunk: Chunk, task: Task) -> LocalUpdates:
        """Return the local training of all clients as one result, with the changes of each, for a sender of its own."""
        (trained,) = self.local_updates(broadcast, chunk, task)
        return trained

    def send(self, broadcast: Arrays, chunk: Chunk, task: Task, updates: Sequence[LocalUpdates]) -> ChunkResult:
        """Send each client's message within its budget, add up what arrives, and account for it."""
        (trained,) = updates
        contribution, uploads = self.contributed(broadcast, chunk, task, trained)
        counted = contribution if self.sums_up else contribution.apart()
        partial = counted.partial(uploads.delivered)
        return chunk_result(chunk, trained, uploads, partial, contribution.state, contribution.metrics)

    def contributed(
        self, broadcast: Arrays, chunk: Chunk, task: Task, trained: LocalUpdates
    ) -> tuple[Contribution, Uploads]:
        """Send the messages of clients that one call trained; return their contributions, and what was sent."""
        claimed = self.tamper(broadcast, chunk, task, trained)
        if claimed is not trained:
            claimed = replace(claimed, finite=None)  # the training cannot tell of what attackers claim
        message = self.message(broadcast, chunk, task, claimed)
        finite = finite_clients(claimed, message.tensors)
        tensors, rows, uploads = send_messages(chunk, task, message, self.codec, finite)
        delivered, finite, columns = uploads.delivered, uploads.finite, message.columns
        arrived = Arrived(claimed, tensors, message.numbers, delivered, finite, rows, columns)
        return self.contribution(broadcast, chunk, task, arrived), uploads

    def fold(self, partials: Sequence[Arrays]) -> Arrays:
        """Return the sum of the chunks' partial sums."""
        return add_up(partials)
