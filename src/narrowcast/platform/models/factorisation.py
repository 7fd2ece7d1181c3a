"""Models of matrix factorisation: for the ranks of items and for the values of entries.

Factors of users, or of columns, never leave their client. The factors of values may be constrained to a set
(`ConstraintSet`), and their clusters are compared with known classes, by measures that do not depend on the numbers of
the clusters.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal, Self

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field, model_validator
from torch import Tensor

from narrowcast.platform.config.files import Section
from narrowcast.platform.data.dataset import Dataset
from narrowcast.platform.data.interactions import NO_ITEM, Interactions
from narrowcast.platform.data.rating_matrix import RatingMatrix
from narrowcast.platform.errors import UserError
from narrowcast.platform.models.model import ITEM_FACTORS, USER_FACTORS, Model, Split
from narrowcast.platform.models.rating_baselines import rating_baselines, rating_errors
from narrowcast.platform.rounds.client_contracts import ClientSplit
from narrowcast.platform.seeds import generator
from narrowcast.platform.types import Arrays, FloatArray, IntArray

_USERS_AT_ONCE = 100  # their scores, or the rows gathered for them, fit in the processor's cache
_ITEMS_PER_CANDIDATE = 50  # up to here, scoring all items is faster than gathering the ranked ones


class MatrixFactorisation(Model, Section):
    """Matrix factorisation for implicit feedback: user u scores item i by p_u . q_i.

    Both factors start as N(0, 1/d), and there is no bias. Shapes: Q item_factors [N, d] is global; P user_factors
    [U, d] is private.
    """

    shares: ClassVar[frozenset[str]] = frozenset(("hr@10", "ndcg@10"))

    kind: Literal["matrix_factorisation"] = "matrix_factorisation"
    embedding_dim: int = Field(64, ge=1, le=1024, description="d, the length of user and item vectors")

    def check(self, data: Dataset) -> None:
        """Raise `UserError` unless the data are interactions."""
        if not isinstance(data, Interactions):
            raise UserError(
                f"model.kind = {self.kind} needs user-item interactions, but {data.name} has labelled samples; "
                "use another model or data set"
            )

    def init_server(self, data: Interactions, seed: int) -> Arrays:
        """Draw the item factors Q."""
        return {ITEM_FACTORS: self._draw(data.n_items, seed, ITEM_FACTORS)}

    def init_clients(self, data: Interactions, seed: int) -> Arrays:
        """Draw the user factors P."""
        return {USER_FACTORS: self._draw(data.n_users, seed, USER_FACTORS)}

    def _draw(self, rows: int, seed: int, purpose: str) -> np.ndarray[tuple[int, int], np.dtype[np.float32]]:
        draw = generator(seed, purpose).standard_normal((rows, self.embedding_dim), dtype=np.float32)
        return draw * np.float32(self.embedding_dim**-0.5)

    def evaluate(
        self, server: Arrays, clients: Arrays, data: Interactions, split: Literal["validation", "test"]
    ) -> Mapping[str, float]:
        """Return HR@10 and NDCG@10 of each user's held-out item among its 99 fixed negatives."""
        values = _gains(self.ranks(server, clients, data, split))
        return {name: float(gains.mean()) for name, gains in values.items() if len(gains)}

    def baselines(self, data: Interactions) -> Mapping[str, Mapping[str, float]]:
        """Return the metrics of ranking items by their numbers of training interactions, the same for all users."""
        counts = np.bincount(data.items, minlength=data.n_items).astype(np.float32)
        factors = {ITEM_FACTORS: counts[:, None]}, {USER_FACTORS: np.ones((data.n_users, 1), dtype=np.float32)}
        splits: tuple[Split, Split] = ("test", "validation")
        metrics = {
            f"{split}.{name}": value for split in splits for name, value in self.evaluate(*factors, data, split).items()
        }
        return {"popularity": metrics}

    @property
    def client_parameters(self) -> frozenset[str]:
        """The arrays of the clients' state that `measure_clients` takes."""
        return frozenset((USER_FACTORS,))

    def measure_clients(
        self, parameters: Arrays, state: Arrays, data: Interactions, split: ClientSplit, clients: IntArray
    ) -> Mapping[str, FloatArray]:
        """Return HR@10, which is 0 or 1, and NDCG@10 of each user's held-out item, [C]; NaN without one."""
        targets = data.test if split == "test" else data.validation
        rows = np.flatnonzero(targets[clients] != NO_ITEM)
        item_factors = torch.from_numpy(np.array(parameters[ITEM_FACTORS]))
        own = torch.from_numpy(np.array(state[USER_FACTORS]))
        ranks = np.empty(0, dtype=np.int64)
        if len(item_factors) == 1:
            ranks = _ranks(item_factors[0], own[rows], _candidates(data, targets, clients[rows]))
        elif len(rows):
            parts = [slice(row, row + 1) for row in rows.tolist()]
            by_user = [_ranks(item_factors[at][0], own[at], _candidates(data, targets, clients[at])) for at in parts]
            ranks = np.concatenate(by_user)
        measured = {name: np.full(len(clients), np.nan) for name in sorted(self.shares)}
        for name, values in _gains(ranks).items():
            measured[name][rows] = values
        return measured

    def ranks(
        self, server: Arrays, clients: Arrays, data: Interactions, split: Literal["validation", "test"]
    ) -> IntArray:
        """Return the rank of each user's held-out item, 0 to 99, among its 99 fixed negatives; a tie ranks it last.

        The published ML-1M lists hold the test item itself among the negatives of 156 users; it then ties with itself
        and loses a place, here as in the code released with CoLR. Users without such an item are left out.

        Reference: He et al., Neural Collaborative Filtering, WWW 2017, section 4.1.
        """
        targets = data.test if split == "test" else data.validation
        users = np.flatnonzero(targets != NO_ITEM)
        item_factors = torch.from_numpy(np.array(server[ITEM_FACTORS]))
        user_factors = torch.from_numpy(np.array(clients[USER_FACTORS]))
        return _ranks(item_factors, user_factors[torch.from_numpy(users)], _candidates(data, targets, users))


