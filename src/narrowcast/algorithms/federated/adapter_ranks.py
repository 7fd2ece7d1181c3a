"""Ranks of the adapters of each client: a client of rank k trains and sends the first k columns of B and rows of A.

Letters: A [r, i], B [o, r] a layer's factors; k_u the rank of client u, which trains a layer with r < k_u whole.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from narrowcast.algorithms.client.sums import EACH, TENSORS, WEIGHT
from narrowcast.algorithms.client.uploads import Columns
from narrowcast.algorithms.codecs.messages import dense_wire_bits
from narrowcast.algorithms.codecs.wire import dtype_of
from narrowcast.algorithms.federated.rank_policy import RankPolicy
from narrowcast.platform.config.files import Section
from narrowcast.platform.contracts import Task
from narrowcast.platform.models.adapted_layers import A, factor_pairs, is_factor
from narrowcast.platform.types import Arrays, BoolArray, Chunk, FloatArray, IntArray

RANK = "rank"
"""The array of `EACH` with the clients' ranks, where these are chosen."""


def _is_a(name: str) -> bool:
    return name.rpartition(".")[2] == A


def in_columns(tensors: Arrays) -> dict[str, NDArray[Any]]:
    """Return tensors with each A transposed, as [..., i, r], so that clients send columns of all; its own inverse."""
    return {name: np.swapaxes(values, -1, -2) if _is_a(name) else values for name, values in tensors.items()}


@dataclass(frozen=True)
class AdapterRanks:
    """The ranks of a model's layers, and the number of values of its factors at each rank of a client."""

    of_factors: Mapping[str, int]
    values: IntArray
    dtype: np.dtype[Any]

    @classmethod
    def of(cls, model: Arrays) -> AdapterRanks:
        """Return those of a model's tensors; others than factors are sent whole, at each rank."""
        columns = {name: values.shape for name, values in in_columns(model).items() if is_factor(name)}
        ranks = {name: rank for name, (_, rank) in columns.items()}
        at_rank = np.arange(max(ranks.values()) + 1)
        whole = sum(values.size for name, values in model.items() if name not in columns)
        parts = [long * np.minimum(at_rank, rank) for long, rank in columns.values()]
        return cls(ranks, whole + sum(parts), dtype_of(model))

    @property
    def largest(self) -> int:
        """The rank of a client that trains all."""
        return len(self.values) - 1

    @property
    def bits(self) -> IntArray:
        """The size of an uncoded message of a client of rank 0, 1, ..., [r + 1]."""
        return np.array([dense_wire_bits(size, self.dtype) for size in self.values.tolist()])

    def chosen(self, policy: RankPolicy, task: Task, clients: IntArray, round_index: int) -> IntArray:
        """Return the rank that a policy gives each client if the radio limits none, [C]."""
        sizes = np.broadcast_to(self.bits, (len(clients), len(self.values)))
        return policy.ranks(task.profiles.take(clients), self.largest, sizes, task.seed, round_index)

    def columns(self, policy: RankPolicy, chunk: Chunk, task: Task) -> Columns:
        """Return the columns that each client of a chunk trains and sends.

        With `rank_policy: channel` they are as many as the bits that the radio gives it carry without a codec.
        """
        if policy.kind == "channel" and chunk.budget_bits is not None:
            ranks = (self.bits[1:] <= chunk.budget_bits[:, None]).sum(axis=1)
        else:
            ranks = self.chosen(policy, task, chunk.clients, chunk.round_index)
        return self.first(ranks)

    def first(self, ranks: IntArray) -> Columns:
        """Return the first columns of each factor, as many as clients of these ranks [C] have."""
        return Columns(ranks, self.masks(ranks))

    def masks(self, ranks: IntArray) -> dict[str, BoolArray]:
        """Return which columns of each factor clients of these ranks [C] have, [C, r]."""
        return {name: np.arange(rank) < ranks[:, None] for name, rank in self.of_factors.items()}


