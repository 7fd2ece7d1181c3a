"""Predictions of ratings without factors and without training, which every model of ratings is to be compared with.

They stand apart from the models of factors because solves and studies read them without torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from narrowcast.platform.types import FloatArray, IntArray

if TYPE_CHECKING:
    from narrowcast.platform.data.rating_matrix import RatingMatrix
    from narrowcast.platform.models.model import Split

USER_MEAN, BIASES = "mean of each user", "biases of items and users"
_RIDGE = 5.0
"""Of the biases, in ratings; nothing is tuned."""
_TOLERANCE, _ITERATIONS = 1e-10, 1000
_SPLITS: tuple[Split, Split] = ("test", "validation")


def rating_baselines(data: RatingMatrix) -> dict[str, dict[str, float]]:
    """Return RMSE and MAE, such as `test.rmse`, of each baseline on the held-out ratings; empty if there are none.

    `USER_MEAN` is the mean of a user's own training ratings, for which a client sends and receives nothing; the mean of
    all for one without any. `BIASES` are fitted to all training ratings in one place, and take a number for each item.
    Predictions are clipped to the range of the training ratings.
    """
    if not any(len(data.part(split).values) for split in _SPLITS):
        return {}
    users, items, values = data.part("train")
    mean, shape = data.training_mean, (data.n_items, data.n_users)
    counts = np.bincount(users, minlength=data.n_users)
    own = np.where(counts > 0, np.bincount(users, values, data.n_users) / np.maximum(counts, 1), mean)
    of_items, of_users = biases_of(items, users, values - mean, shape, _RIDGE)
    errors: dict[str, dict[str, float]] = {USER_MEAN: {}, BIASES: {}}
    for split in _SPLITS:
        users, items, values = data.part(split)
        predicted = {USER_MEAN: own[users], BIASES: mean + of_items[items] + of_users[users]}
        for name, predictions in predicted.items():
            clipped = predictions.clip(*data.training_range)
            errors[name] |= {f"{split}.{metric}": value for metric, value in rating_errors(clipped, values).items()}
    return errors


def rating_errors(predicted: FloatArray, values: FloatArray) -> Mapping[str, float]:
    """Return root mean squared and mean absolute error of predictions [m]; nothing for none."""
    if not len(values):
        return {}
    errors = predicted - values
    return {"rmse": float(np.sqrt(np.square(errors).mean())), "mae": float(np.abs(errors).mean())}


def biases_of(
    row: IntArray, column: IntArray, values: FloatArray, shape: tuple[int, int], decay: float
) -> tuple[FloatArray, FloatArray]:
    """Return the biases a [m] and b [n] that minimise the sum of (v_ij - a_i - b_j)^2 + decay (|a|^2 + |b|^2).

    The normal equations are solved by conjugate gradients. Shapes: row, column, values [p].

    Source: Koren, Bell and Volinsky, Computer 42(8), 2009, equation 3, without the factors.
    """
    from scipy import sparse  # takes a while to import
    from scipy.sparse import linalg

    rows, columns = shape
    pattern = sparse.csr_array((np.ones(len(values)), (row, column)), shape=shape)
    in_row, in_column = (sparse.diags_array(pattern.sum(axis=axis) + decay) for axis in (1, 0))
    right = np.append(np.bincount(row, values, rows), np.bincount(column, values, columns))
    equations = sparse.block_array([[in_row, pattern], [pattern.T, in_column]], format="csr")
    solution, _ = linalg.cg(equations, right, rtol=_TOLERANCE, maxiter=_ITERATIONS)
    return solution[:rows], solution[rows:]
