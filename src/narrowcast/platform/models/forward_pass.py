"""Side effects of a forward pass, found by running it: its draws, and the statistics that it changes."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from narrowcast.platform.global_generators import isolated, moved_since, states
from narrowcast.platform.models.module_call import Inputs, call_module
from narrowcast.platform.models.module_parts import copy_of, fixed_of, same_values

_WORDS = (0x3C6E_F372_FE94_F82B, 0xA54F_F53A_5F1D_36F1)


@dataclass(frozen=True)
class ForwardPass:
    """Side effects of a module's forward passes in training mode, and draws of those in evaluation mode.

    `statistics` are the names of what is not trained and changes, as the means of batch norm. `draws` and
    `evaluation_draws` are names of `GENERATORS`. `repeats` is False if two passes from one state of all generators have
    different outputs.
    """

    statistics: tuple[str, ...] = ()
    draws: tuple[str, ...] = ()
    evaluation_draws: tuple[str, ...] = ()
    repeats: bool = True


def forward_pass(module: nn.Module, inputs: Inputs) -> ForwardPass:
    """Try a module on inputs [n, ...], which it has to take; the module itself stays as it is."""
    trial = deepcopy(copy_of(module))  # the first copy shares frozen parameters and buffers, the second does not
    kept = {name: each.clone() for name, each in fixed_of(trial).items()}

    def call(word: int) -> tuple[object, tuple[str, ...]]:
        for name, each in fixed_of(trial).items():
            if name in kept and each.shape == kept[name].shape:
                each.copy_(kept[name])
        with isolated(word), torch.no_grad():
            before = states()
            outputs = call_module(trial, inputs)
            return outputs, moved_since(before)

    trial.eval()
    _, evaluation_draws = call(_WORDS[0])
    trial.train()
    first, draws = call(_WORDS[0])
    after = fixed_of(trial)
    statistics = [name for name, each in kept.items() if name not in after or not same_values(each, after[name])]
    again, _ = call(_WORDS[0])
    repeats = not (isinstance(first, Tensor) and isinstance(again, Tensor)) or torch.allclose(
        first, again, rtol=1e-3, atol=1e-6, equal_nan=True
    )
    return ForwardPass(tuple(statistics), draws, evaluation_draws, repeats)
