"""FedNova: changes normalised by each client's local steps, so that clients with more steps do not bias the model.

Reference: Wang et al., Tackling the Objective Inconsistency Problem in Heterogeneous Federated Optimization, NeurIPS
2020 (arXiv:2007.07481), equation 11. Letters: x the server's model, y_u client u's, tau_u its local steps, a_u the
vector of the factors that its gradients have in y_u - x, p_u = w_u / sum w_u.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import numpy as np
from pydantic import Field

from narrowcast.algorithms.client.client_pass import Arrived, Contribution
from narrowcast.algorithms.client.sums import WEIGHT, SumLayout, tensor_weights
from narrowcast.algorithms.client.uploads import COUNT_BITS, Message, with_bits
from narrowcast.algorithms.federated.fedprox import Proximal
from narrowcast.algorithms.local_training.rules import BY_ROUND_ADVICE, only_gradient_descent
from narrowcast.platform.contracts import Task
from narrowcast.platform.errors import UserError
from narrowcast.platform.types import Arrays, Chunk, FloatArray, IntArray, LocalUpdates

_STEPS = "steps"


class FedNova(Proximal):
    """FedAvg whose changes are divided by the number of local steps, so that clients with more steps do not prevail.

    x += server_learning_rate * (sum p_u |a_u|) * sum p_u (y_u - x) / |a_u|, with |a_u| the sum of a_u's entries.

    |a_u| is tau_u for plain SGD; local momentum and the proximal term `mu` have the factors of their own recursion,
    sections 4.1 and 4.2. Clients take different numbers of steps if they have different numbers of examples, part of
    the epochs (`partial_share`), or little time. A client sends its number of steps, 32 bits, with its change.

    Differs from the paper: 1. weight decay counts as part of the loss; gradient clipping has no factors and is refused.
    """

    kind: Literal["fednova"] = "fednova"
    mu: float = Field(0.0, ge=0, description="weight of the proximal term")
    aggregator: None = Field(None, description="none: the step is a mean of normalised changes")

    def check(self, task: Task) -> None:
        """Raise `UserError` if the local steps are not linear in the gradients."""
        super().check(task)
        only_gradient_descent(task, "algorithm.kind = fednova needs local steps that are linear in the gradients")
        if task.training.traits.clip_norm is not None:
            raise UserError(
                "algorithm.kind = fednova needs local steps that are linear in the gradients; leave out "
                "training.clip_norm"
            )
        schedule = task.training.traits.learning_rate_schedule
        if schedule is not None and schedule.by_step:
            raise UserError(
                "algorithm.kind = fednova counts steps of one learning rate; "
                f"training.learning_rate_schedule.kind = {schedule.kind} changes it within a round; {BY_ROUND_ADVICE}"
            )

    def mean_change(self, server: Arrays, total: Arrays, task: Task, round_index: int) -> Arrays | None:
        """Return the mean normalised change times the mean number of steps; None if no client delivered."""
        if (means := super().mean_change(server, total, task, round_index)) is None:
            return None
        steps = float(total[_STEPS]) / float(total[WEIGHT])
        return {name: steps * mean for name, mean in means.items()}

    def sum_layout(self, task: Task, cohort: int) -> SumLayout | None:
        """Return None: the server needs the steps of the clients that delivered besides a sum of weighted changes."""
        del task, cohort
        return None

    def upload_bits(self, broadcast: Arrays, task: Task, clients: IntArray) -> IntArray | None:
        """Return the size of each client's upload, [C], with its steps; None if only the training can tell."""
        bits = super().upload_bits(broadcast, task, clients)
        return None if bits is None else with_bits(bits, COUNT_BITS)

    def message(self, broadcast: Arrays, chunk: Chunk, task: Task, updates: LocalUpdates) -> Message:
        """Send y_u - x and tau_u."""
        return replace(super().message(broadcast, chunk, task, updates), numbers={_STEPS: updates.steps})

    def contribution(self, broadcast: Arrays, chunk: Chunk, task: Task, arrived: Arrived) -> Contribution:
        """Return w_u (y_u - x) / |a_u| and w_u |a_u|."""
        del broadcast
        updates, weight = arrived.updates, tensor_weights(self.weights, task, chunk)
        rates = updates.mean_rates(task.training.learning_rate)[updates.steps > 0]
        norms = self._norms(task, updates.steps, float(rates.max(initial=0.0)))
        return Contribution(arrived.tensors, weight / norms, divisor=weight, sums={_STEPS: weight * norms})

    def _norms(self, task: Task, steps: IntArray, learning_rate: float) -> FloatArray:
        """Return |a_u| of each client, [C]: the change that a gradient of 1 in every step makes, in learning rates."""
        momentum = task.training.traits.momentum
        pull = self.mu * learning_rate
        norms, velocity = [0.0], 0.0
        for _ in range(int(steps.max(initial=0))):
            velocity = momentum * velocity + 1 - pull * norms[-1]
            norms.append(norms[-1] + velocity)
        return np.array(norms)[np.maximum(steps, 1)] if len(norms) > 1 else np.ones(len(steps))
