from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_allclose
from numpy.typing import NDArray
from sklearn.datasets import load_diabetes

from narrowcast.platform.data.classification import tenths
from narrowcast.platform.data.partition import Dirichlet
from narrowcast.platform.data.scikit_learn import Diabetes


def scaled(values: NDArray[Any]) -> NDArray[np.float64]:
    return (values.astype(np.float64) - values.mean(axis=0)) / values.std(axis=0)


def test_the_patients_are_those_of_scikit_learn() -> None:
    data = Diabetes(validation_share=0).load()
    features, target = load_diabetes(return_X_y=True, scaled=False)
    assert (data.targets, data.n_outputs, len(data.train), len(data.test)) == ("numbers", 1, 354, 88)
    assert_allclose(data.train.labels.mean(), 0, atol=1e-6)
    assert_allclose(data.train.features.std(axis=0), 1, atol=1e-5)
    parts = [np.hstack([part.features, part.labels]) for part in (data.train, data.test)]
    ours, theirs = scaled(np.concatenate(parts)), scaled(np.c_[features, target])
    key = np.arange(1, 12)  # the patients are in another order
    assert_allclose(ours[np.argsort(ours @ key)], theirs[np.argsort(theirs @ key)], atol=1e-4)


def test_the_test_set_does_not_depend_on_the_seed() -> None:
    first, second = Diabetes(seed=0).load(), Diabetes(seed=1).load()
    assert np.array_equal(first.test.labels, second.test.labels)
    assert not np.array_equal(first.validation.labels, second.validation.labels)


def test_numbers_are_partitioned_by_their_tenths() -> None:
    numbers = np.random.default_rng(0).permutation(1000.0 + np.arange(200))
    assert np.bincount(tenths(numbers)).tolist() == pytest.approx([20] * 10, abs=1)
    data = Diabetes(clients=10, partition=Dirichlet(alpha=0.01, capped=False)).load()
    own = [data.train.labels[rows] for rows in np.split(data.order, data.indptr[1:-1]) if len(rows) > 5]
    assert np.mean([each.std() for each in own]) < 0.8 * data.train.labels.std()
