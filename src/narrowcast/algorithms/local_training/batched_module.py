"""Batched forward pass of a torch module in which every client has its own parameters."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

Forward = Callable[[Mapping[str, Tensor], Tensor], Tensor]
"""Map parameters [a, ...] and features [a, b, ...] of a clients to scores [a, b, K]."""

_Elementwise = nn.ReLU | nn.Tanh | nn.Sigmoid | nn.GELU | nn.ELU | nn.LeakyReLU | nn.SiLU | nn.Identity


def gains_from_batching(module: nn.Module) -> bool:
    """Return whether the module is a chain of linear and elementwise layers; it batches into a few matrix products."""
    return isinstance(module, nn.Sequential) and all(
        isinstance(layer, nn.Linear | nn.Flatten | _Elementwise) for layer in module
    )


def batched_forward(module: nn.Module) -> Forward:
    """Return the module's forward pass over a leading client axis.

    A chain of linear and elementwise layers becomes batched matrix products; any other module goes through
    `torch.func.vmap`.
    """
    if gains_from_batching(module):
        assert isinstance(module, nn.Sequential)
        chain = module
        return lambda parameters, features: _run_chain(chain, parameters, features)
    return vmap(lambda parameters, features: functional_call(module, dict(parameters), (features,)))


def _run_chain(chain: nn.Sequential, parameters: Mapping[str, Tensor], features: Tensor) -> Tensor:
    for name, layer in chain.named_children():
        if isinstance(layer, nn.Linear):
            weight = parameters[f"{name}.weight"].transpose(1, 2)
            if layer.bias is None:
                features = torch.bmm(features, weight)
            else:
                features = torch.baddbmm(parameters[f"{name}.bias"].unsqueeze(1), features, weight)
        else:
            features = features.flatten(2) if isinstance(layer, nn.Flatten) else layer(features)
    return features
