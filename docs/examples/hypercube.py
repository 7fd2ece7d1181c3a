"""A topology: clients are corners of a hypercube, linked if their numbers differ in one bit."""

from typing import Literal

import numpy as np

from narrowcast.extend import IntArray, Topology


class Hypercube(Topology):
    """A hypercube; of a number of clients that is no power of two, the corners that are there."""

    kind: Literal["hypercube"] = "hypercube"

    def links(self, n_clients: int, round_index: int, seed: int) -> IntArray:
        """Return the links of a round, [E, 2]."""
        first, bit = np.meshgrid(np.arange(n_clients), 1 << np.arange(int(n_clients).bit_length()))
        links = np.column_stack([first.ravel(), (first ^ bit).ravel()])
        return links[(links[:, 0] < links[:, 1]) & (links[:, 1] < n_clients)]
