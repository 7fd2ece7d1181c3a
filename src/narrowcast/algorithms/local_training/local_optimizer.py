"""The step that clients take with their gradients: gradient descent with momentum, Adam and AdamW.

Each client's step is that of torch's optimiser of the same name, for one client and for many at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from narrowcast.platform.contracts import Task
from narrowcast.platform.errors import UserError

Rate = float | Tensor
"""A learning rate that all clients share, or one for each, [a] in float64."""
OptimizerState = dict[str, tuple[Tensor, ...]]
"""The state of an optimizer for each parameter from step to step, [a or more, ...]; empty before the first step."""


class LocalOptimizer(Protocol):
    """A step of local training, the same for each client; it begins anew in each round."""

    def move(
        self, values: dict[str, Tensor], gradients: dict[str, Tensor], state: OptimizerState, rate: Rate, step: int
    ) -> None:
        """Take step number `step`, from 0: change values [a, ...] and `state` in place; gradients may be used up.

        The a clients are the first of those that took the step before.
        """
        ...


@dataclass(frozen=True)
class GradientDescent:
    """y -= lr v with v = momentum v + g."""

    momentum: float = 0.0

    def move(
        self, values: dict[str, Tensor], gradients: dict[str, Tensor], state: OptimizerState, rate: Rate, step: int
    ) -> None:
        """Move against the gradients, or against their running sum."""
        for name, gradient in gradients.items():
            if self.momentum:
                if step:
                    gradient.add_(state[name][0][: len(gradient)], alpha=self.momentum)
                state[name] = (gradient,)
            if isinstance(rate, float):
                values[name].sub_(gradient, alpha=rate)
            else:
                values[name].addcmul_(gradient, along(rate.to(gradient.dtype), gradient), value=-1)


@dataclass(frozen=True)
class AdamSteps:
    """y -= lr m' / (sqrt(v') + eps), with the moments m and v of g and of its square, divided by 1 - beta^t.

    Before it y is multiplied by 1 - lr decay: the decoupled decay of AdamW.

    References: Kingma and Ba, Adam, ICLR 2015 (arXiv:1412.6980), Algorithm 1; Loshchilov and Hutter, Decoupled Weight
    Decay Regularization, ICLR 2019 (arXiv:1711.05101), Algorithm 2, with the decay scaled by lr, as in torch.
    """

    beta1: float
    beta2: float
    eps: float
    decay: float = 0.0

    def move(
        self, values: dict[str, Tensor], gradients: dict[str, Tensor], state: OptimizerState, rate: Rate, step: int
    ) -> None:
        """Move by the ratio of the moments."""
        correction = 1 - self.beta1 ** (step + 1), (1 - self.beta2 ** (step + 1)) ** 0.5
        for name, gradient in gradients.items():
            value = values[name]
            moments = state[name] if step else (gradient.new_zeros(gradient.shape), gradient.new_zeros(gradient.shape))
            state[name] = first, second = moments[0][: len(gradient)], moments[1][: len(gradient)]
            first.lerp_(gradient, 1 - self.beta1)
            second.mul_(self.beta2).addcmul_(gradient, gradient, value=1 - self.beta2)
            if self.decay:
                value.mul_(_for_all(1 - rate * self.decay, value))
            spread = second.sqrt().div_(correction[1]).add_(self.eps)
            value.addcdiv_(first * _for_all(rate / correction[0], value), spread, value=-1)


def along(values: Tensor, like: Tensor) -> Tensor:
    """Reshape one value per client [a] so that it multiplies tensors [a, ...]."""
    return values.view(-1, *[1] * (like.ndim - 1))


def _for_all(rate: Rate, like: Tensor) -> Rate:
    return rate if isinstance(rate, float) else along(rate.to(like.dtype), like)


def only_gradient_descent(task: Task, reason: str, otherwise: str = "") -> None:
    """Raise `UserError`, with the reason, if the task's training takes other steps than along its gradients.

    A training says so by its traits. `otherwise` is what else the user may set.
    """
    if not task.training.traits.descends_gradients:
        advice = f"use sgd, or set {otherwise}" if otherwise else "use sgd"
        raise UserError(f"{reason}, and training.kind = {task.training.kind} does not take such steps; {advice}")
