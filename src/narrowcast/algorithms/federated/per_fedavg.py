"""Per-FedAvg: the mean of models that are good after a step on a client's own samples, as in MAML.

Reference: Fallah, Mokhtari and Ozdaglar, Personalized Federated Learning with Theoretical Guarantees: A Model-Agnostic
Meta-Learning Approach, NeurIPS 2020 (arXiv:2002.07948), Algorithm 1 and section 5. Letters: x the server's model, y_u
client u's copy of it, g_k the gradient of its loss on the k-th part of a batch, alpha the rate of the step that adapts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import Field

from narrowcast.algorithms.federated.fedavg import Averaging, model_of
from narrowcast.algorithms.federated.personal import adapted, check_adapted
from narrowcast.algorithms.local_training.rules import only_gradient_descent
from narrowcast.platform.contracts import Task
from narrowcast.platform.errors import UserError
from narrowcast.platform.types import Arrays, Chunk, Gradient, LocalTerms

Hessian = Literal["none", "exact", "difference"]


@dataclass(frozen=True)
class AdaptedGradient:
    """y -= rate d with d = g_1(y - alpha g_0(y)), or (I - alpha H_2(y)) d, H_2 d exact or a difference of gradients."""

    alpha: float
    hessian: Hessian = "none"
    delta: float = 1e-3
    same_batch: bool = False

    @property
    def parts(self) -> int:
        """The parts of a batch: D and D', and D'' for the Hessian."""
        return 1 if self.same_batch else 2 if self.hessian == "none" else 3

    def init(self, start: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
        """Keep nothing."""
        del start, own
        return {}

    def step(
        self,
        values: Mapping[str, Any],
        slots: Mapping[str, Any],
        gradient: Gradient,
        own: Mapping[str, Any],
        rate: float,
        step: int,
    ) -> None:
        """Move y."""
        del slots, own, step
        direction = gradient(_moved(values, gradient(values, 0), -self.alpha), min(1, self.parts - 1))
        if self.hessian == "exact":
            direction = _moved(direction, gradient.hessian_product(values, self.parts - 1, direction), -self.alpha)
        elif self.hessian == "difference":
            above, below = (gradient(_moved(values, direction, sign * self.delta), self.parts - 1) for sign in (1, -1))
            scale = self.alpha / (2 * self.delta)
            direction = {name: d - scale * (above[name] - below[name]) for name, d in direction.items()}
        for name, d in direction.items():
            values[name].sub_(d, alpha=rate)


@dataclass(frozen=True)
class FirstSteps:
    """Gradient descent at a rate of its own, which ends after some steps."""

    rate: float
    steps: int
    parts: int = 1

    def init(self, start: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
        """Keep nothing."""
        del start, own
        return {}

    def step(
        self,
        values: Mapping[str, Any],
        slots: Mapping[str, Any],
        gradient: Gradient,
        own: Mapping[str, Any],
        rate: float,
        step: int,
    ) -> None:
        """Move, or stay."""
        del slots, own, rate
        for name, direction in gradient(values, 0).items():
            if step < self.steps:
                values[name].sub_(direction, alpha=self.rate)


class PerFedAvg(Averaging):
    """Rounds of FedAvg along gradients taken after a step; clients use x after `steps` such steps on their own samples.

    `training.learning_rate` is beta of the paper, and `alpha` its alpha; the released code of pFedMe swaps the two. A
    step takes 2 gradients, and 2 more with `hessian: difference`; a product with the exact Hessian costs about as much.
    Bits are those of FedAvg. With `alpha` 0 it is FedAvg on a part of each batch, or on all of it with `batches: same`.

    Differs from the paper: 1. the parts D, D' and D'' of a step are parts of one batch, of equal size; the paper draws
    batches for each, and `batches: same` uses the whole batch for all. A batch with fewer samples than parts has empty
    ones, whose gradient is 0.
    """

    kind: Literal["per_fedavg"] = "per_fedavg"
    alpha: float = Field(0.01, ge=0, description="step size of the adaptation to a client")
    hessian: Hessian = Field(
        "none",
        description="Hessian in the gradient: none, first order (FO); exact; or a difference of gradients (HF)",
    )
    delta: float = Field(1e-3, gt=0, description="step of the difference of gradients")
    batches: Literal["split", "same"] = Field(
        "split", description="samples of the gradients of a step: parts of the batch, or all of it for each"
    )
    steps: int = Field(1, ge=0, description="steps of size alpha on training samples before a client is measured")

    def check(self, task: Task) -> None:
        """Raise `UserError` for models and trainings that take no steps of an algorithm's own."""
        super().check(task)
        check_adapted(task, f"algorithm.kind = {self.kind}")
        only_gradient_descent(task, f"algorithm.kind = {self.kind} moves along gradients")
        if momentum := task.training.traits.momentum:
            raise UserError(f"training.momentum = {momentum:g}: the steps of {self.kind} have no momentum; set 0")

    def terms(self, chunk: Chunk, task: Task) -> LocalTerms:
        """Return the steps of y_u."""
        del chunk, task
        return LocalTerms(rule=AdaptedGradient(self.alpha, self.hessian, self.delta, self.batches == "same"))

    def personal(self, broadcast: Arrays, chunk: Chunk, task: Task) -> Arrays:
        """Return x after each client's first steps of size alpha, [C, ...]."""
        model = model_of(broadcast)
        return adapted(model, chunk, task, self.steps, rule=FirstSteps(self.alpha, self.steps))


def _moved(values: Mapping[str, Any], direction: Mapping[str, Any], factor: float) -> dict[str, Any]:
    """Return values + factor direction."""
    return {name: tensor.add(direction[name], alpha=factor) for name, tensor in values.items()}
