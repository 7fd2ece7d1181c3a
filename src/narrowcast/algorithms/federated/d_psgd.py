"""D-PSGD: clients take local steps and average their models with those of their neighbours.

Reference: Lian et al., Can Decentralized Algorithms Outperform Centralized Algorithms?, NeurIPS 2017
(arXiv:1705.09056), Algorithm 1. Letters: x_i the model of client i, y_i what its local steps make of it, W the weights.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
from pydantic import Field

from narrowcast.algorithms.client.uploads import Message
from narrowcast.algorithms.federated.gossip import MODELS, Exchange, Gossip
from narrowcast.algorithms.federated.topology import mixed
from narrowcast.platform.contracts import Task
from narrowcast.platform.types import Arrays, Chunk, LocalUpdates


class DPSGD(Gossip):
    """x_i <- sum_j w_ij y_j, or x_i <- sum_j w_ij x_j + (y_i - x_i).

    With a codec neighbours mix what they decode, and a client its own model as it is. That is the simple way, which
    loses the mean of the models and does not come to rest; `choco_sgd` does.

    Differs from the paper: 1. clients may take several local steps; the paper's take one, on one sample. 2. the paper
    mixes first; both orders are there, and its gradient is at x_i in both.
    """

    kind: Literal["d_psgd"] = "d_psgd"
    order: Literal["step_then_mix", "mix_then_step"] = Field(
        "step_then_mix", description="clients mix what their local steps have made, or add the steps to what they mix"
    )

    def message(self, broadcast: Arrays, chunk: Chunk, task: Task, updates: LocalUpdates) -> Message:
        """Return y_i, or x_i, of each client."""
        models = self.personal(broadcast, chunk, task)
        if self.order == "step_then_mix":
            models = {name: values + updates.changes[name] for name, values in models.items()}
        return Message(models)

    def mixed_models(self, exchange: Exchange, server: Arrays) -> tuple[Arrays, Arrays]:
        """Return the mixture of the messages, with each client's own as it is."""
        weights, after = exchange.mixing.among(exchange.clients), {}
        for name, values in MODELS.of(server).items():
            held = exchange.stepped(name) if self.order == "step_then_mix" else exchange.models[name]
            mixture = mixed(weights, exchange.sent[name])
            if self.codec:
                own = weights.diagonal().reshape(-1, *[1] * (values.ndim - 1))
                mixture += own * (held.astype(np.float64) - exchange.sent[name])
            if self.order == "mix_then_step":
                mixture += exchange.changes[name]
            after[name] = mixture.astype(values.dtype)
        return after, {}
