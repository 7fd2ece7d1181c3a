"""Sensor localisation as a semidefinite program: squared distances are linear in the Gram matrix of positions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from narrowcast.algorithms.sdp.certificate import Proof, sparse_eigenvalue_bound
from narrowcast.algorithms.sdp.semidefinite_program import NEGLIGIBLE, SemidefiniteProgram, numerical_rank
from narrowcast.algorithms.sdp.sensor_network import SensorNetwork
from narrowcast.algorithms.sdp.symmetric_constraints import SymmetricConstraints, constraints_of
from narrowcast.platform.types import Arrays, FloatArray

LOWER_IS_BETTER = ("objective", "bound", "gap", "rank", "position_rmse", "stress", "infeasibility")
"""Metrics of `Localisation` of which the lower value is better."""


@dataclass(frozen=True, eq=False)
class Localisation:
    """Find Z = [[I, X'], [X, Y]] >= 0 of side d + n whose squared distances are near the measured ones.

    An answer is `positions` X [n, d]; `lifted` P [n, k], k >= d, stands for Z with X = P[:, :d] and Y = P P'. With
    Y = X X', of rank d, positions have exactly these distances; Z >= 0 relaxes it. The objective is
    f(Z) = sum_e (q_e(Z) - d_e^2)^2, where q_e is linear in Z.

    `program` is the linear program of Biswas and Ye, sum_e |q_e(Z) - d_e^2|, for solvers of those; their answer is
    `vectors` V [d + n + 2 m, k], a row for each dimension, sensor and side of an error.

    Source: Biswas and Ye, IPSN 2004; So and Ye, Mathematical Programming 109, 2007.
    """

    name: str
    source: str
    network: SensorNetwork
    proof: Proof = "lanczos"

    @property
    def digest(self) -> str:
        """The sha256 of the network."""
        return self.network.digest

    @property
    def sizes(self) -> Mapping[str, int]:
        """Sensors, anchors and measured distances."""
        network = self.network
        return {"sensors": network.sensors, "anchors": len(network.anchors), "distances": len(network.distances)}

    @cached_property
    def squared(self) -> SymmetricConstraints:
        """The matrices A_e of the squared distances q_e(Z) = <A_e, Z>."""
        network, count = self.network, len(self.network.distances)
        dimension, every = network.dimension, np.arange(count)
        first, second = network.pairs.T
        between = second < network.sensors
        entries = [(every, dimension + first, dimension + first, np.ones(count))]
        e, i, j = every[between], dimension + first[between], dimension + second[between]
        entries += [(e, j, j, np.ones(len(e))), (e, np.minimum(i, j), np.maximum(i, j), -np.ones(len(e)))]
        e, i = every[~between], dimension + first[~between]
        place = network.anchors[second[~between] - network.sensors]
        for c in range(dimension):
            entries.append((e, np.full(len(e), c), i, -place[:, c]))
            entries += [(e, np.full(len(e), b), np.full(len(e), c), place[:, b] * place[:, c]) for b in range(c + 1)]
        parts = [np.concatenate(each) for each in zip(*entries, strict=True)]
        return constraints_of(dimension + network.sensors, count, *parts)

    @cached_property
    def program(self) -> SemidefiniteProgram:
        """The linear program, with two diagonal entries for the positive and negative part of each error.

        Its bound on the trace holds for optimal matrices alone: their objective is at most that of X = 0, Y = 0.
        """
        from scipy.sparse import csr_array

        network, squared = self.network, self.squared
        count, core = len(network.distances), squared.size
        size, targets = core + 2 * count, network.distances**2
        values = squared.values.tocoo()
        every = np.arange(count)
        entries = [(values.row, squared.rows[values.col], squared.columns[values.col], values.data)]
        entries += [(every, core + every, core + every, -np.ones(count))]
        entries += [(every, core + count + every, core + count + every, np.ones(count))]
        unit = [(b, c) for c in range(network.dimension) for b in range(c + 1)]
        entries += [(np.array([count + n]), np.array([b]), np.array([c]), np.ones(1)) for n, (b, c) in enumerate(unit)]
        constraints = constraints_of(
            size, count + len(unit), *(np.concatenate(each) for each in zip(*entries, strict=True))
        )
        costs = np.concatenate([np.zeros(core), np.ones(2 * count)])
        cost = csr_array((costs, (np.arange(size), np.arange(size))), shape=(size, size))
        wanted = np.concatenate([targets, [1.0 if b == c else 0.0 for b, c in unit]])
        worst = float(np.abs(self._distances(np.zeros((network.sensors, network.dimension))) - targets).sum())
        trace = self._trace_bound(worst) + worst
        return SemidefiniteProgram(self.name, self.source, cost, constraints, wanted, trace, self.proof)

    def errors(self, lifted: FloatArray) -> FloatArray:
        """Return q_e - d_e^2 [m] of positions in d or more dimensions [n, k]."""
        return self._distances(lifted) - self.network.distances**2

    def measure(self, answer: Arrays) -> Mapping[str, float]:
        """Return the metrics of an answer.

        `objective`: f of the lifted positions, or of the positions if there are no others; `bound`: a lower bound on f
        over all Z, `gap`: their difference over sum_e d_e^4; `rank`: d, and the eigenvalues of Y - X X' that count.
        `stress`: f of the positions themselves. `test.position_rmse` where the true positions are known. Of `vectors`
        the metrics of `program`.
        """
        dimension = self.network.dimension
        found: dict[str, float] = {}
        if "vectors" in answer:
            vectors = answer["vectors"]
            axes, sensors = vectors[:dimension], vectors[dimension : dimension + self.network.sensors]
            positions = sensors @ axes.T
            found |= self.program.measure(answer)
            found["rank"] = numerical_rank(vectors[: dimension + self.network.sensors])
        else:
            positions, lifted = answer["positions"], answer.get("lifted", answer["positions"])
            objective, bound = float(np.sum(self.errors(lifted) ** 2)), self.bound(lifted)
            found |= {"objective": objective, "bound": bound}
            found["gap"] = (objective - bound) / float(np.sum(self.network.distances**4))
            beyond = np.linalg.svd(lifted[:, dimension:], compute_uv=False)
            found["rank"] = float(dimension + np.count_nonzero(beyond**2 > NEGLIGIBLE * np.linalg.norm(lifted, 2) ** 2))
        found["stress"] = float(np.sum(self.errors(positions) ** 2))
        if self.network.truth is not None:
            error = np.sum((positions - self.network.truth) ** 2, axis=1)
            found["test.position_rmse"] = float(np.sqrt(error.mean()))
        return found

    def bound(self, lifted: FloatArray) -> float:
        """Return a lower bound on f over all Z >= 0, from the gradient at the Z of lifted positions [n, k].

        f is convex in Z. With G = sum_e 2 (q_e - d_e^2) A_e and any L [d, d], an optimal Z* has
        <G, Z*> >= tr L + R min(0, l), where l is the least eigenvalue of G - [[L, 0], [0, 0]] from below, and R bounds
        the trace of Z*: its objective is at most f, so that each distance, and each path to an anchor, is bounded.
        """
        from scipy.sparse import coo_array, csr_array

        dimension, errors = self.network.dimension, self.errors(lifted)
        gradient = self.squared.adjoint(2 * errors)
        upper = gradient[:dimension].toarray()
        multiplier = upper[:, :dimension] + upper[:, dimension:] @ lifted[:, :dimension]
        multiplier = (multiplier + multiplier.T) / 2
        places = np.indices((dimension, dimension)).reshape(2, -1)
        block = coo_array((multiplier.ravel(), tuple(places)), shape=gradient.shape)
        least = min(0.0, sparse_eigenvalue_bound(csr_array(gradient - block), self.proof))
        objective = float(errors @ errors)
        along = 2 * float(errors @ self._distances(lifted))
        trace = self._trace_bound(float(np.sqrt(objective)))
        return max(0.0, objective - along + float(np.trace(multiplier)) + trace * least)

    def _distances(self, lifted: FloatArray) -> FloatArray:
        """Return the squared distances q_e [m]."""
        network = self.network
        anchors = np.zeros((len(network.anchors), lifted.shape[1]))
        anchors[:, : network.dimension] = network.anchors
        nodes = np.concatenate([lifted, anchors])
        return np.asarray(((nodes[network.pairs[:, 0]] - nodes[network.pairs[:, 1]]) ** 2).sum(axis=1))

    def _trace_bound(self, error: float) -> float:
        """Return a bound on tr Z if no squared distance is above the measured one by more than `error`."""
        network = self.network
        return network.dimension + float(np.sum(network.farthest(np.sqrt(network.distances**2 + error)) ** 2))
