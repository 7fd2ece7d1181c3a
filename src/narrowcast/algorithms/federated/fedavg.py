"""FedAvg: clients train the whole model and the server adds the weighted mean of their changes.

Reference: McMahan et al., Communication-Efficient Learning of Deep Networks from Decentralized Data, AISTATS 2017,
Algorithm 1. Letters: x the server's model, y_u client u's after its local steps, n_u its examples.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Literal

import numpy as np
from pydantic import Field

from narrowcast.algorithms.client.client_pass import Arrived, ClientPass, Contribution
from narrowcast.algorithms.client.sums import (
    EACH,
    TENSORS,
    WEIGHT,
    SumLayout,
    TensorSum,
    Weights,
    largest_weight,
    stale_sum,
    tensor_sum_layout,
    tensor_weights,
)
from narrowcast.algorithms.client.uploads import init_codec_state
from narrowcast.algorithms.codecs.messages import dense_wire_bits
from narrowcast.algorithms.codecs.wire import dtype_of
from narrowcast.algorithms.federated.aggregator import AggregationContext, Aggregator
from narrowcast.algorithms.federated.downloads import DOWNLOAD, Download, SizesDownloads
from narrowcast.algorithms.federated.server_optimizer import SERVER_ONLY, ServerOptimizer, initial_slots, optimizer_step
from narrowcast.platform.config.catalog import AGGREGATORS, SERVER_OPTIMIZERS
from narrowcast.platform.config.kinds import kind_of
from narrowcast.platform.contracts import Broadcast, LocalCall, Task
from narrowcast.platform.errors import UserError
from narrowcast.platform.traits import Traits
from narrowcast.platform.types import Arrays, Chunk, FloatArray, IntArray, LocalTerms, PrefixedArrays

ServerLearningRate = Annotated[
    float,
    Field(gt=0, description="factor of the mean update in the server's step; below 1 damps what few clients send"),
]


_LAST_AGGREGATE = PrefixedArrays(SERVER_ONLY.name("aggregate/"))
_REFERENCE = PrefixedArrays("reference/")


def model_of(arrays: Arrays) -> Arrays:
    """Return what clients train: a server state or a broadcast without what downloads and server optimizers keep."""
    return SERVER_ONLY.without(DOWNLOAD.without(arrays))


def dense_bits(tensors: Arrays, task: Task, clients: IntArray) -> IntArray:
    """Return the size of these tensors, uncoded, for each client that has examples, [C]; 0 for the others."""
    bits = dense_wire_bits(sum(values.size for values in tensors.values()), dtype_of(tensors))
    return np.where(task.data.examples[clients] > 0, bits, 0)


class Averaging(SizesDownloads, ClientPass):
    """x += server_learning_rate * sum w_u (y_u - x) / sum w_u over the clients that delivered; w_u is n_u, or 1.

    With a `server_optimizer` that mean is its pseudo-gradient: FedAvgM, FedAdam, FedYogi and FedAdagrad are fields of
    these algorithms. Subclasses change the local steps (`terms`) or the parameters that are averaged (`parameters`).
    With an `aggregator` its aggregate replaces the weighted mean. A round in which no client delivers leaves x
    and the optimizer as they are.

    A subclass with another server step overrides `moved`, or `mean_change`, and keeps what it remembers in `init` and
    `moved` under names of `SERVER_ONLY`: these arrays stay on the server, and are not part of the model.
    """

    server_learning_rate: ServerLearningRate = 1.0
    weights: Weights = "examples"
    server_optimizer: Annotated[ServerOptimizer, SERVER_OPTIMIZERS] | None = Field(
        None, description="optimizer of the server's step, with server_learning_rate; null: add the mean change"
    )
    aggregator: Annotated[Aggregator, AGGREGATORS] | None = Field(
        None, description="robust aggregate of the clients' changes; null: their weighted mean"
    )
    download: Download = None

    def init(self, task: Task) -> Arrays:
        """Return x, the server optimizer's slots, and what downloads on a grid need."""
        model = self.parameters(task)
        slots = {} if self.server_optimizer is None else initial_slots(self.server_optimizer, model)
        last = {name: np.zeros_like(values) for name, values in model.items()}
        return {**model, **slots, **self._remembered(last), **self.begun_download(model)}

    def parameters(self, task: Task) -> Arrays:
        """Return what x holds before round 1: the model's parameters."""
        return task.initial_parameters()

    def init_clients(self, task: Task) -> Arrays:
        """Return the clients' private parameters, and the codec's state for what they train and send."""
        clients = task.model.init_clients(task.data, task.private_seed.value)
        if not self.codec:
            return clients
        return {**clients, **init_codec_state(self.codec, task.data.n_clients, self.parameters(task))}

    # Client half

    def terms(self, chunk: Chunk, task: Task) -> LocalTerms:
        """Return what the algorithm adds to the local steps: nothing, plain SGD."""
        del chunk, task
        return LocalTerms()

    def local_calls(self, broadcast: Arrays, chunk: Chunk, task: Task) -> list[LocalCall]:
        """Train the whole model from x."""
        return [LocalCall(model_of(broadcast), chunk, task, self.terms(chunk, task))]

    def weights_in_mean(self, chunk: Chunk, task: Task) -> FloatArray:
        """Return w_u, [C]."""
        return tensor_weights(self.weights, task, chunk)

    @property
    def sums_up(self) -> bool:
        """Return whether the changes are added up: an aggregator is given each."""
        return self.aggregator is None

    def contribution(self, broadcast: Arrays, chunk: Chunk, task: Task, arrived: Arrived) -> Contribution:
        """Return y_u - x, with w_u."""
        del broadcast
        return Contribution(arrived.tensors, tensor_weights(self.weights, task, chunk))

    # Server half

    def broadcast(self, server: Arrays, task: Task, round_index: int) -> Broadcast:
        """Send x to every client of the round, or x on a grid."""
        return self.broadcast_model(model_of(server), server, task, round_index)

    def step(self, server: Arrays, broadcast: Arrays, total: Arrays, task: Task, round_index: int) -> Arrays:
        """Return x after the server's step along the mean change; the state as it is if there is none."""
        if self._asks_reference:
            total = {**total, **_REFERENCE.add(self.reference(broadcast, task, round_index))}
        changes = self.mean_change(server, total, task, round_index)
        if changes is None:
            return {**server, **self.kept_download(model_of(server), server, broadcast)}
        return self.moved(server, broadcast, changes)

    def mean_change(self, server: Arrays, total: Arrays, task: Task, round_index: int) -> Arrays | None:
        """Return the weighted mean, or the aggregate, of the clients' changes.

        It is None if no client delivered, or too few for the aggregator.
        """
        if self.aggregator is not None:
            each = EACH.of(total)
            context = AggregationContext(task.seed, round_index, _LAST_AGGREGATE.of(server), _REFERENCE.of(total))
            return self.aggregator.of_round(TENSORS.of(each), each[WEIGHT], context)
        sums = TensorSum.of(total)
        return sums.means() if sums.weight else None

    def reference(self, broadcast: Arrays, task: Task, round_index: int) -> Arrays:
        """Return what the server would send as a client that joins now, with samples of its own and time for all."""
        own = task.of_server()
        joining = Chunk(round_index, 0, np.zeros(1, dtype=np.int64), self.init_clients(own))
        chunk = replace(joining, state=self.joined(broadcast, joining, own))
        (call,) = self.local_calls(broadcast, chunk, own)
        terms = replace(call.terms, epochs=None)
        learnt = call.task.training.train(call.server, call.chunk, call.task, terms)
        message = self.message(broadcast, chunk, own, learnt)
        return {name: values[0] for name, values in message.tensors.items()}

    @property
    def _asks_reference(self) -> bool:
        return self.aggregator is not None and self.aggregator.traits.reference

    def moved(self, server: Arrays, broadcast: Arrays, changes: Arrays) -> Arrays:
        """Return the server state after a step along `changes`, at the server's learning rate."""
        rate, model = self.server_learning_rate, model_of(server)
        kept = {**self._remembered(changes), **self.kept_download(model, server, broadcast)}
        if self.server_optimizer is not None:
            return {**optimizer_step(self.server_optimizer, rate, model, changes, server), **kept}
        return {**{name: values + rate * changes[name] for name, values in model.items()}, **kept}

    def _remembered(self, aggregate: Arrays) -> Arrays:
        """Return the aggregate as a part of the server's state; nothing unless the aggregator is given it again."""
        remembers = self.aggregator is not None and self.aggregator.traits.remembers
        return _LAST_AGGREGATE.add(aggregate) if remembers else {}

    def final(self, server: Arrays) -> Arrays:
        """Return x."""
        return model_of(server)

    # What the run asks of the settings

    @property
    def traits(self) -> Traits:
        """A client drawn k times has k times its weight in the mean; most aggregators need the change of each."""
        needs_each = ""
        if self.aggregator is not None and not self.aggregator.traits.sums:
            needs_each = f"aggregator = {self.aggregator.kind}"  # type: ignore[attr-defined]
        return replace(super().traits, counts_draws=self.aggregator is None, needs_each=needs_each)

    @property
    def unlike_mean(self) -> dict[str, bool]:
        """Return the settings by which x is not a mean of the clients' models, and whether each is made."""
        return {
            "algorithm.codec": bool(self.codec),
            "algorithm.server_optimizer": self.server_optimizer is not None,
            "algorithm.server_learning_rate above 1": self.server_learning_rate > 1,
            "algorithm.download": self.download is not None,
        }

    def check(self, task: Task) -> None:
        """Raise `UserError` for `download.rows: touched`, and for an aggregator that lacks samples of the server."""
        super().check(task)
        if self._asks_reference and task.data.of_server is None:
            raise UserError(
                f"algorithm.aggregator = {kind_of(self.aggregator)} compares changes with the server's own, and the "
                "server has no samples to train on; give classification data with data.server, such as "
                "data.server.samples=100, or use another aggregator"
            )
        if self.download is not None and self.download.rows == "touched":
            raise UserError(
                "algorithm.download.rows = touched asks for rows of an item matrix; use download.rows = all"
            )

    def check_cohort(self, clients: int) -> None:
        """Raise `UserError` if the aggregator has no guarantee for a whole cohort."""
        if self.aggregator is not None:
            self.aggregator.check(clients)

    def upload_bits(self, broadcast: Arrays, task: Task, clients: IntArray) -> IntArray | None:
        """Return the size of each client's upload, [C], which is that of x; None with a codec."""
        return None if self.codec else dense_bits(model_of(broadcast), task, clients)

    def weighted_by_staleness(self, partial: Arrays, factor: float) -> Arrays | None:
        """Return a partial sum with its changes times `factor`, and their weight unchanged; None with an aggregator."""
        return stale_sum(partial, factor) if self.sums_up else None

    def sum_layout(self, task: Task, cohort: int) -> SumLayout | None:
        """Return one group: all tensors that clients train, and their weight; None with an aggregator."""
        if not self.sums_up:
            return None
        most = largest_weight(task, cohort) if self.weights == "examples" else cohort
        return tensor_sum_layout(self.parameters(task), most, cohort)


class FedAvg(Averaging):
    """The weighted mean of the clients' models.

    Differs from the paper: 1. the change is averaged and scaled by `server_learning_rate`; 1 gives the paper's mean of
    models.
    """

    kind: Literal["fedavg"] = "fedavg"

    @property
    def traits(self) -> Traits:
        """Clients train whole models by plain steps."""
        return replace(super().traits, mean_unless=self.unlike_mean)