def _candidates(data: Interactions, targets: IntArray, users: IntArray) -> IntArray:
    """Return the held-out item of each user and its negatives, [n, 100]."""
    return np.concatenate([targets[users, None], data.negatives[users]], axis=1)


def _ranks(item_factors: Tensor, user_factors: Tensor, candidates: IntArray) -> IntArray:
    """Return the rank of the first of each user's candidates [n, k] among them; user_factors [n, d]."""
    ranks = [torch.empty(0, dtype=torch.int64)]
    for start in range(0, len(candidates), _USERS_AT_ONCE):
        part = slice(start, start + _USERS_AT_ONCE)
        own, items = user_factors[part], torch.from_numpy(candidates[part])
        if len(item_factors) <= _ITEMS_PER_CANDIDATE * items.shape[1]:
            scores = (own @ item_factors.T).gather(1, items)
        else:
            scores = torch.bmm(item_factors[items], own.unsqueeze(2)).squeeze(2)
        ranks.append((scores[:, 1:] >= scores[:, :1]).sum(dim=1))
    return torch.cat(ranks).numpy()


def _gains(ranks: IntArray) -> dict[str, FloatArray]:
    """Return HR@10 and NDCG@10 of each rank."""
    hit = ranks < 10
    return {"hr@10": hit.astype(np.float64), "ndcg@10": np.where(hit, 1 / np.log2(ranks + 2.0), 0.0)}


def _table(clusters: IntArray, labels: IntArray) -> np.ndarray[tuple[int, int], np.dtype[np.float64]]:
    counts = np.zeros((int(clusters.max()) + 1, int(labels.max()) + 1))
    np.add.at(counts, (clusters, labels), 1)
    return counts


