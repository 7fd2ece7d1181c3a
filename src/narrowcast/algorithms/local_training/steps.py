"""The terms of clients' steps besides the gradient of the loss, and how they are added to it.

Shapes: a clients of a step, of C; each tensor is [a, ...].
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, reduce

import torch
from torch import Tensor

from narrowcast.algorithms.local_training.gradients import Tensors
from narrowcast.algorithms.local_training.rules import GradientDescent, Rate, along
from narrowcast.platform.models.adapted_layers import factor_pairs
from narrowcast.platform.types import LocalRule


@dataclass(frozen=True)
class Steps:
    """The terms of a client's steps besides the gradient of the loss, in the order of torch's optimisers.

    `rule` takes them with g + weight_decay y + correction. g is the gradient of the loss, multiplied by `gains`
    [C, ...], plus that of the proximal term, clipped to a norm. `correction` is [C, ...]. A learning rate is a scalar
    or [C]; there is one for each step, or one for all. `own` [C, ...] is for the rule. pulls [C] are added to
    `proximal`, and radii [C] bound the distance from the start after a step. `tail_weight` is that of the products of
    norms of adapters from tails [C] on.
    """

    learning_rates: Sequence[Rate]
    rule: LocalRule = field(default_factory=GradientDescent)
    weight_decay: float = 0.0
    clip_norm: float | None = None
    proximal: float = 0.0
    gains: Tensors = field(default_factory=dict)
    correction: Tensors = field(default_factory=dict)
    own: Tensors = field(default_factory=dict)
    pulls: Tensor | None = None
    radii: Tensor | None = None
    tails: Tensor | None = None
    tail_weight: float = 0.0

    def learning_rate(self, step: int, rows: slice) -> Rate:
        """Return the learning rate of a step of some clients."""
        rate = self.learning_rates[min(step, len(self.learning_rates) - 1)]
        return rate if isinstance(rate, float) else rate[rows]

    @cached_property
    def plain(self) -> bool:
        """Return whether the gradient of a step is that of the loss and nothing else."""
        terms = (self.weight_decay, self.clip_norm, self.proximal, self.gains, self.correction)
        return not any(terms) and self.pulls is None and self.tails is None


def add_terms(
    values: Mapping[str, Tensor], start: Tensors, gradients: Tensors, steps: Steps, rows: slice, decay: float
) -> None:
    """Add all terms but momentum to gradients [a, ...] of the loss at `values`, in place; `start` is [1 or C, ...]."""
    for name, gradient in gradients.items():
        if name in steps.gains:
            gradient.mul_(steps.gains[name][rows])
        if steps.proximal or steps.pulls is not None:
            moved = values[name] - rows_of({name: start[name]}, rows)[name]
            gradient.add_(moved, alpha=steps.proximal)
            if steps.pulls is not None:
                gradient.addcmul_(along(steps.pulls[rows].to(moved.dtype), moved), moved)
    if steps.tails is not None:
        _add_tails(values, gradients, steps.tails[rows], steps.tail_weight)
    if steps.clip_norm is not None:
        scale = (steps.clip_norm / _lengths(gradients).clamp(min=1e-12)).clamp(max=1.0)
        for gradient in gradients.values():
            gradient.mul_(along(scale, gradient))
    for name, gradient in gradients.items():
        if decay:
            gradient.add_(values[name], alpha=decay)
        if name in steps.correction:
            gradient.add_(steps.correction[name][rows])


def _add_tails(values: Mapping[str, Tensor], gradients: Tensors, tails: Tensor, weight: float) -> None:
    """Add the gradient of weight |B_t| |A_t| of each adapter, in place; where a norm is 0, its own part is 0."""
    for a, b in factor_pairs(gradients).values():
        right, left = values[a], values[b].mT  # [a, r, i] and [a, r, o]
        inside = (torch.arange(right.shape[1], device=right.device) >= tails.unsqueeze(1)).unsqueeze(2)
        right, left = torch.where(inside, right, 0), torch.where(inside, left, 0)
        right_norm, left_norm = _lengths({a: right}), _lengths({b: left})
        least = torch.finfo(right.dtype).tiny
        gradients[a].add_(along(weight * left_norm / right_norm.clamp(min=least), right) * right)
        gradients[b].add_((along(weight * right_norm / left_norm.clamp(min=least), left) * left).mT)


def _lengths(tensors: Mapping[str, Tensor]) -> Tensor:
    """Return the L2 norm of each client's tensors [a, ...] taken together, [a]."""
    squares = [tensor.reshape(len(tensor), -1).square().sum(dim=1) for tensor in tensors.values()]
    # in turn: the rounding of torch's sum over many tensors depends on the number of clients in the batch
    return reduce(torch.add, squares).sqrt()


def move_back(values: Mapping[str, Tensor], start: Tensors, radii: Tensor) -> None:
    """Move values [a, ...] that are farther than radii [a] from `start` [1 or a, ...] to that distance, in place."""
    moved = {name: value - start[name] for name, value in values.items()}
    lengths = _lengths(moved)
    radii = radii.to(lengths.dtype)
    outside, factors = lengths > radii, radii / lengths
    for name, value in values.items():
        inside = start[name] + along(factors, value) * moved[name]
        value.copy_(torch.where(along(outside, value), inside, value))


def rows_of(tensors: Tensors, rows: slice) -> Tensors:
    """Return the rows of some clients; a tensor that all clients share has one row and is returned whole."""
    whole = (1, rows.stop - rows.start)
    return {name: tensor if tensor.shape[0] in whole else tensor[rows] for name, tensor in tensors.items()}
