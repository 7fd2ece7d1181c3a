"""A loaded completion problem: observed entries, and how factors are measured against the rest of the matrix."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from narrowcast.algorithms.completion.low_rank_matrix import difference, frobenius
from narrowcast.algorithms.completion.nuclear_ball import ball_metrics
from narrowcast.algorithms.completion.nuclear_norm_program import nuclear_norm_program
from narrowcast.algorithms.completion.observed import ObservedMatrix
from narrowcast.algorithms.sdp.semidefinite_program import SemidefiniteProgram
from narrowcast.platform.data.rating_matrix import RatingMatrix
from narrowcast.platform.models.rating_baselines import rating_baselines
from narrowcast.platform.solver_contracts import Work
from narrowcast.platform.types import Arrays, FloatArray, IntArray

LOWER_IS_BETTER = (
    *("observed_error", "relative_error", "unseen_error", "column_sum_error", "rmse"),
    *("objective", "gap", "nuclear_norm", "rank", "infeasibility"),
)
"""Metrics of `Completion` of which the lower value is better; others of its metrics are better if higher."""


@dataclass(frozen=True)
class HeldOut:
    """Entries that no solver sees; [q] each."""

    row: IntArray
    column: IntArray
    value: FloatArray


@dataclass(frozen=True, eq=False)
class Completion:
    """A matrix of which some entries are observed; an answer is `left` [m, k] and `right` [n, k].

    `truth` is the whole matrix where it is known: factors (left, right) of a matrix of low rank, or a dense array.
    Where it is not, `held_out` has entries to test with, and `validation` others to choose a solver's settings by.
    `rank` is the rank of the matrix where that is known, `peak` the largest possible value, which a PSNR is relative
    to. Ratings have an `offset` and may have `biases` of rows [m] and columns [n], which were subtracted from the
    observed values, and `bounds`, to which predictions are clipped; `ratings` are all of them, for its `baselines`.

    `program` is the semidefinite program of least nuclear norm, for solvers of those; their answer is `vectors` V
    [m + n, k], `left` above `right`.
    """

    name: str
    source: str
    observed: ObservedMatrix
    truth: tuple[FloatArray, FloatArray] | FloatArray | None = None
    held_out: HeldOut | None = None
    validation: HeldOut | None = None
    rank: int | None = None
    symmetric: bool = False
    peak: float | None = None
    offset: float = 0.0
    biases: tuple[FloatArray, FloatArray] | None = None
    bounds: tuple[float, float] | None = None
    ratings: RatingMatrix | None = None

    @cached_property
    def digest(self) -> str:
        """The sha256 of the sizes, the pattern and the observed values."""
        observed = self.observed
        found = hashlib.sha256(f"{observed.rows} {observed.columns} {self.rank} {self.symmetric}".encode())
        for array in (observed.indptr, observed.indices, observed.values):
            found.update(np.ascontiguousarray(array).data)
        return found.hexdigest()

    @property
    def sizes(self) -> Mapping[str, int]:
        """Rows, columns and observed entries, and the rank where it is known."""
        observed = self.observed
        known = {} if self.rank is None else {"rank": self.rank}
        return {"rows": observed.rows, "columns": observed.columns, "observed": observed.count, **known}

    @cached_property
    def _observed_truth(self) -> ObservedMatrix:
        """The true values at the observed entries: the observed matrix itself unless that has noise."""
        observed, truth = self.observed, self.truth
        assert truth is not None
        if isinstance(truth, tuple):
            values = observed.sampled(*truth)
        else:
            values = truth[observed.row_of_entries(), observed.indices]
        return observed if np.array_equal(values, observed.values) else replace(observed, values=values)

    @cached_property
    def program(self) -> SemidefiniteProgram:
        """The program of the matrix of least nuclear norm that has the observed entries exactly."""
        return nuclear_norm_program(self.name, self.source, self.observed)

    def exported(self) -> Arrays:
        """Return what programs in other languages are given: `entries` [p, 3], row, column, value; `sizes` [1, 2]."""
        observed = self.observed
        rows = np.repeat(np.arange(observed.rows), np.diff(observed.indptr))
        entries = np.column_stack([rows, observed.indices, observed.values])
        return {"entries": entries, "sizes": np.array([[observed.rows, observed.columns]])}

    def baselines(self) -> Mapping[str, Mapping[str, float]]:
        """Return the metrics of predictions that take no factors, by name; none where the entries are no ratings."""
        found = {} if self.ratings is None else rating_baselines(self.ratings)
        return {
            name: {each: metrics[each] for each in metrics if each.endswith("rmse")} for name, metrics in found.items()
        }

    def measurement_work(self, answer: Arrays) -> Work:
        """Return the work of an answer of `vectors`, whose bound is proved; measurements of others take no proof."""
        return self.program.measurement_work(answer) if "vectors" in answer else Work(0, 0)

    def measure(self, answer: Arrays) -> Mapping[str, float]:
        """Return the metrics of factors `left` and `right`.

        `observed_error`: the relative error on the observed entries. With the whole matrix known,
        `test.relative_error` is the relative Frobenius error, `test.unseen_error` that on the other entries, both of
        the matrix without noise, and `test.column_sum_error` the Euclidean norm of the errors of the column sums, which
        Engels and Morse's programs report as the Frobenius distance. `test.psnr` in dB where values have a peak. With
        held-out entries `test.rmse` and, relative to their norm, `test.unseen_error`; with entries for validation
        `validation.rmse`. An answer that has a `radius` is measured as one over the ball of that nuclear norm too
        (`nuclear_ball.ball_metrics`), and one of `vectors` has the metrics of `program`.
        """
        observed = self.observed
        if "vectors" in answer:
            left, right = np.split(answer["vectors"], [observed.rows])
            return {**self.measure({"left": left, "right": right}), **self.program.measure(answer)}
        left, right = answer["left"], answer["right"]
        residual = float(np.linalg.norm(observed.residual(left, right)))
        found = {"observed_error": residual / max(observed.norm, np.finfo(float).tiny)}
        if self.truth is not None:
            error, norm, sums = self._whole_errors(left, right)
            true = self._observed_truth
            seen_error = residual if true is observed else float(np.linalg.norm(true.residual(left, right)))
            unseen, unseen_norm = (
                math.sqrt(max(whole**2 - seen**2, 0.0)) for whole, seen in ((error, seen_error), (norm, true.norm))
            )
            found["test.relative_error"] = error / norm if norm else error
            if observed.count < observed.rows * observed.columns:
                found["test.unseen_error"] = unseen / unseen_norm if unseen_norm else unseen
            found["test.column_sum_error"] = sums
            if self.peak is not None:
                rmse = error / math.sqrt(observed.rows * observed.columns)
                found["test.psnr"] = 20 * math.log10(self.peak / rmse) if rmse else math.inf
        for split, entries in (("test", self.held_out), ("validation", self.validation)):
            if entries is not None:
                error = float(np.linalg.norm(self._predicted(entries, left, right) - entries.value))
                found[f"{split}.rmse"] = error / math.sqrt(len(entries.value))
                if split == "test" and self.truth is None and (norm := float(np.linalg.norm(entries.value))):
                    found["test.unseen_error"] = error / norm
        if "radius" in answer:
            found |= ball_metrics(observed, left, right, float(answer["radius"]))
        return found

    def _whole_errors(self, left: FloatArray, right: FloatArray) -> tuple[float, float, float]:
        """Return the Frobenius norms of the error and of the matrix, and the norm of the column sums of the error."""
        if isinstance(self.truth, tuple):
            own_left, own_right = self.truth
            sums = np.hstack([right, own_right]) @ np.concatenate([left.sum(axis=0), -own_left.sum(axis=0)])
            return (
                difference(left, right, own_left, own_right),
                frobenius(own_left, own_right),
                float(np.linalg.norm(sums)),
            )
        assert self.truth is not None
        error = left @ right.T - self.truth
        return tuple(float(np.linalg.norm(each)) for each in (error, self.truth, error.sum(axis=0)))  # type: ignore[return-value]

    def _predicted(self, held_out: HeldOut, left: FloatArray, right: FloatArray) -> FloatArray:
        predicted = self.offset + np.einsum("ek,ek->e", left[held_out.row], right[held_out.column])
        if self.biases is not None:
            of_rows, of_columns = self.biases
            predicted += of_rows[held_out.row] + of_columns[held_out.column]
        if self.bounds is not None:
            predicted = predicted.clip(*self.bounds)
        return np.asarray(predicted)
