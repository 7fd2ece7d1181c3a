"""Topologies: the links between clients that have no server, and the weights with which they mix their models.

Letters: U clients, E links, d_i the neighbours of client i, W [U, U] the weights.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from narrowcast.platform.config.catalog import TOPOLOGIES
from narrowcast.platform.config.csv_file import Columns, CSVFile
from narrowcast.platform.config.files import Section
from narrowcast.platform.config.quantities import RATE_LIMITS
from narrowcast.platform.errors import UserError
from narrowcast.platform.seeds import generator
from narrowcast.platform.types import FloatArray, IntArray

if TYPE_CHECKING:
    from scipy.sparse import csr_array

_MEGABIT = 1e6


class Topology(Section, ABC):
    """The links between clients in each round, in both directions, and the weights W of their mixing.

    Mixing by W, which is symmetric and whose rows sum to 1, leaves the mean of all models as it is. The differences
    between the models shrink by |lambda_2| a step, the second largest modulus of W's eigenvalues.
    """

    @property
    def rounds_to_connect(self) -> int:
        """The number of rounds whose links together have to connect all clients; above 1 if links change."""
        return 1

    @property
    def stamp(self) -> tuple[int, ...]:
        """What the links depend on besides fields, round and seed: the times and sizes of files; none by default."""
        return ()

    @property
    def advice(self) -> str:
        """The change by which a topology that is not connected may become so."""
        return "add links, or use another topology"

    @abstractmethod
    def links(self, n_clients: int, round_index: int, seed: int) -> IntArray:
        """Return the links of a round, [E, 2]: pairs of different clients, each once."""

    @property
    def directed(self) -> bool:
        """Return whether messages go over a link in one direction; methods with symmetric weights refuse that."""
        return False

    def arcs(self, n_clients: int, round_index: int, seed: int) -> IntArray:
        """Return the directions of a round's links, [A, 2], from sender to receiver: both, by default."""
        links = self.links(n_clients, round_index, seed)
        return np.concatenate([links, links[:, ::-1]])

    def weights(self, n_clients: int, round_index: int, seed: int) -> csr_array:
        """Return W of a round, [U, U]: Metropolis weights, unless a topology has others on its links.

        w_ij = 1 / (1 + max(d_i, d_j)) on a link, and w_ii is the rest of 1.

        Reference: Xiao, Boyd and Lall, A Scheme for Robust Distributed Sensor Fusion Based on Average Consensus,
        IPSN 2005.
        """
        links = self.links(n_clients, round_index, seed)
        degrees = np.bincount(links.reshape(-1), minlength=n_clients)
        return symmetric_weights(links, 1.0 / (1.0 + degrees[links].max(axis=1, initial=0)), n_clients)

    def rates(self, pairs: IntArray, seed: int) -> FloatArray | None:
        """Return the bits per second of the links between pairs of clients [n, 2], [n]; the same in both directions.

        None, the default: links have no rates of their own, and clients send at those of the fleet.
        """
        del pairs, seed
        return None

    def check(self, n_clients: int, seed: int) -> None:
        """Raise `UserError` unless the links connect all clients, at rates within the limits."""
        from scipy.sparse import coo_array
        from scipy.sparse.csgraph import connected_components

        rounds = range(1, self.rounds_to_connect + 1)
        links = np.concatenate([self.links(n_clients, round_index, seed) for round_index in rounds])
        graph = coo_array((np.ones(len(links)), (links[:, 0], links[:, 1])), shape=(n_clients, n_clients))
        parts, _ = connected_components(graph, directed=False)
        if parts > 1:
            raise UserError(
                f"algorithm.topology = {self._named} has {parts} parts without a link between them, of {n_clients} "
                f"clients: lambda_2 = 1, so that their models never agree; {self.advice}"
            )
        self._check_rates(links, seed)

    def _check_rates(self, links: IntArray, seed: int) -> None:
        """Raise `UserError` unless each of the links [E, 2] has a rate within the limits, or none has one."""
        rates = self.rates(links, seed)
        if rates is None:
            return
        if (shape := np.shape(rates)) != (len(links),):
            raise UserError(
                f"algorithm.topology = {self._named}: rates returned the shape {list(shape)} for {len(links)} pairs of "
                "clients; return one rate for each"
            )
        least, most, unit = RATE_LIMITS
        if (beyond := np.flatnonzero(~((rates >= least) & (rates <= most)))).size:
            first, second = links[beyond[0]].tolist()
            raise UserError(
                f"algorithm.topology = {self._named}: the rates of {beyond.size} of {len(links)} links are not between "
                f"{least:g} and {most:g} {unit}, such as {rates[beyond[0]]:g} of that of {first} and {second}; change "
                "the rates"
            )

    @property
    def _named(self) -> str:
        """The kind with its fields, in a message."""
        fields = ", ".join(f"{name} = {value}" for name, value in self.model_dump().items() if name != "kind")
        kind: str = getattr(self, "kind")  # noqa: B009 - every subclass has one
        return f"{kind} ({fields})" if fields else kind


