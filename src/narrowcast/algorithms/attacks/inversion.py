"""Inversion of a linear layer's change: the inputs of a layer with a bias, without any optimisation.

For one example the gradient of W x + b is g x^T for W and g for b, so that every row of the one over its entry of the
other is x itself, whatever comes after the layer; the learning rate cancels. For a batch a row is the mixture
sum_n g_n x_n / sum_n g_n, which is an example itself if only that one excites the row's unit.

Reference: Phong et al., Privacy-Preserving Deep Learning via Additively Homomorphic Encryption, IEEE TIFS 2018, section
3; Geiping et al., Inverting Gradients, NeurIPS 2020, proposition 3.1; Boenisch et al., When the Curious Abandon
Honesty, EuroS&P 2023, section 4, for batches. Letters: n examples, o rows of the layer, i inputs.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linear_sum_assignment

from narrowcast.platform.errors import UserError
from narrowcast.platform.types import Arrays, FloatArray

Floats = NDArray[np.floating]


def _weight_and_bias(change: Arrays, layer: str) -> tuple[FloatArray, FloatArray]:
    try:
        weight, bias = change[f"{layer}.weight"], change[f"{layer}.bias"]
    except KeyError:
        layers = [name.removesuffix(".bias") for name in change if name.endswith(".bias")]
        raise UserError(f'no layer "{layer}" with weight and bias; give one of {", ".join(layers)}') from None
    if weight.ndim != 2:
        raise UserError(f"layer {layer} has a weight of {weight.ndim} dimensions; give a linear layer, which has 2")
    return np.asarray(weight, dtype=np.float64), np.asarray(bias, dtype=np.float64)


def rows_over_bias(change: Arrays, layer: str) -> FloatArray:
    """Return dW_j / db_j of each row j whose bias changed, [rows, i], that of the largest |db_j| first.

    Raise `UserError` for a layer that is not linear, or has no bias.
    """
    weight, bias = _weight_and_bias(change, layer)
    order = np.argsort(-np.abs(bias), kind="stable")
    order = order[bias[order] != 0]
    return np.asarray(weight[order] / bias[order, np.newaxis])


def single_input(change: Arrays, layer: str) -> FloatArray:
    """Return the x [i] that fits dW = db x^T best by least squares: the input of a step on one example.

    Rows count by the square of their bias, so that the many rows of a coded change average its error out. It is zero if
    no bias changed. Raise `UserError` as `rows_over_bias`.
    """
    weight, bias = _weight_and_bias(change, layer)
    return np.asarray(bias @ weight / (float(bias @ bias) or 1.0))


def cosines(estimates: Floats, truth: Floats) -> FloatArray:
    """Return the cosine of each estimate [k, i] and each true input [n, i], [k, n]; 0 with a vector of zeros."""
    unit = []
    for vectors in (estimates, truth):
        rows = np.asarray(vectors, dtype=np.float64)
        unit.append(rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-30))
    return np.asarray(unit[0] @ unit[1].T)


def matched(estimates: Floats, truth: Floats) -> tuple[Floats, FloatArray]:
    """Return for each true input the estimate that is matched to it, [n, i], and their cosine, [n].

    The matching is the best one, each estimate being used once; it is made with knowledge of the truth, so that the
    mean is at least what an attacker would have who must tell the estimates apart. True inputs beyond the number of
    estimates get zeros.
    """
    similarity = cosines(estimates, truth)
    rows, columns = linear_sum_assignment(-similarity)
    of_truth, reached = np.zeros(truth.shape), np.zeros(len(truth))
    of_truth[columns], reached[columns] = estimates[rows], similarity[rows, columns]
    return of_truth, reached


def share_identified(estimates: Floats, pool: Floats, rows: NDArray[np.int64]) -> float:
    """Return the share of estimates [n, i] whose most similar input of the pool [p, i] is the true one, `rows` [n].

    An estimate of zeros identifies nothing; a guess is right with probability 1 / p.
    """
    similarity = cosines(estimates, pool)
    return float(np.mean((similarity.argmax(axis=1) == rows) & similarity.any(axis=1)))
