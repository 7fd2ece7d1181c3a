import numpy as np

from labelled_sets import check_dealt
from narrowcast.platform.data.scikit_learn import Digits


def test_digits_are_always_there() -> None:
    data = Digits().load()
    check_dealt(data)
    assert (data.n_clients, data.n_classes) == (20, 10)
    assert (len(data.train), len(data.validation), len(data.test)) == (1293, 144, 360)
    assert data.train.features.dtype == np.float32
    assert (data.train.features.min(), data.train.features.max()) == (0.0, 1.0)
    assert sum(part.features.sum(dtype=np.float64) * 16 for part in (data.train, data.validation, data.test)) == 561718
    assert len(Digits(validation_share=0).load().train) == 1437


def test_the_seed_moves_validation_and_partition_but_not_the_test_set() -> None:
    first, again, other = (Digits(seed=seed).load() for seed in (1, 1, 2))
    assert first.digest == again.digest != other.digest
    assert np.array_equal(first.test.features, other.test.features)
    assert not np.array_equal(first.validation.features, other.validation.features)
    assert np.array_equal(first.validation.labels, Digits(seed=1, partition="dirichlet").load().validation.labels)


def test_more_clients_than_samples_leave_some_empty() -> None:
    data = Digits(clients=2000).load()
    check_dealt(data)
    assert (data.examples == 0).sum() == 2000 - 1293
