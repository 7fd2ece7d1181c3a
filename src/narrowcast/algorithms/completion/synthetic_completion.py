"""Synthetic completion problems: matrices of a given rank and condition number, observed at random."""

from __future__ import annotations

from typing import ClassVar, Literal, Self

import numpy as np
from pydantic import Field, model_validator

from narrowcast.algorithms.completion.completion_problem import LOWER_IS_BETTER, Completion
from narrowcast.algorithms.completion.observed import observed_at
from narrowcast.platform.errors import UserError
from narrowcast.platform.section import Section
from narrowcast.platform.seeds import generator
from narrowcast.platform.types import IntArray

MOST_ENTRIES = 10**9
"""Of the whole matrix; numpy draws from no larger urn."""


class SyntheticCompletion(Section):
    """A random matrix U diag(s) V' of known rank and condition number, of which a random share is observed.

    U and V are orthonormal bases of Gaussian matrices and s falls geometrically from `condition` to 1. Exactly
    round(fraction m n) entries are observed, uniformly without replacement; a row may have none.

    Source: the test matrices of Engels and Morse, Benchmarking Low-Rank Matrix Completion Algorithms, section 3.2.
    """

    lower_is_better: ClassVar[tuple[str, ...]] = LOWER_IS_BETTER
    drawn: ClassVar[bool] = True

    kind: Literal["synthetic_completion"] = "synthetic_completion"
    rows: int = Field(1000, ge=1, le=10**7, description="number of rows")
    columns: int | None = Field(None, ge=1, le=10**7, description="number of columns; null: as many as rows")
    rank: int = Field(2, ge=1, le=10**5, description="rank of the matrix")
    fraction: float = Field(0.4, gt=0, le=1, description="share of the entries that is observed")
    condition: float = Field(2.0, ge=1, le=1e15, description="ratio of the largest to the least nonzero singular value")
    noise: float = Field(
        0.0,
        ge=0,
        le=1e6,
        description="standard deviation of noise on observed entries, relative to their root mean square",
    )
    symmetric: bool = Field(
        False, description="make the matrix positive semidefinite, U diag(s) U', and observe (i, j) and (j, i)"
    )
    seed: int | None = Field(None, ge=0, description="seed of the matrix and its pattern; null: that of the run")

    @model_validator(mode="after")
    def _check(self) -> Self:
        columns = self.columns or self.rows
        if self.rank > min(self.rows, columns):
            raise ValueError(
                f"rank is {self.rank}, but a {self.rows} x {columns} matrix has rank at most its least side"
            )
        if self.rows * columns > MOST_ENTRIES:
            raise ValueError(f"rows times columns is {self.rows * columns}, but at most {MOST_ENTRIES} is allowed")
        if self.symmetric and columns != self.rows:
            raise ValueError("symmetric needs as many columns as rows; omit columns")
        return self

    def load(self) -> Completion:
        """Draw the matrix and its pattern; raise `UserError` if `fraction` leaves no entry."""
        rows, columns, seed = self.rows, self.columns or self.rows, self.seed or 0
        if not (count := round(self.fraction * rows * columns)):
            raise UserError(f"fraction is {self.fraction}, which leaves no entry of {rows} x {columns}; raise it")
        random = generator(seed, "completion matrix")
        u = np.linalg.qr(random.standard_normal((rows, self.rank)))[0]
        v = u if self.symmetric else np.linalg.qr(random.standard_normal((columns, self.rank)))[0]
        scale = self.condition ** -(np.arange(self.rank) / max(self.rank - 1, 1)) * self.condition
        drawn = generator(seed, "completion pattern")
        if self.symmetric:
            keys = _symmetric_positions(drawn, rows, self.fraction)
        else:
            keys = _positions(drawn, rows, columns, count)
        pattern = observed_at(rows, columns, keys, np.zeros(len(keys)))
        values = pattern.sampled(u * scale, v)
        if self.noise:
            size = self.noise * np.sqrt(np.mean(values**2))
            values += size * generator(seed, "completion noise").standard_normal(len(values))
        return Completion(
            self.kind,
            "drawn",
            observed_at(rows, columns, keys, values),
            truth=(u * scale, v),
            rank=self.rank,
            symmetric=self.symmetric,
        )


def _positions(random: np.random.Generator, rows: int, columns: int, count: int) -> IntArray:
    """Return `count` of the positions i * columns + j, ascending: first the number in each row, then the columns."""
    in_row = random.multivariate_hypergeometric(np.full(rows, columns), count)
    found = np.empty(count, dtype=np.int64)
    end = np.cumsum(in_row)
    for i in range(rows):
        chosen = random.choice(columns, in_row[i], replace=False, shuffle=False)
        found[end[i] - in_row[i] : end[i]] = np.sort(chosen) + i * columns
    return found


def _symmetric_positions(random: np.random.Generator, rows: int, fraction: float) -> IntArray:
    """Return this share of the positions of the upper triangle with their mirror images, ascending."""
    upper = rows * (rows + 1) // 2
    chosen = random.choice(upper, max(1, round(fraction * upper)), replace=False, shuffle=False)
    # place q of the upper triangle, counted by columns: column j begins at j (j + 1) / 2
    j = ((np.sqrt(8.0 * chosen + 1) - 1) / 2).astype(np.int64)
    j += (j + 1) * (j + 2) // 2 <= chosen
    j -= j * (j + 1) // 2 > chosen
    i = chosen - j * (j + 1) // 2
    return np.unique(np.concatenate([i * rows + j, j * rows + i]))
