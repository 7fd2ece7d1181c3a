"""The parts of a torch module: what clients train, and what is the same for all of them and is never sent.

`requires_grad` says which parameters train. A tensor under several names is one, called by its first. Frozen parameters
and buffers keep the values of the seeded build; buffers that a training step changes are the module's statistics.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping
from copy import deepcopy

import numpy as np
import torch
from torch import Tensor, nn

from narrowcast.platform.models.module_build import named_tensors
from narrowcast.platform.models.module_call import HALF_TYPES
from narrowcast.platform.types import Arrays


def trained_of(module: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters that clients train, by their first name."""
    return {name: each for name, each in module.named_parameters() if each.requires_grad}


def fixed_of(module: nn.Module) -> dict[str, Tensor]:
    """Return the frozen parameters and the buffers, by their first name."""
    trained = trained_of(module)
    return {name: each.detach() for name, each in named_tensors(module).items() if name not in trained}


def fixed_sha256(module: nn.Module) -> str | None:
    """Return the sha256 of names, types, shapes and values of all that is not trained; None if there is nothing."""
    if not (fixed := fixed_of(module)):
        return None
    hasher = hashlib.sha256()
    for name in sorted(fixed):
        values = fixed[name].contiguous()
        hasher.update(f"{name}\0{values.dtype}\0{tuple(values.shape)}\0".encode())
        hasher.update(values.reshape(-1).view(torch.uint8).numpy().data)
    return hasher.hexdigest()


def copy_of(module: nn.Module, device: str = "cpu", own: Collection[str] = ()) -> nn.Module:
    """Return a copy of a module on a device, with trained parameters of its own.

    On the CPU it shares the frozen parameters and the buffers, but for those named in `own`.
    """
    for layer in module.modules():
        for name, each in list(vars(layer).items()):
            if isinstance(each, Tensor) and each.grad_fn is not None:  # as weight_norm's hook leaves at each call
                setattr(layer, name, each.detach())
    if device != "cpu":
        return deepcopy(module).to(device)
    shared = (each for name, each in named_tensors(module).items() if not each.requires_grad and name not in own)
    return deepcopy(module, {id(each): each for each in shared})


def with_values(module: nn.Module, values: Mapping[str, Tensor]) -> nn.Module:
    """Put values in place of tensors of these names, which have to be the module's own, and return the module."""
    tensors = named_tensors(module)
    with torch.no_grad():
        for name, each in values.items():
            tensors[name].copy_(each)
    return module


def state_of(module: nn.Module) -> dict[str, np.ndarray]:
    """Return the module's `state_dict` as arrays, each of its own memory; bfloat16 as float32, which has its values."""
    return {
        name: (each.to(torch.float32) if each.dtype == torch.bfloat16 else each).numpy().copy()
        for name, each in module.state_dict().items()
    }


def differing(one: nn.Module, other: nn.Module) -> str | None:
    """Return the name of a tensor that two modules have different values of; None if there is none."""
    mine, theirs = named_tensors(one), named_tensors(other)
    if mine.keys() != theirs.keys():
        return sorted(mine.keys() ^ theirs.keys())[0]
    return next((name for name, each in mine.items() if not same_values(each.detach(), theirs[name].detach())), None)


def owner_of(module: nn.Module, name: str) -> str:
    """Return the class and the name of the layer that has this tensor, as `BatchNorm1d 1`."""
    path = name.rpartition(".")[0]
    return f"{type(module.get_submodule(path)).__name__} {path}".rstrip()


def same_values(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors have the same type, shape and bits."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    return torch.equal(one.reshape(-1).view(torch.uint8), other.contiguous().reshape(-1).view(torch.uint8))


def shapes_of(module: nn.Module) -> dict[str, tuple[int, ...]]:
    """Return the shapes of what clients train."""
    return {name: tuple(each.shape) for name, each in trained_of(module).items()}


def arrays_of(module: nn.Module, names: Collection[str] | None = None) -> Arrays:
    """Return copies of these tensors, by default of what clients train, as arrays; half types as float32."""
    tensors = named_tensors(module)
    chosen = trained_of(module) if names is None else names
    return {name: _as_sent(tensors[name].detach()).numpy().copy() for name in chosen}


def _as_sent(values: Tensor) -> Tensor:
    return values.to(torch.float32) if values.dtype in HALF_TYPES else values
