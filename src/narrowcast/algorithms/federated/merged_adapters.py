"""Products of factors that the server adds to the frozen weights of adapters, and what clients are sent of them.

Letters: W [o, i] a weight, W += s L R its change in a round, with L [o, k] and R [k, i]; A [r, i], B [o, r] the
adapter's factors, A_u, B_u those of client u after its local steps, p_u its weight, of sum 1.

Clients compute the change as the server does, from L and R or, if it has fewer values, from their product.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from narrowcast.algorithms.federated.downloads import DOWNLOAD
from narrowcast.algorithms.federated.server_optimizer import SERVER_ONLY
from narrowcast.platform.models.adapted_layers import WEIGHT
from narrowcast.platform.types import Arrays, FloatArray, PrefixedArrays

BASE = PrefixedArrays(DOWNLOAD.name("base/"))
"""W of each adapted layer, in a server state and in a broadcast."""
_LAST = PrefixedArrays(SERVER_ONLY.name("merged/"))
"""L and R of the last round, or L R."""
_ALL = PrefixedArrays(SERVER_ONLY.name("merged before/"))
"""L and R of all rounds, one beside the other, as long as they have fewer values than W."""
_LEFT, _RIGHT, _DENSE = "left", "right", "product"

Products = Mapping[str, tuple[FloatArray, FloatArray]]
"""L and R of each layer, by what the names of its tensors begin with."""


def unmerged(weights: Arrays) -> Arrays:
    """Return what the server keeps of weights to which nothing is added yet."""
    nothing = _nothing(weights)
    return {**BASE.add(weights), **_LAST.add(nothing), **_ALL.add(nothing)}


def merged(server: Arrays, products: Products, scales: Mapping[str, float]) -> Arrays:
    """Return what the server keeps after W += s L R of each layer; without products, of a round that adds nothing."""
    weights = BASE.of(server)
    if not products:
        return {**BASE.add(weights), **_LAST.add(_nothing(weights)), **_ALL.add(_ALL.of(server))}
    earlier, last, after, every = _ALL.of(server), _in_few_values(products, weights), {}, {}
    for layer, (left, right) in products.items():
        weight = weights[layer + WEIGHT]
        after[layer + WEIGHT] = (weight + scales[layer] * _product(last, layer)).astype(weight.dtype)
        if layer + _LEFT in earlier:
            every[layer] = np.hstack([earlier[layer + _LEFT], left]), np.vstack([earlier[layer + _RIGHT], right])
    factors = {name: part for name, part in _in_few_values(every, weights).items() if not name.endswith(_DENSE)}
    return {**BASE.add(after), **_LAST.add(last), **_ALL.add(factors)}


def _nothing(weights: Arrays) -> Arrays:
    """Return L and R without columns of each layer."""
    empty = {
        name.removesuffix(WEIGHT): (np.zeros((len(weight), 0)), np.zeros((0, weight.shape[1])))
        for name, weight in weights.items()
    }
    return _in_few_values(empty, weights)


def _in_few_values(products: Products, weights: Arrays) -> Arrays:
    """Return L and R of each layer, or L R if that has fewer values, in the type of its weight."""
    sent: dict[str, NDArray[Any]] = {}
    for layer, (left, right) in products.items():
        weight = weights[layer + WEIGHT]
        few = left.size + right.size < weight.size
        arrays = {_LEFT: left, _RIGHT: right} if few else {_DENSE: left @ right}
        sent |= {layer + name: values.astype(weight.dtype) for name, values in arrays.items()}
    return sent


def _product(sent: Arrays, layer: str) -> FloatArray:
    """Return L R as clients compute it, in float64."""
    if layer + _DENSE in sent:
        return sent[layer + _DENSE].astype(np.float64)
    return sent[layer + _LEFT].astype(np.float64) @ sent[layer + _RIGHT]


def added(before: Arrays, after: Arrays, layer: str) -> FloatArray:
    """Return what W of a layer has moved by between two server states, in float64."""
    was, now = (BASE.of(server)[layer + WEIGHT].astype(np.float64) for server in (before, after))
    return now - was


def of_last_round(server: Arrays) -> Arrays:
    """Return what clients lack that have followed up to the last round."""
    return _LAST.of(server)


def of_all_rounds(server: Arrays) -> Arrays:
    """Return what clients lack that have the weights of before round 1: all L and R, or W."""
    factors = _ALL.of(server)
    whole = {
        name: weight for name, weight in BASE.of(server).items() if name.removesuffix(WEIGHT) + _LEFT not in factors
    }
    return {**factors, **whole}


def stack(shares: FloatArray, a: FloatArray, b: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Return [p_1 B_1, ..., p_K B_K] and [A_1; ...; A_K], whose product is the mean product."""
    weighted = b * shares[:, np.newaxis, np.newaxis]
    return np.concatenate(list(weighted), axis=1), np.concatenate(list(a), axis=0)


def residual(shares: FloatArray, a: FloatArray, b: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Return L [o, (K - 1) r] and R with L R = sum p_u B_u A_u - B A, where A and B are the means of the factors.

    The sum of p_u (B_u - B) is zero, so that any matrix may be taken off all A_u in the covariance
    sum p_u (B_u - B) (A_u - A): with that of the last client its term is zero.
    """
    mean = np.tensordot(shares, b, 1)
    left, right = stack(shares, a - a[-1], b - mean)
    rank = a.shape[1]
    return left[:, : left.shape[1] - rank], right[: len(right) - rank]
