"""DCD-PSGD: clients send coded differences of their models, and each moves its own by what its neighbours decode.

Reference: Tang et al., Communication Compression for Decentralized Training, NeurIPS 2018 (arXiv:1803.06443), Algorithm
1. Letters: x_i the model of client i, y_i what its local steps make of it, W the weights, Q the codec.
"""

from __future__ import annotations

from typing import Literal

from narrowcast.algorithms.client.uploads import Message
from narrowcast.algorithms.federated.gossip import MODELS, Copying, Exchange
from narrowcast.algorithms.federated.topology import mixed
from narrowcast.platform.contracts import Task
from narrowcast.platform.types import Arrays, Chunk, LocalUpdates


class DCDPSGD(Copying):
    """q_i = Q(sum_j w_ij x_j + (y_i - x_i) - x_i); x_i += q_i.

    A client's neighbours add the same q_i to the copies of its model, which are x_i itself. What Q leaves out is in no
    later message, and the errors of Q do not shrink as the models agree: with a coarse codec the models diverge, where
    those of `choco_sgd` converge. Without a codec it is `d_psgd` that mixes first.

    Differs from the paper: 1. clients may take several local steps.
    """

    kind: Literal["dcd_psgd"] = "dcd_psgd"

    def message(self, broadcast: Arrays, chunk: Chunk, task: Task, updates: LocalUpdates) -> Message:
        """Return the difference of each client's next model to x_i."""
        weights = self._mixing(task, chunk.round_index).weights[chunk.clients]
        return Message(
            {
                name: (mixed(weights, values) + updates.changes[name] - values[chunk.clients]).astype(values.dtype)
                for name, values in MODELS.of(broadcast).items()
            }
        )

    def mixed_models(self, exchange: Exchange, server: Arrays) -> tuple[Arrays, Arrays]:
        """Move the models by the messages."""
        del server
        return {name: values + exchange.sent[name] for name, values in exchange.models.items()}, {}
