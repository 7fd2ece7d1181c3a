"""Losses of neural networks: what local training minimises, and what an evaluation reports as `loss`."""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from narrowcast.platform.data.samples import Samples, Targets
from narrowcast.platform.kinds import Registry
from narrowcast.platform.models.sample_measures import SampleMeasure, differences, over_positions, per_position_mean


class Loss(SampleMeasure):
    """Base of the losses: clients minimise the mean of `per_sample` over a mini-batch, by torch's autograd."""

    def n_outputs(self, data: Samples) -> int:
        """Return the number of outputs of the module's last layer: one for each class, token or number by default."""
        return data.n_outputs


class CrossEntropy(Loss):
    """Cross-entropy of the softmax of the outputs, in nats; for tokens, the mean over a sample's positions."""

    takes: ClassVar[tuple[Targets, ...]] = ("classes", "tokens")
    kind: Literal["cross_entropy"] = "cross_entropy"

    def per_sample(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the cross-entropy of each sample, [n]."""
        entropy = nn.functional.cross_entropy(over_positions(outputs), targets.flatten(), reduction="none")
        return per_position_mean(entropy, targets)


class SquaredLoss(Loss):
    """Squared error, averaged over the numbers that a sample has."""

    takes: ClassVar[tuple[Targets, ...]] = ("numbers",)
    kind: Literal["squared_error"] = "squared_error"

    def per_sample(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the squared error of each sample, [n]."""
        return differences(outputs, targets).square().mean(1)


class AbsoluteLoss(Loss):
    """Absolute error, averaged over the numbers that a sample has."""

    takes: ClassVar[tuple[Targets, ...]] = ("numbers",)
    kind: Literal["absolute_error"] = "absolute_error"

    def per_sample(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the absolute error of each sample, [n]."""
        return differences(outputs, targets).abs().mean(1)


class Huber(Loss):
    """Squared error / 2 up to an error of `delta`, and linear beyond, so that outliers count less.

    Reference: Huber, Robust Estimation of a Location Parameter, Annals of Mathematical Statistics 1964.
    """

    takes: ClassVar[tuple[Targets, ...]] = ("numbers",)
    kind: Literal["huber"] = "huber"
    delta: float = Field(1.0, gt=0, description="error, in units of the target, beyond which the loss is linear")

    def per_sample(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the loss of each sample, averaged over its numbers, [n]."""
        error = differences(outputs, targets)
        return nn.functional.huber_loss(error, torch.zeros_like(error), reduction="none", delta=self.delta).mean(1)


LOSSES = Registry(
    "loss",
    Loss,
    {"cross_entropy": CrossEntropy, "squared_error": SquaredLoss, "absolute_error": AbsoluteLoss, "huber": Huber},
)


_OF_CLASSES, _OF_NUMBERS = CrossEntropy(), SquaredLoss()


def default_loss(targets: Targets) -> Loss:
    """Return the loss of a model that names none."""
    return _OF_NUMBERS if targets == "numbers" else _OF_CLASSES
