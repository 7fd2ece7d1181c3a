"""Contracts of the evaluation of clients, each on its own samples: of models and data sets."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Literal, Protocol, runtime_checkable

from narrowcast.platform.types import Arrays, FloatArray, IntArray

ClientSplit = Literal["train", "validation", "test"]
"""A split of which clients have samples of their own."""


@runtime_checkable
class MeasuresClients(Protocol):
    """A `Model` that can be evaluated on the samples of each client, as `evaluate_clients` asks."""

    @property
    def client_parameters(self) -> Collection[str]:
        """The names of the private parameters that `measure_clients` takes."""
        ...

    def measure_clients(
        self, parameters: Arrays, state: Arrays, data: Any, split: ClientSplit, clients: IntArray
    ) -> Mapping[str, FloatArray]:
        """Return metrics of C clients, each on its own samples of a split, [C]; NaN for a client without samples.

        Shapes: parameters [1, ...], one global model for all, or [C, ...]; state [C, ...], the private parameters;
        clients [C] ascending. The metrics are those of `evaluate`.
        """
        ...


@runtime_checkable
class HasClientSplits(Protocol):
    """A `Dataset` that says how many samples of each split a client has."""

    @property
    def name(self) -> str:
        """The name of the data set."""
        ...

    def examples_of(self, split: ClientSplit) -> IntArray:
        """Return the number of each client's own samples of a split, [U]; `UserError` if it has none by definition."""
        ...
