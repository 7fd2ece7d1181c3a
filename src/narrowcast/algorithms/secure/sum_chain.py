"""Robust aggregates through secure sums: a chain of weighted means, whose weights clients compute for themselves."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from narrowcast.algorithms.client.client_pass import Contribution
from narrowcast.algorithms.client.sums import SumLayout, TensorSum
from narrowcast.algorithms.codecs.messages import dense_wire_bits
from narrowcast.algorithms.codecs.wire import dtype_of
from narrowcast.algorithms.federated.aggregator import Aggregator
from narrowcast.platform.types import Arrays, FloatArray, PrefixedArrays

ESTIMATE = PrefixedArrays("estimate/")
"""The last mean, z, which the server sends besides the broadcast before a sum that is not a round's first."""

_LEAST_PULL = 16
"""The integer that is the pull of a client of the largest weight at the largest distance that changes can have."""


@dataclass(frozen=True)
class SumChain:
    """An aggregate that is the last of `rule.traits.sums` weighted means, each opened from a secure sum of its own.

    The first mean is that of all clients. Then the server sends the last mean z; each client u computes its distance to
    z and from it its pull, sends its change times the pull, and the pull, through the secure sum; the server divides.
    It learns the sums, and no distance. A client that does not deliver in one sum is asked for none of the next ones.

    Pulls are rounded to integers, in units of a 16th of the pull of a client of the largest weight at the largest
    possible distance: the width of a sum follows from public numbers, and not from the data. `clip` cuts the values of
    changes, so that no distance is above 2 clip sqrt(values). `largest_weight` is that of any client.

    Reference: Pillutla et al., Robust Aggregation for Federated Learning, IEEE Transactions on Signal Processing 2022
    (arXiv:1912.13445), Algorithm 2, whose iterations are averages that are secure if the oracle of averages is.

    Differs from the paper: 1. changes and pulls are rounded to the grid of the secure sum. 2. a sum is opened over more
    honest clients than there are sums: those of fewer clients are equations enough to solve for each client's change.
    """

    rule: Aggregator
    clip: float
    largest_weight: int

    @property
    def sums(self) -> int:
        """The number of sums of a round."""
        return self.rule.traits.sums

    @property
    def least_senders(self) -> int:
        """The fewest honest clients whose sums are opened: each sum has an equation for each value, each client one."""
        return self.sums + 1

    def layout(self, of_mean: SumLayout) -> SumLayout:
        """Return the layout of each sum, from that of the weighted mean."""
        of_weights = of_mean.max_weight / self.largest_weight
        most = math.ceil(self._largest_pull(of_mean) * of_weights) + of_mean.max_clients
        return replace(of_mean, max_weight=most)

    def estimate_bits(self, layout: SumLayout) -> int:
        """Return the size of the means that the server sends in a round, all but the last."""
        zeros = TensorSum.of(layout.zeros()).tensors
        return (self.sums - 1) * dense_wire_bits(sum(values.size for values in zeros.values()), dtype_of(zeros))

    def pulled(self, contribution: Contribution, estimate: Arrays, layout: SumLayout) -> Contribution:
        """Return the contributions of a chunk's clients to a sum, weighed by their pulls; no estimate in the first."""
        assert contribution.weight is not None, "the layout of a mean has weights"
        weights = np.asarray(contribution.weight, dtype=np.float64)
        with np.errstate(invalid="ignore", over="ignore"):  # clients that did not stay finite send nothing
            pulls = self.rule.pulls(weights, self._distances(contribution, estimate, len(weights)))
            shares = pulls / self.rule.pulls(np.array([float(self.largest_weight)]), np.zeros(1))
            rounded = np.maximum(np.rint(self._largest_pull(layout) * shares), 1.0)
        return replace(contribution, weight=rounded)

    def _distances(self, contribution: Contribution, estimate: Arrays, clients: int) -> FloatArray:
        """Return the distance of each client's change, as the clip leaves it, to the estimate, [C]; 0 without one."""
        squares = np.zeros(clients)
        for name, mean in estimate.items():
            values = contribution.tensors[name]
            assert isinstance(values, np.ndarray), "layouts of tensors have no rows"
            for client, change in enumerate(values):
                squares[client] += np.square(self._clipped(change) - mean).sum()
        return np.sqrt(squares)

    def _clipped(self, change: NDArray[np.floating]) -> FloatArray:
        return np.clip(np.asarray(change, dtype=np.float64), -self.clip, self.clip)

    def _largest_pull(self, layout: SumLayout) -> int:
        """Return the integer pull of the client of the largest weight at distance 0."""
        reach = 2 * self.clip * math.sqrt(sum(group.n_values for group in layout.groups))
        near, far = (float(self.rule.pulls(np.ones(1), np.array([distance]))[0]) for distance in (0.0, reach))
        return math.ceil(_LEAST_PULL * near / far)
