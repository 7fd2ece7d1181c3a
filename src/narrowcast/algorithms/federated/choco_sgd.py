"""CHOCO-SGD: clients send coded differences to estimates of their models, which their neighbours keep too.

Reference: Koloskova, Stich and Jaggi, Decentralized Stochastic Optimization and Gossip Algorithms with Compressed
Communication, ICML 2019 (arXiv:1902.00340), Algorithm 2. Letters: x_i the model of client i, y_i what its local steps
make of it, e_i its estimate (x hat in the paper), W the weights, Q the codec.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from narrowcast.algorithms.client.uploads import Message
from narrowcast.algorithms.federated.gossip import MODELS, Copying, Exchange
from narrowcast.algorithms.federated.topology import mixed
from narrowcast.platform.contracts import Task
from narrowcast.platform.types import Arrays, Chunk, LocalUpdates, PrefixedArrays

ESTIMATES = PrefixedArrays("estimates/")
"""The estimates of the clients' models, [U, ...] each, as sender and neighbours hold them."""


class ChocoSGD(Copying):
    """q_i = Q(y_i - e_i); e_i += q_i; x_i <- y_i + gamma sum_j w_ij (e_j - e_i).

    The mean of the models stays what the local steps make it, whatever Q leaves out: the differences to the estimates
    are sent in later rounds. A client and its neighbours add the same q_i, so that all hold the same e_i; of a message
    that is lost none of them adds any. Without a codec and with `gamma: 1` it is D-PSGD that steps and then mixes.

    e_i begins as the model that all clients begin with, which takes no message; the code released for deep learning
    begins with 0. That for convex problems mixes the estimates of the round before.

    Differs from the paper: 1. clients may take several local steps.
    """

    kind: Literal["choco_sgd"] = "choco_sgd"
    gamma: float = Field(
        1.0, gt=0, le=1, description="step size of the mixing; the coarser the codec, the smaller it has to be"
    )

    def init(self, task: Task) -> Arrays:
        """Return the models of all clients, and their estimates: the same model for each."""
        server = super().init(task)
        return {**server, **ESTIMATES.add(MODELS.of(server))}

    def message(self, broadcast: Arrays, chunk: Chunk, task: Task, updates: LocalUpdates) -> Message:
        """Return y_i - e_i of each client."""
        models, estimates = self.personal(broadcast, chunk, task), ESTIMATES.of(broadcast)
        return Message({name: models[name] + updates.changes[name] - estimates[name][chunk.clients] for name in models})

    def mixed_models(self, exchange: Exchange, server: Arrays) -> tuple[Arrays, Arrays]:
        """Move the estimates by the messages, and the models towards the estimates of their neighbours."""
        weights, after = exchange.mixing.among(exchange.clients), {}
        estimates = ESTIMATES.of(server)
        for name, values in estimates.items():
            moved = values[exchange.clients] + exchange.sent[name]
            towards = mixed(weights, moved) - moved
            after[name] = (exchange.stepped(name) + self.gamma * towards).astype(values.dtype)
            estimates[name] = values.copy()
            estimates[name][exchange.clients] = moved
        return after, ESTIMATES.add(estimates)