def distinct_links(pairs: IntArray) -> IntArray:
    """Return the links among pairs of clients [n, 2], each once; a client is not linked to itself."""
    ordered = np.sort(pairs.reshape(-1, 2), axis=1)
    return np.unique(ordered[ordered[:, 0] < ordered[:, 1]], axis=0)


def symmetric_weights(links: IntArray, weights: FloatArray, n_clients: int) -> csr_array:
    """Return W [U, U] with these weights [E] on links, in both directions, and the rest of each row on its diagonal."""
    from scipy.sparse import coo_array

    first, second = links.T
    kept = 1.0 - np.bincount(links.reshape(-1), np.repeat(weights, 2), minlength=n_clients)
    clients = np.arange(n_clients)
    rows, columns = np.concatenate([first, second, clients]), np.concatenate([second, first, clients])
    return coo_array((np.concatenate([weights, weights, kept]), (rows, columns)), (n_clients, n_clients)).tocsr()


def push_weights(arcs: IntArray, n_clients: int) -> csr_array:
    """Return the weights [U, U] by which each sender of arcs [A, 2] divides: its column sums to 1, rows need not."""
    from scipy.sparse import coo_array

    senders, receivers = arcs.T
    shares, clients = 1.0 / (1.0 + np.bincount(senders, minlength=n_clients)), np.arange(n_clients)
    rows, columns = np.concatenate([receivers, clients]), np.concatenate([senders, clients])
    return coo_array((shares[columns], (rows, columns)), (n_clients, n_clients)).tocsr()


def lambda_2(weights: csr_array) -> float:
    """Return the second largest modulus of the eigenvalues of symmetric weights [U, U]; 0 for one client."""
    moduli = np.sort(np.abs(np.linalg.eigvalsh(weights.toarray())))
    return float(moduli[-2]) if len(moduli) > 1 else 0.0


@dataclass(frozen=True)
class Mixing:
    """The weights W [U, U] of one round, which are read only.

    `slowest` [U] are the bits per second of the slowest link over which each client sends, infinity for one without a
    link; None if links have no rates of their own.
    """

    weights: csr_array
    slowest: FloatArray | None = field(default=None, kw_only=True)

    @cached_property
    def neighbours(self) -> csr_array:
        """The links as ones, [U, U], without the diagonal."""
        from scipy.sparse import coo_array

        entries = self.weights.tocoo()
        linked = (entries.row != entries.col) & (entries.data > 0)
        ones = np.ones(int(linked.sum()), dtype=np.int64)
        return coo_array((ones, (entries.row[linked], entries.col[linked])), entries.shape).tocsr()

    @cached_property
    def degrees(self) -> IntArray:
        """The number of neighbours of each client, [U]."""
        return np.diff(self.neighbours.indptr).astype(np.int64)

    def among(self, clients: IntArray) -> csr_array:
        """Return the weights of these clients [k, k]; those of links to others go to the client that is there."""
        if len(clients) == self.weights.shape[0]:
            return self.weights
        from scipy.sparse import diags_array

        part = self.weights[clients][:, clients]
        return (part + diags_array(1.0 - np.asarray(part.sum(axis=1)))).tocsr()


