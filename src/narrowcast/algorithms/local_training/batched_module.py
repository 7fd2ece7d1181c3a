"""Batched forward pass of a torch module in which every client has its own parameters."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn
from torch.func import vmap

from narrowcast.platform.models.module_call import Inputs, call_module, has_half_types
from narrowcast.platform.models.module_parts import copy_of, trained_of

Forward = Callable[[Mapping[str, Tensor], Inputs], Tensor]
"""Map parameters [a, ...] and features [a, b, ...] each of a clients to scores [a, b, K]."""

_ELEMENTWISE = (nn.ReLU, nn.Tanh, nn.Sigmoid, nn.GELU, nn.ELU, nn.LeakyReLU, nn.SiLU, nn.Identity)
_OF_LINEAR = ("weight", "bias")
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def layers_of(module: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return the layers of a chain with their names, a layer that occurs several times as often as it does."""
    return [(name, layer) for name, layer in module.named_modules(remove_duplicate=False) if name]


def gains_from_batching(module: nn.Module) -> bool:
    """Return whether the module is a chain of linear and elementwise layers; it batches into a few matrix products.

    Not so a chain that has a layer or a weight twice, frozen or further parameters, half types, parametrisations,
    hooks, a forward pass of its own, or a flattening anywhere but before the first linear layer.
    """
    if not isinstance(module, nn.Sequential) or type(module).forward is not nn.Sequential.forward:
        return False
    kinds = [type(layer) for layer in module]
    if has_half_types(module) or any(kind not in (nn.Linear, nn.Flatten, *_ELEMENTWISE) for kind in kinds):
        return False
    if nn.Linear in kinds and nn.Flatten in kinds[kinds.index(nn.Linear) :]:
        return False
    if any("forward" in vars(layer) or any(getattr(layer, each) for each in _HOOKS) for layer in (module, *module)):
        return False
    own = {f"{name}.{each}" for name, layer in layers_of(module) if isinstance(layer, nn.Linear) for each in _OF_LINEAR}
    names = dict(module.named_parameters(remove_duplicate=False)).keys()
    return names == trained_of(module).keys() and names <= own


def callable_of(module: nn.Module, device: str) -> nn.Module:
    """Return a module that may be called, for one that all calls of a process share; a chain is only read."""
    return module if gains_from_batching(module) else copy_of(module, device)


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


def _run_chain(layers: list[tuple[str, nn.Module]], parameters: Mapping[str, Tensor], features: Inputs) -> Tensor:
    assert isinstance(features, Tensor), "a chain takes no inputs by name"
    for name, layer in layers:
        if isinstance(layer, nn.Linear):
            features = linear(layer, name, parameters, features)
        else:
            features = features.flatten(2) if isinstance(layer, nn.Flatten) else layer(features)
    return features
