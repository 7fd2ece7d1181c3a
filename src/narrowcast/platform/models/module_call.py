"""The one way in which a torch module is called: its inputs, parameters in place of its own, and what counts as scores.

Batched, client-by-client and rule steps, losses before training, evaluation and distillation all call `call_module`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from narrowcast.platform.data.samples import each_input
from narrowcast.platform.errors import UserError

Inputs = Tensor | Mapping[str, Tensor]
"""The inputs of a module: one tensor, or keyword arguments by name, all [n, ...]."""
HALF_TYPES = frozenset((torch.bfloat16, torch.float16))
_HALF = "_narrowcast_half_types"
Output = str | int | None
"""The part of a module's outputs that are its scores: a name, a place, or None if it returns a tensor alone."""


def call_module(module: nn.Module, inputs: Inputs, tensors: Mapping[str, Tensor] | None = None) -> Tensor:
    """Return the outputs of a module for inputs [n, ...]; `tensors` replace parameters and buffers of these names.

    A tensor that the module has under several names is replaced under all of them. Modules whose outputs are more than
    a tensor have been given `select_output`. A module with half types, see `HalfTypes`, gets numbers in its types, and
    its outputs are returned in float32.
    """
    half: HalfTypes | None = vars(module).get(_HALF)
    if half is not None:
        inputs = each_input(lambda values: values.to(half.inputs) if values.is_floating_point() else values, inputs)
        tensors = tensors and {name: tensor.to(half.of.get(name, tensor.dtype)) for name, tensor in tensors.items()}
    arguments, named = ((), dict(inputs)) if isinstance(inputs, Mapping) else ((inputs,), {})
    outputs: Tensor
    if tensors is None:
        outputs = module(*arguments, **named)
    else:
        outputs = functional_call(module, dict(tensors), arguments, named)
    return outputs.to(torch.float32) if half is not None and isinstance(outputs, Tensor) else outputs


@dataclass(frozen=True)
class HalfTypes:
    """The types of a module with parameters of bfloat16 or float16, in which it computes: `of` those that it trains.

    What trains is held, stepped and sent in float32 all the same, so that small steps add up. Inputs with fractions
    enter in the type of the module's first parameter.
    """

    inputs: torch.dtype
    of: Mapping[str, torch.dtype]


def keep_half_types(module: nn.Module) -> None:
    """Let calls of the module, and of its copies, compute in its half types, if it has parameters of some."""
    types = {name: tensor.dtype for name, tensor in module.named_parameters()}
    if not HALF_TYPES.isdisjoint(types.values()):
        floating = [dtype for dtype in types.values() if dtype.is_floating_point]
        vars(module)[_HALF] = HalfTypes(
            floating[0], {name: dtype for name, dtype in types.items() if dtype in HALF_TYPES}
        )


def has_half_types(module: nn.Module) -> bool:
    """Return whether the module computes in half types."""
    return _HALF in vars(module)


def select_output(module: nn.Module, output: Output) -> nn.Module:
    """Let the module return this part of its outputs, wherever it is called, and return the module."""
    if output is not None and _Selected(output) not in module._forward_hooks.values():
        module.register_forward_hook(_Selected(output))
    return module


@dataclass(frozen=True)
class _Selected:
    """A forward hook that returns one part of the outputs; a tensor, as some modules return when evaluated, whole."""

    output: str | int

    def __call__(self, module: nn.Module, inputs: Any, outputs: Any) -> Tensor:
        del inputs
        if isinstance(outputs, Tensor):
            return outputs
        parts = _parts(outputs)
        if self.output not in parts:
            raise UserError(
                f"model.output = {self.output}: {type(module).__name__} returns {described_outputs(outputs)}; use one "
                "of these"
            )
        return parts[self.output]


def check_tensor(module: nn.Module, outputs: Any) -> Tensor:
    """Return outputs that are a tensor; raise `UserError`, which says what to select, for others."""
    if isinstance(outputs, Tensor):
        return outputs
    parts = _parts(outputs)
    likely = "logits" if "logits" in parts else next(iter(parts), None)
    advice = "return a tensor" if likely is None else f"say which part the scores are, such as model.output = {likely}"
    raise UserError(f"{type(module).__name__} returns {described_outputs(outputs)} in place of a tensor; {advice}")


def described_outputs(outputs: Any) -> str:
    """Return what a module returned in a few words, with the names or places and the shapes of its tensors."""
    parts = ", ".join(f"{name} {list(tensor.shape)}" for name, tensor in _parts(outputs).items())
    return f"{type(outputs).__name__} of {parts}" if parts else type(outputs).__name__


def _parts(outputs: Any) -> dict[str | int, Tensor]:
    """Return the tensors among outputs by name, and by place if they are a sequence."""
    parts: dict[str | int, Any] = {}
    if isinstance(outputs, Mapping):
        parts.update(outputs)
    elif isinstance(outputs, Sequence):
        parts.update(enumerate(outputs))
        parts.update({name: getattr(outputs, name) for name in getattr(outputs, "_fields", ())})
    elif hasattr(outputs, "__dict__"):
        parts.update(vars(outputs))
    return {name: part for name, part in parts.items() if isinstance(part, Tensor)}
