"""Held-out samples as the clients' own: those of their users, or dealt as the training samples are."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from narrowcast.platform.data.partition import split_in_proportion
from narrowcast.platform.seeds import generator
from narrowcast.platform.types import IntArray


class ClientIndex(NamedTuple):
    """Samples of clients by index: client u has `order[indptr[u]:indptr[u + 1]]`. Shapes: order [n]; indptr [U + 1]."""

    order: IntArray
    indptr: IntArray

    def rows(self, clients: IntArray) -> tuple[IntArray, IntArray]:
        """Return the samples of these clients one client after the other, [m], and the number of each, [C]."""
        counts = self.indptr[clients + 1] - self.indptr[clients]
        starts = np.repeat(self.indptr[clients] - np.cumsum(counts) + counts, counts)
        return self.order[starts + np.arange(len(starts))], counts


def index_of_owners(owners: IntArray, n_clients: int) -> ClientIndex:
    """Return the index of samples whose clients are known, [n]; those of client -1 are left out."""
    indptr = np.zeros(n_clients + 1, dtype=np.int64)
    np.cumsum(np.bincount(owners[owners >= 0], minlength=n_clients), out=indptr[1:])
    return ClientIndex(np.argsort(owners, kind="stable")[int((owners < 0).sum()) :], indptr)


def deal_alike(
    classes: IntArray, owners: IntArray, held_out: IntArray, n_clients: int, seed: int, split: str
) -> ClientIndex:
    """Deal held-out samples so that a client has of each class the share that it has of the training samples.

    The held-out samples of a client are then distributed as its training samples, as if its own samples had been split
    after the partition, which FedProx (Li et al., MLSys 2020), q-FFL (Li et al., ICLR 2020) and LEAF (Caldas et al.
    2018) do. Each sample is dealt to one client; a class without training samples to none.

    Shapes: classes [n] and owners [n] of the training samples; held_out [m], the classes of those to be dealt.
    """
    random = generator(seed, split + " of clients")
    found = np.full(len(held_out), -1, dtype=np.int64)
    for label in np.unique(held_out):
        rows = random.permutation(np.flatnonzero(held_out == label))
        # In random order, since rounding would otherwise favour the same clients in every class.
        clients = random.permutation(n_clients)
        counts = np.bincount(owners[classes == label], minlength=n_clients)[clients]
        if counts.any():
            found[rows] = np.repeat(clients, split_in_proportion(len(rows), counts))
    return index_of_owners(found, n_clients)
