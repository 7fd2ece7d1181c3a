"""Push-sum: stochastic gradient push over links of one direction, and over links that lose messages.

Reference: Assran, Loizou, Ballas and Rabbat, Stochastic Gradient Push for Distributed Deep Learning, ICML 2019
(arXiv:1811.10792), Algorithm 1; Hadjicostis, Vaidya and Dominguez-Garcia, Robust Distributed Average Consensus via
Exchange of Running Sums, IEEE Transactions on Automatic Control 2016, for lost messages. Letters: U clients, A arcs,
that is links in one direction, x_i the mass of client i, w_i its weight, z_i = x_i / w_i its model, d_i its receivers.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from narrowcast.algorithms.client.uploads import Message
from narrowcast.algorithms.federated.gossip import MODELS, Exchange, LastingLinks
from narrowcast.algorithms.federated.topology import Mixing, Topology, push_weights, slowest_rates
from narrowcast.platform.contracts import Broadcast, Task
from narrowcast.platform.seeds import generator
from narrowcast.platform.types import Arrays, BoolArray, Chunk, FloatArray, IntArray, LocalUpdates, PrefixedArrays

if TYPE_CHECKING:
    from scipy.sparse import csr_array

MASSES = PrefixedArrays("masses/")
"""x_i of all clients, [U, ...] each."""
IN_FLIGHT = PrefixedArrays("in flight/")
"""The parts that were sent over each arc and have not arrived, [A, ...] each."""
WEIGHTS, WEIGHTS_IN_FLIGHT = "push weights", IN_FLIGHT.name("push weights")
"""w_i of all clients, [U], and what of them has not arrived, [A]."""


@dataclass(frozen=True)
class Pushes(Mixing):
    """The arcs of a round, [A] each, and whether what is sent over each arrives; the weights sum to 1 by column."""

    senders: IntArray
    receivers: IntArray
    arrives: BoolArray

    @cached_property
    def neighbours(self) -> csr_array:
        """The arcs over which messages arrive as ones, [U, U]: a row has the senders that a client hears."""
        from scipy.sparse import coo_array

        ends = self.receivers[self.arrives], self.senders[self.arrives]
        return coo_array((np.ones(len(ends[0]), dtype=np.int64), ends), self.weights.shape).tocsr()

    @cached_property
    def degrees(self) -> IntArray:
        """The number of receivers of each client, [U]."""
        return np.bincount(self.senders, minlength=self.weights.shape[0])


class PushSum(LastingLinks):
    """x_i and w_i are divided by 1 + d_i; each receiver adds a part to its own; z_i = x_i / w_i.

    Local steps start at z_i, and their change is added to x_i. Columns of the weights sum to 1, rows need not: a client
    knows to how many it sends, not who else does. The sum of all x_i stays, with that of what is in flight.

    A client sends the running sums of its parts, so that a later message makes up for one that was lost: nobody tells
    the sender. What was sent over an arc since the last message that arrived is in flight, and is kept here in place of
    the two running sums of which it is the difference.

    With a codec a client keeps what its receivers do not decode; the weight is sent as it is.

    Differs from the paper: 1. clients may take several local steps. 2. a round is a step of all clients, without delay.
    """

    kind: Literal["push_sum"] = "push_sum"
    message_loss: float = Field(
        0.0, ge=0, lt=1, description="probability that one receiver does not get a message, of which nobody tells"
    )
    directed_links: ClassVar[bool] = True

    def init(self, task: Task) -> Arrays:
        """Return the models of all clients as masses of weight 1, and nothing in flight."""
        server, arcs = super().init(task), len(self._mixing(task, 1).senders)
        models = MODELS.of(server)
        none = {name: np.zeros((arcs, *values.shape[1:]), dtype=values.dtype) for name, values in models.items()}
        weights = {WEIGHTS: np.ones(task.data.n_clients), WEIGHTS_IN_FLIGHT: np.zeros(arcs)}
        return {**server, **MASSES.add(models), **IN_FLIGHT.add(none), **weights}

    def broadcast(self, server: Arrays, task: Task, round_index: int) -> Broadcast:
        """Give each client its model, its mass and the number of its receivers."""
        return super().broadcast(IN_FLIGHT.without(server), task, round_index)

    def message(self, broadcast: Arrays, chunk: Chunk, task: Task, updates: LocalUpdates) -> Message:
        """Return the part of each client's mass that every receiver is sent, and that of its weight."""
        del task
        parts = 1.0 / (1.0 + self.receivers(broadcast)[chunk.clients])
        masses = MASSES.of(broadcast)
        tensors = {
            name: _times(parts, values[chunk.clients] + updates.changes[name]).astype(values.dtype)
            for name, values in masses.items()
        }
        return Message(tensors, numbers={"weight": parts * broadcast[WEIGHTS][chunk.clients]})

    def message_bits(self, broadcast: Arrays) -> int:
        """Return the size of a mass, and of a weight beside it."""
        values: NDArray[np.floating] = next(iter(MASSES.of(broadcast).values()))
        return super().message_bits(broadcast) + 8 * values.dtype.itemsize

    def mixed_models(self, exchange: Exchange, server: Arrays) -> tuple[Arrays, Arrays]:
        """Move the parts from senders to receivers, or to what is in flight."""
        pushes, clients, weights = exchange.mixing, exchange.clients, server[WEIGHTS].copy()
        assert isinstance(pushes, Pushes), "_mixing() made it"
        moves, receivers = _Moves.of(pushes, clients), pushes.degrees[clients]
        sent_weights = weights[clients] / (1.0 + receivers)
        weights[clients] -= receivers * sent_weights
        weights, in_flight = moves.made(weights, server[WEIGHTS_IN_FLIGHT], sent_weights)
        after, kept = {}, {WEIGHTS: weights, WEIGHTS_IN_FLIGHT: in_flight}
        for name, values in MASSES.of(server).items():
            masses, sent = values.copy(), exchange.sent[name]
            masses[clients] += exchange.changes[name] - _times(receivers, sent)
            masses, in_flight = moves.made(masses, server[IN_FLIGHT.name(name)], sent)
            kept |= {MASSES.name(name): masses, IN_FLIGHT.name(name): in_flight}
            after[name] = _times(1.0 / weights[clients], masses[clients]).astype(values.dtype)
        return after, kept

    def final(self, server: Arrays) -> Arrays:
        """Return the mean of all masses, with what is in flight."""
        n_clients = len(server[WEIGHTS])
        return {
            name: (
                (values.sum(axis=0, dtype=np.float64) + server[IN_FLIGHT.name(name)].sum(axis=0, dtype=np.float64))
                / n_clients
            ).astype(values.dtype)
            for name, values in MASSES.of(server).items()
        }

    def _mixing(self, task: Task, round_index: int) -> Pushes:
        arcs, weights, slowest = _arcs(self.topology, task.data.n_clients, task.seed, self.topology.stamp)
        lost = generator(task.seed, "message losses", round_index).random(len(arcs)) < self.message_loss
        return Pushes(weights, arcs[:, 0], arcs[:, 1], ~lost, slowest=slowest)


