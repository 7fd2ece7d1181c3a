"""A torch module of anybody's: how it is built, and which of its parts are trained, shared or constant.

A module is built without wrappers and with all shapes, and what goes wrong is one line. `requires_grad` says which
parameters clients train; everything else is the same for all clients and is never sent. A tensor under several names is
one, called by its first. Frozen parameters and buffers keep the values of the seeded build; buffers that a training
step changes are the module's statistics.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode

from narrowcast.platform.errors import UserError, described
from narrowcast.platform.models.module_call import HALF_TYPES, Inputs, call_module, keep_half_types
from narrowcast.platform.seeds import generator, isolated
from narrowcast.platform.types import Arrays

_PARALLEL = (nn.DataParallel, nn.parallel.DistributedDataParallel)


@contextmanager
def seeded_draws(seed: int) -> Iterator[None]:
    """Let torch, NumPy and Python draw from this seed, and afterwards go on as if nothing had been drawn."""
    with isolated(int(generator(seed, "model").integers(2**63))):
        yield


class _NoInitialValues(TorchFunctionMode):
    """Leaves out the initial values of modules: on "meta" torch has normal ones by its compiler, 100 MB of modules."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Return the tensor in place of calling an initialiser."""
        words = kwargs or {}
        if func is torch.Tensor.normal_ or getattr(func, "__module__", "") == "torch.nn.init":
            return words["tensor"] if "tensor" in words else args[0]
        return func(*args, **words)


@contextmanager
def shapes_alone() -> Iterator[None]:
    """Build modules on the device "meta", which has shapes and no values."""
    with torch.device("meta"), _NoInitialValues():
        yield


def build_module(make: Callable[[], Any], dtype: str, inputs: Callable[[], Inputs], named: str) -> nn.Module:
    """Return what `make` returns as a module whose parameters and buffers are of `dtype`, or of the half types it has.

    With a `dtype` but float32 half types become it too. Frozen parameters may also be whole numbers.
    Wrappers of `torch.compile` and of data parallelism are taken off. Lazy layers get their shapes from a forward pass
    on `inputs`. Raise `UserError`, which begins with `named`, if that fails, or for anything but a module.
    """
    try:
        with _within_memory():
            module = make()
    except UserError as error:
        raise error if str(error).startswith("model.") else UserError(f"{named}: {error}") from error
    except (Exception, SystemExit) as error:
        raise UserError(f"{named} cannot be built ({described(error)})") from error
    if not isinstance(module, nn.Module):
        if isinstance(module, type):
            got = f"the class {module.__name__} in place of an object of it"
        else:
            got = f"a function, {module.__name__}" if callable(module) else type(module).__name__
        raise UserError(f"{named} returned {got}; it must return a torch.nn.Module")
    module = unwrapped(module)
    if any(isinstance(child, torch.jit.ScriptModule) for child in module.modules()):
        raise UserError(
            f"{named} is compiled by torch.jit, which does not allow its parameters to be replaced; give the module as "
            "it was before torch.jit.script or torch.jit.trace"
        )
    if absent := [name for name, tensor in named_tensors(module).items() if tensor.is_meta]:
        raise UserError(f'{named} has {absent[0]} on the device "meta", without values; build it on the CPU')
    types = {tensor.dtype for tensor in module.parameters() if tensor.requires_grad or tensor.is_floating_point()}
    wanted: torch.dtype = getattr(torch, dtype)
    if other := types - {torch.float32, wanted, *HALF_TYPES}:
        has = str(other.pop()).removeprefix("torch.")
        advice = "set model.dtype = float64" if has == "float64" else "build it in float32"
        raise UserError(f"{named} has parameters of {has}, and model.dtype = {dtype}; {advice}")
    try:
        if wanted != torch.float32 or HALF_TYPES.isdisjoint(types):
            module = module.to(wanted)
        keep_half_types(module)
        if any(is_lazy(tensor) for tensor in named_tensors(module).values()):
            _dry_forward(module, inputs())
    except (Exception, SystemExit) as error:
        raise UserError(f"{named} cannot be prepared ({described(error)})") from error
    if lazy := [name for name, tensor in named_tensors(module).items() if is_lazy(tensor)]:
        raise UserError(f"{named} has {lazy[0]} of a lazy layer that a forward pass does not reach; give it its shape")
    return module


def unwrapped(module: nn.Module) -> nn.Module:
    """Return a module without the wrappers of `torch.compile` and of data parallelism, at any depth."""
    while isinstance(module, _PARALLEL) or isinstance(getattr(module, "_orig_mod", None), nn.Module):
        inner: Any = module.module if isinstance(module, _PARALLEL) else module._orig_mod
        module = inner
    for name, child in module._modules.items():
        if child is not None and (plain := unwrapped(child)) is not child:
            module._modules[name] = plain
    module._compiled_call_impl = None  # of `module.compile()`
    return module


