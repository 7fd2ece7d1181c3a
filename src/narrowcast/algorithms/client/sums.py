"""The sums of a round: weights of clients, partial sums of chunks, divisors; their layout under secure aggregation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Annotated, Any, Literal, Self

import numpy as np
from numpy.typing import DTypeLike, NDArray
from pydantic import Field

from narrowcast.algorithms.local_training.factorisation_kernels import sum_rows
from narrowcast.platform.compiled import compiled, read_only
from narrowcast.platform.config.files import Section
from narrowcast.platform.contracts import Task
from narrowcast.platform.errors import UserError
from narrowcast.platform.models.model import ITEM_FACTORS
from narrowcast.platform.seeds import generator
from narrowcast.platform.types import Arrays, BoolArray, Chunk, FloatArray, IntArray, PrefixedArrays, RowChanges, scaled

Weights = Annotated[Literal["examples", "equal"], Field(description="weights of the clients in the mean")]
"""A client's weight in the mean of tensors: its training examples, as in FedAvg, or 1."""

Aggregation = Annotated[
    Literal["per_item_mean", "per_component_mean", "weighted"], Field(description="divisor of the sum of a row")
]
"""The divisor of a row's sum.

`per_item_mean`: the number of clients that touched the row, as in the code released with CoLR (each client's row mask
is then sent and paid for). `per_component_mean`: for each entry of A, the number of clients that sent that component of
the row, so that low ranks do not shrink the mean. `weighted`: sum N_u A_u / sum N_u over the cohort, Algorithm 1 of
Nguyen et al., WWW 2024.
"""


def refuse_weights(kind: str, weights: Weights) -> None:
    """Raise `UserError` for an algorithm that defines the clients' weights itself."""
    if weights != "equal":
        raise UserError(f"algorithm.weights = {weights}: {kind} has weights of its own; leave weights out")


def tensor_weights(weights: Weights, task: Task, chunk: Chunk) -> FloatArray:
    """Return each client's weight in the mean of tensors, [C], times its draws."""
    examples = task.data.examples[chunk.clients].astype(np.float64)
    counted = examples if weights == "examples" else np.ones(len(examples))
    return counted if chunk.draws is None else counted * chunk.draws


def row_weights(aggregation: Aggregation, task: Task, chunk: Chunk) -> NDArray[np.float32]:
    """Return each client's weight in the sum of rows, [C]."""
    weights = task.data.examples[chunk.clients] if aggregation == "weighted" else np.ones(len(chunk.clients))
    return weights.astype(np.float32)


WEIGHT = "weight"
"""The divisor of a sum: a number, or a column for each row that clients changed."""
TENSORS, COMPONENT_WEIGHTS = PrefixedArrays("sum/"), PrefixedArrays("component weight/")
"""The arrays of a sum of tensors, by tensor."""
ROWS = TENSORS.name(ITEM_FACTORS)
"""The array of a sum of rows of the item matrix."""
EACH = PrefixedArrays("each/")
"""Arrays [k, ...] of the clients that delivered, which are not added up but put one after the other."""
CLIENT = "client"
"""The array of `EACH` with the numbers of these clients, for algorithms that take them in order."""


def each_in_order(total: Arrays) -> dict[str, NDArray[Any]]:
    """Return the arrays of `EACH` in ascending order of `CLIENT`, whatever the order of the chunks."""
    each = EACH.of(total)
    order = np.argsort(each[CLIENT])
    return {name: values[order] for name, values in each.items()}


def add_up(partials: Sequence[Arrays]) -> Arrays:
    """Add the chunks' partial sums in the order of the chunks, so that rounding does not depend on timing.

    Arrays of `EACH` are concatenated in that order.
    """
    each = {name: np.concatenate([partial[name] for partial in partials]) for name in EACH.add(EACH.of(partials[0]))}
    first, *rest = (EACH.without(partial) for partial in partials)
    if not rest:
        return {**first, **each}
    with np.errstate(over="ignore"):  # a sum that leaves the finite numbers ends the run with advice
        total = {name: np.asarray(values + rest[0][name]) for name, values in first.items()}
        for partial in rest[1:]:
            for name, values in partial.items():
                total[name] += values
    return {**total, **each}


@compiled()
def _divide(total: NDArray[np.floating], weight: FloatArray, mean: NDArray[np.floating]) -> None:
    """Write total / max(weight, 1), computed in float64; the weight is [N, 1], [N, k], [1, k] or [1, 1]."""
    for row in range(len(total)):
        divisors = weight[row if len(weight) > 1 else 0]
        if len(divisors) == 1:
            divisor = np.maximum(divisors[0], 1.0)
            for column in range(total.shape[1]):
                mean[row, column] = total[row, column] / divisor
        else:
            for column in range(total.shape[1]):
                mean[row, column] = total[row, column] / np.maximum(divisors[column], 1.0)


