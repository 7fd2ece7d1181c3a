"""Gossip: every client has a model; those of a round train theirs, and average it with their neighbours on a ring.

Reference: Lian et al., Can Decentralized Algorithms Outperform Centralized Algorithms?, NeurIPS 2017
(arXiv:1705.09056), with several local steps before a doubly stochastic mixing, which keeps the mean of all models.
"""

from dataclasses import replace
from typing import Literal

import numpy as np
from pydantic import Field

from narrowcast.extend import (
    EACH,
    SERVER_ONLY,
    Averaging,
    Broadcast,
    Contribution,
    NeuralNetwork,
    PrefixedArrays,
    UserError,
)

MODELS, CLIENTS = PrefixedArrays(SERVER_ONLY.name("models/")), "clients"


class Gossip(Averaging):
    """Models [U, ...] of all clients; the global model is their mean."""

    kind: Literal["gossip"] = "gossip"
    aggregator: None = None
    server_optimizer: None = None
    download: None = None
    neighbours: int = Field(1, ge=1, description="neighbours on either side")

    @property
    def traits(self):
        """A client that is drawn twice mixes once."""
        return replace(super().traits, counts_draws=False)

    def check(self, task):
        """Refuse item matrices, whose clients cannot start from one of their own."""
        super().check(task)
        if not isinstance(task.model, NeuralNetwork):
            raise UserError(f"gossip trains networks, not {task.model.kind}")

    def mixing(self, n):
        """Return the mixing matrix of n clients in a ring, [n, n]."""
        return np.mean([np.roll(np.eye(n), k, axis=1) for k in range(-self.neighbours, self.neighbours + 1)], axis=0)

    def init(self, task):
        """Return the same model for every client."""
        model = super().init(task)
        return {**model, **MODELS.add({name: np.stack([x] * task.data.n_clients) for name, x in model.items()})}

    def broadcast(self, server, task, round_index):
        """Send each client its model, which its neighbours' messages make."""
        sent = super().broadcast(server, task, round_index)
        return Broadcast({**sent.arrays, **MODELS.add(MODELS.of(server))}, sent.full, None)

    def download_bits(self, server, broadcast, task, recipients):
        """Return the bits of the neighbours' models, [C]."""
        return np.full(len(recipients.clients), 2 * self.neighbours * broadcast.full.wire_bits())

    def personal(self, broadcast, chunk, task):
        """Return the clients' models, [C, ...]."""
        return {name: values[chunk.clients] for name, values in MODELS.of(broadcast).items()}

    def local_calls(self, broadcast, chunk, task):
        """Train each client's own model."""
        (call,) = super().local_calls(broadcast, chunk, task)
        return [replace(call, terms=replace(call.terms, start=self.personal(broadcast, chunk, task)))]

    def sum_layout(self, task, cohort):
        """Return None: models of neighbours are not added up, so that they cannot be protected."""

    def contribution(self, broadcast, chunk, task, arrived):
        """Return each client's change."""
        return Contribution(each={CLIENTS: chunk.clients, **arrived.tensors})

    def step(self, server, broadcast, total, task, round_index):
        """Mix the models of the clients that delivered."""
        each, models = EACH.of(total), dict(MODELS.of(server))
        ring = np.argsort(each[CLIENTS])
        clients = each[CLIENTS][ring]
        if not len(clients):
            return server
        for name, values in models.items():
            mixed = np.tensordot(self.mixing(len(clients)), values[clients] + each[name][ring], 1)
            models[name] = values.copy()
            models[name][clients] = mixed
        return {**server, **{name: values.mean(axis=0) for name, values in models.items()}, **MODELS.add(models)}

    def weighted_by_staleness(self, partial, factor):
        """Return None: neighbours mix present models."""
