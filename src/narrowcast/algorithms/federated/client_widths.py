"""The width of each client's slice of a network, and what a slice of each width costs to train."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import prod
from typing import Annotated, Any, Literal

import numpy as np
import torch
from pydantic import Field

from narrowcast.platform.data.features import rows_of_inputs
from narrowcast.platform.data.samples import Samples
from narrowcast.platform.kinds import optional
from narrowcast.platform.models.hidden_units import HasHiddenUnits
from narrowcast.platform.models.module_call import call_module
from narrowcast.platform.models.module_parts import copy_of
from narrowcast.platform.models.neural_network import NeuralNetwork, as_inputs, skeleton
from narrowcast.platform.seeds import stream_keys, uniform_below
from narrowcast.platform.types import FloatArray, IntArray

Width = Annotated[float, Field(gt=0, le=1)]
"""Share of the units of each hidden layer."""
Assignment = Literal["turns", "draw", "compute", "link"]
"""Clients have widths in turn by their number, by a draw in each round, or the widest that they can afford."""


def unit_counts(widths: Sequence[float], n_units: Sequence[int], layers: Sequence[int] | None = None) -> IntArray:
    """Return the number of units at each width in each layer, [widths, layers]: the share, rounded down.

    Layers that are not among `layers` are whole; None stands for all.
    """
    counts = np.floor(np.outer(widths, n_units) + 1e-9).astype(np.int64)
    if layers is not None:
        counts = np.where(np.isin(np.arange(len(n_units)), layers), counts, n_units)
    return counts


def drawn_widths(n_widths: int, clients: IntArray, seed: int, round_index: int) -> IntArray:
    """Return a place of 0..n_widths-1 for each client, [C], drawn from the public seed in each round."""
    keys = stream_keys(seed, "width", round_index, clients)
    return uniform_below(keys, np.zeros(len(clients), dtype=np.int64), np.full(len(clients), n_widths))


def affordable_widths(costs: FloatArray, budgets: FloatArray) -> IntArray:
    """Return the place of the dearest width within each client's budget, [C]; of the cheapest one if none is.

    Shapes: costs [widths]; budgets [C], in the same unit.
    """
    dearest_first = np.argsort(-costs, kind="stable")
    affordable = costs[dearest_first] <= budgets[:, None]
    affordable[:, -1] = True
    return dearest_first[affordable.argmax(axis=1)]


@lru_cache(maxsize=2)
def relative_work(
    model: HasHiddenUnits, widths: tuple[float, ...], data: Any, layers: tuple[int, ...] | None = None
) -> FloatArray:
    """Return the multiplications of a forward pass at each width, relative to those of the whole model, [widths].

    `layers` are those whose units are sliced, None if all are.
    """
    whole = model.hidden_units(data).counts
    counts = unit_counts(widths, whole, layers).tolist()
    if (count := optional(model, "multiplications")) is not None:
        work = np.array([count(data, each) for each in (whole, *counts)], dtype=np.float64)
    else:
        models: list[Any] = [model, *map(model.narrowed, counts)]
        work = np.array([multiplications(each, data) for each in models], dtype=np.float64)
    return work[1:] / work[0]


def multiplications(model: NeuralNetwork, data: Samples) -> int:
    """Return the floating-point operations of a network's forward pass on one sample."""
    from torch.utils.flop_counter import FlopCounterMode  # imports for a third of a second

    fused = {  # the CPU's own kernels, which torch counts nothing for
        torch.ops.aten.mkldnn_rnn_layer: _lstm_operations,
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention_operations,
    }
    features = as_inputs(rows_of_inputs(data.train.features, slice(0, 1)), model.torch_dtype)
    with FlopCounterMode(display=False, custom_mapping=fused) as counter, torch.no_grad():
        call_module(copy_of(skeleton(model, data)), features)
    return int(counter.get_total_flops())


def _lstm_operations(
    inputs: Sequence[int], of_inputs: Sequence[int], of_hidden: Sequence[int], *_: Any, **__: Any
) -> int:
    """Return the operations of one LSTM layer in one direction: inputs [length, batch, m], weights [4h, m], [4h, h]."""
    return 2 * inputs[0] * inputs[1] * (prod(of_inputs) + prod(of_hidden))


def _attention_operations(query: Sequence[int], key: Sequence[int], value: Sequence[int], *_: Any, **__: Any) -> int:
    """Return the operations of attention: query [..., s, d], key [..., t, d], value [..., t, e]."""
    return 2 * prod(query[:-1]) * key[-2] * (query[-1] + value[-1])