def accuracy_of_clusters(clusters: IntArray, labels: IntArray) -> float:
    """Return the share of samples in the class of their cluster, under the best one-to-one assignment of both."""
    from scipy.optimize import linear_sum_assignment  # takes a tenth of a second

    counts = _table(clusters, labels)
    rows, columns = linear_sum_assignment(counts, maximize=True)
    return float(counts[rows, columns].sum() / len(labels))


def mutual_information(clusters: IntArray, labels: IntArray) -> float:
    """Return the mutual information of clusters and classes over the mean of their entropies, 0 to 1.

    As scikit-learn's `normalized_mutual_info_score`: 1 if both are one cluster.
    """
    joint = _table(clusters, labels) / len(labels)
    rows, columns = joint.sum(axis=1), joint.sum(axis=0)
    entropies = _entropy(rows) + _entropy(columns)
    return float(2 - 2 * _entropy(joint.ravel()) / entropies) if entropies else 1.0


def _entropy(shares: np.ndarray[tuple[int], np.dtype[np.float64]]) -> float:
    positive = shares[shares > 0]
    return float(-(positive * np.log(positive)).sum())


SetKind = Literal["none", "nonnegative", "box", "ball", "simplex", "orthogonal_nonnegative"]


class ConstraintSet(Section):
    """A closed set of factors, by its kind alone or with its fields.

    `ball` and `simplex` constrain each column of H, and each column of W: to a Euclidean norm of at most `radius`, and
    to non-negative values of sum `radius`. `orthogonal_nonnegative` allows one positive value in each column of H, and
    in each row of W, so that the K rows of H, or columns of W, are orthogonal; it is not convex.
    """

    kind: SetKind = Field("none", description="set of the factors' values; none: all real numbers")
    low: float = Field(0.0, allow_inf_nan=False, description="least value of a box")
    high: float = Field(1.0, allow_inf_nan=False, description="largest value of a box")
    radius: float = Field(1.0, gt=0, allow_inf_nan=False, description="largest norm in a ball, or sum in a simplex")

    @model_validator(mode="before")
    @classmethod
    def _by_kind_alone(cls, values: Any) -> Any:
        return {"kind": values} if isinstance(values, str) else values

    @model_validator(mode="after")
    def _low_below_high(self) -> Self:
        if self.low >= self.high:
            raise ValueError(f"low = {self.low:g} should be below high = {self.high:g}")
        return self

    def project(self, vectors: NDArray[Any]) -> NDArray[Any]:
        """Return the nearest vectors [..., K] of the set, each by its last axis.

        Onto a simplex by the sort of Held et al. (1974), as in Duchi et al., ICML 2008, Figure 1.
        """
        match self.kind:
            case "none":
                return vectors
            case "nonnegative":
                return np.maximum(vectors, 0)
            case "box":
                return np.clip(vectors, self.low, self.high)
            case "ball":
                norms = np.sqrt(np.square(vectors).sum(axis=-1, keepdims=True))
                return np.asarray(vectors * (self.radius / np.maximum(norms, self.radius)).astype(vectors.dtype))
            case "simplex":
                falling = -np.sort(-vectors, axis=-1)
                sums = falling.cumsum(axis=-1) - self.radius
                counts = np.arange(1, vectors.shape[-1] + 1, dtype=vectors.dtype)
                last = (falling * counts > sums).sum(axis=-1, keepdims=True) - 1
                shift = np.take_along_axis(sums / counts, last, axis=-1)
                return np.asarray(np.maximum(vectors - shift, 0), dtype=vectors.dtype)
            case _:
                largest = vectors.argmax(axis=-1, keepdims=True)
                kept = np.maximum(np.take_along_axis(vectors, largest, axis=-1), 0)
                projected = np.zeros_like(vectors)
                np.put_along_axis(projected, largest, kept, axis=-1)
                return projected

    def project_w(self, w: NDArray[Any]) -> NDArray[Any]:
        """Return the nearest W [N, K] of the set."""
        return self.project(w) if self.kind == "orthogonal_nonnegative" else self.project(w.T).T


ROW_FACTORS, COLUMN_FACTORS = "row_factors", "column_factors"


class MaskedFactorisation(Model, Section):
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
