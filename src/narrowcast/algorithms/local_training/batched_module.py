"""Batched forward pass of a torch module in which every client has its own parameters."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn
from torch.func import vmap

from narrowcast.platform.models.module_call import call_module

Forward = Callable[[Mapping[str, Tensor], Tensor], Tensor]
"""Map parameters [a, ...] and features [a, b, ...] of a clients to scores [a, b, K]."""

_Elementwise = nn.ReLU | nn.Tanh | nn.Sigmoid | nn.GELU | nn.ELU | nn.LeakyReLU | nn.SiLU | nn.Identity


def layers_of(module: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return the layers of a chain with their names, a layer that occurs several times as often as it does."""
    return [(name, layer) for name, layer in module.named_modules(remove_duplicate=False) if name]


def gains_from_batching(module: nn.Module) -> bool:
    """Return whether the module is a chain of linear and elementwise layers; it batches into a few matrix products.

    A chain in which a linear layer occurs twice is not one of these: the occurrences share their parameters.
    """
    if not isinstance(module, nn.Sequential):
        return False
    linear_layers = [layer for layer in module if isinstance(layer, nn.Linear)]
    return len(set(linear_layers)) == len(linear_layers) and all(
        isinstance(layer, nn.Linear | nn.Flatten | _Elementwise) for layer in module
    )


def batched_forward(module: nn.Module) -> Forward:
    """Return the module's forward pass over a leading client axis.

    A chain of linear and elementwise layers becomes batched matrix products; any other module goes through
    `torch.func.vmap`.
    """
    if gains_from_batching(module):
        layers = layers_of(module)
        return lambda parameters, features: _run_chain(layers, parameters, features)
    return vmap(lambda parameters, features: call_module(module, features, parameters))


def linear(layer: nn.Linear, name: str, parameters: Mapping[str, Tensor], inputs: Tensor) -> Tensor:
    """Return the layer's outputs [a, b, m] for inputs [a, b, n], each client with its own weights and bias."""
    weight = parameters[f"{name}.weight"].transpose(1, 2)
    if layer.bias is None:
        return torch.bmm(inputs, weight)
    return torch.baddbmm(parameters[f"{name}.bias"].unsqueeze(1), inputs, weight)


def _run_chain(layers: list[tuple[str, nn.Module]], parameters: Mapping[str, Tensor], features: Tensor) -> Tensor:
    for name, layer in layers:
        if isinstance(layer, nn.Linear):
            features = linear(layer, name, parameters, features)
        else:
            features = features.flatten(2) if isinstance(layer, nn.Flatten) else layer(features)
    return features
