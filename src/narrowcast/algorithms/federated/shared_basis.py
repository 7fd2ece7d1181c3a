"""The factors of low-rank changes, and what all parties of a round regenerate: the basis B, the components of clients.

An item matrix Q [N, d] changes by A B with A [N, r] and B [r, d]. Of a network, every weight with two or more
dimensions changes so, the rest is trained and sent whole. A weight is viewed as the matrix W [m, d] whose shorter side
is d, transposed if that is the first; r is the algorithm's rank, or d if that is less. A rank policy chooses the rank
r_u of each SCoLR client in a round.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import Any, Literal, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field
from torch import Tensor

from narrowcast.algorithms.client.sums import (
    COMPONENT_WEIGHTS,
    ROWS,
    TENSORS,
    WEIGHT,
    Aggregation,
    MaskGroup,
    SumBlock,
    SumLayout,
    largest_weight,
    row_sum_layout,
)
from narrowcast.platform.config.files import Section
from narrowcast.platform.contracts import Task
from narrowcast.platform.models.model import ITEM_FACTORS
from narrowcast.platform.seeds import generator, stream_keys, uniform_below, uniform_bits
from narrowcast.platform.types import Arrays, BoolArray, FloatArray, IntArray, PrefixedArrays, Profiles


def label(name: str) -> str:
    """Return the name of a tensor in random streams: that of an item matrix, which is alone, is empty."""
    return "" if name == ITEM_FACTORS else name


class TensorNames(PrefixedArrays):
    """Arrays of each tensor under a prefix; that of an item matrix is named by the prefix alone."""

    def name(self, name: str) -> str:
        """Return the full name of an array of this part."""
        return super().name(label(name)).removesuffix("/")

    def add(self, arrays: Arrays) -> dict[str, NDArray[Any]]:
        """Return arrays under their full names."""
        return {self.name(name): values for name, values in arrays.items()}

    def of(self, arrays: Arrays) -> dict[str, NDArray[Any]]:
        """Return the arrays of this part under the names of their tensors."""
        if (alone := self.name(ITEM_FACTORS)) in arrays:
            return {ITEM_FACTORS: arrays[alone]}
        return super().of(arrays)


BASIS = TensorNames("basis/")
"""B of each weight, in a broadcast."""


def basis_seed(seed: int, round_index: int) -> int:
    """Return the 64-bit seed that the server sends for the basis of a round."""
    return int(generator(seed, "basis", round_index).integers(2**64, dtype=np.uint64))


def draw_components(
    ranks: IntArray, rank: int, clients: IntArray, seed: int, round_index: int, name: str = ""
) -> BoolArray:
    """Return S_u of each client, [C, rank]: a random subset of `ranks[u]` of the components of the tensor `name`."""
    if (ranks >= rank).all():
        return np.ones((len(clients), rank), dtype=bool)
    keys = stream_keys(seed, "components" + name, round_index, clients)
    order = uniform_bits(keys[:, None], np.arange(rank)[None, :]).argsort(axis=1)
    components = np.zeros((len(clients), rank), dtype=bool)
    np.put_along_axis(components, order, np.arange(rank) < ranks[:, None], axis=1)
    return components


@dataclass(frozen=True)
class UpdateSizes:
    """The sizes of the updates of a chunk's clients at each rank, by which they choose theirs.

    Shapes: float_bits [C, r + 1], without a codec at rank 0..r; values [C, r], the number of values at rank 1..r;
    head_bits [C], sent beside them; rows [C], the length of a column if all columns of a client have the same,
    otherwise None.
    """

    float_bits: IntArray
    values: FloatArray
    head_bits: FloatArray
    rows: FloatArray | None = None


@dataclass(frozen=True)
class Factor:
    """The shape of the factors of a weight W, or of the item matrix. Shapes: A [long, rank], B [rank, short]."""

    shape: tuple[int, ...]
    long: int
    short: int
    rank: int
    transposed: bool

    @classmethod
    def all_of(cls, model: Arrays, rank: int) -> dict[str, Factor]:
        """Return the factors of an item matrix, or of a network's weights; vectors have none."""
        if ITEM_FACTORS in model:
            n_items, dimension = shape = model[ITEM_FACTORS].shape
            return {ITEM_FACTORS: cls(shape, n_items, dimension, rank, transposed=False)}
        factors = {name: cls.of(values.shape, rank) for name, values in model.items()}
        return {name: factor for name, factor in factors.items() if factor}

    @classmethod
    def of(cls, shape: tuple[int, ...], rank: int) -> Factor | None:
        """Return the factor of a tensor of this shape; None for a vector."""
        if len(shape) < 2:
            return None
        rows, columns = shape[0], prod(shape[1:])
        short = min(rows, columns)
        return cls(shape, max(rows, columns), short, min(rank, short), transposed=rows < columns)

    def change_of(self, a: NDArray[Any], basis: NDArray[Any]) -> NDArray[Any]:
        """Return A B in the weight's own shape, of arrays."""
        return self.change(torch.from_numpy(a), torch.from_numpy(np.array(basis))).numpy()

    def change(self, a: Tensor, basis: Tensor) -> Tensor:
        """Return A B in the weight's own shape."""
        product = a @ basis
        return (product.T if self.transposed else product).reshape(self.shape)


