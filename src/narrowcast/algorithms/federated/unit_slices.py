"""The hidden units that each client trains; they follow from public seeds and the model, so that no index is sent.

Letters: n the units of a layer, k those of a slice, t the round.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np

from narrowcast.algorithms.federated.client_widths import unit_counts
from narrowcast.platform.models.hidden_units import HiddenUnits, Units
from narrowcast.platform.seeds import generator
from narrowcast.platform.types import Arrays, FloatArray, IntArray

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
        """Return the units of each client's slice in this round; `width_of` maps clients to places in `widths`."""
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
            circles = [_stratified(each, int(own.min()), draw) for each, own in zip(squares, counts.T, strict=True)]
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
