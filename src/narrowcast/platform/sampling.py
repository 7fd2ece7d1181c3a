"""Client sampling: the clients that take part in a round."""

from __future__ import annotations

import math
from typing import Literal

import numpy as np

from narrowcast.platform.seeds import generator
from narrowcast.platform.types import BoolArray, IntArray

Sampling = Literal["round_robin", "uniform"]


def rotation_of(sampling: Sampling, seed: int, n_clients: int) -> IntArray:
    """Return the order in which round robin visits the clients, [U]."""
    if sampling == "uniform":
        return np.arange(n_clients)
    return generator(seed, "cohort").permutation(n_clients)


def cohort_size(clients_per_round: int, over_selection: float, n_clients: int) -> int:
    """Return the number of clients sampled in a round, at most all clients."""
    return math.ceil(min(round(clients_per_round * over_selection, 9), n_clients))


def next_in(order: IntArray, first: int, size: int, free: BoolArray | None) -> IntArray:
    """Return the next `size` clients of the rotation from position `first` on that are `free` [U]."""
    turn = (first + np.arange(size if free is None else len(order))) % len(order)
    return order[turn] if free is None else order[turn][free[order[turn]]][:size]


def drawn_from(free: BoolArray | None, size: int, draw: np.random.Generator, n_clients: int) -> IntArray:
    """Draw `size` of the clients that are `free` [U], each set equally likely; all of them if there are fewer."""
    if free is None:
        return draw.choice(n_clients, size, replace=False)
    clients = np.flatnonzero(free)
    return clients[draw.choice(len(clients), min(size, len(clients)), replace=False)] if len(clients) else clients
