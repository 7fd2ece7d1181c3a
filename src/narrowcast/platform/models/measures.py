"""Losses and metrics of neural networks: values of single samples, and numbers from their means.

A loss is what local training minimises and what an evaluation reports as `loss`. A metric is a number from the means of
values over held-out samples.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from typing import ClassVar, Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor, nn

from narrowcast.platform.config.files import Section
from narrowcast.platform.config.kinds import kind_of
from narrowcast.platform.data.samples import Samples, Targets
from narrowcast.platform.errors import UserError
from narrowcast.platform.types import FloatArray


class SampleMeasure(Section):
    """Base of losses and metrics: a subclass maps outputs and targets of n samples to values, in `per_sample`.

    Outputs are those of the module, [n, ...]; targets are those of the data set: classes [n] int64, tokens [n, length]
    int64, numbers [n, k] in the type of the outputs. `takes` names the targets that the subclass is defined for.
    """

    takes: ClassVar[tuple[Targets, ...]] = ("classes", "tokens", "numbers")

    def __hash__(self) -> int:
        return hash(type(self))  # once or more in a round; equality tells the measures of a class apart

    def check(self, data: Samples) -> None:
        """Raise `UserError` if the measure is not defined for the targets of this data set."""
        if data.targets not in self.takes:
            raise UserError(
                f"{kind_of(self)} takes {' or '.join(self.takes)}, but the targets of "
                f"{data.name} are {data.targets}; use another, or leave it out"
            )

    def per_sample(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the value of each sample, [n], which must not depend on the other samples."""
        raise NotImplementedError


def over_positions(outputs: Tensor) -> Tensor:
    """Return scores [n, classes] or [n, length, classes] as one row for each prediction."""
    return outputs.flatten(0, -2)


def per_position_mean(values: Tensor, targets: Tensor) -> Tensor:
    """Return one value per prediction as the mean over the positions of each sample, [n]."""
    return values if targets.ndim == 1 else values.view(targets.shape).mean(1)


