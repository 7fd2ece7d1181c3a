"""Linear semidefinite programs with sparse data: constraints, bounds on trace and rank, and certificates of answers.

Programs come from problems that state one, or from files in the sparse format of SDPA, as those of the collection
SDPLIB. Solvers keep a factor V of X = V V', and take products of the constraints with it.
"""

from __future__ import annotations

import hashlib
import logging
import math
import re
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
from pydantic import Field

from narrowcast.platform.config.files import Section
from narrowcast.platform.data.download import located
from narrowcast.platform.errors import UserError
from narrowcast.platform.solving import Problem, ProblemSource, Work, name_of
from narrowcast.platform.storage.disk import readable
from narrowcast.platform.types import Arrays, FloatArray, IntArray
from narrowcast.solves.certificate import Proof, gershgorin_bound, proof_work, sparse_eigenvalue_bound
from narrowcast.solves.vector_kernels import pair_products
from narrowcast.solves.weighted_graph import MOST_WEIGHT

if TYPE_CHECKING:
    from scipy.sparse import csr_array


_ROUNDING = 1e-12
"""Of the largest entry of a matrix: mirror images may differ by it, as those of computed matrices do.

Times a trace and of the largest entry of C, an objective of this size may be the rounding of 0.
"""


@dataclass(frozen=True, eq=False)
class SymmetricConstraints:
    """The entries of m symmetric matrices of side n, as values at the p positions where any of them has an entry.

    Shapes: rows and columns [p], rows <= columns, sorted by row and column; values [m, p] in compressed rows, value
    (i, q) being the entry of A_i at (rows[q], columns[q]) and at its mirror image.
    """

    size: int
    rows: IntArray
    columns: IntArray
    values: csr_array

    @property
    def count(self) -> int:
        """The number of matrices m."""
        return int(self.values.shape[0])

    def of_vectors(self, vectors: FloatArray, right: FloatArray | None = None) -> FloatArray:
        """Return <A_i, V V'> [m] for V [n, k], or with U = `right` [n, k] <A_i, (V U' + U V') / 2>."""
        products = pair_products(self.rows, self.columns, vectors, vectors if right is None else right)
        return np.asarray(self._doubled @ products)

    def of_matrix(self, matrix: FloatArray) -> FloatArray:
        """Return <A_i, X> [m] for a dense symmetric X [n, n]."""
        return np.asarray(self._doubled @ matrix[self.rows, self.columns])

    def adjoint(self, dual: FloatArray) -> csr_array:
        """Return sum_i y_i A_i [n, n] for y = `dual` [m]."""
        return self._matrix_of(self.values.T @ dual)

    @property
    def pattern(self) -> csr_array:
        """Ones where any A_i has an entry, [n, n]."""
        return self._matrix_of(np.ones(len(self.rows)))

    def _matrix_of(self, values: FloatArray) -> csr_array:
        from scipy.sparse import csr_array

        indptr, indices, order = self._pattern
        return csr_array((values[order], indices, indptr), shape=(self.size, self.size))

    @cached_property
    def digest(self) -> str:
        """The sha256 of the matrices."""
        digest = hashlib.sha256(str((self.size, self.count)).encode())
        values = self.values
        for array in (self.rows, self.columns, values.indptr, values.indices):
            digest.update(np.ascontiguousarray(array, dtype=np.int64).data)
        digest.update(np.ascontiguousarray(values.data, dtype=np.float64).data)
        return digest.hexdigest()

    @cached_property
    def _doubled(self) -> csr_array:
        """Return the values, twice those off the diagonal: products with half of a symmetric matrix."""
        from scipy.sparse import csr_array, diags_array

        return csr_array(self.values @ diags_array(np.where(self.rows == self.columns, 1.0, 2.0)))

    @cached_property
    def _pattern(self) -> tuple[IntArray, IntArray, IntArray]:
        """Return indptr and indices of the positions with their mirror images, and the index of each entry."""
        off = np.flatnonzero(self.rows != self.columns)
        rows = np.concatenate([self.rows, self.columns[off]])
        columns = np.concatenate([self.columns, self.rows[off]])
        entries = np.concatenate([np.arange(len(self.rows)), off])
        order = np.lexsort((columns, rows))
        indptr = np.zeros(self.size + 1, dtype=np.int64)
        np.cumsum(np.bincount(rows, minlength=self.size), out=indptr[1:])
        return indptr, columns[order], entries[order]