@dataclass(frozen=True)
class TensorSum:
    """The weighted sum of clients' tensors, or of rows of the item matrix, and the divisor of its mean.

    `weight` is a number; of a sum of rows [N, k] it is [N, 1], [N, k] or [1, 1]. `component_weights` [r] has the weight
    of the clients that sent each column of a tensor, for tensors of which clients send some columns.
    """

    tensors: Arrays
    weight: NDArray[np.float64]
    component_weights: Arrays = field(default_factory=dict)

    @classmethod
    def of(cls, arrays: Arrays) -> Self:
        """Read the sum from its arrays."""
        weight = np.asarray(arrays[WEIGHT], dtype=np.float64)
        return cls(TENSORS.of(arrays), weight, COMPONENT_WEIGHTS.of(arrays))

    def arrays(self) -> Arrays:
        """Return the sum under the names of its arrays."""
        return {
            **TENSORS.add(self.tensors),
            **COMPONENT_WEIGHTS.add(self.component_weights),
            WEIGHT: self.weight,
        }

    def mean(self, name: str) -> NDArray[Any]:
        """Return the weighted mean of one tensor; 0 where no client delivered anything.

        A divisor of its own, of a row or a column, is a count or a number of examples, so that it is 0 or at least 1.
        """
        total, divisor = np.asarray(self.tensors[name]), self.component_weights.get(name, self.weight)
        if not np.ndim(divisor):
            return total / (float(divisor) or 1.0)
        mean = np.empty(total.shape, total.dtype)
        _divide(read_only(total, total.dtype), read_only(np.atleast_2d(divisor), np.float64), mean)
        return mean

    def means(self) -> dict[str, NDArray[Any]]:
        """Return the weighted mean of every tensor."""
        return {name: self.mean(name) for name in self.tensors}


def weighted_sums(tensors: Arrays, weight: NDArray[Any]) -> dict[str, NDArray[Any]]:
    """Return sum_u w_u y_u of each tensor [C, ...], weight [C]; clients of weight 0 may hold anything."""
    if not weight.all():
        counted = np.flatnonzero(weight)
        weight, tensors = weight[counted], {name: values[counted] for name, values in tensors.items()}
    sums = {}
    with np.errstate(over="ignore", invalid="ignore"):
        for name, values in tensors.items():
            shape = values.shape[1:]
            rows = values.reshape(len(values), prod(shape))
            sums[name] = np.dot(weight.astype(values.dtype)[None], rows).reshape(shape)
    return sums


Summand = NDArray[Any] | RowChanges
"""Values of each client [C, ...] that are added up, or changes of some rows of a tensor."""


def sum_of_rows(changes: RowChanges, weight: NDArray[Any], delivered: BoolArray) -> NDArray[Any]:
    """Return sum_u w_u change_u [n_rows, k] over the clients that delivered, in the type of the changes.

    Shapes: weight and delivered [C]. A product is rounded to the wider type of weight and change.
    """
    if changes.total is not None:
        return changes.total
    order = slice(None) if changes.order is None else changes.order
    counted = delivered[order] & (weight[order] != 0)
    total, _ = sum_rows(
        *(changes.n_rows, changes.rows, changes.row_starts, changes.values, weight[order], counted),
        dtype=changes.values.dtype,
    )
    return total


def stale_sum(partial: Arrays, factor: float) -> Arrays:
    """Return a partial sum with its tensors times `factor`, and their weights unchanged."""
    return {**partial, **TENSORS.add({name: values * factor for name, values in TENSORS.of(partial).items()})}


