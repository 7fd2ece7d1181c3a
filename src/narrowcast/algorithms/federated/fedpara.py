"""FedPara: federated averaging of the factors of a low-rank Hadamard product, in place of the weights.

A weight is the Hadamard product of two low-rank ones, whose rank reaches the square of theirs.

Reference: Hyeon-Woo et al., FedPara: Low-rank Hadamard Product for Communication-Efficient Federated Learning,
ICLR 2022 (arXiv:2108.06098). Letters: a weight W [m, n], or [m, n, K...] of a convolution with kernel K; inner rank r;
factors X [m, r], Y [n, r] and core T [r, r, K...], two of each.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import ceil, floor, prod, sqrt
from typing import Any, Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from narrowcast.algorithms.federated.fedavg import Averaging, model_of
from narrowcast.platform.contracts import Task
from narrowcast.platform.errors import UserError
from narrowcast.platform.models.neural_network import NeuralNetwork
from narrowcast.platform.seeds import generator
from narrowcast.platform.types import Arrays, Chunk, LocalTerms

LEFTS, RIGHTS, CORES = ("/X1", "/X2"), ("/Y1", "/Y2"), ("/T1", "/T2")
"""The factors of NAME are NAME/X1, NAME/Y1 and so on."""


def n_factor_values(shape: tuple[int, ...], rank: int) -> int:
    """Return the number of values of the factors: 2 r (m + n), or 2 r (m + n + r K): Propositions 2 and 3."""
    rows, columns, *kernel = shape
    return 2 * rank * (rows + columns + (rank * prod(kernel) if kernel else 0))


def inner_rank(shape: tuple[int, ...], gamma: float) -> int:
    """Return (1 - gamma) r_min + gamma r_max, rounded; 0 if factors of rank r_min have no fewer values than the weight.

    r_min is the least rank whose square allows full rank (for a convolution: in both channels); r_max is the largest
    one with no more values than the weight has.
    """
    if len(shape) < 2:
        return 0
    rows, columns, *kernel = shape
    full = max(rows, columns) if kernel else min(rows, columns)
    lowest, size = ceil(sqrt(full)), prod(shape)
    if n_factor_values(shape, lowest) >= size:
        return 0
    half, kernel_size = rows + columns, prod(kernel) if kernel else 0
    highest = size / (2 * half) if not kernel else (sqrt(half**2 + 2 * kernel_size * size) - half) / (2 * kernel_size)
    return round((1 - gamma) * lowest + gamma * floor(highest))


def factorise(model: Arrays, gamma: float, seed: int) -> Arrays:
    """Return factors, drawn from the seed, for every weight that they make smaller; other parameters as they are.

    A factor's entries are normal; their variance is the same in all factors of a weight, such that the product's is the
    mean square of the model's own initial weight. A weight that starts at zero is left whole.
    """
    server = {}
    for name, values in model.items():
        rank = inner_rank(values.shape, gamma)
        square = float(np.mean(np.square(values, dtype=np.float64)))
        if not rank or not square:
            server[name] = values
            continue
        rows, columns, *kernel = values.shape
        # each of the two halves adds up r products of two factors, or r^2 of three
        spread = (square / rank**4) ** (1 / 12) if kernel else (square / rank**2) ** (1 / 8)
        shapes = {**dict.fromkeys(LEFTS, (rows, rank)), **dict.fromkeys(RIGHTS, (columns, rank))}
        if kernel:
            shapes |= dict.fromkeys(CORES, (rank, rank, *kernel))
        for part, shape in shapes.items():
            drawn = generator(seed, "hadamard" + name + part).standard_normal(shape)
            server[name + part] = (spread * drawn).astype(values.dtype)
    return server


def products(trained: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the module's parameters: (X1 Y1') * (X2 Y2'), with T between X and Y for convolutions, and all others."""
    parameters = {name: values for name, values in trained.items() if "/" not in name}
    for name in (left.removesuffix(LEFTS[0]) for left in trained if left.endswith(LEFTS[0])):
        first, second = (
            _low_rank(trained[name + left], trained[name + right], trained.get(name + core))
            for left, right, core in zip(LEFTS, RIGHTS, CORES, strict=True)
        )
        parameters[name] = first * second
    return parameters


def products_of_arrays(server: Arrays) -> Arrays:
    """Return `products` for numpy arrays."""
    tensors = {name: torch.from_numpy(np.array(values)) for name, values in server.items()}
    return {name: values.numpy() for name, values in products(tensors).items()}


def _low_rank(left: Tensor, right: Tensor, core: Tensor | None) -> Tensor:
    if core is None:
        return left @ right.T
    return torch.einsum("ma,an...->mn...", left, torch.einsum("nb,ab...->an...", right, core))


class FedPara(Averaging):
    """Averaging of the factors of a low-rank Hadamard product in place of the weights.

    W = (X1 Y1') * (X2 Y2') for each linear weight, Proposition 1, and Proposition 3's form for each convolution.

    Clients train, send and receive the factors, and vectors whole; `gamma` chooses the inner rank.

    Differs from the paper: 1. all weights with two or more dimensions are factorised if that saves values; the
    paper names its layers by hand. 2. factors are drawn so that the product has the variance of the model's own
    initial weight; the released code draws each by He's rule. 3. weight decay is that of W and not of the factors.
    4. no tanh on the halves and no Jacobian correction: the paper calls them optional, Table 4, and its experiments on
    images use them.
    """

    kind: Literal["fedpara"] = "fedpara"
    gamma: float = Field(
        0.1,
        ge=0,
        le=1,
        description="interpolates the rank: 0 is the least that allows full rank, 1 gives as many values as W",
    )

    def check(self, task: Task) -> None:
        """Raise `UserError` for models other than networks: they have weights to factorise."""
        super().check(task)
        if not isinstance(task.model, NeuralNetwork):
            raise UserError(
                f'algorithm.kind = "{self.kind}" trains networks, not {task.model.kind}; use colr, or fedmf with fewer '
                "values for each item, model.embedding_dim"
            )
        if task.start is not None:
            raise UserError("start_from: fedpara draws factors, of which no product is a given model; use fedavg")

    def parameters(self, task: Task) -> Arrays:
        """Return the factors, and the parameters that have none."""
        return factorise(task.initial_parameters(), self.gamma, task.seed)

    def terms(self, chunk: Chunk, task: Task) -> LocalTerms:
        """Return local SGD on the factors."""
        del chunk, task
        return LocalTerms(rebuild=_rebuild)

    def final(self, server: Arrays) -> Arrays:
        """Return the model's parameters: the products of the factors."""
        return products_of_arrays(model_of(server))


def _rebuild(trained: Mapping[str, Any], frozen: Mapping[str, Any]) -> Mapping[str, Any]:
    del frozen
    return products(trained)
