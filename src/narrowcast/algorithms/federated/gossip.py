"""Learning without a server: clients have models of their own, and mix them with those of their neighbours.

Letters: U clients, x_i the model of client i, y_i what its local steps make of it, W the weights of the topology,
lambda_2 the second largest modulus of their eigenvalues.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from narrowcast.algorithms.client.client_pass import Arrived, ClientPass, Contribution
from narrowcast.algorithms.client.sums import CLIENT, each_in_order
from narrowcast.algorithms.client.uploads import Uploads, init_codec_state
from narrowcast.algorithms.codecs.messages import DensePayload, dense_wire_bits
from narrowcast.algorithms.codecs.wire import dtype_of
from narrowcast.algorithms.federated.topology import Mixing, Ring, Topology, mixing
from narrowcast.platform.config.catalog import TOPOLOGIES
from narrowcast.platform.contracts import Broadcast, LocalCall, Recipients, Task
from narrowcast.platform.errors import UserError
from narrowcast.platform.models.neural_network import NeuralNetwork
from narrowcast.platform.traits import Traits
from narrowcast.platform.types import Arrays, Chunk, FloatArray, IntArray, LocalTerms, LocalUpdates, PrefixedArrays

MODELS = PrefixedArrays("models/")
"""The models of all clients, [U, ...] each."""
_UNHEARD = "unheard_bits"
"""The bits that each client's neighbours have sent and that it has not downloaded yet, [U]."""
_NEIGHBOURS = "neighbours"
"""The number of each client's neighbours in a round, [U]."""
_BITS = "bits"
_CHANGES, _SENT = PrefixedArrays("change/"), PrefixedArrays("sent/")


@dataclass(frozen=True)
class Exchange:
    """The k clients that exchanged messages in a round, in ascending order, and what each had and sent.

    Shapes: clients [k]; bits [k], the size of each one's message; models [k, ...], before the round; changes [k, ...],
    by the local steps; sent [k, ...], the messages as neighbours decode them.
    """

    clients: IntArray
    bits: IntArray
    models: Arrays
    changes: Arrays
    sent: Arrays
    mixing: Mixing

    def stepped(self, name: str) -> NDArray[Any]:
        """Return y_i of a tensor, [k, ...]."""
        return np.asarray(self.models[name] + self.changes[name])


