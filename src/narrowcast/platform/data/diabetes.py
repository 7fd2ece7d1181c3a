"""Regression: the progression of diabetes in 442 patients, a data set that needs no download."""

from __future__ import annotations

from typing import Literal

import numpy as np
from pydantic import Field

from narrowcast.platform.data.classification import MOST_CLIENTS, Classification
from narrowcast.platform.data.samples import Labelled, Samples
from narrowcast.platform.data.scikit_learn import bundled_table
from narrowcast.platform.seeds import generator

TEST_SAMPLES = 88


class Diabetes(Classification):
    """442 patients with 10 measurements each, and the progression of the disease a year later: 354 train, 88 test.

    The test set does not depend on the seed. Features [n, 10] and the target [n, 1] are float32 with mean 0 and
    variance 1 over the 354, so that an RMSE of 1 is that of predicting the mean.

    Reference: Efron et al., Least Angle Regression, Annals of Statistics 2004; as in scikit-learn's `load_diabetes`.
    """

    kind: Literal["diabetes"] = "diabetes"
    clients: int = Field(default=10, ge=1, le=MOST_CLIENTS, description="number of clients")

    def load(self) -> Samples:
        """Return the patients partitioned across clients; raise `UserError` if the partition does not fit them."""
        features = bundled_table("diabetes_data_raw.csv.gz", delimiter=None)
        target = bundled_table("diabetes_target.csv.gz", delimiter=None)[:, np.newaxis]
        rows = generator(0, "diabetes: test").permutation(len(target))
        train, test = np.sort(rows[TEST_SAMPLES:]), np.sort(rows[:TEST_SAMPLES])
        features, target = (
            ((values - values[train].mean(axis=0)) / values[train].std(axis=0)).astype(np.float32)
            for values in (features, target)
        )
        everyone = Labelled(features, target)
        return self._dealt(
            self.kind, "scikit-learn", 0, everyone.take(train), everyone.take(test), clients=self.clients
        )
