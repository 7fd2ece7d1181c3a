"""Weights of the clients in a round's sum, and its divisor."""

from __future__ import annotations

from typing import Literal

import numpy as np
from numpy.typing import NDArray

from narrowcast.platform.contracts import Task
from narrowcast.platform.types import BoolArray, Chunk, FloatArray, IntArray

Weights = Literal["examples", "equal"]
"""A client's weight in the mean of tensors: its training examples, as in FedAvg, or 1."""

Aggregation = Literal["per_item_mean", "per_component_mean", "weighted"]
"""The divisor of a row's sum.

`per_item_mean`: the number of clients that touched the row, as in the code released with CoLR (each client's row mask
is then sent and paid for). `per_component_mean`: for each entry of A, the number of clients that sent that component of
the row, so that low ranks do not shrink the mean. `weighted`: sum N_u A_u / sum N_u over the cohort, Algorithm 1 of
Nguyen et al., WWW 2024.
"""


def tensor_weights(weights: Weights, task: Task, chunk: Chunk, delivered: BoolArray) -> FloatArray:
    """Return each client's weight in the mean of tensors, [C]; 0 if its update was not delivered."""
    examples = task.data.examples[chunk.clients].astype(np.float64)
    return np.where(delivered, examples if weights == "examples" else 1.0, 0.0)


def row_weights(aggregation: Aggregation, task: Task, chunk: Chunk, ranks: IntArray) -> NDArray[np.float32]:
    """Return each client's weight in the sum of rows, [C]; 0 if it sends no column."""
    weights = task.data.examples[chunk.clients] if aggregation == "weighted" else np.ones(len(chunk.clients))
    return np.where(ranks > 0, weights, 0).astype(np.float32)
