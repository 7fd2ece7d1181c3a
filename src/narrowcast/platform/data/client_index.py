"""The samples of each client, by index."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

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
