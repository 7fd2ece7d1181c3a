"""Gradient inversion: images whose gradient points along the change that a client sent, found by optimisation.

Reference: Geiping et al., Inverting Gradients - How easy is it to break privacy in federated learning?, NeurIPS 2020
(arXiv:2003.14053), equation 4: 1 - cosine of the gradients plus total variation, minimised by Adam on the signs of the
derivatives within the box of the pixels; Zhu et al., Deep Leakage from Gradients, NeurIPS 2019, for the idea. Letters:
k changes that are attacked at once, n images of each.

Differs from the paper: 1. the attacker is given the labels (which he reads from a batch's bias, or guesses): no attack
with unknown labels does better by that. 2. what he compares is the dummy gradient after what is public of the encoding:
the projection onto a shared basis, and the entries that a sparse upload holds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.func import functional_call, grad, vmap

from narrowcast.algorithms.attacks.network_transcript import ObservedChange
from narrowcast.algorithms.federated.low_rank import Factor
from narrowcast.platform.compiled import one_thread
from narrowcast.platform.contracts import Task
from narrowcast.platform.data.samples import Samples, one_array
from narrowcast.platform.errors import UserError
from narrowcast.platform.models.neural_network import NeuralNetwork
from narrowcast.platform.seeds import generator
from narrowcast.platform.types import Arrays, FloatArray, IntArray


@dataclass(frozen=True)
class GradientInversion:
    """The settings of the attack; the best of `restarts` starts is kept, by its own objective.

    `total_variation` is the weight of the mean absolute difference of neighbouring pixels. Features without a height
    and a width are images of `width` columns, or have no neighbours if that is None. Pixels are from 0 to 1.
    """

    steps: int = 200
    step_size: float = 0.1
    total_variation: float = 0.0
    restarts: int = 2
    width: int | None = None
    seed: int = 0

    def images(self, task: Task, model: Arrays, observed: Sequence[ObservedChange], labels: IntArray) -> FloatArray:
        """Return the images [k, n, ...] that explain each change of `model`, of labels [k, n].

        The change is one of a step, or some, along the mean gradient of the n images. Raise `UserError` for a model
        that is no network of images, and for labels of another number of changes.
        """
        explained = _Explanation(task, model, observed, np.tile(labels, (self.restarts, 1)), self.restarts)
        start = generator(self.seed, "dummy images").random((self.restarts * len(observed), *explained.shape))
        images = torch.from_numpy(start.astype(np.float32)).requires_grad_()
        optimizer = torch.optim.Adam([images], lr=self.step_size)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, self.steps, eta_min=self.step_size / 100)
        with one_thread():  # two threads mostly wait for one another
            for _ in range(self.steps):
                objective = explained.distances(images) + self._roughness(images)
                (images.grad,) = torch.autograd.grad(objective.sum(), images)
                images.grad.sign_()
                optimizer.step()
                schedule.step()
                with torch.no_grad():
                    images.clamp_(0, 1)
            with torch.no_grad():
                reached = explained.distances(images) + self._roughness(images)
                best = reached.view(self.restarts, -1).argmin(0)
                of_starts = images.view(self.restarts, len(observed), *images.shape[1:])
                return of_starts[best, torch.arange(len(observed))].numpy().astype(np.float64)

    def _roughness(self, images: Tensor) -> Tensor:
        """Return the weighted total variation of each row of images [k, n, ...], [k]."""
        if not self.total_variation or (images.ndim < 4 and self.width is None):
            return torch.zeros(len(images))
        pixels = images if self.width is None else images.view(*images.shape[:2], -1, self.width)
        across, down = pixels.diff(dim=-1).abs(), pixels.diff(dim=-2).abs()
        return self.total_variation * (across.flatten(1).mean(1) + down.flatten(1).mean(1))


def gradient_distances(
    task: Task, model: Arrays, observed: Sequence[ObservedChange], images: FloatArray, labels: IntArray
) -> FloatArray:
    """Return 1 - cosine of each change and the gradient of images [k, n, ...] with labels [k, n], [k].

    It is 0 for the true images of one step without a codec's error. Raise `UserError` as `GradientInversion.images`.
    """
    explained = _Explanation(task, model, observed, labels, copies=1)
    with torch.no_grad():
        return explained.distances(torch.from_numpy(images.astype(np.float32))).numpy().astype(np.float64)


class _Explanation:
    """The gradients of images with given labels [k, n], beside changes, `copies` times over; k counts the copies.

    `shape` is that of the n images of a change.
    """

    def __init__(
        self, task: Task, model: Arrays, observed: Sequence[ObservedChange], labels: IntArray, copies: int
    ) -> None:
        data, network = task.data, task.model
        if not isinstance(network, NeuralNetwork) or not isinstance(data, Samples):
            raise UserError(f"model.kind = {network.kind}: gradients of images are those of networks; use mlp or cnn")
        if len(labels) != copies * len(observed):
            raise UserError(
                f"labels of {len(labels) // copies} changes, but {len(observed)} changes; give labels of each"
            )
        self.shape = (labels.shape[1], *one_array(data.train.features).shape[1:])
        self._labels = torch.from_numpy(labels)
        self._parameters = {name: torch.from_numpy(np.array(values)) for name, values in model.items()}
        self._sight = _Sight(observed, self._parameters, copies)
        module, loss = network.loaded(model, data), network.loss_on(data)

        def mean_loss(values: Mapping[str, Tensor], images: Tensor, of_images: Tensor) -> Tensor:
            return loss.per_sample(functional_call(module, dict(values), (images,)), of_images).mean()

        self._gradients = vmap(grad(mean_loss), in_dims=(None, 0, 0))

    def distances(self, images: Tensor) -> Tensor:
        """Return 1 - cosine of each change and the gradient of the images [k, n, ...], [k]."""
        return self._sight.distances(self._gradients(self._parameters, images, self._labels))


class _Sight:
    """The changes that an attacker compares gradients with, `copies` times over, and what he sees of a gradient."""

    def __init__(self, observed: Sequence[ObservedChange], parameters: Mapping[str, Tensor], copies: int) -> None:
        self._projections, self._kept = dict[str, Any](), dict[str, Tensor]()
        self._factors = {name: Factor.of(tuple(values.shape), 1) for name, values in parameters.items()}
        wanted = []
        for name, values in parameters.items():
            changes = self._stacked([observation.change[name] for observation in observed], copies).reshape(
                -1, values.numel()
            )
            kept = [
                observation.change[name] != 0 if observation.sparse else np.ones(values.shape)
                for observation in observed
            ]
            self._kept[name] = self._stacked(kept, copies).reshape(-1, values.numel())
            if any(name in observation.projections for observation in observed):
                whole = np.eye(min(len(values), values[0].numel()))
                self._projections[name] = self._stacked(
                    [observation.projections.get(name, whole) for observation in observed], copies
                )
            wanted.append(-changes)
        self._wanted = torch.nn.functional.normalize(torch.cat(wanted, 1), dim=1)

    @staticmethod
    def _stacked(arrays: Sequence[Any], copies: int) -> Tensor:
        return torch.from_numpy(np.tile(np.stack(arrays).astype(np.float32), (copies, *[1] * arrays[0].ndim)))

    def distances(self, gradients: Mapping[str, Tensor]) -> Tensor:
        """Return 1 - cosine of each gradient [k, ...] with its change, [k]."""
        seen = []
        for name, values in gradients.items():
            projection = self._projections.get(name)
            sent = values if projection is None else self._projected(name, values, projection)
            seen.append(sent.flatten(1) * self._kept[name])
        return 1 - (torch.nn.functional.normalize(torch.cat(seen, 1), dim=1) * self._wanted).sum(1)

    def _projected(self, name: str, gradients: Tensor, projection: Tensor) -> Tensor:
        factor = self._factors[name]
        assert factor is not None, "vectors have no basis"
        matrices = gradients.flatten(2)
        if factor.transposed:
            return (projection @ matrices).view_as(gradients)  # projections are symmetric
        return (matrices @ projection).view_as(gradients)