class Pruning(Section):
    """Clients lower their ranks: the last columns of each weigh on its loss, and go if its training shrinks them.

    Reference: Cho et al., EMNLP 2024 (arXiv:2401.06432), rank self-pruning. The tail of a client of rank k are the
    columns of B and rows of A from floor(kept k) on, at least one. `weight` times the sum of |B_t| |A_t| over layers is
    added to its loss. If the sum is less after its local steps than before, the client keeps its rank without them.
    """

    kept: float = Field(0.99, gt=0, lt=1, description="share of its rank that a client keeps, rounded down")
    weight: float = Field(0.005, ge=0, allow_inf_nan=False, description="weight of the last columns in the loss")

    def left(self, ranks: IntArray) -> IntArray:
        """Return the ranks [C] without the tail; at least 1, and 0 for clients of rank 0."""
        return np.maximum(np.floor(self.kept * ranks).astype(np.int64), np.minimum(ranks, 1))

    def pruned(self, ranks: IntArray, before: Arrays, after: Arrays) -> IntArray:
        """Return the ranks [C] of clients whose factors [C, ...] local steps have moved from `before` to `after`."""
        left = self.left(ranks)
        return np.where(tail_norms(after, left, ranks) < tail_norms(before, left, ranks), left, ranks)


def tail_norms(factors: Arrays, first: IntArray, ranks: IntArray) -> FloatArray:
    """Return the sum of |B_t| |A_t| over layers for clients' factors [C, ...], in columns first [C] to ranks [C]."""
    columns, total = in_columns(factors), np.zeros(len(ranks))
    for a, b in factor_pairs(factors).values():
        at = np.arange(columns[a].shape[-1])
        tail = ((at >= first[:, None]) & (at < ranks[:, None]))[:, np.newaxis]
        squares = [
            np.square(columns[name], dtype=np.float64, where=tail, out=np.zeros(columns[name].shape)) for name in (a, b)
        ]
        total += np.sqrt(np.prod([square.sum(axis=(1, 2)) for square in squares], axis=0))
    return total


def truncated_to(masks: Mapping[str, BoolArray], model: Arrays) -> dict[str, NDArray[Any]]:
    """Return the factors of each client, [C, ...], which are zero in the columns that it does not have.

    No step moves a column that is zero in both factors, as each is the gradient of the other.
    """
    columns = in_columns(model)
    return in_columns(
        {
            name: np.where(mask[:, np.newaxis], columns[name], np.zeros((), columns[name].dtype))
            for name, mask in masks.items()
        }
    )


def column_mean(shares: FloatArray, values: FloatArray, mask: BoolArray, kept: NDArray[Any]) -> FloatArray:
    """Return the mean of each column [long, r] over the clients that have it, and `kept` where none has.

    Shapes: shares [K]; values [K, long, r]; mask [K, r].
    """
    weight = (shares[:, np.newaxis] * mask).sum(axis=0)
    total = np.einsum("u,ur,ulr->lr", shares, mask.astype(np.float64), values)
    return np.where(weight > 0, total / np.where(weight > 0, weight, 1.0), kept)


def trained_by_clients(
    model: Arrays, total: Arrays
) -> tuple[FloatArray, dict[str, NDArray[Any]], dict[str, BoolArray]]:
    """Return p_u [K] of the clients that delivered, what they trained, [K, ...] in float64, and their columns [K, r].

    Where ranks are not chosen, all have all columns, and there are none of these.
    """
    each = EACH.of(total)
    weights = np.asarray(each[WEIGHT], dtype=np.float64)
    masks = AdapterRanks.of(model).masks(each[RANK]) if RANK in each else {}
    started = {**model, **truncated_to(masks, model)}
    trained = {name: started[name] + np.asarray(change, np.float64) for name, change in TENSORS.of(each).items()}
    return weights / max(weights.sum(), 1e-300), trained, masks
