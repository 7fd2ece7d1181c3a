"""pFedMe: clients move their copies of the global model towards personal models, which a quadratic term ties to them.

Reference: Dinh, Tran and Nguyen, Personalized Federated Learning with Moreau Envelopes, NeurIPS 2020
(arXiv:2006.08848), Algorithm 1; code CharlieDinh/pFedMe @caf24b1f. Letters: x the server's model, y_u client u's copy
of it, theta_u its personal model, g the gradient of its loss, lambda the weight of the tie, K the steps of theta_u in
one of y_u.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from pydantic import Field

from narrowcast.algorithms.client.client_pass import Arrived, Contribution
from narrowcast.algorithms.federated.fedavg import model_of
from narrowcast.algorithms.federated.personal import OWN, Personal
from narrowcast.platform.contracts import Task
from narrowcast.platform.errors import UserError
from narrowcast.platform.types import Arrays, Chunk, Gradient


@dataclass(frozen=True)
class EnvelopeStep:
    """K times theta -= p (g(theta) + decay theta + pull (theta - y)) on a batch, then y -= rate pull (y - theta)."""

    pull: float
    personal_rate: float
    inner_steps: int
    decay: float = 0.0
    parts: int = 1

    def init(self, start: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
        """Return theta, which begins at y in every round."""
        del own
        return {name: values.clone() for name, values in start.items()}

    def step(
        self,
        values: Mapping[str, Any],
        slots: Mapping[str, Any],
        gradient: Gradient,
        own: Mapping[str, Any],
        rate: float,
        step: int,
    ) -> None:
        """Move theta and y."""
        del own, step
        for _ in range(self.inner_steps):
            descent = gradient({name: slots[name] for name in values}, 0)
            for name, y in values.items():
                theta = slots[name]
                tied = descent[name] + self.pull * (theta - y)
                if self.decay:
                    tied = tied + self.decay * theta
                theta.sub_(tied, alpha=self.personal_rate)
        for name, y in values.items():
            y.sub_(y - slots[name], alpha=rate * self.pull)


class PFedMe(Personal):
    """The mean of the y_u moves x, by beta = `server_learning_rate`; clients use theta_u as they last trained it.

    theta_u never leaves the client, and bits are those of FedAvg. A client computes K gradients for each batch.
    `training.learning_rate` is eta of the paper, `personal_rate` is that of theta_u; neither eta lambda nor
    p (L + lambda), where L is the smoothness of the loss, may reach 2.

    Differs from the paper: 1. only clients of a round train; there all do, and the server averages those that it drew.
    2. theta_u takes K steps, as in the code, and not as many as a given accuracy asks for. 3. theta_u begins at x in
    each round and goes on from batch to batch, as in the code. The code adds `decay: 0.001`, and its tables of personal
    models show y_u, as `measured: copy` does.
    """

    kind: Literal["pfedme"] = "pfedme"
    pull: float = Field(
        15.0, gt=0, description="lambda, weight of the squared distance between personal and local model"
    )
    personal_rate: float = Field(0.01, gt=0, description="step size of the personal model")
    inner_steps: int = Field(5, ge=1, description="K, steps of the personal model on each batch")
    decay: float = Field(0.0, ge=0, description="weight decay of the personal model; the released code has 0.001")
    measured: Literal["personal", "copy"] = Field(
        "personal",
        description="what evaluate_clients measures: personal models, or the clients' copies of the global model after "
        "their steps, which the released code shows as personal ones",
    )

    def rule(self) -> EnvelopeStep:
        """Return the steps of theta and y."""
        return EnvelopeStep(self.pull, self.personal_rate, self.inner_steps, self.decay)

    def check(self, task: Task) -> None:
        """Raise `UserError` for step sizes with which y or theta grows without bound."""
        super().check(task)
        rate = task.training.traits.learning_rate
        for name, size in (("training.learning_rate", rate), ("algorithm.personal_rate", self.personal_rate)):
            if size is not None and size * self.pull >= 2:
                raise UserError(
                    f"{name} = {size:g} times algorithm.pull = {self.pull:g} is {size * self.pull:g}, and steps of 2 "
                    "or more grow without bound; lower one of them"
                )

    def contribution(self, broadcast: Arrays, chunk: Chunk, task: Task, arrived: Arrived) -> Contribution:
        """Return y_u - x as FedAvg does, and keep theta_u, or y_u if that is measured."""
        whole = super().contribution(broadcast, chunk, task, arrived)
        if self.measured == "personal":
            return whole
        sent = model_of(broadcast)
        copies = {name: sent[name] + change for name, change in arrived.updates.changes.items()}
        return replace(whole, state=OWN.kept(chunk, self.parameters(task), copies))