class Privacy(Section):
    """Changes of bounded norm, and Gaussian noise on their sum, over a fixed divisor.

    Reference: McMahan, Ramage, Talwar and Zhang, Learning Differentially Private Recurrent Language Models, ICLR 2018
    (arXiv:1710.06963), Algorithm 1 with flat clipping, for clients of equal weight.

    The noise is simulated: it follows from the run's public seed. Nothing computes epsilon: that needs an accountant,
    for `noise_multiplier`, the rate of `sampling: poisson` and the number of rounds. A codec acts after the clip and
    may enlarge a norm again. A round in which nobody delivers has no noise.
    """

    clip: float = Field(1.0, gt=0, allow_inf_nan=False, description="S, largest L2 norm of a client's change")
    noise_multiplier: float = Field(
        1.0, ge=0, allow_inf_nan=False, description="z; the sum has noise of standard deviation z clip"
    )
    expected_clients: float | None = Field(
        None, gt=0, allow_inf_nan=False, description="divisor of the sum, qW of the paper; null: those that delivered"
    )

    def clipped(self, tensors: Arrays) -> Arrays:
        """Return tensors [C, ...] of which each client's have, together, a norm of at most `clip`."""
        rows = [values.reshape(len(values), -1).astype(np.float64) for values in tensors.values()]
        norms = np.sqrt(sum(np.square(values).sum(axis=1) for values in rows))
        return scaled(tensors, np.minimum(1.0, self.clip / np.maximum(norms, self.clip)))

    def noisy(self, total: Arrays, task: Task, round_index: int) -> Arrays:
        """Return a sum of tensors with noise, and with the fixed divisor."""
        if not float(total[WEIGHT]):
            return total
        noise = {
            name: generator(task.seed, f"privacy {name}", round_index).standard_normal(values.shape)
            for name, values in TENSORS.of(total).items()
        }
        deviation = self.noise_multiplier * self.clip
        tensors = {
            name: (values + deviation * noise[name]).astype(values.dtype) for name, values in TENSORS.of(total).items()
        }
        weight = total[WEIGHT] if self.expected_clients is None else np.array(self.expected_clients)
        return {**total, **TENSORS.add(tensors), WEIGHT: weight}


@dataclass(frozen=True)
class SumBlock:
    """One array of a partial sum, or one column of it; `size` is its number of entries."""

    key: str
    column: int | None
    size: int

    def of(self, arrays: Arrays) -> NDArray[Any]:
        """Return the entries in a partial sum, [size]; a view where the array's memory allows one."""
        values = np.asarray(arrays[self.key])
        return values.reshape(-1) if self.column is None else values[..., self.column].reshape(-1)


@dataclass(frozen=True)
class MaskGroup:
    """Entries that a client sends all or none of: signed `values`, and non-negative `counts` that divide them."""

    values: tuple[SumBlock, ...] = ()
    counts: tuple[SumBlock, ...] = ()

    @property
    def n_values(self) -> int:
        """The number of signed entries."""
        return sum(part.size for part in self.values)

    @property
    def n_counts(self) -> int:
        """The number of count entries."""
        return sum(part.size for part in self.counts)


GroupsOfRanks = Callable[[IntArray, IntArray, int, int], BoolArray]
"""(ranks [C], clients [C], seed, round) -> the groups that each client sends, [C, groups]."""


@dataclass(frozen=True)
class SumLayout:
    """The groups of entries of a round's sum, and bounds on what is added up.

    An algorithm that declares it, by `sum_layout`, can run under secure aggregation, which adds up integers unread.

    `shapes` maps each array of the algorithm's partial sum to its shape and dtype. `max_clients` and `max_weight` bound
    the number of clients of a round and the sum of their weights. With `one_weight` all counts of a client equal its
    weight, which its values carry as a factor. `n_items` is the number of items if counts are by item, 0 otherwise.
    `max_rank` is 0 for updates without a rank; otherwise
    `groups_of_ranks` gives the groups that clients of ranks 0..max_rank send. None: every client sends all groups.
    """

    groups: tuple[MaskGroup, ...]
    shapes: dict[str, tuple[tuple[int, ...], DTypeLike]]
    max_weight: int
    max_clients: int
    one_weight: bool = False
    max_rank: int = 0
    groups_of_ranks: GroupsOfRanks | None = None
    n_items: int = 0

    def sent_groups(self, ranks: IntArray, clients: IntArray, seed: int, round_index: int) -> BoolArray:
        """Return the groups that each client sends, [C, groups]; public, every party regenerates them from the seed."""
        if self.groups_of_ranks is None:
            return np.ones((len(clients), len(self.groups)), dtype=bool)
        return self.groups_of_ranks(ranks, clients, seed, round_index)

    def zeros(self) -> dict[str, NDArray[Any]]:
        """Return the partial sum over no clients."""
        return {name: np.zeros(shape, dtype=kind) for name, (shape, kind) in self.shapes.items()}


def largest_weight(task: Task, cohort: int) -> int:
    """Return the most training examples that a cohort of this size can have."""
    return int(np.sort(task.data.examples)[-cohort:].sum())


