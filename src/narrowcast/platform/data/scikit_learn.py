"""The data sets that come with scikit-learn, digits and diabetes, which need no download.

Their files are found without importing scikit-learn, which takes a second.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from narrowcast.platform.data.classification import MOST_CLIENTS, Classification
from narrowcast.platform.data.samples import Labelled, Samples
from narrowcast.platform.errors import UserError
from narrowcast.platform.seeds import generator


def bundled_table(name: str, delimiter: str | None) -> NDArray[np.float64]:
    """Return the numbers of a file that scikit-learn ships; raise `UserError` if that is not installed."""
    spec = find_spec("sklearn")
    if spec is None or spec.origin is None:
        raise UserError(f"{name} comes with scikit-learn, which is not installed; pip install scikit-learn")
    path = Path(spec.origin).parent / "datasets/data" / name
    try:
        return np.loadtxt(path, delimiter=delimiter)
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: {error}; install scikit-learn again") from error


DIGITS_TEST_SAMPLES = 360
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
        train, test = (
            all_of_it.take(np.sort(part)) for part in (rows[DIGITS_TEST_SAMPLES:], rows[:DIGITS_TEST_SAMPLES])
        )
        return self._dealt(self.kind, "scikit-learn", 10, train, test, clients=self.clients)


DIABETES_TEST_SAMPLES = 88


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
        train, test = np.sort(rows[DIABETES_TEST_SAMPLES:]), np.sort(rows[:DIABETES_TEST_SAMPLES])
        features, target = (
            ((values - values[train].mean(axis=0)) / values[train].std(axis=0)).astype(np.float32)
            for values in (features, target)
        )
        everyone = Labelled(features, target)
        return self._dealt(
            self.kind, "scikit-learn", 0, everyone.take(train), everyone.take(test), clients=self.clients
        )
