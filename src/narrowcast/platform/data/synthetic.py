"""Synthetic(alpha, beta) of FedProx (Li et al., MLSys 2020), and its variant without heterogeneity."""

from __future__ import annotations

from typing import Literal, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from narrowcast.platform.data.classification import Classification
from narrowcast.platform.data.partition import Natural, Partition
from narrowcast.platform.data.samples import Labelled, Samples
from narrowcast.platform.errors import UserError
from narrowcast.platform.seeds import generator

N_FEATURES, N_CLASSES = 60, 10
TRAIN_SHARE = 0.9
SPREADS = np.arange(1, N_FEATURES + 1) ** -0.6
"""Standard deviations of the features, whose variances are j ** -1.2."""
MOST_SAMPLES = 20_000_000

FloatArray = NDArray[np.float64]


class Synthetic(Classification):
    """Softmax-regression data of `clients` users: y = argmax(W x + b), 60 features, 10 classes.

    User k has lognormal(4, 2) + 50 samples. W and b are normal around u ~ N(0, alpha); x has the variances j ** -1.2
    around a mean that is normal around B ~ N(0, beta). `alpha` and `beta` are standard deviations, as in the code that
    FedProx released; its paper writes variances (`as_variances`), which is the same for 0 and 1. `iid` gives all users
    one W and b and the mean 0. The last tenth of every user's samples is the test set.
    """

    kind: Literal["synthetic"] = "synthetic"
    alpha: float = Field(default=0.0, ge=0, le=1e6, description="spread of the users' models")
    beta: float = Field(default=0.0, ge=0, le=1e6, description="spread of the users' feature means")
    as_variances: bool = Field(False, description="alpha and beta are variances, and not standard deviations")
    iid: bool = Field(False, description="one model and mean for all users")
    clients: int = Field(default=30, ge=1, le=MOST_SAMPLES // 50, description="number of users, one client each")
    partition: Partition = Field(default=Natural(), description="distribution of the training samples across clients")

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.iid and (self.alpha or self.beta):
            raise ValueError(f"iid: true takes no alpha and beta, got {self.alpha:g} and {self.beta:g}; omit them")
        return self

    def load(self) -> Samples:
        """Draw the samples; those of user k do not depend on the number of users.

        Raise `UserError` if they would not fit in memory, or the partition does not fit them.
        """
        randoms = [generator(self.seed or 0, "synthetic", client=1 + user) for user in range(self.clients)]
        sizes = np.array([50 + int(random.lognormal(4, 2)) for random in randoms])
        if sizes.sum() > MOST_SAMPLES:
            raise UserError(
                f"synthetic: {self.clients} clients have {sizes.sum()} samples, but at most {MOST_SAMPLES} are "
                "allowed; lower clients"
            )
        shared = generator(self.seed or 0, "synthetic")
        model = (shared.normal(0, 1, (N_FEATURES, N_CLASSES)), shared.normal(0, 1, N_CLASSES)) if self.iid else None
        users = np.repeat(np.arange(self.clients), sizes)
        features = np.empty((len(users), N_FEATURES), dtype=np.float32)
        labels = np.empty(len(users), dtype=np.int64)
        ends = np.cumsum(sizes)
        for random, size, end in zip(randoms, sizes.tolist(), ends.tolist(), strict=True):
            features[end - size : end], labels[end - size : end] = self._draw(random, size, model)
        rank = np.arange(len(users)) - np.repeat(ends - sizes, sizes)
        is_train = rank < np.repeat((TRAIN_SHARE * sizes).astype(np.int64), sizes)
        everything = Labelled(features, labels)
        train, test = everything.take(np.flatnonzero(is_train)), everything.take(np.flatnonzero(~is_train))
        name = "synthetic-iid" if self.iid else f"synthetic({self.alpha:g},{self.beta:g})"
        return self._dealt(
            name,
            "drawn",
            N_CLASSES,
            train,
            test,
            clients=self.clients,
            users=users[is_train],
            test_users=users[~is_train],
        )

    def _draw(
        self, random: np.random.Generator, size: int, model: tuple[FloatArray, FloatArray] | None
    ) -> tuple[FloatArray, NDArray[np.int64]]:
        """Return one user's features [size, 60] and labels [size]."""
        mean: FloatArray = np.zeros(N_FEATURES)
        if model is None:
            power = 0.5 if self.as_variances else 1.0
            centre, shift = random.normal(0, self.alpha**power), random.normal(0, self.beta**power)
            mean = random.normal(shift, 1, N_FEATURES)
            model = random.normal(centre, 1, (N_FEATURES, N_CLASSES)), random.normal(centre, 1, N_CLASSES)
        features = mean + SPREADS * random.standard_normal((size, N_FEATURES))
        return features, np.argmax(features @ model[0] + model[1], axis=1)
