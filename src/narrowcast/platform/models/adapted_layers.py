"""Linear layers with a trained change of low rank beside a frozen weight.

Reference: Hu et al., LoRA: Low-Rank Adaptation of Large Language Models, ICLR 2022 (arXiv:2106.09685), section 4.1.
Letters: W0 [o, i] the frozen weight, A [r, i] and B [o, r] the factors of its change, s = alpha / r.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from math import sqrt
from typing import cast

import torch
from torch import Tensor, nn

A, B, WEIGHT = "lora_A", "lora_B", "weight"
"""The factors of a layer and its frozen weight, in the names of its tensors."""


class AdaptedLinear(nn.Linear):
    """A linear layer with outputs (W0 + s B A) x + b, whose weight is not added up with the product of its factors."""

    scale: float

    def forward(self, inputs: Tensor) -> Tensor:
        """Return W0 x + b + s B (A x)."""
        within = nn.functional.linear(inputs, getattr(self, A))
        return super().forward(inputs) + self.scale * nn.functional.linear(within, getattr(self, B))

    def merged_weight(self) -> Tensor:
        """Return W0 + s B A."""
        return (self.weight + self.scale * (getattr(self, B) @ getattr(self, A))).detach()


def adapt(layer: nn.Linear, rank: int, alpha: float, trained: Collection[str]) -> None:
    """Make a linear layer an `AdaptedLinear`, in place, with factors of rank min(rank, o, i) drawn by torch.

    B is zero and A drawn, or the reverse if A alone is trained: the change is zero before training. What is drawn is
    uniform, as torch draws a linear layer of so many inputs, see `initial_bound`.
    """
    rank = min(rank, layer.in_features, layer.out_features)
    factors = {A: torch.zeros(rank, layer.in_features), B: torch.zeros(layer.out_features, rank)}
    nn.init.kaiming_uniform_(factors[A if B in trained else B], a=sqrt(5))
    for name, values in factors.items():
        layer.register_parameter(name, nn.Parameter(values.to(layer.weight.dtype), requires_grad=name in trained))
    layer.__class__ = AdaptedLinear  # the layer's hooks, its places in the module and the names of its tensors stay
    cast(AdaptedLinear, layer).scale = alpha / rank


def initial_bound(inputs: int) -> float:
    """Return the largest entry that a factor with so many columns is drawn with."""
    return 1 / sqrt(inputs)


def adapted_layers(module: nn.Module) -> Iterator[tuple[str, AdaptedLinear]]:
    """Yield the adapted layers of a module and what their names begin with, such as `encoder.0.`."""
    for name, layer in module.named_modules():
        if isinstance(layer, AdaptedLinear):
            yield f"{name}." if name else "", layer


def is_factor(name: str) -> bool:
    """Return whether a tensor of this name is a factor."""
    return name.rpartition(".")[2] in (A, B)


def factor_pairs(names: Iterable[str]) -> dict[str, tuple[str, str]]:
    """Return the names of A and B of each layer of which both are among the names, by what they begin with."""
    names = set(names)
    before = sorted(name.removesuffix(A) for name in names if name.rpartition(".")[2] == A)
    return {layer: (layer + A, layer + B) for layer in before if layer + B in names}
