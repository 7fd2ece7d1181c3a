"""Aggregators: robust aggregates of the clients' changes in place of their weighted mean.

Letters: u a client, w_u its weight, d_u its change, all tensors taken together as one vector; C the clients that
delivered.
"""

from __future__ import annotations

import logging
import math
from abc import ABC, abstractmethod
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from narrowcast.platform.config.files import Section
from narrowcast.platform.errors import UserError
from narrowcast.platform.types import Arrays, FloatArray

logger = logging.getLogger(__name__)


class Aggregator(Section, ABC):
    """The aggregate of a round's changes, for the server's step.

    It needs the change of each client, not a sum: secure aggregation and buffered schedules refuse it, and the server
    holds all changes of a round at once.
    """

    def check(self, clients: int) -> None:
        """Raise `UserError` if the rule has no guarantee for so many changes.

        A round with fewer changes, since clients dropped out, leaves the server as it is.
        """

    def of_round(self, changes: Arrays, weights: FloatArray, round_index: int) -> Arrays | None:
        """Return the aggregate of a round; None if no client delivered, or so few that the rule has no guarantee."""
        if not len(weights):
            return None
        try:
            self.check(len(weights))
        except UserError as error:
            logger.warning("round %d: the changes of %d clients are not used: %s", round_index, len(weights), error)
            return None
        return self.aggregate(changes, weights)

    @abstractmethod
    def aggregate(self, changes: Arrays, weights: FloatArray) -> Arrays:
        """Return the aggregate of each tensor of `changes` [C, ...], C > 0; `weights` [C] are positive."""


class CoordinateMedian(Aggregator):
    """The median of each coordinate, without weights.

    Reference: Yin et al., Byzantine-Robust Distributed Learning: Towards Optimal Statistical Rates, ICML 2018
    (arXiv:1803.01498), Algorithm 1, option I.

    Differs from the paper: 1. clients may take several local steps; the paper's send one gradient.
    """

    kind: Literal["median"] = "median"

    def aggregate(self, changes: Arrays, weights: FloatArray) -> Arrays:
        """Return the medians."""
        del weights
        return {name: np.median(values, axis=0) for name, values in changes.items()}


class TrimmedMean(Aggregator):
    """The mean of each coordinate without its largest and smallest values, without weights.

    Reference: Yin et al., ICML 2018 (arXiv:1803.01498), Algorithm 1, option II.

    Differs from the paper: 1. as the median. 2. floor(share C) values are left out at each end.
    """

    kind: Literal["trimmed_mean"] = "trimmed_mean"
    share: float = Field(0.1, ge=0, lt=0.5, description="share of the clients left out at each end")

    def check(self, clients: int) -> None:
        """Raise `UserError` if the share of the clients is less than one client."""
        if self.share and self.out_of(clients) < 1:
            share, least = math.ceil(1e4 / clients) / 1e4, math.ceil(1 / self.share)
            raise UserError(
                f"algorithm.aggregator.share = {self.share:g} leaves out none of {clients} clients; raise it to at "
                f"least {share:g}, or clients_per_round to at least {least}"
            )

    def out_of(self, clients: int) -> int:
        """Return floor(share C), the values left out at each end; 29 for .29 of 100, whose float64 product is less."""
        return math.floor(self.share * clients + 1e-9)

    def aggregate(self, changes: Arrays, weights: FloatArray) -> Arrays:
        """Return the means of the values between the ends."""
        trimmed = {}
        for name, values in changes.items():
            out = self.out_of(len(weights))
            inside = np.partition(values, (out, len(values) - 1 - out), axis=0)[out : len(values) - out]
            trimmed[name] = inside.mean(axis=0, dtype=values.dtype)
        return trimmed


class GeometricMedian(Aggregator):
    """The point of least weighted distance to all changes, by smoothed Weiszfeld iterations.

    z = sum w_u / max(nu, |z - d_u|) d_u, normalised, from the weighted mean.

    Reference: Pillutla et al., Robust Aggregation for Federated Learning (RFA), IEEE Transactions on Signal Processing
    2022 (arXiv:1912.13445), Algorithm 2.
    """

    kind: Literal["geometric_median"] = "geometric_median"
    iterations: int = Field(4, ge=1, description="Weiszfeld iterations")
    nu: float = Field(1e-5, gt=0, description="least distance that divides a weight")

    def aggregate(self, changes: Arrays, weights: FloatArray) -> Arrays:
        """Return z."""
        vectors = _vectors(changes)
        shares = weights / weights.sum()
        z = shares @ vectors
        for _ in range(self.iterations):
            pulls = shares / np.maximum(self.nu, np.linalg.norm(vectors - z, axis=1))
            z = pulls / pulls.sum() @ vectors
        return _tensors(z, changes)


class Krum(Aggregator):
    """The mean of the changes that are nearest to their neighbours, without weights: Krum, and multi-Krum.

    A change's score is the sum of its squared distances to the C - byzantine - 2 nearest others.

    Reference: Blanchard et al., Machine Learning with Adversaries: Byzantine Tolerant Gradient Descent, NeurIPS 2017
    (arXiv:1703.02757), sections 4 and 6.

    It needs 2 byzantine + 3 changes (the paper's proposition 1: 2 f + 2 < n), and a mean of more than C - byzantine
    would have one of any origin.
    """

    kind: Literal["krum"] = "krum"
    byzantine: int = Field(1, ge=0, description="clients that may send anything")
    selected: int = Field(1, ge=1, description="changes of the least scores that are averaged; 1 is Krum")

    def check(self, clients: int) -> None:
        """Raise `UserError` for fewer than 2 byzantine + 3 clients, or a mean of more than C - byzantine changes."""
        if clients < (least := 2 * self.byzantine + 3):
            raise UserError(
                f"algorithm.aggregator.byzantine = {self.byzantine} needs at least {least} clients in a round, and "
                f"there are {clients}; raise clients_per_round, or lower it to at most {max((clients - 3) // 2, 0)}"
            )
        if self.selected > clients - self.byzantine:
            raise UserError(
                f"algorithm.aggregator.selected = {self.selected}: of {clients} clients, {self.byzantine} of them "
                f"byzantine, at most {clients - self.byzantine} can be averaged; lower it, or raise clients_per_round"
            )

    def aggregate(self, changes: Arrays, weights: FloatArray) -> Arrays:
        """Return the mean of the selected changes."""
        del weights
        vectors = _vectors(changes)
        squares = (vectors**2).sum(axis=1)
        distances = np.maximum(squares[:, None] + squares - 2 * vectors @ vectors.T, 0)
        np.fill_diagonal(distances, np.inf)
        neighbours = len(vectors) - self.byzantine - 2
        scores = np.sort(distances, axis=1)[:, :neighbours].sum(axis=1)
        selected = np.argsort(scores, kind="stable")[: self.selected]
        return {name: values[selected].mean(axis=0, dtype=values.dtype) for name, values in changes.items()}


def _vectors(changes: Arrays) -> NDArray[np.float64]:
    """Return the changes of each client as one vector, [C, parameters]."""
    rows = [np.asarray(values, dtype=np.float64).reshape(len(values), -1) for values in changes.values()]
    return np.concatenate(rows, axis=1)


def _tensors(vector: NDArray[np.float64], changes: Arrays) -> Arrays:
    """Return a vector as tensors of the shapes and precisions of one client's change."""
    tensors: dict[str, NDArray[Any]] = {}
    first = 0
    for name, values in changes.items():
        size = values[0].size
        tensors[name] = vector[first : first + size].reshape(values.shape[1:]).astype(values.dtype)
        first += size
    return tensors
