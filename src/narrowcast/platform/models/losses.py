"""Losses of neural networks: what local training minimises, and what an evaluation reports as `loss`."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor, nn

from narrowcast.platform.data.samples import Samples, Targets
from narrowcast.platform.errors import UserError
from narrowcast.platform.kinds import Registry


class Loss(BaseModel):
    """Base of the losses: a subclass maps outputs and targets of n samples to a loss for each sample, in `per_sample`.

    Clients minimise the mean of `per_sample` over a mini-batch, by torch's autograd. Outputs are those of the module,
    [n, ...]; targets are those of the data set: classes [n] int64, tokens [n, length] int64, numbers [n, k] float32.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    def __hash__(self) -> int:
        return hash((type(self), self.model_dump_json()))

    def check(self, data: Samples) -> None:
        """Raise `UserError` if the loss is not defined for the targets of this data set; any are allowed here."""
        del data

    def n_outputs(self, data: Samples) -> int:
        """Return the number of outputs of the module's last layer: one for each class, token or number by default."""
        return data.n_outputs

    def per_sample(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the loss of each sample, [n]; it must not depend on the other samples."""
        raise NotImplementedError


class CrossEntropy(Loss):
    """Cross-entropy of the softmax of the outputs, in nats; for tokens, the mean over a sample's positions."""

    kind: Literal["cross_entropy"] = "cross_entropy"

    def check(self, data: Samples) -> None:
        """Raise `UserError` unless the targets are classes or tokens."""
        if data.targets == "numbers":
            raise UserError(_no_fit("loss", self.kind, data, "classes or tokens", "squared_error"))

    def per_sample(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the cross-entropy of each sample, [n]."""
        entropy = nn.functional.cross_entropy(over_positions(outputs), targets.flatten(), reduction="none")
        return per_position_mean(entropy, targets)


class SquaredLoss(Loss):
    """Squared error, averaged over the numbers that a sample has."""

    kind: Literal["squared_error"] = "squared_error"

    def check(self, data: Samples) -> None:
        """Raise `UserError` unless the targets are numbers."""
        need_numbers("loss", self.kind, data)

    def per_sample(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the squared error of each sample, [n]."""
        return (outputs - targets).square().flatten(1).mean(1)


class Huber(Loss):
    """Squared error / 2 up to an error of `delta`, and linear beyond, so that outliers count less.

    Reference: Huber, Robust Estimation of a Location Parameter, Annals of Mathematical Statistics 1964.
    """

    kind: Literal["huber"] = "huber"
    delta: float = Field(1.0, gt=0, description="error, in units of the target, beyond which the loss is linear")

    def check(self, data: Samples) -> None:
        """Raise `UserError` unless the targets are numbers."""
        need_numbers("loss", self.kind, data)

    def per_sample(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the loss of each sample, averaged over its numbers, [n]."""
        return nn.functional.huber_loss(outputs, targets, reduction="none", delta=self.delta).flatten(1).mean(1)


LOSSES = Registry("loss", Loss, {"cross_entropy": CrossEntropy, "squared_error": SquaredLoss, "huber": Huber})


def default_loss(targets: Targets) -> Loss:
    """Return the loss of a model that names none."""
    return SquaredLoss() if targets == "numbers" else CrossEntropy()


def need_numbers(section: str, kind: str, data: Samples) -> None:
    """Raise `UserError` unless the targets of the data set are numbers."""
    if data.targets != "numbers":
        raise UserError(_no_fit(section, kind, data, "numbers", "cross_entropy" if section == "loss" else "accuracy"))


def over_positions(outputs: Tensor) -> Tensor:
    """Return scores [n, classes] or [n, length, classes] as one row for each prediction."""
    return outputs.flatten(0, -2)


def per_position_mean(values: Tensor, targets: Tensor) -> Tensor:
    """Return one value per prediction as the mean over the positions of each sample, [n]."""
    return values if targets.ndim == 1 else values.view(targets.shape).mean(1)


def _no_fit(section: str, kind: str, data: Samples, needed: str, instead: str) -> str:
    return (
        f"model.{section} = {kind} needs targets that are {needed}, but those of {data.name} are {data.targets}; "
        f"use {instead}"
    )
