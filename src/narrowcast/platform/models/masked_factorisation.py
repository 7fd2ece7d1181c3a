"""Factorisation of a partly observed matrix; the factors of columns never leave their client."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from narrowcast.platform.contracts import Dataset, Split
from narrowcast.platform.data.rating_matrix import RatingMatrix
from narrowcast.platform.errors import UserError
from narrowcast.platform.models.cluster_agreement import accuracy_of_clusters, mutual_information
from narrowcast.platform.models.constraint_sets import ConstraintSet
from narrowcast.platform.models.rating_baselines import rating_baselines, rating_errors
from narrowcast.platform.section import Section
from narrowcast.platform.seeds import generator
from narrowcast.platform.types import Arrays, FloatArray, IntArray

ROW_FACTORS, COLUMN_FACTORS = "row_factors", "column_factors"


class MaskedFactorisation(Section):
    """The entry of row i and column j is w_i . h_j, plus the mean of the training entries if `centred`.

    The loss is the squared error of the observed entries. W is global, and h_j belongs to the client of column j. The
    mean is taken to be known: two numbers of each client before round 1, which are not counted.

    Metrics are the root mean squared and the mean absolute error of held-out entries. For columns with classes they are
    the share of columns in the class of their cluster, the largest of their K factors, under the best assignment of
    clusters to classes, and the normalised mutual information of both.

    Shapes: W row_factors [N, K]; H column_factors [U, n, K] for clients of at most n columns, the others' zeros.
    """

    lower_is_better: ClassVar[frozenset[str]] = frozenset(("rmse", "mae"))
    shares: ClassVar[frozenset[str]] = frozenset(("accuracy", "nmi"))

    kind: Literal["masked_factorisation"] = "masked_factorisation"
    rank: int = Field(10, ge=1, le=1024, description="K, the length of row and column factors")
    centred: bool = Field(True, description="subtract the mean of the training entries")
    w_set: ConstraintSet = Field(ConstraintSet(), description="set of W")
    h_set: ConstraintSet = Field(ConstraintSet(), description="set of H")
    initial: Literal["normal", "uniform", "constant"] = Field(
        "normal", description="initial factors: normal or uniform between 0 and 1, times initial_scale; or that itself"
    )
    initial_scale: float = Field(0.1, gt=0, allow_inf_nan=False, description="scale of the initial factors")
    dtype: Literal["float32", "float64"] = Field("float32", description="type of the factors, also on the wire")

    def check(self, data: Dataset) -> None:
        """Raise `UserError` unless the data are a matrix."""
        if not isinstance(data, RatingMatrix):
            raise UserError(
                f"model.kind = {self.kind} needs the entries of a matrix, but {data.name} has none; use data.kind = "
                "explicit_ratings or sample_columns, or another model"
            )

    def offset(self, data: RatingMatrix) -> float:
        """Return what is subtracted from every entry."""
        return data.training_mean if self.centred else 0.0

    def init_server(self, data: RatingMatrix, seed: int) -> Arrays:
        """Draw W, and project it onto its set."""
        return {ROW_FACTORS: self.w_set.project_w(self._draw((data.n_items, self.rank), seed, ROW_FACTORS))}

    def init_clients(self, data: RatingMatrix, seed: int) -> Arrays:
        """Draw H, and project it onto its set."""
        counts = data.of_clients.n_columns
        drawn = np.zeros((data.n_clients, counts.max(), self.rank), dtype=self.dtype)
        columns = self.h_set.project(self._draw((data.n_users, self.rank), seed, COLUMN_FACTORS))
        drawn[data.owners, data.places] = columns
        return {COLUMN_FACTORS: drawn}

    def _draw(self, shape: tuple[int, int], seed: int, purpose: str) -> NDArray[np.floating]:
        random = generator(seed, purpose)
        match self.initial:
            case "normal":
                drawn = random.standard_normal(shape)
            case "uniform":
                drawn = random.random(shape)
            case _:
                drawn = np.ones(shape)
        return (drawn * self.initial_scale).astype(self.dtype)

    def evaluate(self, server: Arrays, clients: Arrays, data: RatingMatrix, split: Split) -> Mapping[str, float]:
        """Return the metrics of the held-out entries of a split, and on `test` those of columns with classes."""
        metrics: dict[str, float] = {}
        columns = np.asarray(clients[COLUMN_FACTORS])[data.owners, data.places]
        users, items, values = data.part(split)
        if len(values):
            metrics |= rating_errors(self.predictions(server, columns, data, users, items), values)
        if data.labels is not None and split == "test":
            clusters = columns.argmax(axis=1)
            metrics["accuracy"] = accuracy_of_clusters(clusters, data.labels)
            metrics["nmi"] = mutual_information(clusters, data.labels)
        return metrics

    def baselines(self, data: RatingMatrix) -> Mapping[str, Mapping[str, float]]:
        """Return the metrics of each user's mean and of biases, by name."""
        return rating_baselines(data)

    def predictions(
        self,
        server: Arrays,
        columns: NDArray[np.floating],
        data: RatingMatrix,
        users: IntArray,
        items: IntArray,
    ) -> FloatArray:
        """Return the predicted entries of these users and items [m], [m]; columns [n_users, K]."""
        rows = np.asarray(server[ROW_FACTORS])
        products = np.einsum("mk,mk->m", rows[items].astype(np.float64), columns[users].astype(np.float64))
        return np.asarray(products + self.offset(data))
