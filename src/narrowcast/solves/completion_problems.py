"""Completion problems: observed entries from files, ratings and pictures, or drawn, and the measures of an answer.

An answer is two factors, which are measured against the rest of the matrix as far as that is known.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from narrowcast.platform.config.files import Section
from narrowcast.platform.data.download import located
from narrowcast.platform.data.own import eight_bit_image, opened
from narrowcast.platform.data.rating_matrix import ExplicitRatings, RatingMatrix
from narrowcast.platform.data.ratings import PARQUET, read_rating_table
from narrowcast.platform.data.table_content import Dialect
from narrowcast.platform.errors import UserError
from narrowcast.platform.models.rating_baselines import biases_of, rating_baselines
from narrowcast.platform.seeds import generator
from narrowcast.platform.solving import ProblemSource, Work
from narrowcast.platform.storage.disk import npz_arrays
from narrowcast.platform.types import Arrays, FloatArray, IntArray
from narrowcast.solves.nuclear_norm import ball_metrics, nuclear_norm_program
from narrowcast.solves.observed import ObservedMatrix, difference, frobenius, observe, observed_at
from narrowcast.solves.semidefinite import SemidefiniteProblem, SemidefiniteProgram

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
class Completion(SemidefiniteProblem):
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
        digest = hashlib.sha256(f"{observed.rows} {observed.columns} {self.rank} {self.symmetric}".encode())
        for array in (observed.indptr, observed.indices, observed.values):
            digest.update(np.ascontiguousarray(array).data)
        return digest.hexdigest()

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
        """Return the metrics of predictions that take no factors, by name; none where the entries are not ratings."""
        baselines = {} if self.ratings is None else rating_baselines(self.ratings)
        return {
            name: {metric: metrics[metric] for metric in metrics if metric.endswith("rmse")}
            for name, metrics in baselines.items()
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
        measures = {"observed_error": residual / max(observed.norm, np.finfo(float).tiny)}
        if self.truth is not None:
            error, norm, sums = self._whole_errors(left, right)
            true = self._observed_truth
            seen_error = residual if true is observed else float(np.linalg.norm(true.residual(left, right)))
            unseen, unseen_norm = (
                math.sqrt(max(whole**2 - seen**2, 0.0)) for whole, seen in ((error, seen_error), (norm, true.norm))
            )
            measures["test.relative_error"] = error / norm if norm else error
            if observed.count < observed.rows * observed.columns:
                measures["test.unseen_error"] = unseen / unseen_norm if unseen_norm else unseen
            measures["test.column_sum_error"] = sums
            if self.peak is not None:
                rmse = error / math.sqrt(observed.rows * observed.columns)
                measures["test.psnr"] = 20 * math.log10(self.peak / rmse) if rmse else math.inf
        for split, entries in (("test", self.held_out), ("validation", self.validation)):
            if entries is not None:
                error = float(np.linalg.norm(self._predicted(entries, left, right) - entries.value))
                measures[f"{split}.rmse"] = error / math.sqrt(len(entries.value))
                if split == "test" and self.truth is None and (norm := float(np.linalg.norm(entries.value))):
                    measures["test.unseen_error"] = error / norm
        if "radius" in answer:
            measures |= ball_metrics(observed, left, right, float(answer["radius"]))
        return measures

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
        return tuple(float(np.linalg.norm(array)) for array in (error, self.truth, error.sum(axis=0)))  # type: ignore[return-value]

    def _predicted(self, held_out: HeldOut, left: FloatArray, right: FloatArray) -> FloatArray:
        predicted = self.offset + np.einsum("ek,ek->e", left[held_out.row], right[held_out.column])
        if self.biases is not None:
            of_rows, of_columns = self.biases
            predicted += of_rows[held_out.row] + of_columns[held_out.column]
        if self.bounds is not None:
            predicted = predicted.clip(*self.bounds)
        return np.asarray(predicted)


_NAMES = ("row", "column", "value")
_SUFFIXES = (".csv", ".tsv", ".csv.gz", ".tsv.gz", *PARQUET, ".npz")
MOST_SIDE = 10**7
"""Rows or columns."""


class EntryCompletion(ProblemSource, Section):
    """Entries of a matrix, one a row of a CSV or Parquet file: its row and column, from 0, and its value.

    An .npz file has arrays `row`, `column` and `value` instead. A random share of the entries is held out for testing.
    """

    lower_is_better: ClassVar[tuple[str, ...]] = LOWER_IS_BETTER

    kind: Literal["entry_completion"] = "entry_completion"
    path: Path = Field(description="file of the entries: .csv, .tsv, either with .gz, .parquet or .npz")
    rows: int | None = Field(
        None, ge=1, le=MOST_SIDE, description="number of rows; null: up to the last one with an entry"
    )
    columns: int | None = Field(
        None, ge=1, le=MOST_SIDE, description="number of columns; null: up to the last one with an entry"
    )
    test_share: float = Field(0.1, ge=0, lt=1, description="share of the entries that is held out for testing")
    seed: int | None = Field(None, ge=0, description="seed of the held-out entries; null: that of the run")

    def load(self) -> Completion:
        """Return the problem; raise `UserError` if the file has another format, or an entry cannot be used."""
        path = located(self.path, "path", "problem")
        row, column, value = self._arrays(path)
        rows = self.rows or int(row.max(initial=0)) + 1
        columns = self.columns or int(column.max(initial=0)) + 1
        try:
            observe(rows, columns, row, column, value)
            held_out = np.zeros(len(value), dtype=bool)
            order = generator(self.seed or 0, "completion held out").permutation(len(value))
            held_out[order[: min(round(self.test_share * len(value)), len(value) - 1)]] = True
            test = HeldOut(row[held_out], column[held_out], value[held_out]) if held_out.any() else None
            observed = observe(rows, columns, row[~held_out], column[~held_out], value[~held_out])
        except UserError as error:
            raise UserError(f"{path}: {error}") from error
        return Completion(path.name, str(path), observed, held_out=test)

    def _arrays(self, path: Path) -> tuple[IntArray, IntArray, FloatArray]:
        name = path.name.lower()
        if not name.endswith(_SUFFIXES):
            raise UserError(f"{path}: no table of entries by its name; give a file that ends in {', '.join(_SUFFIXES)}")
        if name.endswith(".npz"):
            arrays = _npz(path)
        else:
            names = {name: name for name in _NAMES}
            table = read_rating_table(path, names, Dialect(has_fields=False))
            arrays = [table.numbers(name) for name in _NAMES]
        row, column, value = arrays
        if any(array.ndim != 1 or len(array) != len(value) or array.dtype.kind not in "iuf" for array in arrays):
            shapes = ", ".join(
                f"{name} {array.dtype} {array.shape}" for name, array in zip(_NAMES, arrays, strict=True)
            )
            raise UserError(f"{path}: has {shapes}; give three lists of numbers of one length")
        for name, index in (("row", row), ("column", column)):
            wrong = np.flatnonzero(~((index >= 0) & (index < MOST_SIDE) & (index == np.floor(index))))
            if len(wrong):
                got = f"entry {wrong[0]} has the {name} {index[wrong[0]]}"
                raise UserError(f"{path}: {got}; {name}s are whole numbers from 0 to {MOST_SIDE - 1}")
        return row.astype(np.int64), column.astype(np.int64), value.astype(np.float64)


def _npz(path: Path) -> list[NDArray[Any]]:
    with npz_arrays(path, "row, column and value") as arrays:
        if missing := [name for name in _NAMES if name not in arrays.files]:
            listed = ", ".join(arrays.files) or "nothing"
            raise UserError(f"{path}: has no array {missing[0]}, only {listed}; write row, column and value")
        return [np.atleast_1d(arrays[name]) for name in _NAMES]


_FIELD_OF_DATA = re.compile(rf"\bdata\.(?=(?:{'|'.join(ExplicitRatings.model_fields)})\b)")


class RatingCompletion(ProblemSource, Section):
    """Ratings of items by users: the training ratings are observed, less their mean, and the test ratings held out.

    The matrix is the one that federated factorisations are trained on, in one place. Ratings for validation are held
    out too, where the split has some. Rows are items and columns users. Predictions are clipped to the range of the
    training ratings.
    """

    lower_is_better: ClassVar[tuple[str, ...]] = LOWER_IS_BETTER

    kind: Literal["rating_completion"] = "rating_completion"
    ratings: ExplicitRatings = Field(
        ExplicitRatings(set="ml-100k"), description="ratings and their split, as an experiment's data section has them"
    )
    bias_decay: float | None = Field(
        None,
        ge=0,
        allow_inf_nan=False,
        description="ridge, in ratings, of biases of items and users, which are subtracted too; null: the mean alone",
    )
    seed: int | None = Field(
        None, ge=0, description="seed of the split, unless `ratings` has its own; null: that of the run"
    )

    def load(self) -> Completion:
        """Return the ratings' problem; raise `UserError` if they cannot be read."""
        ratings = self.ratings
        if ratings.seed is None:
            ratings = ratings.model_copy(update={"seed": self.seed})
        try:
            matrix = ratings.load()
        except UserError as error:  # which names the fields as an experiment has them
            raise UserError(_FIELD_OF_DATA.sub("problem.ratings.", str(error))) from error
        train, test, validation = (matrix.part(split) for split in ("train", "test", "validation"))
        mean = matrix.training_mean
        values, biases, shape = train.values - mean, None, (matrix.n_items, matrix.n_users)
        if self.bias_decay is not None:
            biases = biases_of(train.items, train.users, values, shape, self.bias_decay)
            values = values - biases[0][train.items] - biases[1][train.users]
        return Completion(
            matrix.name,
            matrix.source,
            observe(*shape, train.items, train.users, values),
            held_out=HeldOut(test.items, test.users, test.values) if len(test.values) else None,
            validation=HeldOut(validation.items, validation.users, validation.values)
            if len(validation.values)
            else None,
            offset=mean,
            biases=biases,
            bounds=matrix.training_range,
            ratings=matrix,
        )


