"""Alternating gradient steps on the factors of a partly observed matrix: first on a client's H, then on its copy of W.

Reference: Wang, Suwandi and Chang, Demystifying Model Averaging for Communication-Efficient Federated Matrix
Factorization, ICASSP 2021, Algorithm 1. Letters: s the round, F_p client p's squared error, L its Lipschitz constants.
"""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from narrowcast.algorithms.local_training.complete_steps import descend_columns, descend_rows
from narrowcast.algorithms.local_training.entry_steps import (
    ChunkEntries,
    add_column_grams,
    measure_squares,
    move_rows,
    step_columns,
)
from narrowcast.algorithms.local_training.factor_task import FactorChunk, only_masked_factorisation
from narrowcast.algorithms.local_training.factor_training import FactorTraining
from narrowcast.algorithms.local_training.factor_updates import Factors, FactorUpdates, finite_updates
from narrowcast.platform.contracts import Task
from narrowcast.platform.data.rating_matrix import RatingMatrix
from narrowcast.platform.models.constraint_sets import ConstraintSet
from narrowcast.platform.models.masked_factorisation import COLUMN_FACTORS, MaskedFactorisation
from narrowcast.platform.types import BoolArray, Chunk, FloatArray


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
    ) -> FactorUpdates:
        """Train H of all clients of a chunk, and W for those that `moves` names, [C]."""
        model = task.model
        assert isinstance(model, MaskedFactorisation)
        here = FactorChunk.of(row_factors, chunk, task, moves)
        columns = np.array(chunk.state[COLUMN_FACTORS], dtype=row_factors.dtype)
        steps, changes = self.w_steps_in(chunk.round_index), here.no_changes()
        loss, heaviest = np.empty(len(chunk.clients)), np.empty(len(chunk.clients))
        move = self._move_by_products if task.data.is_complete else self._move_columns
        with np.errstate(over="ignore", invalid="ignore"):  # a client that diverges is found by `finite_updates`
            columns = move(here, columns, task, model.h_set, loss, heaviest)
            grams = np.einsum("cja,cjb->cab", columns, columns)
            constants = np.minimum(largest_eigenvalues(grams), heaviest)
            w_rates = _inverse(self.gamma2 * (constants + self.weight_decay)).astype(row_factors.dtype)
            if task.data.is_complete:
                for place in np.flatnonzero(moves).tolist():
                    x, own = here.complete_columns(place), slice(*here.change_starts[place : place + 2].tolist())
                    h, rate = columns[place, : len(x)], float(w_rates[place])
                    changes[own] = descend_rows(x, row_factors, h, rate=rate, decay=self.weight_decay, steps=steps)
            else:
                move_rows(here.entries, columns, moves, w_rates, self.weight_decay, steps, here.change_starts, changes)
        examples = task.data.examples[chunk.clients]
        passes = self.h_steps + np.where(moves, steps, 0)
        return FactorUpdates(
            row_starts=here.change_starts,
            rows=here.change_rows,
            changes=changes,
            columns=columns,
            loss=loss,
            examples=examples * passes,
            steps=np.where(examples > 0, passes, 0),
            finite=finite_updates(here.change_starts, changes, columns, loss),
        )

    def _move_columns(
        self,
        here: FactorChunk,
        columns: Factors,
        task: Task[RatingMatrix, AlternatingGradient],
        h_set: ConstraintSet,
        loss: FloatArray,
        heaviest: FloatArray,
    ) -> Factors:
        """Return H [C, n, K] after the steps on it; write loss [C] and heaviest [C] as `measure_squares` does."""
        rates = self._h_rates(here.entries, task)
        held = np.arange(columns.shape[1]) < task.data.of_clients.n_columns[here.entries.clients, None]
        for _ in range(self.h_steps):
            step_columns(here.entries, rates, self.weight_decay, self.crossing, columns)
            columns = np.where(held[..., None], h_set.project(columns), columns.dtype.type(0))
        measure_squares(here.entries, columns, loss, heaviest)
        return columns

    def _move_by_products(
        self,
        here: FactorChunk,
        columns: Factors,
        task: Task[RatingMatrix, AlternatingGradient],
        h_set: ConstraintSet,
        loss: FloatArray,
        heaviest: FloatArray,
    ) -> Factors:
        """Do as `_move_columns` for clients whose columns are observed in every row."""
        w, rates = here.entries.row_factors, self._h_rates(here.entries, task)
        for place, rate in enumerate(rates.tolist()):
            x = here.complete_columns(place)
            own = columns[place, : len(x)]
            terms = {"decay": self.weight_decay, "crossing": self.crossing}
            own[...] = descend_columns(x, w, own, rate=rate, steps=self.h_steps, h_set=h_set, **terms)
            loss[place] = np.square(own @ w.T - x).mean()
            heaviest[place] = np.square(own).sum()
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
