"""The handwritten digits that come with scikit-learn, a data set that needs no download."""

from __future__ import annotations

from typing import Literal

import numpy as np
from pydantic import Field

from narrowcast.platform.data.classification import MOST_CLIENTS, Classification
from narrowcast.platform.data.samples import Labelled, Samples
from narrowcast.platform.data.scikit_learn import bundled_table
from narrowcast.platform.seeds import generator

TEST_SAMPLES = 360
GREYS = 16


class Digits(Classification):
    """1797 images of 8x8 pixels in 10 classes: 1437 for training, 360 for testing.

    The test set does not depend on the seed.

    This is the test set of the UCI "Optical Recognition of Handwritten Digits", as in scikit-learn's `load_digits`.
    Features [n, 64] are float32 from 0 to 1.
    """

    kind: Literal["digits"] = "digits"
    clients: int = Field(default=20, ge=1, le=MOST_CLIENTS, description="number of clients")

    def load(self) -> Samples:
        """Return the digits partitioned across clients; raise `UserError` if the partition does not fit them."""
        table = bundled_table("digits.csv.gz", delimiter=",")
        all_of_it = Labelled((table[:, :-1] / GREYS).astype(np.float32), table[:, -1].astype(np.int64))
        rows = generator(0, "digits: test").permutation(len(all_of_it))
        train, test = (all_of_it.take(np.sort(part)) for part in (rows[TEST_SAMPLES:], rows[:TEST_SAMPLES]))
        return self._dealt(self.kind, "scikit-learn", 10, train, test, clients=self.clients)
