"""Laws of the losses and metrics of neural networks, on small outputs and the targets that each of them takes."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from narrowcast.laws.law import on_each, require
from narrowcast.laws.small_tasks import N_CLIENTS, digest, sample_sets
from narrowcast.platform.data.samples import Samples
from narrowcast.platform.models.measures import Loss, SampleMeasure

_SAMPLES = 7


@dataclass(frozen=True)
class MeasureCase:
    """A loss or metric, and random outputs with targets that it takes."""

    measure: Any
    outputs: Tensor
    targets: Tensor

    def values(self, rows: slice = slice(None)) -> Tensor:
        """Return the values of some samples."""
        values: Tensor = self.measure.per_sample(self.outputs[rows], self.targets[rows])
        return values


def cases(measure: SampleMeasure) -> dict[str, MeasureCase]:
    """Return the loss or metric on each kind of targets that it takes; raise `UserError` with reasons if on none."""
    sets = sample_sets(np.full(N_CLIENTS, 3))
    images = sets["labelled images"]
    of_two = replace(images, n_classes=2, train=replace(images.train, labels=images.train.labels % 2))
    return on_each({**sets, "two classes": of_two}, lambda data, name: on_data(measure, data, name))


def on_data(measure: SampleMeasure, data: Samples, name: str = "") -> dict[str, MeasureCase]:
    """Return the loss or metric on some targets of this data set; raise `UserError` if its check refuses them."""
    measure.check(data)
    targets = torch.from_numpy(data.train.labels[:_SAMPLES].copy())
    units = measure.n_outputs(data) if isinstance(measure, Loss) else data.n_outputs
    shape = (*targets.shape, units) if data.targets == "tokens" else (len(targets), units)
    outputs = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    return {name: MeasureCase(measure, torch.from_numpy(outputs), targets)}


def every_sample_has_a_value(case: MeasureCase) -> None:
    """Look at the shape and the values."""
    values = case.values()
    shapes = (1,) if isinstance(case.measure, Loss) else (1, 2)
    n = len(case.targets)
    require(len(values) == n and values.ndim in shapes, f"{n} samples give the shape {list(values.shape)}")
    require(torch.isfinite(values).all(), "a value is not finite")


def a_sample_does_not_depend_on_the_others(case: MeasureCase) -> None:
    """Give samples 2 to 4 alone, and compare to rounding."""
    part = slice(2, 5)
    require(torch.allclose(case.values(part), case.values()[part], atol=1e-6), "its value differs without the others")


def the_values_are_deterministic(case: MeasureCase) -> None:
    """Compute the values twice."""
    require(torch.equal(case.values(), case.values()), "the same outputs give other values")


def it_has_a_finite_gradient(case: MeasureCase) -> None:
    """Differentiate the mean loss by the outputs."""
    outputs = case.outputs.clone().requires_grad_()
    loss = case.measure.per_sample(outputs, case.targets).mean()
    require(loss.requires_grad, "it does not depend on the outputs by torch's operations")
    (gradient,) = torch.autograd.grad(loss, outputs)
    require(torch.isfinite(gradient).all(), "the gradient is not finite")
    require(gradient.any(), "the gradient is zero everywhere")


def the_metric_of_the_means_is_a_number(case: MeasureCase) -> None:
    """Compute the metric of all samples."""
    means = case.values().to(torch.float64).mean(0).reshape(-1).numpy()
    value = case.measure.of_means(means)
    require(isinstance(value, float) and math.isfinite(value), f"it is {value!r}")


def digest_of(case: MeasureCase) -> str:
    """Return the sha256 of the values."""
    return digest({"values": case.values().numpy()})


_OF_BOTH = (every_sample_has_a_value, a_sample_does_not_depend_on_the_others, the_values_are_deterministic)
LOSS_LAWS = (*_OF_BOTH, it_has_a_finite_gradient)
METRIC_LAWS = (*_OF_BOTH, the_metric_of_the_means_is_a_number)