def mixing(topology: Topology, n_clients: int, round_index: int, seed: int) -> Mixing:
    """Return the mixing of a round."""
    return _mixing(topology, n_clients, round_index if topology.rounds_to_connect > 1 else 1, seed, topology.stamp)


@lru_cache(maxsize=4)
def _mixing(topology: Topology, n_clients: int, round_index: int, seed: int, stamp: tuple[int, ...]) -> Mixing:
    del stamp  # a file that changes between two runs of a process gives the second one its own links
    of_round = Mixing(topology.weights(n_clients, round_index, seed))
    heard = of_round.neighbours.tocoo()
    slowest = slowest_rates(topology, np.column_stack([heard.col, heard.row]), n_clients, seed)
    return replace(of_round, slowest=slowest)


def slowest_rates(topology: Topology, arcs: IntArray, n_clients: int, seed: int) -> FloatArray | None:
    """Return the rate of the slowest of each client's arcs [A, 2] to receivers, [U], as `Mixing.slowest` has it."""
    rates = topology.rates(arcs, seed)
    if rates is None:
        return None
    slowest = np.full(n_clients, np.inf)
    np.minimum.at(slowest, arcs[:, 0], rates)
    return slowest


def mixed(weights: csr_array, values: NDArray[np.floating]) -> FloatArray:
    """Return sum_j w_ij x_j of values [k, ...] by weights [m, k], [m, ...] in float64."""
    flat = values.reshape(len(values), -1).astype(np.float64)
    return np.asarray(weights @ flat).reshape(weights.shape[0], *values.shape[1:])


Direction = Annotated[
    Literal["both", "forward"],
    Field(description="a client sends to those before and after it, or to those after it alone, as push_sum can"),
]


def _forward(n_clients: int, hops: IntArray) -> IntArray:
    """Return the arcs from each client to those so many places after it, [A, 2]."""
    senders = np.repeat(np.arange(n_clients), len(hops))
    arcs = np.column_stack([senders, (senders + np.tile(hops, n_clients)) % n_clients])
    return arcs[arcs[:, 0] != arcs[:, 1]]


class Ring(Topology):
    """A ring: client i has the neighbours i - 1 and i + 1."""

    kind: Literal["ring"] = "ring"
    direction: Direction = "both"

    @property
    def directed(self) -> bool:
        """Return whether client i sends to i + 1 alone."""
        return self.direction == "forward"

    def arcs(self, n_clients: int, round_index: int, seed: int) -> IntArray:
        """Return the directions of a round's links, [A, 2]."""
        if self.directed:
            return _forward(n_clients, np.ones(1, dtype=np.int64))
        return super().arcs(n_clients, round_index, seed)

    def links(self, n_clients: int, round_index: int, seed: int) -> IntArray:
        """Return the links of a round, [E, 2]."""
        del round_index, seed
        clients = np.arange(n_clients)
        return distinct_links(np.column_stack([clients, (clients + 1) % n_clients]))


class PathGraph(Topology):
    """A path: client i has the neighbours i - 1 and i + 1, and the ends have one."""

    kind: Literal["path"] = "path"

    def links(self, n_clients: int, round_index: int, seed: int) -> IntArray:
        """Return the links of a round, [E, 2]."""
        del round_index, seed
        clients = np.arange(n_clients)
        return np.column_stack([clients[:-1], clients[1:]])


class Torus(Topology):
    """A grid of clients, row by row, that closes at its edges: each has four neighbours, fewer in one or two rows."""

    kind: Literal["torus"] = "torus"
    rows: int | None = Field(None, ge=1, description="number of rows; null: that of the grid nearest to a square")

    def links(self, n_clients: int, round_index: int, seed: int) -> IntArray:
        """Return the links of a round, [E, 2]."""
        del round_index, seed
        rows = self._rows_of(n_clients)
        grid = np.arange(n_clients).reshape(rows, -1)
        pairs = [np.column_stack([grid.reshape(-1), np.roll(grid, -1, axis).reshape(-1)]) for axis in (0, 1)]
        return distinct_links(np.concatenate(pairs))

    def _rows_of(self, n_clients: int) -> int:
        """Return the number of rows; raise `UserError` if they cannot be of one length."""
        if self.rows is None:
            return max(rows for rows in range(1, int(n_clients**0.5) + 1) if n_clients % rows == 0)
        if n_clients % self.rows:
            raise UserError(
                f"algorithm.topology.rows = {self.rows} does not divide {n_clients} clients into rows of one length; "
                "give a divisor, or leave it out"
            )
        return self.rows


