"""Samples without labels in local steps: a model's prediction for a weak view is the target of a strong one.

References: Sohn et al., FixMatch, NeurIPS 2020 (arXiv:2001.07685), equations 3 and 4; Xie et al., Unsupervised Data
Augmentation for Consistency Training, NeurIPS 2020 (arXiv:1904.12848), equation 1 and section 2.2. Letters: a clients,
m samples of each, K classes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from narrowcast.algorithms.local_training.batches import BatchSchedule, draw_schedule
from narrowcast.algorithms.local_training.gradients import ARRAY_TYPES, Device, StepGradient, Tensors, to_tensor
from narrowcast.algorithms.local_training.views import Views
from narrowcast.platform.config.files import Section
from narrowcast.platform.contracts import LocalCall
from narrowcast.platform.data.samples import Unlabelled, one_array
from narrowcast.platform.errors import UserError
from narrowcast.platform.models.measures import Loss
from narrowcast.platform.models.neural_network import as_input
from narrowcast.platform.seeds import Words
from narrowcast.platform.types import Consistency, IntArray


class SoftCrossEntropy(Loss):
    """Cross-entropy of the softmax of the outputs with shares of the classes as targets, in nats."""

    def per_sample(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the cross-entropy of each sample, [n], for targets [n, K]."""
        return -(targets * torch.log_softmax(outputs, 1)).sum(1)


class _ConfidentTargets(Section):
    """A loss in which samples whose prediction is not sure enough have no part."""

    threshold: float
    weight: float = Field(1.0, ge=0, description="factor of the loss of samples without labels; 0: they are not used")
    ratio: int = Field(7, ge=1, description="samples without labels in a step, for each sample of training.batch_size")
    views: Views = Field(Views(), description="how images are changed for weak and strong views")

    def _confident(self, outputs: Tensor) -> Tensor:
        return torch.softmax(outputs, -1).amax(-1) >= self.threshold


class FixMatch(_ConfidentTargets):
    """The target is the class that the model predicts for the weak view, if its probability is `threshold` or more.

    Differs from the paper: 1. the views are those of `views`, fewer operations than RandAugment has. 2. no moving
    average of the parameters is evaluated.
    """

    kind: Literal["fixmatch"] = "fixmatch"
    threshold: float = Field(0.95, ge=0, le=1, description="least probability of the predicted class")

    def targets(self, outputs: Tensor) -> tuple[Tensor, Tensor]:
        """Return the predicted class of each sample as shares [a, m, K], and whether it counts [a, m]."""
        classes = torch.nn.functional.one_hot(outputs.argmax(-1), outputs.shape[-1])
        return classes.to(outputs.dtype), self._confident(outputs)


class UDA(_ConfidentTargets):
    """The target is the sharpened prediction for the weak view, if the largest probability is `threshold` or more.

    The cross-entropy with it has the gradient of the paper's Kullback-Leibler divergence.

    Differs from the paper: 1. the first prediction is that of a weak view, as for images in the released code. 2. the
    views are those of `views`. 3. training signals are not annealed.
    """

    kind: Literal["uda"] = "uda"
    threshold: float = Field(
        0.8, ge=0, le=1, description="least probability, before sharpening, of the likeliest class"
    )
    temperature: float = Field(0.4, gt=0, description="divisor of the outputs before the softmax of the target")

    def targets(self, outputs: Tensor) -> tuple[Tensor, Tensor]:
        """Return the softmax of the outputs over `temperature` [a, m, K], and whether it counts [a, m]."""
        return torch.softmax(outputs / self.temperature, -1), self._confident(outputs)


ConsistencyLoss = Annotated[FixMatch | UDA, Field(discriminator="kind")]


@dataclass(frozen=True)
class UnlabelledBatch:
    """The samples without labels of one step. Shapes: weak and strong [a, m, ...]; weights [a, m], 0 for padding."""

    weak: Tensor
    strong: Tensor
    weights: Tensor


@dataclass(frozen=True)
class UnlabelledGradient:
    """`UnlabelledStep` of the clients of a step. `saw` takes the losses [a, m] of every gradient."""

    batch: UnlabelledBatch
    outputs_of: Callable[[Mapping[str, Tensor], Tensor], Tensor]
    gradient_of: StepGradient
    saw: Callable[[Tensor], None]

    @property
    def valid(self) -> Tensor:
        """Return which samples there are, [a, m]."""
        return self.batch.weights > 0

    def outputs(self, at: Mapping[str, Tensor]) -> Tensor:
        """Return the outputs for the weak views, [a, m, K]."""
        return self.outputs_of(at, self.batch.weak)

    def gradient(self, at: Mapping[str, Tensor], targets: Tensor, weights: Tensor, *, strong: bool) -> Tensors:
        """Return the gradient of the weighted sum of cross-entropies with shares of classes."""
        views = self.batch.strong if strong else self.batch.weak
        gradients, losses = self.gradient_of(at, views, targets, weights)
        self.saw(losses * (weights > 0))
        return gradients


