"""What users' and films' means alone predict on the ratings of personal-movielens, as baselines without a network."""

from __future__ import annotations

import numpy as np

from narrowcast.platform.data.samples import Samples, one_array
from narrowcast.platform.types import FloatArray
from narrowcast_papers.personal.methods import FEDAVG, USERS, Cell

PRIOR_RATINGS = 2
"""Ratings of the mean of all that each film's mean is drawn towards."""


def users_of(seed: int) -> Samples:
    """Return the data of the runs with this seed."""
    experiment = Cell(USERS, "item embedding", FEDAVG).test((USERS.rate,)).configured(seed, "means")
    data = experiment.data_source.load()
    assert isinstance(data, Samples)
    return data


def accuracies_of_means(seed: int) -> dict[str, float]:
    """Return the mean test accuracy of users, in percent, by the means of the liked ratings that predict.

    A user's own mean takes no bit. A film's is that over the training ratings of all users. Both add up, less the
    mean of all; a film is liked if the sum is above one half.
    """
    data = users_of(seed)
    users, items, liked = data.owners, one_array(data.train.features)[data.order, 0], data.train.labels[data.order]
    overall = liked.mean()
    of_users = np.bincount(users, liked) / np.bincount(users)
    n_ratings, n_liked = (np.bincount(items, weights, data.n_items) for weights in (None, liked))
    of_films = (n_liked + PRIOR_RATINGS * overall) / (n_ratings + PRIOR_RATINGS)
    order, indptr = data.of_clients("test")
    user, film = np.repeat(np.arange(data.n_clients), np.diff(indptr)), one_array(data.test.features)[order, 0]

    def accuracy(score: FloatArray) -> float:
        right = (score > 1 / 2) == data.test.labels[order]
        return float(100 * np.mean(np.bincount(user, right) / np.bincount(user)))

    return {
        "the user's mean": accuracy(of_users[user]),
        "the film's mean": accuracy(of_films[film]),
        "both": accuracy(of_users[user] + of_films[film] - overall),
    }