def named_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Return all parameters and buffers of a module by name, one under several names by its first."""
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def _dry_forward(module: nn.Module, inputs: Inputs) -> None:
    was_training = module.training
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # lazy layers warn that they are new
        call_module(module.eval(), inputs)
    module.train(was_training)


@contextmanager
def _within_memory() -> Iterator[None]:
    """Raise `UserError` at the first parameter that does not fit twice, before its memory is written to.

    A run has the module that it builds, and a copy of it.
    """
    free, known, size = psutil.virtual_memory().available, set[int](), 0

    def count(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        nonlocal size
        if parameter is None or id(parameter) in known or parameter.is_meta or is_lazy(parameter):
            return
        known.add(id(parameter))
        size += parameter.numel() * parameter.itemsize
        if 2 * size > free:
            raise UserError(
                f"{name} of {type(module).__name__}, {list(parameter.shape)}, makes the model {size / 1e9:,.1f} GB, "
                f"which has to fit twice into the {free / 1e9:,.1f} GB of memory that are free; make its layers smaller"
            )

    hook = register_module_parameter_registration_hook(count)
    try:
        yield
    finally:
        hook.remove()


def trained_of(module: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters that clients train, by their first name."""
    return {name: tensor for name, tensor in module.named_parameters() if tensor.requires_grad}


def fixed_of(module: nn.Module) -> dict[str, Tensor]:
    """Return the frozen parameters and the buffers, by their first name."""
    trained = trained_of(module)
    return {name: tensor.detach() for name, tensor in named_tensors(module).items() if name not in trained}


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
        for name, value in list(vars(layer).items()):
            if isinstance(value, Tensor) and value.grad_fn is not None:  # as weight_norm's hook leaves at each call
                setattr(layer, name, value.detach())
    if device != "cpu":
        return deepcopy(module).to(device)
    shared = (tensor for name, tensor in named_tensors(module).items() if not tensor.requires_grad and name not in own)
    return deepcopy(module, {id(tensor): tensor for tensor in shared})


def with_values(module: nn.Module, values: Mapping[str, Tensor]) -> nn.Module:
    """Put values in place of tensors of these names, which have to be the module's own, and return the module."""
    tensors = named_tensors(module)
    with torch.no_grad():
        for name, tensor in values.items():
            tensors[name].copy_(tensor)
    return module


def holding(module: nn.Module, values: Mapping[str, Tensor]) -> nn.Module:
    """Return a copy of a module with these values of tensors that it does not train; without any, the module itself."""
    return with_values(copy_of(module, own=values), values) if values else module


def read_module(path: Path) -> dict[str, Tensor]:
    """Return the tensors of a safetensors file, in any of torch's types; raise `SafetensorError` if it is damaged."""
    with safe_open(path, "pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


def state_of(module: nn.Module) -> dict[str, np.ndarray]:
    """Return the module's `state_dict` as arrays, each of its own memory; bfloat16 as float32, which has its values."""
    return {
        name: (tensor.to(torch.float32) if tensor.dtype == torch.bfloat16 else tensor).numpy().copy()
        for name, tensor in module.state_dict().items()
    }


def differing(module: nn.Module, other: nn.Module) -> str | None:
    """Return the name of a tensor that two modules have different values of; None if there is none."""
    mine, theirs = named_tensors(module), named_tensors(other)
    if mine.keys() != theirs.keys():
        return sorted(mine.keys() ^ theirs.keys())[0]
    return next(
        (name for name, tensor in mine.items() if not same_values(tensor.detach(), theirs[name].detach())), None
    )


def owner_of(module: nn.Module, name: str) -> str:
    """Return the class and the name of the layer that has this tensor, as `BatchNorm1d 1`."""
    path = name.rpartition(".")[0]
    return f"{type(module.get_submodule(path)).__name__} {path}".rstrip()


def same_values(tensor: Tensor, other: Tensor) -> bool:
    """Return whether two tensors have the same type, shape and bits."""
    if tensor.shape != other.shape or tensor.dtype != other.dtype:
        return False
    return torch.equal(tensor.reshape(-1).view(torch.uint8), other.contiguous().reshape(-1).view(torch.uint8))


def shapes_of(module: nn.Module) -> dict[str, tuple[int, ...]]:
    """Return the shapes of what clients train."""
    return {name: tuple(tensor.shape) for name, tensor in trained_of(module).items()}


def arrays_of(module: nn.Module, names: Collection[str] | None = None) -> Arrays:
    """Return copies of these tensors, by default of what clients train, as arrays; half types as float32."""
    tensors = named_tensors(module)
    chosen = trained_of(module) if names is None else names
    return {name: _as_sent(tensors[name].detach()).numpy().copy() for name in chosen}


def _as_sent(values: Tensor) -> Tensor:
    return values.to(torch.float32) if values.dtype in HALF_TYPES else values
