"""Linear semidefinite programs with sparse data: products for factored solvers, and certificates of their answers."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from narrowcast.algorithms.sdp.certificate import Proof, gershgorin_bound, sparse_eigenvalue_bound
from narrowcast.algorithms.sdp.proof_work import proof_work
from narrowcast.algorithms.sdp.rank_bound import pataki_rank
from narrowcast.algorithms.sdp.symmetric_constraints import SymmetricConstraints
from narrowcast.algorithms.sdp.trace_bound import implied_trace_bound
from narrowcast.platform.errors import UserError
from narrowcast.platform.kinds import optional
from narrowcast.platform.solver_contracts import Work, name_of
from narrowcast.platform.types import Arrays, FloatArray

if TYPE_CHECKING:
    from scipy.sparse import csr_array

LOWER_IS_BETTER = ("objective", "infeasibility", "gap", "rank")
"""Metrics of `SemidefiniteProgram` of which the lower value is better."""
_STEPS = 100
"""Of L-BFGS in a usual iteration."""
_ENORMOUS = 1e8
"""Multipliers, in units of the largest entry of C over that of the A_i, that no program is taken to have."""
_ROUNDING = 1e-12
"""Of the largest entry of C times a trace, an objective that may be the rounding of 0."""
NEGLIGIBLE = 1e-6
"""Of the largest singular value, below which a direction of the vectors does not count in their rank."""


@dataclass(frozen=True, eq=False)
class SemidefiniteProgram:
    """Minimise <C, X> over positive semidefinite X [n, n] with <A_i, X> = b_i; an answer is `vectors` V, X = V V'.

    Shapes: cost C [n, n], symmetric, in compressed rows; targets b [m]; `vectors` [n, k]. An answer may have a `dual`
    y [m] too, from which its lower bound follows. `known_trace_bound` is a number that the trace of no feasible X
    exceeds; None: the one that the constraints imply, if they do. Raises `UserError` for a constraint that no X
    satisfies on its own.
    """

    name: str
    source: str
    cost: csr_array
    constraints: SymmetricConstraints
    targets: FloatArray
    known_trace_bound: float | None = None
    proof: Proof = "lanczos"

    def __post_init__(self) -> None:
        values = self.constraints.values
        if len(self.targets) != self.constraints.count or self.cost.shape != (self.constraints.size,) * 2:
            raise ValueError(f"{len(self.targets)} targets and a cost {self.cost.shape} do not fit the constraints")
        if len(wrong := np.flatnonzero(~np.isfinite(self.targets))):
            raise UserError(f"the target of constraint {wrong[0] + 1} is {self.targets[wrong[0]]}; give finite values")
        empty = np.diff(values.indptr) == 0
        if len(wrong := np.flatnonzero(empty)):
            place, target = int(wrong[0]), self.targets[wrong[0]]
            reason = ", which nothing satisfies" if target else ""
            raise UserError(f"constraint {place + 1} has no entries: it says 0 = {target:g}{reason}; leave it out")
        on_diagonal = (self.constraints.rows == self.constraints.columns)[values.indices]
        rising = np.logical_and.reduceat(on_diagonal & (values.data > 0), values.indptr[:-1])
        falling = np.logical_and.reduceat(on_diagonal & (values.data < 0), values.indptr[:-1])
        if len(wrong := np.flatnonzero((rising & (self.targets < 0)) | (falling & (self.targets > 0)))):
            raise UserError(
                f"constraint {wrong[0] + 1} asks a sum of diagonal entries to be {self.targets[wrong[0]]:g}, which no "
                "positive semidefinite matrix satisfies; change its sign"
            )

    @cached_property
    def digest(self) -> str:
        """The sha256 of C, of all A_i and b, and of the known bound on the trace."""
        found = hashlib.sha256(f"{self.constraints.digest} {self.known_trace_bound}".encode())
        for array in (self.cost.indptr, self.cost.indices):
            found.update(np.ascontiguousarray(array, dtype=np.int64).data)
        for array in (self.cost.data, self.targets):
            found.update(np.ascontiguousarray(array, dtype=np.float64).data)
        return found.hexdigest()

    @property
    def sizes(self) -> Mapping[str, int]:
        """The side n of X and the number m of constraints."""
        return {"side": self.constraints.size, "constraints": self.constraints.count}

    @property
    def pataki_rank(self) -> int:
        """A rank, at most n, that some solution does not exceed if there is one."""
        return min(self.constraints.size, pataki_rank(self.constraints.count))

    @cached_property
    def trace_bound(self) -> float | None:
        """The known bound on the trace of every feasible X, or else the implied one, or None."""
        if self.known_trace_bound is not None:
            return self.known_trace_bound
        return implied_trace_bound(self.constraints, self.targets)

    def objective(self, vectors: FloatArray) -> float:
        """Return <C, V V'>."""
        return float(np.einsum("ik,ik->", vectors, self.cost @ vectors))

    def violations(self, vectors: FloatArray) -> FloatArray:
        """Return <A_i, V V'> - b_i [m]."""
        return self.constraints.of_vectors(vectors) - self.targets

    def slack(self, dual: FloatArray) -> csr_array:
        """Return C - sum_i y_i A_i [n, n] for y = `dual` [m]."""
        from scipy.sparse import csr_array

        return csr_array(self.cost - self.constraints.adjoint(dual))

    def bound(self, dual: FloatArray) -> float:
        """Return a lower bound on the objective of every feasible X, as y = `dual` [m] proves it.

        <C, X> >= <b, y> + R min(0, l) if R bounds the trace of X, and l the least eigenvalue of the slack from below.
        Without R it is <b, y> if the slack is proved to be positive semidefinite. If it is not, but no eigenvalue of C
        is below c > 0 (by Gershgorin's circles), the slack of t y is for t = c / (c - l), so that the bound is t <b, y>
        or 0, which is the bound of y = 0. Otherwise it is minus infinity.
        """
        least = min(0.0, sparse_eigenvalue_bound(self.slack(dual), self.proof))
        value = float(self.targets @ dual)
        if self.trace_bound is not None or least == 0:
            return value + (self.trace_bound or 0.0) * least
        of_cost = gershgorin_bound(self.cost)
        return max(0.0, value * of_cost / (of_cost - least)) if of_cost > 0 else -math.inf

    @cached_property
    def _proof_work(self) -> float:
        return proof_work(abs(self.cost) + self.constraints.pattern, self.proof)

    def measurement_work(self, answer: Arrays) -> Work:
        """Return the work of an iteration of `_STEPS` products with V, and of a measurement."""
        columns = answer["vectors"].shape[1]
        product = (self.cost.nnz + 2 * len(self.constraints.rows)) * columns
        proof = self._proof_work if "dual" in answer else 0.0
        return Work(_STEPS * product, proof + product + self.constraints.size * columns**2)

    def check_feasible(self, violations: FloatArray, trace: float) -> None:
        """Raise `UserError` if v = `violations` [m] proves that no X of a trace up to this, or R, is feasible.

        A feasible X has <A*(v), X> = <b, v>, and <A*(v), X> >= l tr X for the least eigenvalue l of A*(v): with <b, v>
        < 0 its trace is at least <b, v> / l, and with l >= 0 there is none (the lemma of Farkas).
        """
        value = float(self.targets @ violations)
        if value >= 0:
            return
        least = sparse_eigenvalue_bound(self.constraints.adjoint(violations), self.proof)
        most = trace if self.trace_bound is None else self.trace_bound
        if value < most * min(0.0, least):
            worst = int(np.argmax(np.abs(violations)))
            raise UserError(
                f"{self.name}: no positive semidefinite matrix of a trace up to {most:.3g} satisfies the constraints; "
                f"constraint {worst + 1} is violated most, by {abs(violations[worst]):.3g}: check the targets"
            )

    def check_bounded(self, vectors: FloatArray) -> None:
        """Raise `UserError` if X = V V' [n, n] shows that no multipliers prove a lower bound on the objective.

        A dual point y has C - A*(y) >= 0 and so <C, X> >= <y, A(X)>: an X that lowers the objective far more than it
        changes the constraints leaves none but an enormous one. Near an optimum A(X) is b, so that of a program that
        has one such an X is not met. With R nothing is unbounded.
        """
        if self.trace_bound is not None:
            return
        trace, objective = float(np.sum(vectors**2)), self.objective(vectors)
        change = float(np.abs(self.constraints.of_vectors(vectors)).max())
        of_cost, of_constraints = (
            float(np.abs(each.data).max(initial=0.0)) for each in (self.cost, self.constraints.values)
        )
        if -objective <= of_cost * max(_ENORMOUS * change / of_constraints, _ROUNDING * trace):
            return
        raise UserError(
            f"{self.name} is unbounded: along a positive semidefinite matrix of trace 1 the objective changes by "
            f"{objective / trace:.3g} and no constraint by more than {change / trace:.3g}; check the signs of the "
            "cost, or add a constraint that bounds the trace"
        )

    def measure(self, answer: Arrays) -> Mapping[str, float]:
        """Return the metrics of an answer.

        `objective`: <C, V V'>; `infeasibility`: the norm of the violations over 1 + max |b_i|; `rank`: the number of
        directions that the vectors span. With a `dual` whose bound is finite `bound`, and
        `gap`: |objective - bound| / (1 + |objective| + |bound|). The gap proves an answer to be near an optimum only so
        far as the answer is feasible.
        """
        vectors = answer["vectors"]
        objective, violations = self.objective(vectors), self.violations(vectors)
        found = {
            "objective": objective,
            "infeasibility": float(np.linalg.norm(violations)) / (1 + float(np.abs(self.targets).max())),
            "rank": numerical_rank(vectors),
        }
        if "dual" in answer and math.isfinite(bound := self.bound(answer["dual"])):
            found |= {"bound": bound, "gap": abs(objective - bound) / (1 + abs(objective) + abs(bound))}
        return found


def numerical_rank(vectors: FloatArray) -> float:
    """Return the number of directions that vectors [n, k] span."""
    spread = np.linalg.svd(vectors, compute_uv=False)
    return float(np.count_nonzero(spread > NEGLIGIBLE * spread[0]))


def semidefinite_program_of(problem: Any) -> SemidefiniteProgram:
    """Return the semidefinite program that a problem is, or that its `program` states; raise `UserError` for others."""
    found = optional(problem, "program", problem)
    if not isinstance(found, SemidefiniteProgram):
        raise UserError(f"{name_of(problem)} is not a semidefinite program; use problems such as sdpa or max_cut")
    return found
