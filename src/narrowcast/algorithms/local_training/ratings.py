"""Local training on a partly observed matrix: alternating gradient steps, and SGD rating by rating.

The matrix is W H: the clients' changes of W [N, K] are sent by row, and each client keeps its H. A chunk is one call of
the loops of `rating_kernels` over observed entries.

Letters: s the round, F_p client p's squared error, C clients of a chunk, n columns of a client, R rows that the clients
change.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, replace
from typing import Any, Literal, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from narrowcast.algorithms.local_training.rating_kernels import (
    ChunkEntries,
    add_column_grams,
    descend_columns,
    descend_entry_by_entry,
    descend_rows,
    measure_squares,
    move_rows,
    step_columns,
)
from narrowcast.platform.compiled import read_only
from narrowcast.platform.config.files import Section
from narrowcast.platform.contracts import Task, Training
from narrowcast.platform.data.partition import ClientIndex
from narrowcast.platform.data.rating_matrix import RatingMatrix
from narrowcast.platform.errors import UserError
from narrowcast.platform.models.factorisation import COLUMN_FACTORS, ROW_FACTORS, ConstraintSet, MaskedFactorisation
from narrowcast.platform.traits import TrainingTraits
from narrowcast.platform.types import (
    Arrays,
    BoolArray,
    Chunk,
    FloatArray,
    IntArray,
    LocalTerms,
    LocalUpdates,
    RowChanges,
)

Factors = NDArray[np.floating[Any]]


def factor_updates(
    changes: RowChanges, columns: Factors, loss: FloatArray, examples: IntArray, steps: IntArray
) -> LocalUpdates:
    """Return changes of W in the rows of the clients' training entries, and their new H.

    Shapes: columns [C, n, K]; loss [C], the mean squared error of the training entries before W moves; examples and
    steps [C].
    """
    finite = np.isfinite(loss) & np.isfinite(columns).all(axis=(1, 2))
    wrong = ~np.isfinite(changes.values).all(axis=1)
    if wrong.any():
        clients = np.repeat(np.arange(len(finite)), np.diff(changes.row_starts))
        finite &= np.bincount(clients[wrong], minlength=len(finite)) == 0
    state, rows = {COLUMN_FACTORS: columns}, {ROW_FACTORS: changes}
    return LocalUpdates({}, state, loss, examples, steps, rows=rows, finite=finite)


def only_masked_factorisation(kind: str, task: Task) -> None:
    """Raise `UserError` unless the model is a factorisation of a partly observed matrix."""
    if not isinstance(task.model, MaskedFactorisation):
        raise UserError(f"training.kind = {kind} trains masked_factorisation only, not {task.model.kind}; use another")


@dataclass(frozen=True)
class FactorChunk:
    """A chunk's entries as the compiled loops take them, and the rows of W of the clients that move W.

    Shapes: change_starts [C + 1]; change_rows [R].
    """

    entries: ChunkEntries
    change_starts: IntArray
    change_rows: IntArray

    @classmethod
    def of(cls, row_factors: Factors, chunk: Chunk, task: Task, moves: BoolArray) -> Self:
        """Return the entries of a chunk, less the model's offset and in the type of W; moves [C]."""
        model, data, dtype = task.model, task.data, row_factors.dtype
        assert isinstance(model, MaskedFactorisation)
        held, values = data.of_clients, data.shifted_values(model.offset(data), dtype.name)
        rows, counts = ClientIndex(np.arange(len(held.items)), held.row_starts).rows(chunk.clients[moves])
        changing = np.zeros(len(chunk.clients), dtype=np.int64)
        changing[moves] = counts
        entries = ChunkEntries(
            row_factors=read_only(row_factors, dtype),
            clients=read_only(chunk.clients, np.int64),
            starts=read_only(held.starts, np.int64),
            rows=read_only(held.rows, np.int64),
            columns=read_only(held.columns, np.int64),
            values=read_only(values, dtype),
            row_starts=read_only(held.row_starts, np.int64),
            items=read_only(held.items, np.int64),
        )
        return cls(entries, np.concatenate([[0], np.cumsum(changing)]), held.items[rows])

    def complete_columns(self, index: int) -> Factors:
        """Return the columns of one client of the chunk, as rows [n, N], of a matrix without missing entries."""
        first, last = self.entries.starts[self.entries.clients[index] :][:2].tolist()
        return self.entries.values[first:last].reshape(-1, len(self.entries.row_factors))

    def no_changes(self) -> RowChanges:
        """Return changes of W that are zeros."""
        w = self.entries.row_factors
        zeros = np.zeros((len(self.change_rows), w.shape[1]), dtype=w.dtype)
        return RowChanges(self.change_rows, self.change_starts, zeros, len(w))


