"""The federated least squares of the lecture: its closed forms, and the same problem as a run of the platform.

Reference: X. Chang, Lecture 11, Federated Optimization, section 1 and Example 1. Letters: K clients; A_k [m, n] and
b_k the samples of client k, the last column of A_k ones; H_k = (2 / m) A_k'A_k and g_k = (2 / m) A_k'b_k, so that
client k's loss f_k = |A_k x - b_k|^2 / m has the gradient H_k x - g_k; s the step size and E a round's local steps.

Differs from the lecture: f_k is a mean of squares, as the platform's loss, where the lecture has half of their sum:
its step size is 2 s / m, and all clients have equal m.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from narrowcast.experiment import Experiment, load_experiment
from narrowcast.platform.data.samples import Samples, one_array
from narrowcast.platform.rounds.state import Run, start
from narrowcast.platform.types import Arrays, FloatArray

PRECISION = 1e-10
"""Error, over the norm of the solution, up to which a run's limit equals its closed form."""
Watch = Callable[[int, FloatArray], None]
"""Called with the number of rounds and x after each of them."""
_RANK = 1e-10  # share of the largest eigenvalue below which one counts as 0


@dataclass(frozen=True)
class LeastSquaresProblem:
    """The losses x'H_k x / 2 - g_k'x + c_k of K clients. Shapes: H [K, n, n]; g [K, n]; c [K]; rows [K, m, n]."""

    curvatures: FloatArray
    linear: FloatArray
    constants: FloatArray
    rows: FloatArray
    targets: FloatArray

    @classmethod
    def of(cls, data: Samples) -> LeastSquaresProblem:
        """Return the problem of a data set whose clients have equally many samples."""
        (m,) = set(data.examples.tolist())
        features = np.hstack([one_array(data.train.features), np.ones((len(data.train), 1))], dtype=np.float64)
        rows = features[data.order].reshape(data.n_clients, m, -1)
        targets = data.train.labels[data.order, 0].astype(np.float64).reshape(data.n_clients, m)
        transposed: FloatArray = 2 / m * rows.transpose(0, 2, 1)
        linear = (transposed @ targets[..., None])[..., 0]
        return cls(transposed @ rows, linear, np.mean(targets**2, axis=1), rows, targets)

    @property
    def n_clients(self) -> int:
        """K."""
        return len(self.linear)

    @cached_property
    def solution(self) -> FloatArray:
        """x_LS, a minimiser of f; the one of least norm if there are several."""
        return least_norm(self.curvatures.mean(axis=0), self.linear.mean(axis=0))

    @cached_property
    def own_solutions(self) -> FloatArray:
        """A minimiser of each f_k, [K, n]."""
        return np.stack([least_norm(*each) for each in zip(self.curvatures, self.linear, strict=True)])

    @cached_property
    def smoothness(self) -> float:
        """The lecture's beta: every f_k is beta-smooth."""
        return float(np.linalg.eigvalsh(self.curvatures).max())

    @cached_property
    def strong_convexity(self) -> float:
        """The lecture's alpha: every f_k is alpha-strongly convex; 0 if some f_k is only convex."""
        least = float(np.linalg.eigvalsh(self.curvatures).min())
        return least if least > _RANK * self.smoothness else 0.0

    @property
    def heterogeneity(self) -> float:
        """The lecture's Gamma = f* - mean f_k*, 0 if all clients have a minimiser in common."""
        return self.loss(self.solution) - float(np.mean([self.losses(x)[k] for k, x in enumerate(self.own_solutions)]))

    def losses(self, x: FloatArray) -> FloatArray:
        """Return f_k(x), [K]."""
        return np.mean((self.rows @ x - self.targets) ** 2, axis=1)

    def loss(self, x: FloatArray) -> float:
        """Return f(x), the mean of f_k(x)."""
        return float(self.losses(x).mean())

    def gap(self, x: FloatArray) -> float:
        """Return f(x) - f*, from the distance to the solution, so that no digits cancel."""
        off = x - self.solution
        return float(off @ self.curvatures.mean(axis=0) @ off / 2)

    def fixed_point(self, rate: float, steps: int) -> FloatArray:
        """Return the limit of the rounds, equation 6; of least norm if there are several."""
        sums = self._sums(rate, steps)
        return least_norm((sums @ self.curvatures).mean(axis=0), (sums @ self.linear[..., None])[..., 0].mean(axis=0))

    def unseen(self, x: FloatArray) -> FloatArray:
        """Return the part of x that no sample sees, which no gradient moves; 0 if f has one minimiser."""
        curvature = self.curvatures.mean(axis=0)
        if np.linalg.matrix_rank(curvature) == len(x):
            return np.zeros_like(x)
        seen = least_norm(curvature, curvature @ x)
        return x - seen

    def contraction(self, rate: float, steps: int) -> float:
        """Return the factor by which a round brings x nearer to the limit: the spectral radius of B, below 1."""
        powers = np.linalg.matrix_power(np.eye(self.linear.shape[1]) - rate * self.curvatures, steps)
        values = np.abs(np.linalg.eigvals(powers.mean(axis=0)))
        return float(values[values < 1 - 1e-9].max())

    def _sums(self, rate: float, steps: int) -> FloatArray:
        """Return the sum of (I - s H_k)^e over e < E, [K, n, n]."""
        factor = np.eye(self.linear.shape[1]) - rate * self.curvatures
        total = power = np.broadcast_to(np.eye(self.linear.shape[1]), factor.shape)
        for _ in range(steps - 1):
            power = power @ factor
            total = total + power
        return total


def least_norm(matrix: FloatArray, right: FloatArray) -> FloatArray:
    """Return the solution of least norm of `matrix` x = `right`."""
    return np.asarray(np.linalg.lstsq(matrix, right, rcond=_RANK)[0], dtype=np.float64)


def configured(data: str, *overrides: str) -> Experiment:
    """Return an experiment in float64 in which every client of `data` takes part in every round."""
    every = (f"data={{kind: least_squares, {data}}}", "model={kind: softmax, dtype: float64}")
    cohort = ("clients_per_round=1000", "chunk_size=1000", "checkpoint_seconds=100000")
    return load_experiment("fedavg-digits", [*every, *cohort, *overrides])


def run_platform(experiment: Experiment, watch: Watch) -> FloatArray:
    """Run the experiment on this process, and return its last x."""
    task = experiment.task(experiment.data_source.load())
    run, x = Run(experiment, experiment.algorithm, task), np.empty(0)
    run.check()
    for outcome in experiment.backend.run(run, start(run)):
        if outcome.state is not None:
            x = as_vector(run.algorithm.final(outcome.state.server))
            watch(outcome.record.round, x)
    return x


def as_vector(parameters: Arrays) -> FloatArray:
    """Return x of the linear layer's weights and intercept."""
    bias, weights = (np.asarray(parameters[name], dtype=np.float64).ravel() for name in sorted(parameters))
    return np.concatenate([weights, bias])


def initial_vector(experiment: Experiment) -> FloatArray:
    """Return x before round 1."""
    task: Any = experiment.task(experiment.data_source.load())
    return as_vector(task.initial_parameters())