@lru_cache(maxsize=4)
def _arcs(
    topology: Topology, n_clients: int, seed: int, stamp: tuple[int, ...]
) -> tuple[IntArray, csr_array, FloatArray | None]:
    """Return the arcs of all rounds, their weights, and the rate of each client's slowest one; they are read only."""
    del stamp  # see topology.mixing
    arcs = topology.arcs(n_clients, 1, seed)
    return arcs, push_weights(arcs, n_clients), slowest_rates(topology, arcs, n_clients, seed)


@dataclass(frozen=True)
class _Moves:
    """Which arcs were sent over [A], by whom, as places among the clients of a round, and over which it arrived [A]."""

    sent: BoolArray
    places: IntArray
    arrived: BoolArray
    receivers: IntArray

    @classmethod
    def of(cls, pushes: Pushes, clients: IntArray) -> _Moves:
        """Return the moves of a round in which these clients took part."""
        place = np.full(pushes.weights.shape[0], -1)
        place[clients] = np.arange(len(clients))
        sent = place[pushes.senders] >= 0
        arrived = sent & pushes.arrives & (place[pushes.receivers] >= 0)
        return cls(sent, place[pushes.senders[sent]], arrived, pushes.receivers[arrived])

    def made(
        self, held: NDArray[np.floating], in_flight: NDArray[np.floating], parts: NDArray[np.floating]
    ) -> tuple[NDArray[np.floating], NDArray[np.floating]]:
        """Return what clients hold [U, ...], and what is in flight [A, ...], after each sent its part [k, ...]."""
        in_flight = in_flight.copy()
        in_flight[self.sent] += parts[self.places]
        np.add.at(held, self.receivers, in_flight[self.arrived])
        in_flight[self.arrived] = 0
        return held, in_flight


def _times(factors: NDArray[Any], values: NDArray[np.floating]) -> NDArray[np.floating]:
    """Return the values of each client [k, ...] times its factor [k]."""
    return np.asarray(factors.reshape(-1, *[1] * (values.ndim - 1)) * values)