def differences(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return outputs less targets, [n, k]; raise `ValueError` if the shapes differ, which would be broadcast."""
    if outputs.shape != targets.shape:
        raise ValueError(f"outputs {list(outputs.shape)} are not predictions of targets {list(targets.shape)}")
    return outputs - targets


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


_MOST_NATS = 20.0
"""Log-odds beyond which scores are tied, at probabilities within 2e-9 of 0 and 1."""
_OF_CLASSES, _OF_NUMBERS = CrossEntropy(), SquaredLoss()


def default_loss(targets: Targets) -> Loss:
    """Return the loss of a model that names none."""
    return _OF_NUMBERS if targets == "numbers" else _OF_CLASSES


class Metric(SampleMeasure):
    """Base of the metrics: a subclass gives values of each sample, and computes the metric from their means.

    `per_sample` returns one value of each sample, [n], or several, [n, m]. A metric that is better when lower sets
    `lower_is_better`, which best values, targets and studies follow; one that lies between 0 and 1 sets `is_share`:
    a target above 1 is refused, and the metric is shown in percent.
    """

    lower_is_better: ClassVar[bool] = False
    is_share: ClassVar[bool] = False

    @property
    def name(self) -> str:
        """The name of the metric in results, after `validation.` or `test.`; by default its kind."""
        return str(vars(self).get("kind", type(self).__name__.lower()))

    def of_means(self, means: FloatArray) -> float:
        """Return the metric from the means [m] of the values over all held-out samples; by default the first mean."""
        return float(means[0])


class Accuracy(Metric):
    """Share of correct predictions; with `k`, of those whose class is among the k highest scores."""

    takes: ClassVar[tuple[Targets, ...]] = ("classes", "tokens")
    is_share: ClassVar[bool] = True
    kind: Literal["accuracy"] = "accuracy"
    k: int = Field(1, ge=1, description="highest scores among which the class has to be")

    @property
    def name(self) -> str:
        """`accuracy`, or `accuracy@k`."""
        return self.kind if self.k == 1 else f"{self.kind}@{self.k}"

    def check(self, data: Samples) -> None:
        """Raise `UserError` unless the targets are classes or tokens, and more than k."""
        super().check(data)
        if self.k > data.n_classes:
            raise UserError(f"model.metrics: {self.name} of {data.n_classes} classes; use k up to {data.n_classes}")

    def per_sample(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return whether each prediction is right, as a share of the sample's positions, [n]."""
        scores, wanted = over_positions(outputs), targets.reshape(-1, 1)
        predicted = scores.argmax(1, keepdim=True) if self.k == 1 else scores.topk(self.k, dim=1).indices
        return per_position_mean((predicted == wanted).any(1).to(torch.float32), targets)


class ROCAUC(Metric):
    """Area under the ROC curve of two classes: how often a sample of class 1 scores above one of class 0.

    It does not depend on a threshold, nor on the shares of the classes. Scores are counted in bins of `nats`, and
    samples in one bin are tied, which counts half: the error is at most half the share of the pairs that share a bin.
    """

    takes: ClassVar[tuple[Targets, ...]] = ("classes",)
    is_share: ClassVar[bool] = True
    kind: Literal["roc_auc"] = "roc_auc"
    nats: float = Field(0.125, ge=0.05, le=1, description="width of a bin of the log-odds of class 1")

    def check(self, data: Samples) -> None:
        """Raise `UserError` unless there are two classes."""
        super().check(data)
        if data.n_classes != 2:
            raise UserError(
                f"model.metrics: roc_auc of {data.n_classes} classes; it is of 2: use accuracy, or leave it out"
            )

    def per_sample(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return 1 in the bin of a sample's log-odds, of those of its class, [n, 2 bins], and 0 elsewhere."""
        bins = 2 * math.ceil(_MOST_NATS / self.nats)
        scaled = (outputs[:, 1] - outputs[:, 0]).to(torch.float64) / self.nats
        # NaN outputs have no place among scores: their share, and with it the area, is NaN.
        place = scaled.nan_to_num().floor().clamp(-bins // 2, bins // 2 - 1).long() + bins // 2
        values = nn.functional.one_hot(targets * bins + place, 2 * bins).to(torch.float64)
        return torch.where(scaled.isnan()[:, None], torch.nan, values)

    def of_means(self, means: FloatArray) -> float:
        """Return the area; NaN if a class has no samples."""
        of_0, of_1 = means.reshape(2, -1)
        pairs = of_0.sum() * of_1.sum()
        return float((of_1 * (of_0.cumsum() - of_0 / 2)).sum() / pairs) if pairs else math.nan


class Perplexity(Metric):
    """exp of the mean cross-entropy of a prediction."""

    takes: ClassVar[tuple[Targets, ...]] = ("classes", "tokens")
    kind: Literal["perplexity"] = "perplexity"
    lower_is_better: ClassVar[bool] = True

    def per_sample(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the cross-entropy of each sample, [n]."""
        return CrossEntropy().per_sample(outputs, targets)

    def of_means(self, means: FloatArray) -> float:
        """Return the perplexity; infinite if it exceeds the largest float."""
        return math.exp(means[0]) if means[0] < math.log(sys.float_info.max) else math.inf


class RMSE(Metric):
    """Root of the mean squared error, in units of the target."""

    takes: ClassVar[tuple[Targets, ...]] = ("numbers",)
    kind: Literal["rmse"] = "rmse"
    lower_is_better: ClassVar[bool] = True

    def per_sample(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the squared error of each sample, [n]."""
        return SquaredLoss().per_sample(outputs, targets)

    def of_means(self, means: FloatArray) -> float:
        """Return the root."""
        return float(means[0]) ** 0.5


class MAE(Metric):
    """Mean absolute error, in units of the target."""

    takes: ClassVar[tuple[Targets, ...]] = ("numbers",)
    kind: Literal["mae"] = "mae"
    lower_is_better: ClassVar[bool] = True

    def per_sample(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the absolute error of each sample, [n]."""
        return differences(outputs, targets).abs().mean(1)


class R2(Metric):
    """Coefficient of determination: 1 - mean squared error / variance of the targets, over all numbers together."""

    takes: ClassVar[tuple[Targets, ...]] = ("numbers",)
    kind: Literal["r2"] = "r2"

    def per_sample(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the squared error, the target and its square of each number, [n, 3 k]."""
        return torch.cat([differences(outputs, targets).square(), targets, targets.square()], dim=1)

    def of_means(self, means: FloatArray) -> float:
        """Return 1 - error / variance, averaged over the numbers of a sample; 0 for a target that does not vary."""
        error, mean, square = means.reshape(3, -1)
        variance = square - mean**2
        return float(np.where(variance > 0, 1 - error / np.where(variance > 0, variance, 1), 0.0).mean())


_DEFAULTS: Mapping[Targets, tuple[Metric, ...]] = {
    "classes": (Accuracy(),),
    "tokens": (Accuracy(), Perplexity()),
    "numbers": (RMSE(), MAE(), R2()),
}
DEFAULT_METRICS = tuple(metric for metrics in _DEFAULTS.values() for metric in metrics)
"""The metrics of models that name none, on any targets."""


def default_metrics(targets: Targets) -> tuple[Metric, ...]:
    """Return the metrics of a model that names none."""
    return _DEFAULTS[targets]
