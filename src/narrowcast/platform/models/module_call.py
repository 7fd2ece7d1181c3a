"""The one way in which a torch module is called: its inputs, parameters in place of its own, and what counts as scores.

Batched, client-by-client and rule steps, losses before training, evaluation and distillation all call `call_module`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.func import functional_call

from narrowcast.platform.errors import UserError

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
    parts = ", ".join(f"{name} {list(each.shape)}" for name, each in _parts(outputs).items())
    return f"{type(outputs).__name__} of {parts}" if parts else type(outputs).__name__


def _parts(outputs: Any) -> dict[str | int, Tensor]:
    """Return the tensors among outputs by name, and by place if they are a sequence."""
    found: dict[str | int, Any] = {}
    if isinstance(outputs, Mapping):
        found.update(outputs)
    elif isinstance(outputs, Sequence):
        found.update(enumerate(outputs))
        found.update({name: getattr(outputs, name) for name in getattr(outputs, "_fields", ())})
    elif hasattr(outputs, "__dict__"):
        found.update(vars(outputs))
    return {name: each for name, each in found.items() if isinstance(each, Tensor)}
