"""FedAvg without a server: clients serve in turn, or add their changes up around a ring.

Letters: n clients of a round, x the model that all of them have, y_u client u's after its local steps, w_u its weight.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from narrowcast.algorithms.client.client_pass import Arrived, Contribution
from narrowcast.algorithms.client.sums import CLIENT, TENSORS, WEIGHT, each_in_order
from narrowcast.algorithms.codecs.messages import dense_wire_bits
from narrowcast.algorithms.codecs.wire import dtype_of
from narrowcast.algorithms.federated.downloads import DOWNLOAD
from narrowcast.algorithms.federated.fedavg import Averaging, model_of
from narrowcast.algorithms.federated.server_optimizer import SERVER_ONLY
from narrowcast.platform.contracts import Broadcast, Recipients, Task
from narrowcast.platform.errors import UserError
from narrowcast.platform.models.neural_network import NeuralNetwork
from narrowcast.platform.seeds import generator
from narrowcast.platform.traits import Traits
from narrowcast.platform.types import Arrays, Chunk, IntArray

_STATE_BITS = DOWNLOAD.name("state_bits")
"""The size of x and of what a server optimizer remembers, of which a new server needs both."""


class ServerFree(Averaging):
    """FedAvg's step, made by one of the clients or by all of them around a ring.

    `exchange: elected`: a client of the cohort is its server for one round. It is sent x and the optimizer's state by
    the server of the round before, sends x to the others, and adds up their uploads; its own costs nothing. x is that
    of `fedavg` bit for bit. The next server is sent x even if it is the same client.

    `exchange: ring`: clients divide the weighted sum into n segments. In n - 1 steps each sends a segment to the next
    client, which adds its own part; in n - 1 more the finished segments go round. All then have the sum, and make the
    step by themselves. A client sends 2 (n - 1) / n of the values of its change and its weight. x is that of `fedavg`
    but for the order of the additions. A client that was not in the round before is sent x by the one before it.

    Clients whose upload is lost are left out of the sum; who serves, and the order of the ring, follow from the cohort
    alone. A client that is elected and whose own upload is lost serves all the same.

    Reference: for the ring Patarasuk and Yuan, Bandwidth Optimal All-reduce Algorithms for Clusters of Workstations,
    Journal of Parallel and Distributed Computing 2009.
    """

    kind: Literal["server_free"] = "server_free"
    exchange: Literal["elected", "ring"] = Field(
        "elected", description="who adds the changes up: a client that serves for one round, or all around a ring"
    )
    election: Literal["in_turn", "drawn"] = Field(
        "in_turn", description="how a server is elected: the next client of the cohort, or one by the public seed"
    )
    transmission: Literal["broadcast", "unicast"] = Field(
        "unicast", description="an elected server sends the model once for all clients, or once to each"
    )

    @model_validator(mode="after")
    def _ring_has_nobody_who_sees_all(self) -> Self:
        held = {"codec": self.codec, "aggregator": self.aggregator, "download": self.download}
        if self.exchange == "ring" and (given := [name for name, value in held.items() if value]):
            raise ValueError(
                f"exchange = ring adds changes up on their way, without anybody for {given[0]}; leave it out, or use "
                "exchange = elected"
            )
        if self.download is not None and self.download.history:
            raise ValueError("download.history is kept by one server; leave it out")
        return self

    @property
    def traits(self) -> Traits:
        """Clients train whole models by plain steps, and what each receives depends on its part in the exchange."""
        return replace(super().traits, downloads="by_client", mean_unless=self.unlike_mean)

    def check(self, task: Task) -> None:
        """Raise `UserError` for models other than networks."""
        super().check(task)
        if not isinstance(task.model, NeuralNetwork):
            raise UserError(f"algorithm.kind = {self.kind} trains networks, not {task.model.kind}")

    # The exchange

    def broadcast(self, server: Arrays, task: Task, round_index: int) -> Broadcast:
        """Send x, with the size of all that a new server is sent."""
        sent = super().broadcast(server, task, round_index)
        model = model_of(server)
        values = sum(values.size for values in (*model.values(), *SERVER_ONLY.of(server).values()))
        bits = np.array(dense_wire_bits(values, dtype_of(model)))
        return replace(sent, arrays={**sent.arrays, _STATE_BITS: bits})

    def download_bits(
        self, server: Arrays, broadcast: Broadcast, task: Task, recipients: Recipients
    ) -> IntArray | None:
        """Return what each client lacks of x, [C]; around a ring those of the round before have it."""
        if self.exchange == "elected":
            return super().download_bits(server, broadcast, task, recipients)
        lacks = (recipients.last_round == 0) | (recipients.last_round < recipients.round_index - 1)
        return np.where(lacks, int(broadcast.arrays[_STATE_BITS]), 0)

    def exchanged_bits(
        self, broadcast: Arrays, task: Task, round_index: int, uploads: IntArray, downloads: IntArray
    ) -> tuple[IntArray, IntArray]:
        """Return the bits that each client of a cohort sends and receives, [C] each."""
        if not len(uploads):
            return uploads, downloads
        if self.exchange == "ring":
            return _around_ring(broadcast, round_index, uploads, downloads)
        state_bits, sent, received = int(broadcast[_STATE_BITS]), uploads.copy(), downloads.copy()
        server = self.server(len(uploads), task.seed, round_index)
        sent[server] = received[server] = 0
        models = received.sum() if self.transmission == "unicast" else received.max()
        sent[server], received[server] = models + state_bits, sent.sum() + state_bits
        return sent, received

    def server(self, n_clients: int, seed: int, round_index: int) -> int:
        """Return the place in the cohort, in ascending order, of the client that serves in a round."""
        if self.election == "in_turn":
            return (round_index - 1) % n_clients
        return int(generator(seed, "elected server", round_index).integers(n_clients))

    def elected_server(self, task: Task, cohort: IntArray, round_index: int) -> int | None:
        """Return the client that serves; None around a ring."""
        if self.exchange == "ring" or not len(cohort):
            return None
        return int(cohort[self.server(len(cohort), task.seed, round_index)])

    # The sum

    @property
    def sums_up(self) -> bool:
        """Return whether the changes are added up in the order of the chunks: not around a ring."""
        return super().sums_up and self.exchange == "elected"

    def contribution(self, broadcast: Arrays, chunk: Chunk, task: Task, arrived: Arrived) -> Contribution:
        """Return y_u - x, with w_u, and whose it is if the order matters."""
        contribution = super().contribution(broadcast, chunk, task, arrived)
        return contribution if self.exchange == "elected" else replace(contribution, each={CLIENT: chunk.clients})

    def mean_change(self, server: Arrays, total: Arrays, task: Task, round_index: int) -> Arrays | None:
        """Return the weighted mean, or the aggregate, of the changes; None if no client delivered."""
        if self.exchange == "elected":
            return super().mean_change(server, total, task, round_index)
        each = each_in_order(total)
        weights, changes = each[WEIGHT][:, np.newaxis], TENSORS.of(each)
        if not weights.any():
            return None
        names = sorted(changes)
        flat = [weights * changes[name].reshape(len(weights), -1) for name in names]
        total_and_weight = ring_sum(np.concatenate([*flat, weights], axis=1).astype(dtype_of(changes)))
        ends = np.cumsum([values.shape[1] for values in flat])
        mean = np.split(total_and_weight[:-1] / total_and_weight[-1], ends[:-1])
        return {name: part.reshape(changes[name].shape[1:]) for name, part in zip(names, mean, strict=True)}

    # What has no meaning without a server

    def weighted_by_staleness(self, partial: Arrays, factor: float) -> None:
        """Return None: a round has a server, or a ring, of its own."""
        del partial, factor

    def sum_layout(self, task: Task, cohort: int) -> None:
        """Return None: the keys of secure sums are kept by one server."""
        del task, cohort


def ring_sum(parts: NDArray[Any]) -> NDArray[Any]:
    """Return the sum of the rows of [n, values], added up as around a ring: segment k from client k on."""
    n_clients, segments = len(parts), []
    for first, columns in enumerate(np.array_split(np.arange(parts.shape[1]), n_clients)):
        total = parts[first][columns]
        for hop in range(1, n_clients):
            total = total + parts[(first + hop) % n_clients][columns]
        segments.append(total)
    return np.concatenate(segments)


def _around_ring(
    broadcast: Arrays, round_index: int, uploads: IntArray, downloads: IntArray
) -> tuple[IntArray, IntArray]:
    """Return the bits that each client sends and receives around a ring of those that have something to send."""
    sent, received, members = np.zeros_like(uploads), downloads.copy(), np.flatnonzero(uploads)
    model = model_of(broadcast)
    values, n_members = sum(tensor.size for tensor in model.values()) + 1, max(len(members), 1)
    sizes = values // n_members + (np.arange(n_members) < values % n_members)
    messages = np.where(sizes > 0, dense_wire_bits(sizes, dtype_of(model)), 0)
    # a client sends all segments but the next one while they are summed, and all but that after it when they are done
    sent[members] = (2 * messages.sum() - np.roll(messages, -1) - np.roll(messages, -2))[: len(members)]
    received[members] += np.roll(sent[members], 1)
    if round_index > 1:
        sent += np.roll(downloads, -1)
    return sent, received
