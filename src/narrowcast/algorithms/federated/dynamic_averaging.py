"""Dynamic averaging: a client sends its model only if that has moved far enough from the last one that all shared.

Reference: Kamp, Adilova, Sicking, Hueger, Schlicht, Wirtz and Wrobel, Efficient Decentralized Deep Learning by Dynamic
Model Averaging, ECML PKDD 2018 (arXiv:1807.03210), Algorithm 1, and Algorithm 2 for clients of unequal weights.
Letters: U clients, k those of a round, x_i the model of client i, y_i what its local steps make of it, r the reference,
d_i = y_i - r, w_i weights, B the clients whose models are averaged.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from narrowcast.algorithms.client.client_pass import Arrived, ClientPass, Contribution
from narrowcast.algorithms.client.sums import CLIENT, TensorSum, Weights, each_in_order, tensor_weights, weighted_sums
from narrowcast.algorithms.client.uploads import Message, Uploads
from narrowcast.algorithms.codecs.messages import DensePayload, dense_wire_bits
from narrowcast.algorithms.codecs.wire import dtype_of
from narrowcast.algorithms.federated.gossip import MODELS, consensus_error
from narrowcast.platform.contracts import Broadcast, LocalCall, Recipients, Task
from narrowcast.platform.errors import UserError
from narrowcast.platform.models.neural_network import NeuralNetwork
from narrowcast.platform.seeds import generator
from narrowcast.platform.traits import Traits
from narrowcast.platform.types import (
    Arrays,
    BoolArray,
    Chunk,
    FloatArray,
    IntArray,
    LocalTerms,
    LocalUpdates,
    PrefixedArrays,
)

SILENCE_BITS = 1
"""The size of the message of a client that keeps its model to itself."""
REFERENCE = PrefixedArrays("reference/")
"""r, the model that all clients of a round shared last."""
_WEIGHTS, _VIOLATIONS, _AVERAGED = "weights", "violations", "averaged_clients"
_UNHEARD = "unheard_models"
"""The models that each client has to download when it takes part next, its own after an average and r, [U, 2]."""
_REQUESTED = "requested_bits"
_DIVERGED, _WEIGHT, _BITS = "diverged", "weight", "bits"
_DIVERGENCE = PrefixedArrays("divergence/")


@dataclass(frozen=True)
class Arrivals:
    """The k clients of a round whose messages arrived, silence included, in ascending order.

    Shapes: clients [k]; divergences d_i [k, ...]; diverged [k], who sent its model by itself; weights [k]; bits [k],
    the size of a model if the client may send it on request, 0 if not. `total` is the sum over those that diverged.
    """

    clients: IntArray
    divergences: Arrays
    diverged: BoolArray
    weights: FloatArray
    bits: IntArray
    total: TensorSum

    @classmethod
    def of(cls, total: Arrays) -> Arrivals:
        """Read them from the sum of a round."""
        each = each_in_order(total)
        clients, diverged, weights, bits = (each[name] for name in (CLIENT, _DIVERGED, _WEIGHT, _BITS))
        return cls(clients, _DIVERGENCE.of(each), diverged, weights, bits, TensorSum.of(total))

    def with_client(self, total: TensorSum, index: int) -> TensorSum:
        """Return a sum with the model of one more client."""
        one, weight = slice(index, index + 1), self.weights[index : index + 1]
        more = weighted_sums({name: values[one] for name, values in self.divergences.items()}, weight)
        tensors = {name: values + more[name] for name, values in total.tensors.items()}
        return TensorSum(tensors, np.asarray(total.weight + weight[0]))


def squared_norm(tensors: Arrays) -> float:
    """Return the squared L2 norm of all tensors together."""
    return sum(float(np.square(values, dtype=np.float64).sum()) for values in tensors.values())


class DynamicAveraging(ClientPass):
    """Clients train models of their own; those with ||y_i - r||^2 > threshold send them, and the others one bit.

    The server averages the models that it is sent, B. While their mean is itself farther than the threshold from r, it
    asks a client more, drawn by the seed, until the mean is near or B has all clients of the round. The clients of B
    go on from the mean, the others from their own models; if B has all, the mean is the next r. Once there have been as
    many violations as a round has clients, B has all. A weighted mean in place of some models leaves the weighted mean
    of all as it is.

    The state has the model of every client; there is no model of the server. The global model is the mean of the
    models, which nobody has; `evaluate_clients` measures each client's own. All clients begin with the same model. With
    `threshold: 0` and all clients in every round it is FedAvg, and with a huge one it is `local`.

    A client whose message is lost, or exceeds its budget, takes no part in the round: its model stays as it is. So it
    is with clients that are not sampled, or have no examples. They keep their models when the others change r.

    Bits: a model as FedAvg sends it, by itself or on request, or one bit. A client that may not send a model within its
    budget is not asked. A request is not counted, as an invitation is not; models on request are sent at the same time
    after all others, and no deadline bounds them. A mean is downloaded when a client takes part next, and so is an r
    that became another without it. Columns: `averaged_clients`, the size of B, and `consensus_error`, the mean of
    ||x_i - mean||^2.

    Differs from the paper: 1. it checks the threshold every b mini-batches, here after a round's local steps. 2. its m
    clients take part in all rounds; here m are those of the round. 3. it waits for the number of violations to be m,
    here for m or more: several in one round may pass m. 4. it leaves open how B grows; here by one client, drawn with
    equal probabilities.
    """

    kind: Literal["dynamic_averaging"] = "dynamic_averaging"
    threshold: float = Field(
        0.1,
        ge=0,
        allow_inf_nan=False,
        description="Delta, squared L2 distance of a client's model from the reference above which it sends the model",
    )
    weights: Weights = "examples"

    @property
    def traits(self) -> Traits:
        """Clients may send one bit, and download what was averaged with their own models."""
        return replace(super().traits, downloads="by_client", stays_silent=True)

    def check(self, task: Task) -> None:
        """Raise `UserError` for codecs, and for models other than networks."""
        super().check(task)
        if self.codec:
            raise UserError(
                f"algorithm.codec has {self.codec[0].kind}, but {self.kind} averages models as they are, so that their "
                "mean is kept; leave it out, or use choco_sgd"
            )
        if not isinstance(task.model, NeuralNetwork):
            raise UserError(f"algorithm.kind = {self.kind} trains networks, not {task.model.kind}")

    def init(self, task: Task) -> Arrays:
        """Return the models of all clients, the same for each, r, and the clients' weights in means."""
        n_clients, start = task.data.n_clients, task.initial_parameters()
        models = {name: np.repeat(values[np.newaxis], n_clients, axis=0) for name, values in start.items()}
        everyone = Chunk(0, 0, np.arange(n_clients), {})
        return {
            **MODELS.add(models),
            **REFERENCE.add(start),
            _WEIGHTS: tensor_weights(self.weights, task, everyone),
            _VIOLATIONS: np.array(0),
            _UNHEARD: np.zeros((n_clients, 2), dtype=np.int64),
            **_asked_nobody(n_clients),
        }

    def init_clients(self, task: Task) -> Arrays:
        """Return the clients' private parameters."""
        return task.model.init_clients(task.data, task.private_seed.value)

    # Client half

    def local_calls(self, broadcast: Arrays, chunk: Chunk, task: Task) -> list[LocalCall]:
        """Train each client's own model."""
        terms = LocalTerms(start=self.personal(broadcast, chunk, task))
        return [LocalCall(REFERENCE.of(broadcast), chunk, task, terms)]

    def message(self, broadcast: Arrays, chunk: Chunk, task: Task, updates: LocalUpdates) -> Message:
        """Return d_i of each client, which those send that have diverged."""
        reference, models = REFERENCE.of(broadcast), self.personal(broadcast, chunk, task)
        divergences = {name: (models[name] - reference[name]) + updates.changes[name] for name in reference}
        norms = sum(
            np.square(values, dtype=np.float64).reshape(len(values), -1).sum(axis=1) for values in divergences.values()
        )
        # A model that is not finite is sent, paid for and left out, as those of FedAvg are.
        return Message(divergences, sends=~(norms <= self.threshold) & (task.data.examples[chunk.clients] > 0))

    def weights_in_mean(self, chunk: Chunk, task: Task) -> FloatArray:
        """Return w_i, [C]."""
        return tensor_weights(self.weights, task, chunk)

    def contribution(self, broadcast: Arrays, chunk: Chunk, task: Task, arrived: Arrived) -> Contribution:
        """Return d_i, with w_i if the client has diverged, and apart from that d_i of each client."""
        message = self.message(broadcast, chunk, task, arrived.updates)
        weights, diverged = self.weights_in_mean(chunk, task), message.sent(chunk, task)
        bits = _bits_of_models(arrived.tensors, len(weights))
        each = {
            CLIENT: chunk.clients,
            _DIVERGED: diverged,
            _WEIGHT: weights,
            _BITS: np.where(chunk.affords(bits + SILENCE_BITS), bits, 0),
            **_DIVERGENCE.add(arrived.tensors),
        }
        return Contribution(arrived.tensors, np.where(diverged, weights, 0), each=each)

    def contributed(
        self, broadcast: Arrays, chunk: Chunk, task: Task, trained: LocalUpdates
    ) -> tuple[Contribution, Uploads]:
        """Send the models of clients that have diverged, and one bit for each of the others that has examples."""
        contribution, uploads = super().contributed(broadcast, chunk, task, trained)
        silent = ~contribution.each[_DIVERGED] & (task.data.examples[chunk.clients] > 0)
        silent &= chunk.affords(np.full(len(silent), SILENCE_BITS))
        heard = uploads.delivered | (silent & uploads.finite & chunk.arrives())
        return contribution, replace(uploads, bits=np.where(silent, SILENCE_BITS, uploads.bits), delivered=heard)

    def personal(self, broadcast: Arrays, chunk: Chunk, task: Task) -> Arrays:
        """Return x_i of each client, [C, ...]."""
        del task
        return {name: values[chunk.clients] for name, values in MODELS.of(broadcast).items()}

    # Server half

    def broadcast(self, server: Arrays, task: Task, round_index: int) -> Broadcast:
        """Give each client its model, which an average may have made, and r."""
        del task, round_index
        reference = REFERENCE.of(server)
        return Broadcast(
            {**MODELS.add(MODELS.of(server)), **REFERENCE.add(reference)}, DensePayload.of(reference), None
        )

    def download_bits(self, server: Arrays, broadcast: Broadcast, task: Task, recipients: Recipients) -> IntArray:
        """Return the bits of the models that each client has not heard, [C]; newcomers are sent the first, too."""
        del task
        models = server[_UNHEARD][recipients.clients].sum(axis=1) + (recipients.last_round == 0)
        return np.asarray(models * broadcast.full.wire_bits())

    def step(self, server: Arrays, broadcast: Arrays, total: Arrays, task: Task, round_index: int) -> Arrays:
        """Average the models that were sent and those that it asks for."""
        del broadcast
        n_clients, arrivals = len(server[_UNHEARD]), Arrivals.of(total)
        if not len(arrivals.clients):
            return {**server, **_asked_nobody(n_clients)}
        seen, averaged, some = arrivals.diverged.copy(), arrivals.total, bool(arrivals.diverged.any())
        violations = int(server[_VIOLATIONS]) + int(seen.sum())
        everyone = some and violations >= len(seen)
        for index in generator(task.seed, "augmentation", round_index).permutation(len(seen)).tolist():
            if not some or (not everyone and squared_norm(averaged.means()) <= self.threshold):
                break
            if not seen[index] and arrivals.bits[index]:
                averaged, seen[index] = arrivals.with_client(averaged, index), True
        asked = arrivals.clients[seen & ~arrivals.diverged]
        requested = np.zeros(n_clients, dtype=np.int64)
        requested[asked] = arrivals.bits[seen & ~arrivals.diverged]
        unheard: NDArray[np.int64] = server[_UNHEARD].copy()
        if seen.all():
            unheard[:, 1] = 1
        unheard[arrivals.clients] = np.column_stack([seen, np.zeros_like(seen)])
        return {
            **self._moved(server, arrivals, seen, averaged.means()),
            _WEIGHTS: server[_WEIGHTS],
            _VIOLATIONS: np.array(0 if everyone else violations),
            _UNHEARD: unheard,
            _REQUESTED: requested,
            _AVERAGED: np.array(int(seen.sum())),
        }

    def _moved(self, server: Arrays, arrivals: Arrivals, seen: BoolArray, mean: Arrays) -> dict[str, NDArray[Any]]:
        """Return the models after a round in which those of the clients `seen` [k] were averaged, and r."""
        models, reference = MODELS.of(server), REFERENCE.of(server)
        for name, values in models.items():
            shared = reference[name] + mean[name]
            models[name] = values.copy()
            models[name][arrivals.clients] = reference[name] + arrivals.divergences[name]
            models[name][arrivals.clients[seen]] = shared
            if seen.all():
                reference[name] = shared
        return {**MODELS.add(models), **REFERENCE.add(reference)}

    def requested_bits(self, server: Arrays) -> IntArray:
        """Return the size of the models that the server asked for, [U]."""
        return np.asarray(server[_REQUESTED])

    def step_metrics(self, before: Arrays, after: Arrays, total: Arrays, task: Task) -> Mapping[str, float]:
        """Return the number of clients whose models were averaged, and how far the models are from their mean."""
        del before, total, task
        return {
            "averaged_clients": float(after[_AVERAGED]),
            "consensus_error": consensus_error(MODELS.of(after)),
        }

    def final(self, server: Arrays) -> Arrays:
        """Return the weighted mean of all clients' models."""
        weights, reference = server[_WEIGHTS] / server[_WEIGHTS].sum(), REFERENCE.of(server)
        return {
            name: (reference[name] + np.tensordot(weights, values - reference[name], 1)).astype(values.dtype)
            for name, values in MODELS.of(server).items()
        }


def _asked_nobody(n_clients: int) -> Arrays:
    """Return what the state says of a step without an average."""
    return {_REQUESTED: np.zeros(n_clients, dtype=np.int64), _AVERAGED: np.array(0)}


def _bits_of_models(divergences: Arrays, n_clients: int) -> IntArray:
    """Return the size of each client's model, [C]."""
    values = sum(tensor[0].size for tensor in divergences.values())
    return np.full(n_clients, dense_wire_bits(values, dtype_of(divergences)))
