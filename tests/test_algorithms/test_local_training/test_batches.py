"""Batches of matrix-factorisation clients: negatives, shuffles and independence of the other clients."""

import numpy as np
import pytest

from cohorts import ml_100k
from narrowcast.algorithms.local_training.negatives import draw_batches
from narrowcast.platform.data.interactions import Interactions
from per_client import Array, client_batches, make_task, synthetic


@pytest.mark.parametrize("train_negatives", ["clean", "leaky"])
def test_batches_do_not_depend_on_company(train_negatives: str) -> None:
    task = make_task(ml_100k(), seed=5, batch_size=32, train_negatives=train_negatives)
    clients = np.sort(np.random.default_rng(1).choice(943, 40, replace=False))
    together = client_batches(draw_batches(task, clients, round_index=9))
    for client, steps in zip(clients, together, strict=True):
        (alone,) = client_batches(draw_batches(task, np.array([client]), round_index=9))
        assert len(alone) == len(steps)
        for mine, theirs in zip(alone, steps, strict=True):
            assert np.array_equal(mine[0], theirs[0])
            assert np.array_equal(mine[1], theirs[1])


@pytest.mark.parametrize(("batch_size", "epochs", "negatives"), [(7, 3, 4), (64, 2, 1), (256, 1, 4), (16, 2, 0)])
def test_each_epoch_visits_each_sample_once(batch_size: int, epochs: int, negatives: int) -> None:
    data, clients = ml_100k(), np.array([3, 12, 500, 942])
    task = make_task(data, seed=1, batch_size=batch_size, epochs=epochs, negatives=negatives)
    batches = draw_batches(task, clients, round_index=2)
    for client, steps in zip(clients, client_batches(batches), strict=True):
        own = data.items[data.indptr[client] : data.indptr[client + 1]]
        per_epoch = len(steps) // epochs
        visited = []
        for epoch in range(epochs):
            part = steps[epoch * per_epoch : (epoch + 1) * per_epoch]
            assert [len(items) for items, _ in part[:-1]] == [batch_size] * (per_epoch - 1)
            items, labels = (np.concatenate(column) for column in zip(*part, strict=True))
            assert np.array_equal(np.sort(items[labels]), own)
            assert len(items) == len(own) * (1 + negatives)
            visited.append((np.sort(items).tolist(), items.tolist()))
        assert len({str(same) for same, _ in visited}) == 1
        assert len({str(order) for _, order in visited}) == epochs  # shuffled anew
    assert np.array_equal(batches.samples, data.examples[clients[batches.order]] * (1 + negatives))


def negatives_of(data: Interactions, round_index: int, **training: object) -> list[Array]:
    task = make_task(data, seed=3, **training)
    steps = client_batches(draw_batches(task, np.arange(data.n_users), round_index))
    return [np.concatenate([items[~labels] for items, labels in each]) for each in steps]


@pytest.mark.parametrize("train_negatives", ["clean", "leaky"])
def test_what_is_never_a_negative(train_negatives: str) -> None:
    data = synthetic([5, 30, 12, 140], n_items=150, n_negatives=20)
    drawn_by_user = negatives_of(data, 1, epochs=1, negatives=40, train_negatives=train_negatives)
    for user, drawn in enumerate(drawn_by_user):
        own = set(data.items[data.indptr[user] : data.indptr[user + 1]])
        held_out = {data.test[user], data.validation[user], *data.negatives[user]}
        never = own | held_out | (set(range(data.n_items)) - set(data.items)) if train_negatives == "leaky" else own
        allowed = set(range(data.n_items)) - never
        assert set(drawn) <= allowed
        if len(drawn) > 20 * len(allowed):
            assert set(drawn) == allowed  # held-out items too, where they are clean
    assert len(set(data.items)) < data.n_items


def chi_square_deviations(counts: Array) -> float:
    """How many of its standard deviations the statistic of a uniform draw lies above its mean."""
    expected, freedom = counts.sum() / len(counts), len(counts) - 1
    return float((((counts - expected) ** 2).sum() / expected - freedom) / (2 * freedom) ** 0.5)


def test_negatives_are_uniform_over_the_allowed_items() -> None:
    data = synthetic([10, 10, 10], n_items=60)
    for user, drawn in enumerate(negatives_of(data, 1, epochs=1, negatives=2000)):
        counts = np.bincount(drawn, minlength=60)
        allowed = np.setdiff1d(np.arange(60), data.items[10 * user : 10 * user + 10])
        assert len(drawn) == 20_000
        assert abs(chi_square_deviations(counts[allowed])) < 4
    assert chi_square_deviations(np.append(counts[allowed], 0)) > 30  # the statistic does see a missing item


def test_shuffles_are_uniform() -> None:
    task = make_task(synthetic([4], n_items=60), epochs=1, negatives=4, batch_size=256)
    counts = np.zeros(20)
    for round_index in range(1, 1001):
        ((_, labels),) = client_batches(draw_batches(task, np.array([0]), round_index))[0]
        counts[np.flatnonzero(labels)] += 1
    assert counts.sum() == 4000
    assert abs(chi_square_deviations(counts)) < 4


def test_negatives_differ_between_rounds_and_stay_over_the_epochs() -> None:
    data = synthetic([20, 20])
    first, again, other = (negatives_of(data, round_index, epochs=2) for round_index in (1, 1, 2))
    assert np.array_equal(first[0], again[0])
    assert sorted(first[0]) != sorted(other[0])
    assert sorted(first[0]) != sorted(first[1])
    assert sorted(first[0][:80]) == sorted(first[0][80:])
