"""Federated least squares: clients with linear regressions of their own, which differ by a given amount."""

from __future__ import annotations

from typing import Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from narrowcast.platform.data.classification import Classification
from narrowcast.platform.data.partition import Natural, Partition
from narrowcast.platform.data.samples import Labelled, Samples
from narrowcast.platform.errors import UserError
from narrowcast.platform.seeds import generator

TEST_SHARE = 0.2
MOST_VALUES = 2**30
"""Of features."""

FloatArray = NDArray[np.float64]


class LeastSquares(Classification):
    """Linear regression by `clients` users with their own solutions: b = A x_k + noise, of `samples` rows each.

    x_k is normal around a common x ~ N(0, I) with the standard deviation `heterogeneity`. Feature j of client k is
    normal with mean 0 and a standard deviation of exp(z), z ~ N(0, `scale_spread`), so that the clients' A'A differ
    too. With fewer samples than features a client's loss is convex and has many minima. `model: softmax` adds an
    intercept, whose true value is 0.

    Features [n, features] and targets [n, 1] are float32. Each client has a fifth more samples, which are the test set.
    """

    kind: Literal["least_squares"] = "least_squares"
    clients: int = Field(default=10, ge=1, le=10**6, description="number of users, one client each")
    samples: int = Field(default=50, ge=1, le=10**6, description="training samples of each user, before validation")
    features: int = Field(default=5, ge=1, le=10**5, description="number of features")
    heterogeneity: float = Field(default=1.0, ge=0, le=1e6, description="standard deviation of the users' solutions")
    scale_spread: float = Field(
        default=0.5, ge=0, le=10, description="standard deviation of the logarithm of a feature's scale across users"
    )
    noise: float = Field(default=0.5, ge=0, le=1e6, description="standard deviation of the targets around A x_k")
    partition: Partition = Field(default=Natural(), description="distribution of the training samples across clients")
    validation_share: float = Field(
        default=0.0, ge=0, lt=1, description="share of the training samples held out for validation on the server"
    )

    def load(self) -> Samples:
        """Draw the samples; those of user k do not depend on the number of users.

        Raise `UserError` if they would not fit in memory, or the partition does not fit them.
        """
        if (values := self.clients * self.samples * self.features) > MOST_VALUES:
            raise UserError(
                f"least_squares: {self.clients} clients with {self.samples} samples of {self.features} features have "
                f"{values} values, but at most {MOST_VALUES} are allowed; lower one of them"
            )
        centre = generator(self.seed or 0, "least squares").standard_normal(self.features)
        tested = max(1, round(TEST_SHARE * self.samples))
        drawn = [
            self._draw(generator(self.seed or 0, "least squares", client=1 + user), tested, centre)
            for user in range(self.clients)
        ]
        train, test = (
            Labelled(
                np.concatenate([features[part] for features, _ in drawn]).astype(np.float32),
                np.concatenate([targets[part] for _, targets in drawn]).astype(np.float32)[:, None],
            )
            for part in (slice(tested, None), slice(tested))
        )
        users, test_users = (np.repeat(np.arange(self.clients), each) for each in (self.samples, tested))
        return self._dealt(self.kind, "drawn", 0, train, test, clients=self.clients, users=users, test_users=test_users)

    def _draw(self, random: np.random.Generator, tested: int, centre: FloatArray) -> tuple[FloatArray, FloatArray]:
        """Return one user's features [n, features] and targets [n], those of the test set first."""
        solution = centre + self.heterogeneity * random.standard_normal(self.features)
        scales = np.exp(self.scale_spread * random.standard_normal(self.features))
        features = scales * random.standard_normal((tested + self.samples, self.features))
        return features, features @ solution + self.noise * random.standard_normal(len(features))
