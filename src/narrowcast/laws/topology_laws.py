"""Laws of topologies: symmetric weights of rows that sum to 1, on links that connect all clients, and their rates."""

from __future__ import annotations

import pickle
from contextlib import suppress
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from narrowcast.algorithms.federated.topology import Topology
from narrowcast.laws.law import require
from narrowcast.laws.small_tasks import digest
from narrowcast.platform.errors import UserError
from narrowcast.platform.types import FloatArray, IntArray

_SIZES = (1, 2, 11, 16)
_SEED = 3


@dataclass(frozen=True)
class TopologyCase:
    """A topology, and a number of clients that it connects."""

    topology: Topology
    clients: int

    @property
    def rounds(self) -> range:
        """The rounds whose links together connect the clients."""
        return range(1, self.topology.rounds_to_connect + 1)

    def links(self, round_index: int) -> IntArray:
        """Return the links of a round, [E, 2]."""
        return self.topology.links(self.clients, round_index, _SEED)

    def rates(self, pairs: IntArray) -> FloatArray | None:
        """Return the rates of links between pairs of clients [n, 2], [n]."""
        return self.topology.rates(pairs, _SEED)

    def weights(self, round_index: int) -> FloatArray:
        """Return the weights of a round, [U, U]."""
        dense: NDArray[np.float64] = self.topology.weights(self.clients, round_index, _SEED).toarray()
        return dense


def topology_cases(topology: Topology) -> dict[str, TopologyCase]:
    """Return the topology of one, two, eleven and sixteen clients, of those that it connects."""
    cases = {}
    for clients in _SIZES:
        with suppress(UserError):
            topology.check(clients, _SEED)
            cases[f"{clients} clients"] = TopologyCase(topology, clients)
    return cases


def links_are_pairs_of_different_clients(case: TopologyCase) -> None:
    """Look at the links of the rounds that connect the clients."""
    for round_index in case.rounds:
        links = case.links(round_index)
        require(links.ndim == 2 and links.shape[1] == 2, f"links have the shape {links.shape}, not [E, 2]")
        require(np.issubdtype(links.dtype, np.integer), f"links are {links.dtype}, not whole numbers")
        require(((links >= 0) & (links < case.clients)).all(), f"a client is not 0 to {case.clients - 1}")
        require((links[:, 0] != links[:, 1]).all(), "a client is linked to itself")
        ordered = np.unique(np.sort(links, axis=1), axis=0)
        require(len(ordered) == len(links), "a link is there twice")


def weights_are_symmetric_and_their_rows_sum_to_1(case: TopologyCase) -> None:
    """Look at the weights of the rounds that connect the clients."""
    for round_index in case.rounds:
        weights = case.weights(round_index)
        require(weights.shape == (case.clients, case.clients), f"weights have the shape {weights.shape}")
        require((weights >= 0).all(), f"a weight of round {round_index} is negative")
        require(np.array_equal(weights, weights.T), f"weights of round {round_index} are not symmetric")
        sums = weights.sum(axis=1)
        require(np.allclose(sums, 1, rtol=0, atol=1e-12), f"a row of round {round_index} sums to {sums[sums != 1][:1]}")


def weights_are_on_links_alone(case: TopologyCase) -> None:
    """Compare the weights off the diagonal with the links."""
    for round_index in case.rounds:
        weights, (first, second) = case.weights(round_index), case.links(round_index).T
        linked = np.zeros(weights.shape, dtype=bool)
        linked[first, second] = linked[second, first] = True
        np.fill_diagonal(weights, 0)
        require(not weights[~linked].any(), f"in round {round_index} clients mix that are not linked")


def models_come_to_agree(case: TopologyCase) -> None:
    """Mix by the rounds that connect the clients, in turn: all differences become smaller."""
    product = np.eye(case.clients)
    for round_index in case.rounds:
        product = case.weights(round_index) @ product
    shrunk = float(np.linalg.norm(product - 1 / case.clients, 2))
    require(shrunk < 1 - 1e-12, f"some differences between models stay: lambda_2 of these rounds is {shrunk:.12g}")


def links_depend_on_seed_and_round_alone(case: TopologyCase) -> None:
    """Ask for rounds in the opposite order, through pickle."""
    copied = TopologyCase(pickle.loads(pickle.dumps(case.topology)), case.clients)
    forwards = [case.links(index) for index in (1, 2, 30)]
    backwards = [copied.links(index) for index in (30, 2, 1)][::-1]
    for links, again in zip(forwards, backwards, strict=True):
        require(np.array_equal(links, again), "the same round has other links")


def rates_are_those_of_pairs(case: TopologyCase) -> None:
    """Ask for the rates of links, if there are any, of each link alone and from its other end."""
    for round_index in case.rounds:
        links = case.links(round_index)
        if (rates := case.rates(links)) is None:
            return
        require(np.shape(rates) == (len(links),), f"{len(links)} links have rates of the shape {np.shape(rates)}")
        require((np.isfinite(rates) & (rates > 0)).all(), "a rate is not finite and above 0")
        for link, rate in zip(links[:5], rates[:5], strict=True):
            alone = case.rates(link[np.newaxis, ::-1])
            same = alone is not None and alone.tolist() == [rate]
            require(same, f"the link of {link[0]} and {link[1]} has {rate} and {alone} bit/s")


def digest_of(case: TopologyCase) -> str:
    """Return the sha256 of the weights and of the rates, if there are any, of rounds 1 and 2."""
    rates = {f"rates {index}": case.rates(case.links(index)) for index in (1, 2)}
    given = {name: values for name, values in rates.items() if values is not None}
    return digest({**{str(index): case.weights(index) for index in (1, 2)}, **given})


LAWS = (
    links_are_pairs_of_different_clients,
    weights_are_symmetric_and_their_rows_sum_to_1,
    weights_are_on_links_alone,
    models_come_to_agree,
    links_depend_on_seed_and_round_alone,
    rates_are_those_of_pairs,
)
