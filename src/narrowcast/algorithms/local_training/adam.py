"""Local training of neural networks by Adam and by AdamW, for any torch module."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from narrowcast.algorithms.local_training.local_optimizer import AdamSteps
from narrowcast.algorithms.local_training.sgd import NetworkTraining


class _Moments(NetworkTraining):
    learning_rate: float = Field(0.001, gt=0, description="step size of local training")
    beta1: float = Field(0.9, ge=0, lt=1, description="decay rate of the mean of gradients")
    beta2: float = Field(0.999, ge=0, lt=1, description="decay rate of the mean of squared gradients")
    eps: float = Field(1e-8, gt=0, description="added to the root of the second moment")

    @property
    def local_optimizer(self) -> AdamSteps:
        """Adam without decoupled decay."""
        return AdamSteps(self.beta1, self.beta2, self.eps)


class Adam(_Moments):
    """Mini-batch steps of Adam over shuffled epochs; `weight_decay` is part of the gradient.

    The moments begin at 0 in each participation, and stay on the client. Proximal terms, corrections of an algorithm
    and clipping act on the gradient, before the moments. Algorithms that need the steps of gradient descent refuse it.

    Reference: Kingma and Ba, Adam: A Method for Stochastic Optimization, ICLR 2015 (arXiv:1412.6980), Algorithm 1; the
    step is that of `torch.optim.Adam`.
    """

    kind: Literal["adam"] = "adam"


class AdamW(_Moments):
    """Adam with decoupled weight decay: each step multiplies what is trained by 1 - learning_rate * weight_decay.

    What is trained are the factors where an algorithm trains factors (`fedpara`, `colr`), and with `colr` they are
    those of the change. All else is as in `adam`.

    Reference: Loshchilov and Hutter, Decoupled Weight Decay Regularization, ICLR 2019 (arXiv:1711.05101), Algorithm 2;
    the step is that of `torch.optim.AdamW`.
    """

    kind: Literal["adamw"] = "adamw"
    weight_decay: float = Field(0.01, ge=0, description="decay of the parameters, times the learning rate, in a step")

    @property
    def local_optimizer(self) -> AdamSteps:
        """Adam with decoupled decay."""
        return AdamSteps(self.beta1, self.beta2, self.eps, self.weight_decay)

    @property
    def gradient_decay(self) -> float:
        """0: the decay is no part of the gradient."""
        return 0.0
