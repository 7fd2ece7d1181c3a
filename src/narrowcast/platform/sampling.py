"""Client sampling: the clients that take part in a round."""

from __future__ import annotations

import math
from typing import Literal

import numpy as np

from narrowcast.platform.seeds import generator
from narrowcast.platform.types import BoolArray, IntArray

Sampling = Literal["round_robin", "uniform", "by_examples"]


def rotation_of(sampling: Sampling, seed: int, n_clients: int) -> IntArray:
    """Return the order in which round robin visits the clients, [U]."""
    return generator(seed, "cohort").permutation(n_clients) if sampling == "round_robin" else np.arange(n_clients)


def cohort_size(clients_per_round: int, over_selection: float, n_clients: int) -> int:
    """Return the number of clients sampled in a round, at most all clients."""
    return math.ceil(min(round(clients_per_round * over_selection, 9), n_clients))


def next_in(order: IntArray, first: int, size: int, free: BoolArray | None) -> IntArray:
    """Return the next `size` clients of the rotation from position `first` on that are `free` [U]."""
    turn = (first + np.arange(size if free is None else len(order))) % len(order)
    return order[turn] if free is None else order[turn][free[order[turn]]][:size]


def weights_of(sampling: Sampling, examples: IntArray | None) -> IntArray | None:
    """Return the weights [U] of a draw of clients, from their numbers of examples; None for equal ones."""
    return examples if sampling == "by_examples" else None


def drawn_from(
    free: BoolArray | None,
    size: int,
    draw: np.random.Generator,
    n_clients: int,
    weights: IntArray | None = None,
    replacement: bool = False,
) -> IntArray:
    """Draw `size` of the clients that are `free` [U]; all of them if there are fewer, unless with `replacement`.

    Each client is equally likely, or drawn by the `weights` [U] of those that are left.
    """
    if free is None and weights is None:
        return draw.choice(n_clients, size, replacement)
    clients = np.arange(n_clients) if free is None else np.flatnonzero(free)
    if weights is not None:
        clients = clients[weights[clients] > 0]
    if not len(clients):
        return clients
    shares = None if weights is None else weights[clients] / weights[clients].sum()
    size = size if replacement else min(size, len(clients))
    return clients[draw.choice(len(clients), size, replacement, shares)]
