"""Held-out samples as the clients' own: those of their users, or dealt as the training samples are."""

from __future__ import annotations

import numpy as np

from narrowcast.platform.data.client_index import ClientIndex, index_of_owners
from narrowcast.platform.seeds import generator
from narrowcast.platform.types import IntArray


def deal_alike(
    classes: IntArray, owners: IntArray, held_out: IntArray, n_clients: int, seed: int, split: str
) -> ClientIndex:
    """Deal held-out samples so that a client has of each class the share that it has of the training samples.

    The held-out samples of a client are then distributed as its training samples, as if its own samples had been split
    after the partition, which FedProx (Li et al., MLSys 2020), q-FFL (Li et al., ICLR 2020) and LEAF (Caldas et al.
    2018) do. Each sample is dealt to one client; a class without training samples to none. Of each class a client gets
    its share rounded down or up, up if it has lost most by the rounding of the classes before.

    Shapes: classes [n] and owners [n] of the training samples; held_out [m], the classes of those to be dealt.
    """
    random = generator(seed, split + " of clients")
    found, lost = np.full(len(held_out), -1, dtype=np.int64), np.zeros(n_clients)
    for label in np.unique(held_out):
        rows = random.permutation(np.flatnonzero(held_out == label))
        counts = np.bincount(owners[classes == label], minlength=n_clients)
        if not (total := counts.sum()):
            continue
        sizes, rest = np.divmod(len(rows) * counts, total)
        lost += rest / total
        able = random.permutation(np.flatnonzero(rest))
        up = able[np.argsort(-lost[able], kind="stable")][: len(rows) - sizes.sum()]
        sizes[up] += 1
        lost[up] -= 1
        found[rows] = np.repeat(np.arange(n_clients), sizes)
    return index_of_owners(found, n_clients)
