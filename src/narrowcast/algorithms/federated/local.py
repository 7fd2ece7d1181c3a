"""Training alone: clients train models of their own and send nothing, a control for all that do.

Letters: v_u client u's model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import numpy as np
from pydantic import BaseModel, ConfigDict

from narrowcast.algorithms.client.uploads import Uploads, chunk_result, finite_clients
from narrowcast.algorithms.federated.personal import OWN
from narrowcast.platform.contracts import Algorithm, Broadcast, LocalCall, Recipients, Task
from narrowcast.platform.errors import UserError
from narrowcast.platform.models.neural_network import NeuralNetwork
from narrowcast.platform.rounds.ledger import ChunkResult
from narrowcast.platform.traits import Traits
from narrowcast.platform.types import Arrays, Chunk, IntArray, LocalTerms, LocalUpdates, Payload


class Nothing(Payload):
    """A message of no bits."""

    def wire_bits(self) -> int:
        """Return 0."""
        return 0

    def to_bytes(self) -> bytes:
        """Return no bytes."""
        return b""


class Local(Algorithm, BaseModel):
    """A client that is drawn trains its v_u further; there is no global model, and no message in either direction.

    `evaluate_clients` measures the v_u. All begin as the model before round 1, which each client draws from the seed
    of the run. Limits on uploads concern nobody: a client counts as delivered if its training stayed finite.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: Literal["local"] = "local"

    @property
    def traits(self) -> Traits:
        """Clients send nothing, and the server has no model."""
        return replace(super().traits, global_model=False, sends=False)

    def check(self, task: Task) -> None:
        """Raise `UserError` for models other than networks."""
        if not isinstance(task.model, NeuralNetwork):
            raise UserError(f"algorithm.kind = {self.kind} trains networks, not {task.model.kind}")

    def init(self, task: Task) -> Arrays:
        """Return the model before round 1."""
        return task.initial_parameters()

    def init_clients(self, task: Task) -> Arrays:
        """Return the clients' private parameters, and v_u."""
        private = task.model.init_clients(task.data, task.private_seed.value)
        return {**private, **OWN.init(task.initial_parameters(), task.data.n_clients)}

    def broadcast(self, server: Arrays, task: Task, round_index: int) -> Broadcast:
        """Send nothing: clients know the model before round 1."""
        del task, round_index
        return Broadcast(server, Nothing(), None)

    def download_bits(self, server: Arrays, broadcast: Broadcast, task: Task, recipients: Recipients) -> IntArray:
        """Return 0 for each client."""
        del server, broadcast, task
        return np.zeros(len(recipients.clients), dtype=np.int64)

    def upload_bits(self, broadcast: Arrays, task: Task, clients: IntArray) -> IntArray:
        """Return 0 for each client."""
        del broadcast, task
        return np.zeros(len(clients), dtype=np.int64)

    def local_calls(self, broadcast: Arrays, chunk: Chunk, task: Task) -> Sequence[LocalCall]:
        """Train v_u."""
        return [LocalCall(broadcast, chunk, task, LocalTerms(start=self.personal(broadcast, chunk, task)))]

    def send(self, broadcast: Arrays, chunk: Chunk, task: Task, updates: Sequence[LocalUpdates]) -> ChunkResult:
        """Send nothing, and keep v_u unless it left the finite numbers."""
        del task
        (trained,) = updates
        own, finite = OWN.moved(chunk, broadcast, trained.changes), finite_clients(trained, trained.changes)
        uploads = Uploads(np.zeros(len(chunk.clients), dtype=np.int64), finite, finite, {})
        return chunk_result(chunk, trained, uploads, {}, state=own)

    def fold(self, partials: Sequence[Arrays]) -> Arrays:
        """Return nothing: there are no sums."""
        del partials
        return {}

    def step(self, server: Arrays, broadcast: Arrays, total: Arrays, task: Task, round_index: int) -> Arrays:
        """Return the state as it is."""
        del broadcast, total, task, round_index
        return server

    def final(self, server: Arrays) -> Arrays:
        """Return the model before round 1."""
        return server

    def personal(self, broadcast: Arrays, chunk: Chunk, task: Task) -> Arrays:
        """Return v_u of each client, [C, ...]."""
        del task
        return OWN.of(chunk, broadcast)