class FactorTraining(Training, Section):
    """Training of the factors of a partly observed matrix; a subclass implements `train_factors`."""

    @property
    def traits(self) -> TrainingTraits:
        """Factors are trained, by `train_factors`."""
        return replace(super().traits, trains_factors=True)

    @property
    def device(self) -> str:
        """The device of the compiled loops."""
        return "cpu"

    def mode(self, task: Task) -> Literal["batched", "per_client"]:
        """Return "batched": a chunk is one call of each compiled loop."""
        del task
        return "batched"

    def samples(self, task: Task, clients: IntArray) -> IntArray:
        """Return the training entries of each client, [C]."""
        return np.asarray(task.data.examples[clients])

    def train(self, server: Arrays, chunk: Chunk, task: Task, terms: LocalTerms) -> LocalUpdates:
        """Train all clients of the chunk; `changes` [C, N, K] are zero in rows without entries of the client."""
        if terms != LocalTerms():
            raise UserError(
                "training of masked_factorisation takes no terms of an algorithm; use algorithm.kind = fedmavg"
            )
        everyone = np.ones(len(chunk.clients), dtype=bool)
        updates = self.train_factors(np.asarray(server[ROW_FACTORS]), chunk, task, everyone)
        return replace(updates, changes={name: rows.dense() for name, rows in updates.rows.items()}, rows={})

    @abstractmethod
    def train_factors(self, row_factors: Factors, chunk: Chunk, task: Any, moves: BoolArray) -> LocalUpdates:
        """Train H of all clients of a chunk, and W for those that `moves` names, [C]."""