class Gossip(ClientPass):
    """Clients train models of their own and send messages to their neighbours, from which all of these mix theirs.

    The state has every client's model; there is no server. The global model is the mean of the models, which nobody has
    during the run; `evaluate_clients` measures each client's own. All clients begin with the same model.

    A client whose message is lost, or exceeds its budget, takes no part in the round: its model stays as it is, and the
    weights of its links go to the other ends. So it is with clients that are not sampled, or have no examples.

    Bits: with `transmission: broadcast` a client sends a message once, with `unicast` once to each neighbour; one
    without a neighbour in a round sends it once. What neighbours sent is downloaded at the start of the next round in
    which a client takes part, and again if that client's own message is lost, which acknowledges it. In its first round
    a client downloads the first model. `consensus_error` is the mean of ||x_i - mean||^2 over all clients.

    Where the topology has rates of its links, a client sends to all neighbours at the same time, and takes as long as
    its slowest link. What it hears has come by then: only the first model takes time to download, by the fleet's rates.

    A subclass says in `message` what clients send, and in `mixed_models` how they mix it.
    """

    topology: Annotated[Topology, TOPOLOGIES] = Field(
        default_factory=Ring, description="links between clients; their messages go over these"
    )
    transmission: Literal["broadcast", "unicast"] = Field(
        "broadcast", description="a message is sent once for all neighbours, or once to each"
    )
    directed_links: ClassVar[bool] = False
    """True for methods that mix over links of one direction."""

    @property
    def traits(self) -> Traits:
        """Each client downloads what its own neighbours send."""
        return replace(super().traits, downloads="by_client", peers=True)

    def check(self, task: Task) -> None:
        """Raise `UserError` for models other than networks, and for a topology that is not connected."""
        super().check(task)
        if not isinstance(task.model, NeuralNetwork):
            raise UserError(f"algorithm.kind = {self._kind} trains networks, not {task.model.kind}")
        if self.topology.directed and not self.directed_links:
            raise UserError(
                f"algorithm.topology.direction = forward: {self._kind} needs the messages of those whom a client sends "
                "its own; use direction = both, or push_sum"
            )
        self.topology.check(task.data.n_clients, task.seed)

    @property
    def _kind(self) -> str:
        return str(vars(self)["kind"])

    def init(self, task: Task) -> Arrays:
        """Return the models of all clients: the same for each."""
        n_clients = task.data.n_clients
        start = {name: np.repeat(x[np.newaxis], n_clients, axis=0) for name, x in task.initial_parameters().items()}
        return {**MODELS.add(start), _UNHEARD: np.zeros(n_clients, dtype=np.int64)}

    def init_clients(self, task: Task) -> Arrays:
        """Return the clients' private parameters, and the codec's state."""
        clients = task.model.init_clients(task.data, task.private_seed.value)
        if not self.codec:
            return clients
        return {**clients, **init_codec_state(self.codec, task.data.n_clients, task.initial_parameters())}

    # Client half

    def local_calls(self, broadcast: Arrays, chunk: Chunk, task: Task) -> list[LocalCall]:
        """Train each client's own model."""
        first = {name: values[0] for name, values in MODELS.of(broadcast).items()}
        return [LocalCall(first, chunk, task, LocalTerms(start=self.personal(broadcast, chunk, task)))]

    def contribution(self, broadcast: Arrays, chunk: Chunk, task: Task, arrived: Arrived) -> Contribution:
        """Return y_i - x_i of each client, and its message as its neighbours decode it."""
        del broadcast, task
        each = {CLIENT: chunk.clients, **_CHANGES.add(arrived.updates.changes), **_SENT.add(arrived.tensors)}
        return Contribution(each=each)

    def contributed(
        self, broadcast: Arrays, chunk: Chunk, task: Task, trained: LocalUpdates
    ) -> tuple[Contribution, Uploads]:
        """Send the messages of clients, each as often as its transmission takes."""
        times = self._times(broadcast, chunk.clients)
        if chunk.budget_bits is not None:
            chunk = replace(chunk, budget_bits=chunk.budget_bits // times)
        contribution, uploads = super().contributed(broadcast, chunk, task, trained)
        each = {**contribution.each, _BITS: uploads.bits}
        return replace(contribution, each=each), replace(uploads, bits=uploads.bits * times)

    def _times(self, broadcast: Arrays, clients: IntArray) -> IntArray:
        """Return how often each client sends its message, [C]."""
        times: IntArray = np.maximum(self.receivers(broadcast)[clients], 1)
        return times if self.transmission == "unicast" else np.ones_like(times)

    def receivers(self, broadcast: Arrays) -> IntArray:
        """Return how many neighbours hear each client's message, [U]."""
        return np.asarray(broadcast[_NEIGHBOURS])

    def sending_rates(self, task: Task, clients: IntArray, round_index: int) -> FloatArray | None:
        """Return the bits per second at which each client sends, [C]: all copies over its slowest link, at one time.

        One without a neighbour sends over its own uplink. None if the topology has no rates of its links.
        """
        mixing = self._mixing(task, round_index)
        if mixing.slowest is None:
            return None
        slowest = mixing.slowest[clients]
        rates = np.where(np.isfinite(slowest), slowest, task.profiles.uplink_bits_per_second[clients])
        return rates * np.maximum(mixing.degrees[clients], 1) if self.transmission == "unicast" else rates

    def message_bits(self, broadcast: Arrays) -> int:
        """Return the size of a message without a codec: that of a model."""
        models = MODELS.of(broadcast)
        return int(dense_wire_bits(sum(values[0].size for values in models.values()), dtype_of(models)))

    def upload_bits(self, broadcast: Arrays, task: Task, clients: IntArray) -> IntArray | None:
        """Return the size of each client's upload, [C]; None with a codec."""
        if self.codec:
            return None
        bits = self.message_bits(broadcast) * self._times(broadcast, clients)
        return np.where(task.data.examples[clients] > 0, bits, 0)

    def personal(self, broadcast: Arrays, chunk: Chunk, task: Task) -> Arrays:
        """Return x_i of each client, [C, ...]."""
        del task
        return {name: values[chunk.clients] for name, values in MODELS.of(broadcast).items()}

    # The network

    def broadcast(self, server: Arrays, task: Task, round_index: int) -> Broadcast:
        """Give each client its model, which its neighbours' messages have made, and the number of its neighbours."""
        degrees = self._mixing(task, round_index).degrees
        whole = DensePayload.of({name: values[0] for name, values in MODELS.of(server).items()})
        arrays = {name: values for name, values in server.items() if name != _UNHEARD}
        return Broadcast({**arrays, _NEIGHBOURS: degrees}, whole, None)

    def download_bits(self, server: Arrays, broadcast: Broadcast, task: Task, recipients: Recipients) -> IntArray:
        """Return the bits that each client's neighbours have sent since it last heard them, [C].

        They are at most a whole message of each neighbour. Newcomers are sent the first model.
        """
        del task
        most = self.receivers(broadcast.arrays)[recipients.clients] * self.message_bits(broadcast.arrays)
        unheard: IntArray = np.minimum(server[_UNHEARD][recipients.clients], most)
        return unheard + np.where(recipients.last_round == 0, broadcast.full.wire_bits(), 0)

    def step(self, server: Arrays, broadcast: Arrays, total: Arrays, task: Task, round_index: int) -> Arrays:
        """Mix the models of the clients that delivered; return the state as it is if none did."""
        del broadcast
        each = each_in_order(total)
        clients = each[CLIENT]
        if not len(clients):
            return server
        models = MODELS.of(server)
        exchange = Exchange(
            clients,
            each[_BITS],
            {name: values[clients] for name, values in models.items()},
            _CHANGES.of(each),
            _SENT.of(each),
            self._mixing(task, round_index),
        )
        after, kept = self.mixed_models(exchange, server)
        for name, values in models.items():
            models[name] = values.copy()
            models[name][clients] = after[name]
        return {**server, **MODELS.add(models), **kept, _UNHEARD: self.unheard(server[_UNHEARD], exchange)}

    def _mixing(self, task: Task, round_index: int) -> Mixing:
        return mixing(self.topology, task.data.n_clients, round_index, task.seed)

    @abstractmethod
    def mixed_models(self, exchange: Exchange, server: Arrays) -> tuple[Arrays, Arrays]:
        """Return x_i of the clients of an exchange after it, [k, ...], and what else the next state has."""

    def unheard(self, before: IntArray, exchange: Exchange) -> IntArray:
        """Return the bits that each client has to download after an exchange, [U]: of its messages, if it took part."""
        after = before.copy()
        after[exchange.clients] = heard_bits(exchange)[exchange.clients]
        return after

    def step_metrics(self, before: Arrays, after: Arrays, total: Arrays, task: Task) -> Mapping[str, float]:
        """Return the mean squared distance of the clients' models to their mean."""
        del before, total, task
        return {"consensus_error": consensus_error(MODELS.of(after))}

    def final(self, server: Arrays) -> Arrays:
        """Return the mean of the models."""
        return {
            name: values.mean(axis=0, dtype=np.float64).astype(values.dtype)
            for name, values in MODELS.of(server).items()
        }


def consensus_error(models: Arrays) -> float:
    """Return the mean squared distance of models [U, ...] to their mean."""
    return sum(
        float(np.square(values - values.mean(axis=0, dtype=np.float64)).sum() / len(values))
        for values in models.values()
    )


def heard_bits(exchange: Exchange) -> IntArray:
    """Return the bits that each client's neighbours sent in an exchange, [U]."""
    sent = np.zeros(exchange.mixing.weights.shape[0], dtype=np.int64)
    sent[exchange.clients] = exchange.bits
    heard: IntArray = exchange.mixing.neighbours @ sent
    return heard


class LastingLinks(Gossip):
    """Gossip over links that stay, since clients keep what was sent over each."""

    def check(self, task: Task) -> None:
        """Raise `UserError` if the links change."""
        super().check(task)
        if self.topology.rounds_to_connect > 1:
            raise UserError(
                f"algorithm.topology = {self.topology.kind} has other links in each round, and clients of "  # type: ignore[attr-defined]
                f"{self._kind} keep what was sent over each; use a topology whose links stay, or d_psgd"
            )


class Copying(LastingLinks):
    """Gossip whose clients keep copies that all messages of a neighbour make up."""

    def unheard(self, before: IntArray, exchange: Exchange) -> IntArray:
        """Return the bits that each client has to download after an exchange, [U]: all since it last took part."""
        missed = before.copy()
        missed[exchange.clients] = 0
        return np.asarray(missed + heard_bits(exchange))
