"""The one way in which a torch module is called: its inputs, parameters in place of its own, and what counts as scores.

Batched, client-by-client and rule steps, losses before training, evaluation and distillation all call `call_module`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.func import functional_call

Inputs = Tensor | Mapping[str, Tensor]
"""What a module is called with: one tensor, or keyword arguments by name, all [n, ...]."""
Output = str | int | None
"""The part of a module's outputs that are its scores: a name, a place, or None if it returns a tensor alone."""


def call_module(module: nn.Module, inputs: Inputs, tensors: Mapping[str, Tensor] | None = None) -> Tensor:
    """Return the outputs of a module for inputs [n, ...]; `tensors` replace parameters and buffers of these names.

    A tensor that the module has under several names is replaced under all of them. Modules whose outputs are more than
    a tensor have been given `select_output`.
    """
    arguments, named = ((), dict(inputs)) if isinstance(inputs, Mapping) else ((inputs,), {})
    outputs: Tensor
    if tensors is None:
        outputs = module(*arguments, **named)
    else:
        outputs = functional_call(module, dict(tensors), arguments, named)
    return outputs


def select_output(module: nn.Module, output: Output) -> nn.Module:
    """Let the module return this part of its outputs, wherever it is called, and return the module."""
    if output is not None:
        module.register_forward_hook(lambda _module, _inputs, outputs: part_of(outputs, output))
    return module


def part_of(outputs: Any, output: str | int) -> Any:
    """Return the part of outputs by this name or place; raise `LookupError` if there is none."""
    if isinstance(output, str) and not isinstance(outputs, Mapping):
        if not hasattr(outputs, output):
            raise LookupError(f"{type(outputs).__name__} has no {output}")
        return getattr(outputs, output)
    return outputs[output]