def row_sum_layout(aggregation: Aggregation, columns: int, task: Task, cohort: int) -> SumLayout:
    """Return the layout of a sum of rows [N, columns] of which a client sends all columns or nothing."""
    n_items, weighted = task.data.n_items, aggregation == "weighted"
    divisor = (1, 1) if weighted else (n_items, columns if aggregation == "per_component_mean" else 1)
    return SumLayout(
        groups=(
            MaskGroup((SumBlock(ROWS, None, n_items * columns),), (SumBlock(WEIGHT, None, divisor[0] * divisor[1]),)),
        ),
        shapes={ROWS: ((n_items, columns), np.float32), WEIGHT: (divisor, np.float64)},
        max_weight=largest_weight(task, cohort) if weighted else cohort,
        max_clients=cohort,
        one_weight=weighted,
        n_items=0 if weighted else n_items,
    )


def tensor_sum_layout(tensors: Arrays, max_weight: int, max_clients: int) -> SumLayout:
    """Return the layout of a sum of tensors like these, of which a client sends all or nothing, and of its weight."""
    named = {TENSORS.name(name): np.asarray(values) for name, values in tensors.items()}
    shapes: dict[str, tuple[tuple[int, ...], DTypeLike]] = {
        name: (values.shape, values.dtype) for name, values in named.items()
    }
    shapes[WEIGHT] = ((), np.float64)
    values = tuple(SumBlock(name, None, values.size) for name, values in named.items())
    group = MaskGroup(values, (SumBlock(WEIGHT, None, 1),))
    return SumLayout((group,), shapes, max_weight, max_clients, one_weight=True)


def row_columns_layout(
    aggregation: Aggregation, columns: int, task: Task, cohort: int, drawn: GroupsOfRanks | None
) -> SumLayout:
    """Return the layout of a sum of rows [N, columns] of which clients send the columns that are `drawn`; None for all.

    There is a group for each column, and one for the counts that columns share; one for all if clients send all.
    """
    whole = row_sum_layout(aggregation, columns, task, cohort)
    if drawn is None:
        return whole
    n_items, by_component = task.data.n_items, aggregation == "per_component_mean"
    groups = [
        MaskGroup((SumBlock(ROWS, column, n_items),), (SumBlock(WEIGHT, column, n_items),) * by_component)
        for column in range(columns)
    ]
    shared = () if by_component else (MaskGroup((), whole.groups[0].counts),)

    def groups_of_ranks(ranks: IntArray, clients: IntArray, seed: int, round_index: int) -> BoolArray:
        sent = drawn(ranks, clients, seed, round_index)
        return np.hstack([sent.any(axis=1, keepdims=True)] * len(shared) + [sent])

    return replace(whole, groups=(*shared, *groups), max_rank=columns, groups_of_ranks=groups_of_ranks)


def tensor_columns_layout(
    whole: Arrays,
    by_column: Arrays,
    aggregation: Aggregation,
    task: Task,
    cohort: int,
    max_rank: int,
    drawn: Sequence[GroupsOfRanks] | None,
) -> SumLayout:
    """Return the layout of a sum of tensors like `whole`, and like `by_column` [long, r], which are sent by column.

    Of the latter clients send the columns that are `drawn` of each; None for all. There is a group for the former, and
    one for each column; one for all if clients send all.
    """
    shapes: dict[str, tuple[tuple[int, ...], DTypeLike]] = {WEIGHT: ((), np.float64)}
    shapes |= {TENSORS.name(name): (values.shape, values.dtype) for name, values in whole.items()}
    groups = [
        MaskGroup(
            tuple(SumBlock(TENSORS.name(name), None, values.size) for name, values in whole.items()),
            (SumBlock(WEIGHT, None, 1),),
        )
    ]
    divided = aggregation != "weighted"
    for name, values in by_column.items():
        (long, columns), key, divisor = values.shape, TENSORS.name(name), COMPONENT_WEIGHTS.name(name)
        shapes[key] = (values.shape, values.dtype)
        if divided:
            shapes[divisor] = ((columns,), np.float64)
        groups += [
            MaskGroup((SumBlock(key, column, long),), (SumBlock(divisor, column, 1),) * divided)
            for column in range(columns)
        ]
    most = largest_weight(task, cohort)
    if drawn is None:
        joined = MaskGroup(
            tuple(part for group in groups for part in group.values),
            tuple(part for group in groups for part in group.counts),
        )
        return SumLayout((joined,), shapes, most, cohort, one_weight=True)

    def groups_of_ranks(ranks: IntArray, clients: IntArray, seed: int, round_index: int) -> BoolArray:
        sent = [columns(ranks, clients, seed, round_index) for columns in drawn]
        return np.hstack([(ranks > 0)[:, None], *sent])

    return SumLayout(tuple(groups), shapes, most, cohort, True, max_rank, groups_of_ranks)