class Star(Topology):
    """A star: client 0 has all others as neighbours, and they have none besides."""

    kind: Literal["star"] = "star"

    def links(self, n_clients: int, round_index: int, seed: int) -> IntArray:
        """Return the links of a round, [E, 2]."""
        del round_index, seed
        others = np.arange(1, n_clients)
        return np.column_stack([np.zeros_like(others), others])


class Complete(Topology):
    """A complete graph: each client has all others as neighbours, and mixing is the mean."""

    kind: Literal["complete"] = "complete"

    def links(self, n_clients: int, round_index: int, seed: int) -> IntArray:
        """Return the links of a round, [E, 2]."""
        del round_index, seed
        return np.column_stack(np.triu_indices(n_clients, 1)).astype(np.int64)


class Exponential(Topology):
    """An exponential graph: client i has the neighbours i - 2^k and i + 2^k, of all powers below U.

    Reference: Ying et al., Exponential Graph is Provably Efficient for Decentralized Deep Training, NeurIPS 2021
    (arXiv:2110.13363).

    Differs from the paper: 1. links are in both directions by default, so that weights are symmetric.
    """

    kind: Literal["exponential"] = "exponential"
    direction: Direction = "both"

    @property
    def directed(self) -> bool:
        """Return whether client i sends to i + 2^k alone."""
        return self.direction == "forward"

    def links(self, n_clients: int, round_index: int, seed: int) -> IntArray:
        """Return the links of a round, [E, 2]."""
        del round_index, seed
        return distinct_links(_forward(n_clients, self._hops(n_clients)))

    def arcs(self, n_clients: int, round_index: int, seed: int) -> IntArray:
        """Return the directions of a round's links, [A, 2]."""
        if self.directed:
            return _forward(n_clients, self._hops(n_clients))
        return super().arcs(n_clients, round_index, seed)

    def _hops(self, n_clients: int) -> IntArray:
        return 2 ** np.arange(int(n_clients - 1).bit_length())


class ErdosRenyi(Topology):
    """A random graph, drawn once from the seed: each pair of clients is linked with the same probability.

    Reference: Erdos and Renyi, On Random Graphs I, 1959, in the form of Gilbert.
    """

    kind: Literal["erdos_renyi"] = "erdos_renyi"
    probability: float = Field(gt=0, le=1, description="probability that two clients are linked")

    @property
    def advice(self) -> str:
        """The change by which a drawn graph may become connected."""
        return "raise algorithm.topology.probability, or set another seed"

    def links(self, n_clients: int, round_index: int, seed: int) -> IntArray:
        """Return the links of a round, [E, 2]."""
        del round_index
        pairs = np.column_stack(np.triu_indices(n_clients, 1)).astype(np.int64)
        return pairs[generator(seed, "topology").random(len(pairs)) < self.probability]


