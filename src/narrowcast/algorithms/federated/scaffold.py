"""SCAFFOLD: local steps corrected by control variates, one on every client and one on the server.

Reference: Karimireddy et al., SCAFFOLD: Stochastic Controlled Averaging for Federated Learning, ICML 2020
(arXiv:1910.06378), Algorithm 1. Letters: x the server's model, y_u client u's, c and c_u the control variates.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from narrowcast.algorithms.client.client_pass import Arrived, ClientPass, Contribution
from narrowcast.algorithms.client.sums import TensorSum, tensor_weights
from narrowcast.algorithms.client.uploads import (
    CONTROL,
    COUNT_BITS,
    Message,
    init_codec_state,
    where_client,
    with_bits,
    zeros_of_clients,
)
from narrowcast.algorithms.federated.downloads import broadcast_all
from narrowcast.algorithms.federated.fedavg import ServerLearningRate, dense_bits
from narrowcast.algorithms.local_training.rules import only_gradient_descent
from narrowcast.platform.contracts import Broadcast, LocalCall, Task
from narrowcast.platform.errors import UserError
from narrowcast.platform.types import Arrays, Chunk, IntArray, LocalTerms, LocalUpdates


class Scaffold(ClientPass):
    """Local steps corrected by control variates of clients and server, so that clients with other data drift less.

    y -= lr (g(y) - c_u + c); x and c move by the mean changes. `control: update`, option II, sets c_u to
    c_u - c + (x - y) / (K lr); `gradient`, option I, to the gradient of the client's loss at x over all of its samples,
    at the cost of one more pass over them.

    A client receives x and c, twice FedAvg's bits, and sends the change of y and its number of steps K, 32 bits. With
    option II the change of c_u is -c - (y - x) / (K lr), which the server computes from these: also with momentum,
    weight decay, clipping, schedules and partial work, which K and y have in them. Client and server take y as it is
    decoded after a codec, so that c stays the mean of all c_u. `control_upload: sent` sends the change of c_u beside
    that of y, through the codec too, as the paper does: twice FedAvg's bits. Option I's change does not follow from y,
    and is always sent.

    Differs from the paper: 1. K lr is the sum of the steps' learning rates; with momentum, weight decay or clipping
    option II's control variate is that of the whole local step, and option I's the gradient of the loss alone. 2. a
    client whose upload is lost, or not sent, keeps its c_u: it is assumed to learn of the loss, or c would be off by it
    for good. 3. the change of c_u is not sent where the server can compute it.
    """

    kind: Literal["scaffold"] = "scaffold"
    server_learning_rate: ServerLearningRate = 1.0
    control: Literal["update", "gradient"] = Field(
        "update",
        description="next control variate of a client: from its update (option II) or its gradient at x (option I)",
    )

    control_upload: Literal["derived", "sent"] | None = Field(
        None,
        description="change of a client's control variate: derived by the server, or sent as in the paper; null: "
        "derived with control = update, sent with gradient",
    )

    @model_validator(mode="after")
    def _gradients_are_sent(self) -> Self:
        if self.control == "gradient" and self.control_upload == "derived":
            raise ValueError(
                "control_upload = derived goes with control = update: a gradient does not follow from a client's "
                "change; leave it out"
            )
        return self

    @property
    def _sends_control(self) -> bool:
        return self.control == "gradient" or self.control_upload == "sent"

    def check(self, task: Task) -> None:
        """Raise `UserError` if the local steps are not those that option I or II of c_u needs."""
        if self.control == "gradient" and not task.training.traits.computes_start_gradient:
            raise UserError(
                f"algorithm.control = gradient: training.kind = {task.training.kind} does not compute the gradient at "
                "the server's model; use control = update"
            )
        if self.control == "update":
            only_gradient_descent(
                task,
                "algorithm.control = update takes a client's change over its learning rates for a mean of gradients",
                "algorithm.control = gradient",
            )

    def init(self, task: Task) -> Arrays:
        """Return x, and c = 0."""
        model = task.initial_parameters()
        return {**model, **CONTROL.add({name: np.zeros_like(values) for name, values in model.items()})}

    def init_clients(self, task: Task) -> Arrays:
        """Return the clients' private parameters, c_u = 0, and the codec's state."""
        server = self.init(task)
        controls = zeros_of_clients(CONTROL.of(server), task.data.n_clients)
        codec = init_codec_state(self.codec, task.data.n_clients, server if self._sends_control else self.final(server))
        return {**task.model.init_clients(task.data, task.private_seed.value), **CONTROL.add(controls), **codec}

    # Server half

    def broadcast(self, server: Arrays, task: Task, round_index: int) -> Broadcast:
        """Send x and c, Algorithm 1, line 3."""
        del task, round_index
        return broadcast_all(server)

    def step(self, server: Arrays, broadcast: Arrays, total: Arrays, task: Task, round_index: int) -> Arrays:
        """Move x by the cohort's mean change, and c by the mean change of c_u over all clients: lines 16 and 17."""
        del broadcast, task, round_index
        sums, rate, controls = TensorSum.of(total), self.server_learning_rate, CONTROL.add(CONTROL.of(server))
        return {
            name: values + (sums.tensors[name] if name in controls else rate * sums.mean(name))
            for name, values in server.items()
        }

    def final(self, server: Arrays) -> Arrays:
        """Return x."""
        return CONTROL.without(server)

    # Client half

    def upload_bits(self, broadcast: Arrays, task: Task, clients: IntArray) -> IntArray | None:
        """Return the size of each client's upload, [C]; None with a codec."""
        if self.codec:
            return None
        if self._sends_control:
            return dense_bits(broadcast, task, clients)
        return with_bits(dense_bits(self.final(broadcast), task, clients), COUNT_BITS)

    def local_calls(self, broadcast: Arrays, chunk: Chunk, task: Task) -> list[LocalCall]:
        """Train from x with c - c_u added to every gradient: lines 7 to 10."""
        server_controls, controls = CONTROL.of(broadcast), CONTROL.of(chunk.state)
        corrections = {name: server_controls[name] - controls[name] for name in server_controls}
        terms = LocalTerms(correction=corrections, start_gradient=self.control == "gradient")
        return [LocalCall(self.final(broadcast), chunk, task, terms)]

    def message(self, broadcast: Arrays, chunk: Chunk, task: Task, updates: LocalUpdates) -> Message:
        """Send the change of y, with that of c_u or the number of steps, from which it follows."""
        if not self._sends_control:
            return Message(updates.changes, {"steps": updates.steps})
        return Message({**updates.changes, **CONTROL.add(self._controls(broadcast, chunk, task, updates))})

    def contribution(self, broadcast: Arrays, chunk: Chunk, task: Task, arrived: Arrived) -> Contribution:
        """Return the changes of y and of c_u, which moves as the server knows it."""
        moved, sent = CONTROL.without(arrived.tensors), CONTROL.of(arrived.tensors)
        if not self._sends_control:
            sent = self._controls(broadcast, chunk, task, replace(arrived.updates, changes=moved))
        weight = tensor_weights("equal", task, chunk)
        of_all = dict.fromkeys(CONTROL.add(sent), weight / task.data.n_clients)
        state = {
            name: where_client(arrived.delivered, before + sent[name], before)
            for name, before in CONTROL.of(chunk.state).items()
        }
        return Contribution({**moved, **CONTROL.add(sent)}, weight, of_all, state=CONTROL.add(state))

    def _controls(self, broadcast: Arrays, chunk: Chunk, task: Task, updates: LocalUpdates) -> dict[str, NDArray[Any]]:
        """Return the change of each client's c_u, [C, ...]: line 12."""
        if self.control == "gradient":
            held = CONTROL.of(chunk.state)
            return {name: updates.start_gradient[name] - held[name] for name in updates.changes}
        travelled = np.maximum(updates.steps, 1) * updates.mean_rates(task.training.learning_rate)
        controls = CONTROL.of(broadcast)
        return {
            name: -controls[name] - (change.T / travelled.astype(change.dtype)).T
            for name, change in updates.changes.items()
        }