@dataclass(frozen=True)
class UnlabelledBatches:
    """Each step's samples without labels of a program's clients, in the order of their steps with labels.

    `rows` lists the rows of `features` of each client in turn, in the order of `schedule`; `places` [C] are the places
    there of the program's clients, and keys [C] those of their views. A client without such samples has none in a step.
    """

    consistency: Consistency
    features: Any
    rows: IntArray
    schedule: BatchSchedule
    places: IntArray
    keys: Words
    device: Device
    dtype: torch.dtype
    padded: bool

    @classmethod
    def of(
        cls,
        calls: Sequence[LocalCall],
        consistency: Consistency,
        steps: BatchSchedule,
        batch_size: int,
        dtype: torch.dtype,
        *,
        padded: bool,
    ) -> UnlabelledBatches:
        """Return those of the calls' clients, as many batches as their steps, in passes over a client's samples."""
        parts = [_of_clients(call) for call in calls]
        counts = np.concatenate([part.examples for part in parts])
        n_steps = np.empty_like(counts)
        n_steps[steps.order] = steps.steps
        passes = -(-n_steps // np.maximum(-(-counts // batch_size), 1))
        streams = [
            (
                call.task.private_seed.stream_keys("unlabelled", call.chunk.round_index, call.chunk.clients),
                call.task.private_seed.stream_keys("views", call.chunk.round_index, call.chunk.clients),
            )
            for call in calls
        ]
        shuffled, viewed = (np.concatenate(keys) for keys in zip(*streams, strict=True))
        schedule = draw_schedule(counts, np.where(counts > 0, passes, 0), batch_size, shuffled)
        features = [one_array(part.features) for part in parts]
        whole = features[0] if all(array is features[0] for array in features) else None
        starts = np.cumsum([0, *map(len, features)]) if whole is None else np.zeros(len(parts), np.int64)
        of_client = [
            part.order[begin:end] + start
            for part, start in zip(parts, starts, strict=False)
            for begin, end in zip(part.indptr[:-1], part.indptr[1:], strict=True)
        ]
        place_of = np.argsort(schedule.order)
        return cls(
            consistency=consistency,
            features=np.concatenate(features) if whole is None else whole,
            rows=np.concatenate([of_client[client] for client in schedule.order]),
            schedule=schedule,
            places=place_of[steps.order],
            keys=viewed[steps.order],
            device=calls[0].task.training.device,
            dtype=dtype,
            padded=padded,
        )

    def at(self, step: int, clients: slice) -> UnlabelledBatch | None:
        """Return those of a step of some of the program's clients; None if none of them has any."""
        schedule, places = self.schedule, self.places[clients]
        if step >= len(schedule.active):
            return None
        has = places < schedule.active[step]
        batch = int(schedule.active[:step].sum()) + np.where(has, places, 0)
        valid = schedule.valid[batch] & has[:, None]
        if not valid.any():
            return None
        samples = schedule.samples[batch]
        if not self.padded:  # a module may look at the whole batch, as batch norm does
            samples, valid = samples[:, : valid.sum()], valid[:, : valid.sum()]
        images = self.features[self.rows[np.where(valid, samples, 0)]]
        inputs = as_input(to_tensor(images, self.device), self.dtype)
        slots = 2 * (step * schedule.samples.shape[1] + np.arange(samples.shape[1]))[None]
        keys, views = self.keys[clients, None], self.consistency.views
        weights = np.divide(valid, np.maximum(valid.sum(axis=1, keepdims=True), 1), dtype=ARRAY_TYPES[self.dtype])
        return UnlabelledBatch(
            weak=views.weak(inputs, keys, slots),
            strong=views.strong(inputs, keys, slots + 1),
            weights=to_tensor(weights, self.device),
        )


def _of_clients(call: LocalCall) -> Unlabelled:
    """Return the samples without labels of the clients of a call, as those of its chunk."""
    unlabelled: Unlabelled | None = call.task.data.unlabelled
    if unlabelled is None:
        raise UserError(f"{call.task.data.name}: every sample has a label; leave some without by data.labelled")
    return unlabelled.of_clients(call.chunk.clients)
