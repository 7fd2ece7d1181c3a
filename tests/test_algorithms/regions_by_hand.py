"""Rate regions and allocations the slow way: every set of users, one after the other."""

from __future__ import annotations

from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from narrowcast.algorithms.channel.regions import GaussianRegion, Independent, Region
from narrowcast.algorithms.channel.table_region import TableRegion

Array = NDArray[np.float64]


def subsets(n_users: int) -> list[tuple[int, ...]]:
    return [users for size in range(1, n_users + 1) for users in combinations(range(n_users), size)]


def capacity(region: Region, users: tuple[int, ...]) -> float:
    """R(users), written out anew."""
    if isinstance(region, GaussianRegion):
        return region.bandwidth * float(np.log1p(sum(region.snr[user] for user in users))) / float(np.log(2))
    if isinstance(region, Independent):
        return sum(float(region.rates[user]) for user in users)
    assert isinstance(region, TableRegion)
    return float(region.capacity[sum(2**user for user in users)])


def worst_excess(region: Region, rates: Array) -> float:
    return max(sum(rates[user] for user in users) - capacity(region, users) for users in subsets(len(region)))


def relative_excess(region: Region, rates: Array) -> float:
    return max(
        (sum(rates[user] for user in users) - capacity(region, users)) / max(capacity(region, users), 1e-300)
        for users in subsets(len(region))
    )


def gaussian(random: np.random.Generator, n_users: int, decades: float = 3.0) -> GaussianRegion:
    return GaussianRegion(10 ** random.uniform(-decades, decades, n_users), float(10 ** random.uniform(0, 2)))


def table(random: np.random.Generator, n_users: int) -> TableRegion:
    """A sum of concave functions of sums: a polymatroid that is not of the Gaussian kind."""
    values = random.uniform(0.1, 3.0, (3, n_users))
    return TableRegion.of({users: float(np.sqrt(values[:, users].sum(axis=1)).sum()) for users in subsets(n_users)})


def base_inside(region: Region, random: np.random.Generator) -> Array:
    """A point that uses the whole capacity: the mean of greedy vertices."""
    n_users = len(region)
    points = []
    for _ in range(2 * n_users):
        order = random.permutation(n_users)
        point = np.zeros(n_users)
        for place, user in enumerate(order):
            before = tuple(sorted(order[:place]))
            point[user] = capacity(region, (*before, user)) - (capacity(region, before) if before else 0.0)
        points.append(point)
    return np.mean(points, axis=0)