class AlternatingGradient(FactorTraining):
    """Q1 projected gradient steps on H_p, then floor(Q / s) + 1 gradient steps on W_p in round s.

    The steps have the sizes 1 / c_p, c_p = gamma1 / 2 L_H, and 1 / d_p, d_p = gamma2 L_W, with the Lipschitz constants
    of the gradients of F_p, the squared error of the client's observed entries plus weight_decay times the squares of
    the factors that these entries have. L_H is exact, the largest over the client's columns. L_W is the largest
    eigenvalue of H_p H_p', or the largest sum of |h_j|^2 over the entries of one row if that is less; it is exact for
    clients of one column.

    Differs from the paper: 1. the error is that of observed entries, and has a weight decay. 2. d is each client's own;
    the paper's is common to all clients, which would have to send their constants first. 3. F_p is not divided by the
    number of its columns, which cancels in steps of these sizes.

    Reference: Wang, Suwandi and Chang, Demystifying Model Averaging for Communication-Efficient Federated Matrix
    Factorization, ICASSP 2021, Algorithm 1.
    """

    kind: Literal["alternating_gradient"] = "alternating_gradient"
    h_steps: int = Field(5, ge=1, le=10_000, description="Q1, steps on H in a round")
    w_steps: int = Field(0, ge=0, le=10_000, description="Q, of the floor(Q / round) + 1 steps on W; 0: one step")
    gamma1: float = Field(2.0, gt=1, allow_inf_nan=False, description="divisor of the steps on H; 2: 1 / L_H")
    gamma2: float = Field(1.0, gt=0.5, allow_inf_nan=False, description="divisor of the steps on W; 1: 1 / L_W")
    weight_decay: float = Field(0.0, ge=0, allow_inf_nan=False, description="coefficient of the squares of factors")
    crossing: float = Field(
        0.0,
        ge=0,
        allow_inf_nan=False,
        description="coefficient of the products of different values of one column of H, which are 0 for clusters",
    )

    @property
    def epochs(self) -> int:
        """The passes over a client's entries in a round with one step on W."""
        return self.h_steps + 1

    def w_steps_in(self, round_index: int) -> int:
        """Return the steps on W in a round."""
        return self.w_steps // round_index + 1

    def check(self, task: Task) -> None:
        """Raise `UserError` unless the model is a factorisation of a partly observed matrix."""
        only_masked_factorisation(self.kind, task)

    def train_factors(
        self,
        row_factors: Factors,
        chunk: Chunk,
        task: Task[RatingMatrix, AlternatingGradient],
        moves: BoolArray,
    ) -> LocalUpdates:
        """Train H of all clients of a chunk, and W for those that `moves` names, [C]."""
        model = task.model
        assert isinstance(model, MaskedFactorisation)
        factor_chunk = FactorChunk.of(row_factors, chunk, task, moves)
        columns = np.array(chunk.state[COLUMN_FACTORS], dtype=row_factors.dtype)
        steps, moved = self.w_steps_in(chunk.round_index), factor_chunk.no_changes()
        changes = moved.values
        loss, heaviest = np.empty(len(chunk.clients)), np.empty(len(chunk.clients))
        move = self._move_by_products if task.data.is_complete else self._move_columns
        with np.errstate(over="ignore", invalid="ignore"):  # a client that diverges is found by `factor_updates`
            columns = move(factor_chunk, columns, task, model.h_set, loss, heaviest)
            grams = np.einsum("cja,cjb->cab", columns, columns)
            constants = np.minimum(largest_eigenvalues(grams), heaviest)
            w_rates = _inverse(self.gamma2 * (constants + self.weight_decay)).astype(row_factors.dtype)
            if task.data.is_complete:
                for index in np.flatnonzero(moves).tolist():
                    x = factor_chunk.complete_columns(index)
                    span = slice(*factor_chunk.change_starts[index : index + 2].tolist())
                    h, rate = columns[index, : len(x)], float(w_rates[index])
                    changes[span] = descend_rows(x, row_factors, h, rate=rate, decay=self.weight_decay, steps=steps)
            else:
                move_rows(
                    factor_chunk.entries,
                    columns,
                    moves,
                    w_rates,
                    self.weight_decay,
                    steps,
                    factor_chunk.change_starts,
                    changes,
                )
        examples = task.data.examples[chunk.clients]
        passes = self.h_steps + np.where(moves, steps, 0)
        return factor_updates(moved, columns, loss, examples * passes, np.where(examples > 0, passes, 0))

    def _move_columns(
        self,
        factor_chunk: FactorChunk,
        columns: Factors,
        task: Task[RatingMatrix, AlternatingGradient],
        h_set: ConstraintSet,
        loss: FloatArray,
        heaviest: FloatArray,
    ) -> Factors:
        """Return H [C, n, K] after the steps on it; write loss [C] and heaviest [C] as `measure_squares` does."""
        rates = self._h_rates(factor_chunk.entries, task)
        held = np.arange(columns.shape[1]) < task.data.of_clients.n_columns[factor_chunk.entries.clients, None]
        for _ in range(self.h_steps):
            step_columns(factor_chunk.entries, rates, self.weight_decay, self.crossing, columns)
            columns = np.where(held[..., None], h_set.project(columns), columns.dtype.type(0))
        measure_squares(factor_chunk.entries, columns, loss, heaviest)
        return columns

    def _move_by_products(
        self,
        factor_chunk: FactorChunk,
        columns: Factors,
        task: Task[RatingMatrix, AlternatingGradient],
        h_set: ConstraintSet,
        loss: FloatArray,
        heaviest: FloatArray,
    ) -> Factors:
        """Do as `_move_columns` for clients whose columns are observed in every row."""
        w, rates = factor_chunk.entries.row_factors, self._h_rates(factor_chunk.entries, task)
        for index, rate in enumerate(rates.tolist()):
            x = factor_chunk.complete_columns(index)
            h = columns[index, : len(x)]
            terms = {"decay": self.weight_decay, "crossing": self.crossing}
            h[...] = descend_columns(x, w, h, rate=rate, steps=self.h_steps, h_set=h_set, **terms)
            loss[index] = np.square(h @ w.T - x).mean()
            heaviest[index] = np.square(h).sum()
        return columns

    def _h_rates(self, entries: ChunkEntries, task: Task[RatingMatrix, AlternatingGradient]) -> NDArray[Any]:
        """Return 2 / (gamma1 L) for the largest eigenvalue L of the Gram matrices of the client's columns, [C]."""
        w, n_clients = entries.row_factors, len(entries.clients)
        if task.data.is_complete:
            constants = np.full(n_clients, largest_eigenvalues((w.T @ w)[None].astype(np.float64))[0])
        else:
            n_columns, rank = int(task.data.of_clients.n_columns[entries.clients].max()), w.shape[1]
            grams = np.zeros((n_clients, n_columns, rank, rank))
            add_column_grams(entries, grams)
            constants = largest_eigenvalues(grams.reshape(-1, rank, rank)).reshape(n_clients, n_columns).max(axis=1)
        constants = constants + self.weight_decay + self.crossing * (w.shape[1] - 1)
        return (2 * _inverse(self.gamma1 * constants)).astype(w.dtype)