def constraints_of(
    size: int,
    count: int,
    constraint: IntArray,
    row: IntArray,
    column: IntArray,
    value: FloatArray,
    *,
    first_number: int = 1,
) -> SymmetricConstraints:
    """Return the constraints with these entries, numbered from 0, one triangle or both; all four arrays are [entries].

    Errors count the matrices from `first_number`, rows and columns from 1.

    An entry that is given with its mirror image has to equal it up to rounding, and that of the upper triangle is
    taken; entries of the value 0 are left out. Raise `UserError` for a place outside the matrices, an entry that is
    given twice, one that differs from its mirror image, and a value that is not a number.
    """
    from scipy.sparse import csr_array

    for label, numbers, most in (("matrix", constraint, count), ("row", row, size), ("column", column, size)):
        if len(wrong := np.flatnonzero((numbers < 0) | (numbers >= most))):
            index = int(wrong[0])
            raise UserError(f"entry {index + 1} has the {label} {numbers[index] + 1}; 1 to {most} are allowed")
    if len(wrong := np.flatnonzero(~np.isfinite(value))):
        raise UserError(f"entry {wrong[0] + 1} has the value {value[wrong[0]]}; give finite values")
    low, high = np.minimum(row, column), np.maximum(row, column)
    order = np.lexsort((row > column, high, low, constraint))
    keys = np.stack([constraint, low, high])[:, order]
    same = (keys[:, 1:] == keys[:, :-1]).all(axis=0)
    largest = np.zeros(count)
    np.maximum.at(largest, constraint, np.abs(value))
    for earlier in np.flatnonzero(same).tolist():
        entry, mirror = order[earlier], order[earlier + 1]
        named = f"({row[entry] + 1}, {column[entry] + 1}) of matrix {constraint[entry] + first_number}"
        if row[entry] == row[mirror]:
            raise UserError(f"entry {named} is given twice; give each entry once")
        if abs(value[entry] - value[mirror]) > _ROUNDING * largest[constraint[entry]]:
            raise UserError(
                f"entry {named} is {value[entry]:.17g}, but its mirror image {value[mirror]:.17g}: the matrix is not "
                "symmetric; give one triangle, or equal values"
            )
    stored = order[np.concatenate([[True], ~same])] if len(order) else order
    stored = stored[value[stored] != 0]
    keys, entry_index = np.unique(low[stored] * size + high[stored], return_inverse=True)
    values = csr_array((value[stored], (constraint[stored], entry_index)), shape=(count, len(keys)), dtype=np.float64)
    values.sort_indices()
    return SymmetricConstraints(size, keys // size, keys % size, values)


_MOST_ERROR = 1e-6
"""Of the identity, beyond which a combination of constraints does not count as it."""


def implied_trace_bound(constraints: SymmetricConstraints, targets: FloatArray) -> float | None:
    """Return a bound on the trace of all X >= 0 with <A_i, X> = b_i, or None if the A_i do not span the identity.

    With A*(t) = I + E every feasible X has tr X = <b, t> - <E, X>, so that tr X <= <b, t> / (1 - |E|), where the
    largest row sum bounds the norm of E.
    """
    from scipy.sparse import csr_array, eye_array
    from scipy.sparse.linalg import lsqr

    diagonal = constraints.rows == constraints.columns
    if np.count_nonzero(diagonal) < constraints.size:
        return None
    combined = lsqr(csr_array(constraints.values.T), diagonal.astype(np.float64), atol=1e-14, btol=1e-14)[0]
    error = float(abs(constraints.adjoint(combined) - eye_array(constraints.size)).sum(axis=1).max())
    if error > _MOST_ERROR:
        return None
    return max(0.0, float(targets @ combined)) / (1 - error)


logger = logging.getLogger(__name__)


def pataki_rank(constraints: int) -> int:
    """Return the largest r with r (r + 1) / 2 <= m: a solution, if there is one, exists with at most this rank.

    Source: Barvinok, Discrete and Computational Geometry 13, 1995; Pataki, Mathematics of Operations Research 23, 1998.
    """
    return (math.isqrt(8 * constraints + 1) - 1) // 2


def warn_of_low_rank(rank: int | None, bound: int) -> None:
    """Warn of columns that are set, but fewer than the rank that some solution is known to have at most."""
    if rank is not None and rank < bound:
        logger.warning(
            "rank %d is below %d, which some solution needs at most; the optimum may not be reached: see the gap",
            rank,
            bound,
        )


LOWER_IS_BETTER = ("objective", "infeasibility", "gap", "rank")
"""Metrics of `SemidefiniteProgram` of which the lower value is better."""
_STEPS = 100
"""Of L-BFGS in a usual iteration."""
_ENORMOUS = 1e8
"""Multipliers, in units of the largest entry of C over that of the A_i, that no program is taken to have."""
NEGLIGIBLE = 1e-6
"""Of the largest singular value, below which a direction of the vectors does not count in their rank."""


class SemidefiniteProblem(Problem):
    """A problem that states a semidefinite program, for solvers of those."""

    @property
    @abstractmethod
    def program(self) -> SemidefiniteProgram:
        """The program."""


@dataclass(frozen=True, eq=False)
class SemidefiniteProgram(SemidefiniteProblem):
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
            index, target = int(wrong[0]), self.targets[wrong[0]]
            reason = ", which nothing satisfies" if target else ""
            raise UserError(f"constraint {index + 1} has no entries: it says 0 = {target:g}{reason}; leave it out")
        on_diagonal = (self.constraints.rows == self.constraints.columns)[values.indices]
        rising = np.logical_and.reduceat(on_diagonal & (values.data > 0), values.indptr[:-1])
        falling = np.logical_and.reduceat(on_diagonal & (values.data < 0), values.indptr[:-1])
        if len(wrong := np.flatnonzero((rising & (self.targets < 0)) | (falling & (self.targets > 0)))):
            raise UserError(
                f"constraint {wrong[0] + 1} asks a sum of diagonal entries to be {self.targets[wrong[0]]:g}, which no "
                "positive semidefinite matrix satisfies; change its sign"
            )

    @property
    def program(self) -> SemidefiniteProgram:
        """The program itself."""
        return self

    @cached_property
    def digest(self) -> str:
        """The sha256 of C, of all A_i and b, and of the known bound on the trace."""
        digest = hashlib.sha256(f"{self.constraints.digest} {self.known_trace_bound}".encode())
        for array in (self.cost.indptr, self.cost.indices):
            digest.update(np.ascontiguousarray(array, dtype=np.int64).data)
        for array in (self.cost.data, self.targets):
            digest.update(np.ascontiguousarray(array, dtype=np.float64).data)
        return digest.hexdigest()

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
            float(np.abs(matrix.data).max(initial=0.0)) for matrix in (self.cost, self.constraints.values)
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
        measures = {
            "objective": objective,
            "infeasibility": float(np.linalg.norm(violations)) / (1 + float(np.abs(self.targets).max())),
            "rank": numerical_rank(vectors),
        }
        if "dual" in answer and math.isfinite(bound := self.bound(answer["dual"])):
            measures |= {"bound": bound, "gap": abs(objective - bound) / (1 + abs(objective) + abs(bound))}
        return measures


def numerical_rank(vectors: FloatArray) -> float:
    """Return the number of directions that vectors [n, k] span."""
    spread = np.linalg.svd(vectors, compute_uv=False)
    return float(np.count_nonzero(spread > NEGLIGIBLE * spread[0]))


def semidefinite_program_of(problem: Any) -> SemidefiniteProgram:
    """Return the semidefinite program that a problem is, or that its `program` states; raise `UserError` for others."""
    if not isinstance(problem, SemidefiniteProblem):
        raise UserError(f"{name_of(problem)} is not a semidefinite program; use problems such as sdpa or max_cut")
    return problem.program


MOST_SIDE = 10**6
"""Side of X."""
_SEPARATORS = re.compile(r"[\s,(){}]+")
_ADVICE = "give lines m, number of blocks, sizes of blocks, targets, then a line `matrix block row column value` each"


class SDPAFile(ProblemSource, Section):
    """A semidefinite program in the sparse format of SDPA (.dat-s): minimise -<F_0, Y>, <F_i, Y> = c_i, Y >= 0.

    This is the dual of the two problems that the format states, so that `objective` is the negative of the optimum of
    SDPLIB's tables. Blocks stand along the diagonal of one matrix: no entry outside them is in any F, so that the
    optimum is the same. Entries of one triangle or of both are read; a block of the negative size -n is a diagonal.

    Source: Fujisawa, Kojima, Nakata and Yamashita, SDPA User's Manual, 2002; Borchers, SDPLIB 1.2, Optimization Methods
    and Software 11, 1999.
    """

    lower_is_better: ClassVar[tuple[str, ...]] = LOWER_IS_BETTER

    kind: Literal["sdpa"] = "sdpa"
    path: Path = Field(description="file in the sparse format of SDPA, .dat-s")
    trace_bound: float | None = Field(
        None, gt=0, description="number that the trace of no feasible Y exceeds; null: as the constraints imply, if so"
    )
    proof: Proof = Field(
        "lanczos",
        description="proof of the bound: least Ritz value less its error, or a sparse factorisation, which is nearer",
    )

    def load(self) -> SemidefiniteProgram:
        """Return the program; raise `UserError` if the file is not in SDPA format."""
        path = located(self.path, "path", "problem")
        with (
            readable(path, (OSError, UnicodeDecodeError, ValueError), _ADVICE),
            path.open(encoding="utf-8-sig") as file,
        ):
            lines = [line for line in file if line.strip() and line[0] not in '"*']
        try:
            with readable(path, (ValueError, OverflowError), _ADVICE):
                return self._program(path, [_words(line) for line in lines])
        except UserError as error:
            raise UserError(str(error) if str(error).startswith(str(path)) else f"{path}: {error}") from error

    def _program(self, path: Path, lines: list[list[str]]) -> SemidefiniteProgram:
        if len(lines) < 4:
            raise UserError(f"ends after {len(lines)} lines; is the file cut off? {_ADVICE}")
        count, blocks = (_first_number(line) for line in lines[:2])
        sizes = np.array(lines[2][:blocks], dtype=np.int64)
        targets = np.array(lines[3], dtype=np.float64)
        if len(sizes) != blocks:
            raise UserError(f"has {len(sizes)} sizes of blocks, but its second line says {blocks}; is it cut off?")
        if len(targets) != count:
            raise UserError(f"has {len(targets)} targets, but its first line says {count} constraints; is it cut off?")
        if not count or (sizes == 0).any() or np.abs(sizes).sum() > MOST_SIDE:
            rows = int(np.abs(sizes).sum())
            raise UserError(f"has {count} constraints and blocks of {rows} rows; 1 to {MOST_SIDE} are allowed")
        for index, row in enumerate(lines[4:]):
            if len(row) != 5:
                reason = "; is the file cut off?" if index == len(lines) - 5 else ""
                raise UserError(f"entry {index + 1} is {' '.join(row)[:60]!r}{reason}; {_ADVICE}")
        positions = np.array([row[:4] for row in lines[4:]], dtype=np.int64).reshape(-1, 4)
        value = np.array([row[4] for row in lines[4:]], dtype=np.float64)
        for what, numbers in (("target", targets), ("entry", value)):
            if len(wrong := np.flatnonzero(~(np.abs(numbers) <= MOST_WEIGHT))):
                raise UserError(
                    f"{what} {wrong[0] + 1} has the value {numbers[wrong[0]]:g}; give finite values of at most "
                    f"{MOST_WEIGHT:g}"
                )
        _check(positions, count, sizes)
        return self._of_entries(path, positions, value, targets, sizes)

    def _of_entries(
        self, path: Path, positions: IntArray, value: FloatArray, targets: FloatArray, sizes: IntArray
    ) -> SemidefiniteProgram:
        side = int(np.abs(sizes).sum())
        before = np.concatenate([[0], np.cumsum(np.abs(sizes))])[positions[:, 1] - 1]
        row, column = before + positions[:, 2] - 1, before + positions[:, 3] - 1
        first = positions[:, 0] == 0
        cost = constraints_of(side, 1, positions[first, 0], row[first], column[first], -value[first], first_number=0)
        matrix = positions[~first, 0] - 1
        constraints = constraints_of(side, len(targets), matrix, row[~first], column[~first], value[~first])
        stated = cost.adjoint(np.ones(1))
        return SemidefiniteProgram(path.stem, str(path), stated, constraints, targets, self.trace_bound, self.proof)


def _words(line: str) -> list[str]:
    return [word for word in _SEPARATORS.split(line) if word]


def _first_number(line: list[str]) -> int:
    """Return the number that a line begins with: the format allows words after it."""
    if not line or not line[0].lstrip("+").isdecimal():
        raise UserError(f"has a line {' '.join(line)[:60]!r} in place of a number; {_ADVICE}")
    return int(line[0])


def _check(positions: IntArray, count: int, sizes: IntArray) -> None:
    """Raise `UserError` for an entry [matrix, block, row, column] outside the matrices or off a diagonal block."""
    for column, label, least, most in ((0, "matrix", 0, count), (1, "block", 1, len(sizes))):
        if len(wrong := np.flatnonzero((positions[:, column] < least) | (positions[:, column] > most))):
            got = positions[wrong[0], column]
            raise UserError(f"entry {wrong[0] + 1} has the {label} {got}; {least} to {most} are allowed")
    size = np.abs(sizes)[positions[:, 1] - 1]
    for column, label in ((2, "row"), (3, "column")):
        if len(wrong := np.flatnonzero((positions[:, column] < 1) | (positions[:, column] > size))):
            block, got = positions[wrong[0], 1], positions[wrong[0], column]
            raise UserError(f"entry {wrong[0] + 1} has the {label} {got}; block {block} has 1 to {size[wrong[0]]}")
    diagonal = sizes[positions[:, 1] - 1] < 0
    if len(wrong := np.flatnonzero(diagonal & (positions[:, 2] != positions[:, 3]))):
        raise UserError(
            f"entry {wrong[0] + 1} is off the diagonal of block {positions[wrong[0], 1]}, which is diagonal"
        )
