"""Matching of hidden units across clients: MAP estimates of a Beta-Bernoulli process by Hungarian assignments.

References: Yurochkin et al., Bayesian Nonparametric Federated Learning of Neural Networks (PFNM), ICML 2019
(arXiv:1905.12022); Wang et al., Federated Learning with Matched Averaging (FedMA), ICLR 2020 (arXiv:2002.06440), and
its code. Letters: J clients, client j has L_j units, G global units so far, D weights of a unit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from narrowcast.platform.types import FloatArray, IntArray

_MOST_POPULAR = 10
"""Popularities above it count as this many, as in the code of FedMA."""


@dataclass(frozen=True)
class UnitPrior:
    """The prior of global units and the search for their best assignment.

    A global unit has the mean `mean` [D] and the variance `sigma_prior`; a client's unit varies around it by `sigma`. A
    unit owned by c of J clients has the log-odds `popularity_factor` log(c / (J - c)), the k-th new one of a client
    2 log(gamma / J) - 2 log k. After `most_units` global units, a client may add one alone, if it has no more units.
    """

    mean: FloatArray
    sigma: float = 1.0
    sigma_prior: float = 1.0
    gamma: float = 7.0
    popularity_factor: int = 1
    sweeps: int = 5
    most_units: int = 700


@dataclass(frozen=True)
class MatchedUnits:
    """The global units of one layer.

    Shapes: means [G, D], the posterior means; sums [G, D] of the clients' units; owners [G], the clients that have each
    unit; units, for each client the global unit of each of its own, [L_j].
    """

    means: FloatArray
    sums: FloatArray
    owners: IntArray
    units: tuple[IntArray, ...]


def match_units(clients: Sequence[FloatArray], prior: UnitPrior, random: np.random.Generator) -> MatchedUnits:
    """Return the global units of the clients' units [L_j, D].

    The clients are matched one by one, those with most units first, each by the best assignment of its units to global
    ones and to new ones. Then in each of `sweeps` sweeps every client, in a random order, is taken out and matched
    again.
    """
    growing = _Growing(prior, len(clients), prior.mean.size)
    order = np.argsort([-len(units) for units in clients], kind="stable")
    for client in order.tolist():
        growing.add(client, clients[client])
    for _ in range(prior.sweeps):
        for client in random.permutation(len(clients)).tolist():
            growing.remove(client, clients[client])
            growing.add(client, clients[client])
    units = tuple(growing.units[client] for client in range(len(clients)))
    return MatchedUnits(growing.means(), growing.sums, growing.owners, units)


def best_assignment(gains: FloatArray) -> IntArray:
    """Return the column of each row in the assignment of the largest sum of gains; columns are as many or more."""
    from scipy.optimize import linear_sum_assignment

    places: IntArray = linear_sum_assignment(gains, maximize=True)[1]
    return places


class _Growing:
    """The global units while clients are added and taken out."""

    def __init__(self, prior: UnitPrior, n_clients: int, size: int) -> None:
        self.prior, self.n_clients = prior, n_clients
        self.sums, self.owners = np.zeros((0, size)), np.zeros(0, dtype=np.int64)
        self.units: dict[int, IntArray] = {}

    def means(self) -> FloatArray:
        """Return the posterior means, [G, D]."""
        means: FloatArray = self._weighted() / self._precisions(self.owners)[:, None]
        return means

    def add(self, client: int, own: FloatArray) -> None:
        """Match a client's units [L_j, D]."""
        units, before = best_assignment(self.gains(own)), len(self.owners)
        new = np.flatnonzero(units >= before)
        # Gains of new units fall with their place and never with the unit, so that theirs are the first places.
        units[new] = before + np.arange(len(new))
        self.sums = np.concatenate([self.sums, np.zeros((len(new), own.shape[1]))])
        self.owners = np.concatenate([self.owners, np.zeros(len(new), dtype=np.int64)])
        self.sums[units] += own
        self.owners[units] += 1
        self.units[client] = units

    def remove(self, client: int, own: FloatArray) -> None:
        """Take a client's units out, and global units that nobody else has."""
        units = self.units.pop(client)
        self.sums[units] -= own
        self.owners[units] -= 1
        stays = self.owners > 0
        place = np.cumsum(stays) - 1
        self.sums, self.owners = self.sums[stays], self.owners[stays]
        self.units = {each: place[theirs] for each, theirs in self.units.items()}

    def gains(self, own: FloatArray) -> FloatArray:
        """Return the gain in the log posterior of each assignment, [L_j, G + new]."""
        prior, least = self.prior, len(own) - len(self.owners)
        n_new = max(min(len(own), max(prior.most_units - len(self.owners), 1)), least)
        weighted, precisions = self._weighted(), self._precisions(self.owners)
        data = own / prior.sigma
        squares = np.square(data).sum(axis=1)[:, None]
        joined = squares + 2 * data @ weighted.T + np.square(weighted).sum(axis=1)
        popular = np.minimum(self.owners, _MOST_POPULAR)
        odds = prior.popularity_factor * np.log(popular / (self.n_clients - popular))
        matched = joined / (precisions + 1 / prior.sigma) - np.square(weighted).sum(axis=1) / precisions + odds
        mean = prior.mean / prior.sigma_prior
        of_new = np.square(data + mean).sum(axis=1) / self._precisions(1) - np.square(mean).sum() * prior.sigma_prior
        places = 2 * np.log(prior.gamma / self.n_clients) - 2 * np.log(np.arange(1, n_new + 1))
        return np.concatenate([matched, of_new[:, None] + places], axis=1)

    def _weighted(self) -> FloatArray:
        """Return the sum of prior and data, each divided by its variance, [G, D]."""
        weighted: FloatArray = self.prior.mean / self.prior.sigma_prior + self.sums / self.prior.sigma
        return weighted

    def _precisions(self, owners: IntArray | int) -> FloatArray:
        """Return one over the posterior variance of units with so many owners."""
        return np.asarray(1 / self.prior.sigma_prior + owners / self.prior.sigma)