class RandomMatching(Topology):
    """A new random matching in each round: every client has one neighbour, and of an odd number one has none.

    The two clients of a pair take their mean, as in randomised gossip.

    Reference: Boyd, Ghosh, Prabhakar and Shah, Randomized Gossip Algorithms, IEEE Transactions on Information Theory
    2006.

    Differs from the paper: 1. all pairs of a matching mix in one round; the paper's clock wakes one pair at a time.
    """

    kind: Literal["random_matching"] = "random_matching"

    @property
    def rounds_to_connect(self) -> int:
        """Thirty matchings: together they connect almost surely."""
        return 30

    def links(self, n_clients: int, round_index: int, seed: int) -> IntArray:
        """Return the links of a round, [E, 2]."""
        order = generator(seed, "matching", round_index).permutation(n_clients)
        return distinct_links(order[: n_clients // 2 * 2].astype(np.int64))


class OfAnother(Topology):
    """A topology that changes one thing about another `topology`, which its own field declares."""

    topology: Topology

    @property
    def stamp(self) -> tuple[int, ...]:
        """Return that of the other topology."""
        return self.topology.stamp

    @property
    def directed(self) -> bool:
        """Return that of the other topology."""
        return self.topology.directed


class Intermittent(OfAnother):
    """The links of another topology, each of which is down in a round by chance: nothing is sent over it.

    Weights are those of the links that are up, so that the mean of the models stays whichever are.
    """

    kind: Literal["intermittent"] = "intermittent"
    topology: Annotated[Topology, TOPOLOGIES] = Field(
        default_factory=Ring, description="topology of which some links are down"
    )
    outage: float = Field(0.2, ge=0, lt=1, description="probability that a link is down in a round")

    @property
    def rounds_to_connect(self) -> int:
        """Thirty rounds of the other topology: of links that are up half of the time, all are there almost surely."""
        return 30 * self.topology.rounds_to_connect

    @property
    def advice(self) -> str:
        """The change by which the links that are up may connect all clients."""
        return f"lower algorithm.topology.outage, or {self.topology.advice}"

    def links(self, n_clients: int, round_index: int, seed: int) -> IntArray:
        """Return the links of a round, [E, 2]."""
        links = self.topology.links(n_clients, round_index, seed)
        return links[generator(seed, "link outages", round_index).random(len(links)) >= self.outage]

    def rates(self, pairs: IntArray, seed: int) -> FloatArray | None:
        """Return those of the other topology, [n]."""
        return self.topology.rates(pairs, seed)


class EdgeList(CSVFile, Topology):
    """The links of a CSV file with the columns client and neighbour, one line for each link, in either order.

    Clients count from 0. The file may have links of more clients than the data set. With a third column,
    mbit_per_second, each link has the rate of its line, in both directions.
    """

    kind: Literal["edge_list"] = "edge_list"
    path: Path = Field(description="CSV file with one line per link")

    columns: ClassVar[Columns] = {"client": int, "neighbour": int}
    optional: ClassVar[Columns] = {"mbit_per_second": float}
    number_advice: ClassVar[str] = "give the numbers of two clients, and the link's rate if there is a column for it"

    def links(self, n_clients: int, round_index: int, seed: int) -> IntArray:
        """Return the links of a round, [E, 2]; raise `UserError` if the file has none that can be read."""
        del round_index, seed
        pairs = np.array(list(self._rates_by_link()), dtype=np.int64).reshape(-1, 2)
        return distinct_links(pairs[(pairs < n_clients).all(axis=1)])

    def rates(self, pairs: IntArray, seed: int) -> FloatArray | None:
        """Return the bits per second of links of the file, [n]; None if it has no column of rates."""
        del seed
        by_link = self._rates_by_link()
        if None in by_link.values():
            return None
        return np.array([by_link[min(pair), max(pair)] for pair in pairs.tolist()], dtype=np.float64) * _MEGABIT

    def _rates_by_link(self) -> dict[tuple[int, int], float | None]:
        """Return the Mbit/s of each link, by its clients in ascending order; None in a file without rates."""
        found: dict[tuple[int, int], float | None] = {}
        for where, row in self.rows(self.path):
            first, second, rate = row["client"], row["neighbour"], row.get("mbit_per_second")
            if min(first, second) < 0 or first == second:
                raise UserError(f"{where}: got {first} and {second}; give two clients, which count from 0")
            if rate is not None and not 0 < rate < np.inf:
                raise UserError(f"{where}: got {rate:g} Mbit/s; a link's rate is above 0")
            link = min(first, second), max(first, second)
            if (before := found.setdefault(link, rate)) != rate:
                raise UserError(
                    f"{where}: the link of {first} and {second} has {rate:g} Mbit/s, and {before:g} in a line before; "
                    "give it one rate"
                )
        return found