_WHITE = 255.0


class ImageCompletion(ProblemSource, Section):
    """A greyscale picture, values 0 to 1, of which a random share of the pixels is observed.

    Pictures are scikit-learn's `china` and `flower`, 427 x 640, or your own file, of 8 bits or the upper 8 of 16.
    They have no exact low rank: `test.psnr` is over all pixels.
    """

    lower_is_better: ClassVar[tuple[str, ...]] = LOWER_IS_BETTER

    kind: Literal["image_completion"] = "image_completion"
    picture: Literal["china", "flower"] = Field("china", description="picture that comes with scikit-learn")
    path: Path | None = Field(None, description="your own image file; null: `picture`")
    fraction: float = Field(0.3, gt=0, le=1, description="share of the pixels that is observed")
    seed: int | None = Field(None, ge=0, description="seed of the observed pixels; null: that of the run")

    def load(self) -> Completion:
        """Return the picture's problem; raise `UserError` if the file is not an image or no pixel would be observed."""
        path = located(self.path, "path", "problem") if self.path is not None else _bundled(self.picture)
        with opened(path) as image:
            whole = np.asarray(eight_bit_image(image, 1, "high_byte"), dtype=np.float64) / _WHITE
        count = round(self.fraction * whole.size)
        if not count:
            raise UserError(f"fraction is {self.fraction}, which leaves no pixel of {path}; raise it")
        random = generator(self.seed or 0, "completion pixels")
        keys = np.sort(random.choice(whole.size, count, replace=False, shuffle=False))
        observed = observed_at(whole.shape[0], whole.shape[1], keys, whole.ravel()[keys])
        return Completion(path.stem, str(path), observed, truth=whole, peak=1.0)


def _bundled(name: str) -> Path:
    package = find_spec("sklearn")  # importing it takes a second
    if package is None or package.origin is None:
        raise UserError(f"{name} comes with scikit-learn, which is not installed; pip install scikit-learn")
    return Path(package.origin).parent / "datasets" / "images" / f"{name}.jpg"


MOST_ENTRIES = 10**9
"""Of the whole matrix; numpy draws from no larger urn."""


class SyntheticCompletion(ProblemSource, Section):
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
    drawn = np.empty(count, dtype=np.int64)
    end = np.cumsum(in_row)
    for i in range(rows):
        chosen = random.choice(columns, in_row[i], replace=False, shuffle=False)
        drawn[end[i] - in_row[i] : end[i]] = np.sort(chosen) + i * columns
    return drawn


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