def largest_eigenvalues(grams: NDArray[Any]) -> FloatArray:
    """Return the largest eigenvalue of each symmetric matrix [m, K, K] of which the lower triangle is given, [m]."""
    finite = np.isfinite(grams).all(axis=(1, 2))
    values = np.full(len(grams), np.nan)
    values[finite] = np.linalg.eigvalsh(grams[finite].astype(np.float64))[:, -1]
    return values


def _inverse(constants: FloatArray) -> FloatArray:
    """Return 1 over each constant; 0 for a constant of 0, which only factors of 0 have: their gradient is 0."""
    return np.divide(1.0, constants, out=np.zeros_like(constants), where=constants != 0)


class RatingSGD(FactorTraining):
    """One SGD step on h_j at each rating in the order of time, and one gradient step of w_i at the h_j after that.

    With e = x - w_i . h_j: h_j -= lr (-2 e w_i + 2 wd h_j), then w_i is to move by -lr (-2 e h_j + 2 wd w_i), where w_i
    stays that of the server. h_j is not projected.

    Differs from the paper: 1. as in the released code, the gradient of w_i has the new h_j.

    Reference: Chai et al., Secure Federated Matrix Factorization, IEEE Intelligent Systems 2020 (arXiv:1906.05108), and
    the released code.
    """

    kind: Literal["rating_sgd"] = "rating_sgd"
    learning_rate: float = Field(1e-3, gt=0, allow_inf_nan=False, description="step size")
    weight_decay: float = Field(
        1e-4, ge=0, allow_inf_nan=False, description="coefficient of the squared norms of h_j and w_i in each step"
    )

    @property
    def epochs(self) -> int:
        """1: each rating once."""
        return 1

    def check(self, task: Task) -> None:
        """Raise `UserError` unless the model is a factorisation of a partly observed matrix without a set for H."""
        only_masked_factorisation(self.kind, task)
        if task.model.h_set.kind != "none":  # type: ignore[attr-defined]
            raise UserError(f"training.kind = {self.kind} does not project H; leave out model.h_set")

    def train_factors(
        self, row_factors: Factors, chunk: Chunk, task: Task[RatingMatrix, RatingSGD], moves: BoolArray
    ) -> LocalUpdates:
        """Train H of all clients of a chunk, and return the steps of W of those that `moves` names, [C]."""
        factor_chunk = FactorChunk.of(row_factors, chunk, task, moves)
        columns = np.array(chunk.state[COLUMN_FACTORS], dtype=row_factors.dtype)
        loss, changes = np.empty(len(chunk.clients)), factor_chunk.no_changes()
        descend_entry_by_entry(
            factor_chunk.entries,
            self.learning_rate,
            self.weight_decay,
            columns,
            loss,
            moves,
            factor_chunk.change_starts,
            changes.values,
        )
        examples = task.data.examples[chunk.clients]
        return factor_updates(changes, columns, loss, examples, examples)
