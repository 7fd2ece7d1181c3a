"""Side effects of a forward pass: the draws that it makes, and the statistics that it changes, averaged or kept.

A pass is run once to find them. Statistics are values that training moves besides the parameters, as the means and
variances of batch norm. Averaged ones are part of the global model. Kept ones stay at the clients with the trained
parameters of their layers, as in FedBN; a client's are one row of its state, as what they have moved by since the model
was built.

Reference: Li, Jiang, Zhang, Kamp and Dou, FedBN, ICLR 2021 (arXiv:2102.07623), Algorithm 1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from math import prod
from typing import Literal

import numpy as np
import torch
from torch import Tensor, nn

from narrowcast.platform.errors import UserError
from narrowcast.platform.models.module_call import Inputs, call_module
from narrowcast.platform.models.modules import copy_of, fixed_of, named_tensors, owner_of, same_values, trained_of
from narrowcast.platform.seeds import isolated, moved_since, states
from narrowcast.platform.types import Arrays, FloatArray

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
    kept = {name: tensor.clone() for name, tensor in fixed_of(trial).items()}

    def call(word: int) -> tuple[object, tuple[str, ...]]:
        for name, tensor in fixed_of(trial).items():
            if name in kept and tensor.shape == kept[name].shape:
                tensor.copy_(kept[name])
        with isolated(word), torch.no_grad():
            before = states()
            outputs = call_module(trial, inputs)
            return outputs, moved_since(before)

    trial.eval()
    _, evaluation_draws = call(_WORDS[0])
    trial.train()
    first, draws = call(_WORDS[0])
    after = fixed_of(trial)
    statistics = [name for name, tensor in kept.items() if name not in after or not same_values(tensor, after[name])]
    again, _ = call(_WORDS[0])
    repeats = not (isinstance(first, Tensor) and isinstance(again, Tensor)) or torch.allclose(
        first, again, rtol=1e-3, atol=1e-6, equal_nan=True
    )
    return ForwardPass(tuple(statistics), draws, evaluation_draws, repeats)


Statistics = Literal["refuse", "local", "average"]
OWN_LAYERS = "own_layers"
"""The clients' array of what they keep, [U, values]."""


def averaged_names(module: nn.Module, statistics: Sequence[str]) -> tuple[str, ...]:
    """Return the statistics that have a mean; counters, which are integers, begin anew in each participation."""
    tensors = named_tensors(module)
    return tuple(name for name in statistics if name in tensors and tensors[name].is_floating_point())


def own_names(module: nn.Module, statistics: Sequence[str]) -> tuple[str, ...]:
    """Return what a client keeps: statistics that are not counters, and the trained parameters of their layers."""
    layers = {name.rpartition(".")[0] for name in statistics}
    parameters = (name for name in trained_of(module) if name.rpartition(".")[0] in layers)
    return (*parameters, *averaged_names(module, statistics))


def packed(values: Mapping[str, FloatArray], names: Sequence[str]) -> FloatArray:
    """Return arrays [C, ...] as one row of values for each client."""
    return np.concatenate([np.asarray(values[name]).reshape(len(values[name]), -1) for name in names], axis=1)


def unpacked(rows: FloatArray, like: Arrays) -> dict[str, FloatArray]:
    """Return rows [C, values] as arrays [C, ...] of the names and shapes of `like`."""
    stops = np.cumsum([values.size for values in like.values()])
    parts = np.split(rows, stops[:-1], axis=1)
    return {name: part.reshape(len(rows), *like[name].shape) for name, part in zip(like, parts, strict=True)}


def count_of(like: Arrays) -> int:
    """Return the number of values of a row."""
    return sum(prod(values.shape) for values in like.values())


def mean_row(rows: FloatArray) -> FloatArray:
    """Return the mean row [1, values] of the clients that have taken part, whose rows have moved; zeros if none has."""
    moved = rows.any(axis=1)
    if not moved.any():
        return np.zeros((1, rows.shape[1]), dtype=rows.dtype)
    return np.asarray(rows[moved].mean(axis=0, keepdims=True, dtype=np.float64), dtype=rows.dtype)


def refusal(named: str, module: nn.Module, statistics: Sequence[str]) -> UserError:
    """Return the error of a model that refuses statistics, with what can be done."""
    norm = any(isinstance(child, nn.modules.batchnorm._NormBase) for child in module.modules())
    advice = "replace batch norm by group norm or layer norm" if norm else "make them constants"
    return UserError(
        f"{named}: training changes {', '.join(statistics[:3])} of {owner_of(module, statistics[0])}, which are no "
        "parameters: set model.statistics = local (clients keep them) or average (clients share their mean), or "
        f"{advice}"
    )
