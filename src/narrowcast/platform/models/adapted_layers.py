"""Linear layers with a trained change of low rank beside a frozen weight.

Reference: Hu et al., LoRA: Low-Rank Adaptation of Large Language Models, ICLR 2022 (arXiv:2106.09685), section 4.1.
Letters: W0 [o, i] the frozen weight, A [r, i] and B [o, r] the factors of its change, R [r, r] a core between them, s =
alpha / r.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from math import sqrt
from typing import ClassVar, cast

import torch
from torch import Tensor, nn

A, B, CORE, WEIGHT = "lora_A", "lora_B", "lora_core", "weight"
"""The factors of a layer, the core between them if there is one, and its frozen weight, in the names of its tensors."""
_CONV1D = "transformers.pytorch_utils.Conv1D"


class Adapted(nn.Module):
    """A layer with outputs (W0 + s B A) x + b, whose weight is not added up with the product of its factors.

    With a core these are (W0 + s B R A) x + b.
    """

    transposed: ClassVar[bool] = False
    """Whether the layer holds W0 as [i, o]."""
    weight: Tensor
    scale: float

    def _frozen(self, inputs: Tensor) -> Tensor:
        """Return W0 x + b."""
        raise NotImplementedError

    def forward(self, inputs: Tensor) -> Tensor:
        """Return W0 x + b + s B (A x), or with a core W0 x + b + s B (R (A x))."""
        within = nn.functional.linear(inputs, getattr(self, A))
        if hasattr(self, CORE):
            within = nn.functional.linear(within, getattr(self, CORE))
        return self._frozen(inputs) + self.scale * nn.functional.linear(within, getattr(self, B))

    def left_factor(self) -> Tensor:
        """Return the B with the product B A that the layer adds: B R if it has a core."""
        left: Tensor = getattr(self, B)
        return left @ getattr(self, CORE) if hasattr(self, CORE) else left

    def merged_weight(self) -> Tensor:
        """Return W0 + s B A, as the layer holds it."""
        product = self.scale * (self.left_factor() @ getattr(self, A))
        return (self.weight + (product.T if self.transposed else product)).detach()


class AdaptedLinear(Adapted, nn.Linear):
    """A layer of torch."""

    def _frozen(self, inputs: Tensor) -> Tensor:
        return nn.functional.linear(inputs, self.weight, self.bias)


class AdaptedConv1D(Adapted):
    """The linear layer of GPT-2 in transformers, which holds W0 transposed, [i, o]."""

    transposed: ClassVar[bool] = True
    bias: Tensor

    def _frozen(self, inputs: Tensor) -> Tensor:
        outputs = torch.addmm(self.bias, inputs.reshape(-1, len(self.weight)), self.weight)
        return outputs.view(*inputs.shape[:-1], -1)


def adapted_kind(layer: nn.Module) -> type[Adapted] | None:
    """Return what a layer is once it has adapters; None for one that cannot have any.

    Classes derived from those two may compute something else, and are not adapted.
    """
    kind = type(layer)
    if kind is nn.Linear:
        return AdaptedLinear
    return AdaptedConv1D if f"{kind.__module__}.{kind.__name__}" == _CONV1D else None


def adapt(layer: nn.Module, rank: int, alpha: float, trained: Collection[str]) -> None:
    """Make a layer that has an `adapted_kind` that, in place, with factors of rank min(rank, o, i) drawn by torch.

    B is zero and A drawn, or the reverse if A alone is trained; if a core is trained, both are drawn and it is zero. So
    the change is zero before training. What is drawn is uniform, as torch draws a linear layer of so many inputs, see
    `initial_bound`.
    """
    kind, weight = adapted_kind(layer), layer.get_parameter(WEIGHT)
    assert kind is not None, "the caller has seen to it"
    outputs, inputs = reversed(weight.shape) if kind.transposed else weight.shape
    rank = min(rank, inputs, outputs)
    factors = {A: torch.zeros(rank, inputs), B: torch.zeros(outputs, rank)}
    if CORE in trained:
        factors[CORE] = torch.zeros(rank, rank)
    for name in (A, B) if CORE in trained else (A,) if B in trained else (B,):
        nn.init.kaiming_uniform_(factors[name], a=sqrt(5))
    for name, values in factors.items():
        layer.register_parameter(name, nn.Parameter(values.to(weight.dtype), requires_grad=name in trained))
    layer.__class__ = kind  # the layer's hooks, its places in the module and the names of its tensors stay
    cast(Adapted, layer).scale = alpha / rank


def put_core_between(layer: Adapted) -> None:
    """Make of B A the same product as B R A, in place: B and A have its singular vectors, and R the singular values.

    The gradient of R then is that of the product, seen from these vectors, whatever the lengths of B and A were. The
    largest entry of each column of B is positive.
    """
    a, b = (getattr(layer, name).detach().double() for name in (A, B))
    (q_left, r_left), (q_right, r_right) = torch.linalg.qr(b), torch.linalg.qr(a.T)
    u, singular, v = torch.linalg.svd(r_left @ r_right.T)
    left, right = q_left @ u, v @ q_right.T
    signs = left.gather(0, left.abs().argmax(0, keepdim=True))[0].sign()
    with torch.no_grad():
        for name, values in {A: signs[:, None] * right, B: left * signs, CORE: singular.diag()}.items():
            getattr(layer, name).copy_(values)


def initial_bound(inputs: int) -> float:
    """Return the largest entry that a factor with so many columns is drawn with."""
    return 1 / sqrt(inputs)


def adapted_layers(module: nn.Module) -> Iterator[tuple[str, Adapted]]:
    """Yield the adapted layers of a module and what their names begin with, such as `encoder.0.`."""
    for name, layer in module.named_modules():
        if isinstance(layer, Adapted):
            yield f"{name}." if name else "", layer


def is_factor(name: str) -> bool:
    """Return whether a tensor of this name is a factor, or a core between two."""
    return name.rpartition(".")[2] in (A, B, CORE)


def factor_pairs(names: Iterable[str]) -> dict[str, tuple[str, str]]:
    """Return the names of A and B of each layer of which both are among the names, by what they begin with."""
    names = set(names)
    before = sorted(name.removesuffix(A) for name in names if name.rpartition(".")[2] == A)
    return {layer: (layer + A, layer + B) for layer in before if layer + B in names}