@dataclass(frozen=True)
class FactoredWeights:
    """The parameters of a module from the A and the vectors that a client trains, and from W and B."""

    factors: tuple[tuple[str, Factor], ...]

    def __call__(self, trained: Mapping[str, Tensor], frozen: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return W + A B for each weight, and the vectors."""
        changes = {
            name: frozen[name] + factor.change(trained[name], frozen[BASIS.name(name)]) for name, factor in self.factors
        }
        return {**trained, **changes}


def layout_of_rows(task: Task, cohort: int, rank: int, aggregation: Aggregation, *, chosen: bool) -> SumLayout:
    """Return one group for all of A of an item matrix; with chosen ranks one for each column and one for the counts."""
    n_items = task.data.n_items
    whole = row_sum_layout(aggregation, rank, task, cohort)
    if not chosen:
        return whole
    by_component = aggregation == "per_component_mean"
    columns = [
        MaskGroup(
            (SumBlock(ROWS, component, n_items),), (SumBlock(WEIGHT, component, n_items),) if by_component else ()
        )
        for component in range(rank)
    ]
    shared = () if by_component else (MaskGroup((), whole.groups[0].counts),)

    def groups_of_ranks(ranks: IntArray, clients: IntArray, seed: int, round_index: int) -> BoolArray:
        drawn = draw_components(ranks, rank, clients, seed, round_index)
        return np.hstack([drawn.any(axis=1, keepdims=True)] * len(shared) + [drawn])

    return replace(whole, groups=(*shared, *columns), max_rank=rank, groups_of_ranks=groups_of_ranks)


def layout_of_weights(task: Task, cohort: int, rank: int, aggregation: Aggregation, *, chosen: bool) -> SumLayout:
    """Return a group for the vectors and one for each component of each weight; one for all if clients send all."""
    model = task.initial_parameters()
    factors = Factor.all_of(model, rank)
    vectors = {name: values for name, values in model.items() if name not in factors}
    shapes: dict[str, tuple[tuple[int, ...], Any]] = {WEIGHT: ((), np.float64)}
    shapes |= {TENSORS.name(name): (values.shape, values.dtype) for name, values in vectors.items()}
    groups = [
        MaskGroup(
            tuple(SumBlock(TENSORS.name(name), None, values.size) for name, values in vectors.items()),
            (SumBlock(WEIGHT, None, 1),),
        )
    ]
    divided = aggregation != "weighted"
    for name, factor in factors.items():
        key, divisor = TENSORS.name(name), COMPONENT_WEIGHTS.name(name)
        shapes[key] = ((factor.long, factor.rank), model[name].dtype)
        if divided:
            shapes[divisor] = ((factor.rank,), np.float64)
        groups += [
            MaskGroup((SumBlock(key, component, factor.long),), (SumBlock(divisor, component, 1),) * divided)
            for component in range(factor.rank)
        ]
    most = largest_weight(task, cohort)
    if not chosen:
        whole = MaskGroup(
            tuple(part for group in groups for part in group.values),
            tuple(part for group in groups for part in group.counts),
        )
        return SumLayout((whole,), shapes, most, cohort, one_weight=True)

    def groups_of_ranks(ranks: IntArray, clients: IntArray, seed: int, round_index: int) -> BoolArray:
        masks = [
            draw_components(ranks, factor.rank, clients, seed, round_index, name) for name, factor in factors.items()
        ]
        return np.hstack([(ranks > 0)[:, None], *masks])

    return SumLayout(tuple(groups), shapes, most, cohort, True, rank, groups_of_ranks)


class RankPolicy(Protocol):
    """A frozen model of how clients choose their rank."""

    @property
    def kind(self) -> str:
        """Its name in the catalog."""
        ...

    def ranks(
        self, profiles: Profiles, global_rank: int, bits_at_rank: IntArray, seed: int, round_index: int
    ) -> IntArray:
        """Return the rank of each client, 0..r_g [C]; a client of rank 0 sends nothing.

        `bits_at_rank` [C, r_g + 1] is the size of uncoded updates of rank 0..r_g.
        """
        ...


class UniformRank(Section):
    """Each client draws its rank from 1..r_g, independently in each round.

    Reference: Nguyen et al., WWW 2024 (arXiv:2401.03748), section 5.3 and Table 4.
    """

    kind: Literal["uniform"] = "uniform"

    def ranks(
        self, profiles: Profiles, global_rank: int, bits_at_rank: IntArray, seed: int, round_index: int
    ) -> IntArray:
        """Return a rank of 1..r_g for each client, [C]."""
        del bits_at_rank
        return self.draw(profiles.client, global_rank, seed, round_index)

    def draw(self, clients: IntArray, global_rank: int, seed: int, round_index: int) -> IntArray:
        """Draw the rank of each client, [C]; public, every party regenerates it from the seed."""
        keys = stream_keys(seed, "rank", round_index, clients)
        return 1 + uniform_below(keys, np.zeros(len(clients), dtype=np.int64), np.full(len(clients), global_rank))


class BandwidthRank(Section):
    """Each client takes the highest rank whose uncoded payload its uplink carries within `upload_seconds`.

    A client that cannot afford rank 1 sends nothing in this round; the ledger records rank 0.
    """

    kind: Literal["bandwidth"] = "bandwidth"
    upload_seconds: float = Field(1.0, gt=0, description="time that an upload may take")

    def ranks(
        self, profiles: Profiles, global_rank: int, bits_at_rank: IntArray, seed: int, round_index: int
    ) -> IntArray:
        """Return the highest rank of each client, [C], whose `bits_at_rank` [C, r_g + 1] its uplink carries in time."""
        del global_rank, seed, round_index
        budget = profiles.uplink_bits_per_second * self.upload_seconds
        return (bits_at_rank[:, 1:] <= budget[:, None]).sum(axis=1)


class ChannelRank(Section):
    """Each client takes the rank that serves best within the bits that the radio gives it in this round.

    With a quantiser in the codec rank and levels are chosen together (`channel.joint`); otherwise the rank is the
    highest that fits uncoded, or with all that `secure` adds. A client that cannot afford rank 1 sends nothing, and
    the ledger records rank 0. If the radio limits no client, all clients take r_g.
    """

    kind: Literal["channel"] = "channel"

    def ranks(
        self, profiles: Profiles, global_rank: int, bits_at_rank: IntArray, seed: int, round_index: int
    ) -> IntArray:
        """Return r_g for each client, [C]: the rank where nothing limits uploads."""
        del bits_at_rank, seed, round_index
        return np.full(len(profiles), global_rank)
