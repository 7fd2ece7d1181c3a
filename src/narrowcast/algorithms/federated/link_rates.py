"""Rates of the links between clients, drawn once for each pair."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

import numpy as np
from pydantic import Field

from narrowcast.algorithms.federated.topology import OfAnother, Ring, Topology
from narrowcast.platform.config.catalog import TOPOLOGIES
from narrowcast.platform.config.quantities import LogNormal
from narrowcast.platform.errors import UserError
from narrowcast.platform.seeds import stream_keys, uniform_unit
from narrowcast.platform.types import FloatArray, IntArray

if TYPE_CHECKING:
    from scipy.sparse import csr_array


class Unequal(OfAnother):
    """The links of another topology, each with a log-normal rate that is drawn once per run for its pair of clients.

    A pair has the same rate in both directions, in every round, and whatever other clients and links there are. Weights
    are those of the other topology: rates decide how long a round takes, not how clients mix.
    """

    kind: Literal["unequal"] = "unequal"
    topology: Annotated[Topology, TOPOLOGIES] = Field(
        default_factory=Ring, description="topology whose links have the rates"
    )
    mbit_per_second: LogNormal = Field(LogNormal(median=2.0, sigma=1.0), description="rate of a link")

    @property
    def rounds_to_connect(self) -> int:
        """Return that of the other topology."""
        return self.topology.rounds_to_connect

    @property
    def advice(self) -> str:
        """Return that of the other topology."""
        return self.topology.advice

    def links(self, n_clients: int, round_index: int, seed: int) -> IntArray:
        """Return the links of a round, [E, 2]."""
        return self.topology.links(n_clients, round_index, seed)

    def arcs(self, n_clients: int, round_index: int, seed: int) -> IntArray:
        """Return the directions of a round's links, [A, 2]."""
        return self.topology.arcs(n_clients, round_index, seed)

    def weights(self, n_clients: int, round_index: int, seed: int) -> csr_array:
        """Return W of a round, [U, U]."""
        return self.topology.weights(n_clients, round_index, seed)

    def rates(self, pairs: IntArray, seed: int) -> FloatArray:
        """Return the bits per second of the links between pairs of clients [n, 2], [n]."""
        lower, higher = np.sort(pairs, axis=1).T
        keys = stream_keys(seed, "link rates", 0, lower)
        radius, angle = (uniform_unit(keys, 2 * higher + draw) for draw in (0, 1))
        normal = np.sqrt(-2.0 * np.log1p(-radius)) * np.cos(2.0 * np.pi * angle)
        with np.errstate(over="ignore"):  # check() refuses rates that are not finite
            return 1e6 * self.mbit_per_second.median * np.exp(self.mbit_per_second.sigma * normal)

    def check(self, n_clients: int, seed: int) -> None:
        """Raise `UserError` unless the links connect all clients, at rates within the limits that are theirs alone."""
        if self.topology.rates(self.topology.links(n_clients, 1, seed), seed) is not None:
            raise UserError(
                "algorithm.topology = unequal: the links of algorithm.topology.topology have rates already; leave out "
                "one of both"
            )
        super().check(n_clients, seed)
