"""Slices of a network's hidden units: the width of a client's slice, what it costs to train, and which units it has.

The units follow from public seeds and the model, so that no index is sent.

Letters: n the units of a layer, k those of a slice, t the round.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import prod
from typing import Annotated, Any, Literal

import numpy as np
import torch
from pydantic import Field

from narrowcast.algorithms.client.uploads import Uploads
from narrowcast.platform.data.samples import Samples, rows_of_inputs
from narrowcast.platform.models.hidden_units import HiddenUnits, Units
from narrowcast.platform.models.model import Model
from narrowcast.platform.models.module_call import call_module
from narrowcast.platform.models.modules import copy_of
from narrowcast.platform.models.neural_network import NeuralNetwork, as_inputs, skeleton
from narrowcast.platform.seeds import generator, stream_keys, uniform_below
from narrowcast.platform.types import Arrays, FloatArray, IntArray, LocalUpdates

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
    """Return an index of 0..n_widths-1 for each client, [C], drawn from the public seed in each round."""
    keys = stream_keys(seed, "width", round_index, clients)
    return uniform_below(keys, np.zeros(len(clients), dtype=np.int64), np.full(len(clients), n_widths))


def affordable_widths(costs: FloatArray, budgets: FloatArray) -> IntArray:
    """Return the index of the dearest width within each client's budget, [C]; of the cheapest one if none is.

    Shapes: costs [widths]; budgets [C], in the same unit.
    """
    dearest_first = np.argsort(-costs, kind="stable")
    affordable = costs[dearest_first] <= budgets[:, None]
    affordable[:, -1] = True
    return dearest_first[affordable.argmax(axis=1)]


@lru_cache(maxsize=2)
def relative_work(
    model: Model, widths: tuple[float, ...], data: Any, layers: tuple[int, ...] | None = None
) -> FloatArray:
    """Return the multiplications of a forward pass at each width, relative to those of the whole model, [widths].

    `layers` are those whose units are sliced, None if all are.
    """
    whole = model.hidden_units(data).counts
    counts = unit_counts(widths, whole, layers).tolist()
    declared = [model.multiplications(data, units) for units in (whole, *counts)]
    if None in declared:
        models: list[Any] = [model, *map(model.narrowed, counts)]
        declared = [multiplications(network, data) for network in models]
    work = np.array(declared, dtype=np.float64)
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


Slices = Literal["prefix", "rolling", "random", "disjoint", "stratified", "important"]
NESTED: tuple[Slices, ...] = ("prefix", "rolling", "important")
"""Slices that all clients of a width share, and of which wider ones contain narrower ones."""


@dataclass(frozen=True)
class UnitSlices:
    """The slices of a network at each of some widths."""

    kind: Slices
    widths: Sequence[float]
    hidden: HiddenUnits
    layers: Sequence[int] | None = None
    """The layers whose units are sliced; slices have all units of the others. None stands for all layers."""

    @cached_property
    def counts(self) -> IntArray:
        """The number of units, k, of each width and layer, [widths, layers]."""
        return unit_counts(self.widths, self.hidden.counts, self.layers)

    @property
    def sliced_counts(self) -> list[int]:
        """The number of units, n, of each layer that is sliced."""
        return [count for layer, count in enumerate(self.hidden.counts) if self.layers is None or layer in self.layers]

    def of_clients(
        self, clients: IntArray, width_of: Callable[[IntArray], IntArray], model: Arrays, seed: int, round_index: int
    ) -> list[Units]:
        """Return the units of each client's slice in this round; `width_of` maps clients to indices in `widths`."""
        if self.kind in ("disjoint", "stratified"):
            return self._arcs(clients, width_of, model, seed, round_index)
        widths = width_of(clients).tolist()
        if self.kind == "random":
            return [
                self._drawn(width, generator(seed, "units", round_index, client))
                for client, width in zip(clients.tolist(), widths, strict=True)
            ]
        slices = {width: self._shared(width, model, round_index) for width in set(widths)}
        return [slices[width] for width in widths]

    def _shared(self, width: int, model: Arrays, round_index: int) -> Units:
        """Return the first k units, the k from unit t - 1 on modulo n, or the k of the largest sums of squares."""
        layers = list(zip(self.counts[width].tolist(), self.hidden.counts, strict=True))
        if self.kind == "prefix":
            return tuple(np.arange(count) for count, _ in layers)
        if self.kind == "rolling":
            return tuple(np.sort((round_index - 1 + np.arange(count)) % total) for count, total in layers)
        ranked = (np.argsort(-squares, kind="stable") for squares in self.hidden.squares(model))
        return tuple(np.sort(units[:count]) for units, (count, _) in zip(ranked, layers, strict=True))

    def _drawn(self, width: int, draw: np.random.Generator) -> Units:
        """Return k units of each layer drawn without replacement."""
        counts = zip(self.counts[width].tolist(), self.hidden.counts, strict=True)
        return tuple(np.sort(draw.permutation(total)[:count]) for count, total in counts)

    def _arcs(
        self, clients: IntArray, width_of: Callable[[IntArray], IntArray], model: Arrays, seed: int, round_index: int
    ) -> list[Units]:
        """Return arcs of circles of each layer's shuffled units, which follow one another over the clients 0, 1, ..."""
        draw = generator(seed, "circle", round_index)
        counts = self.counts[width_of(np.arange(clients.max() + 1))]
        if self.kind == "disjoint":
            circles = [draw.permutation(total) for total in self.hidden.counts]
        else:
            squares = self.hidden.squares(model)
            circles = [
                _stratified(square, int(of_layer.min()), draw)
                for square, of_layer in zip(squares, counts.T, strict=True)
            ]
        first = np.cumsum(counts, axis=0) - counts
        return [
            tuple(
                np.sort(circle[(first[client, layer] + np.arange(counts[client, layer])) % len(circle)])
                for layer, circle in enumerate(circles)
            )
            for client in clients.tolist()
        ]


def _stratified(squares: FloatArray, n_strata: int, draw: np.random.Generator) -> IntArray:
    """Return a circle of units of which each arc of n_strata neighbours has one of every stratum.

    Strata are n / n_strata neighbours among the units ranked by their squares [n]; their order is drawn, and what is
    left of the least important units comes last.
    """
    per_stratum = len(squares) // n_strata
    ranked = np.argsort(-squares, kind="stable")
    strata = ranked[: n_strata * per_stratum].reshape(n_strata, per_stratum)
    shuffled = draw.permuted(strata, axis=1).T.ravel()
    return np.concatenate([shuffled, ranked[n_strata * per_stratum :]])


def joined_updates(positions: Sequence[IntArray], parts: Sequence[LocalUpdates]) -> LocalUpdates:
    """Return loss, examples and steps of parts that were trained apart, in the order of the chunk's clients.

    `positions` are those of each part in the chunk.
    """
    order = np.argsort(np.concatenate(positions))

    def joined(name: str) -> np.ndarray:
        return np.concatenate([getattr(part, name) for part in parts])[order]

    return LocalUpdates({}, {}, joined("loss"), joined("examples"), joined("steps"))


def joined_uploads(positions: Sequence[IntArray], parts: Sequence[Uploads]) -> Uploads:
    """Return the uploads of all parts in the order of the chunk's clients, of codecs without state.

    `positions` are those of each part in the chunk.
    """
    order = np.argsort(np.concatenate(positions))

    def joined(name: str) -> np.ndarray:
        return np.concatenate([getattr(part, name) for part in parts])[order]

    return Uploads(joined("bits"), joined("delivered"), joined("finite"), {})
