"""The layout of the sum of an algorithm's updates."""

from __future__ import annotations

from typing import Any

import numpy as np

from narrowcast.algorithms.federated.colr import LowRank
from narrowcast.algorithms.federated.dense_updates import SUM as TENSOR
from narrowcast.algorithms.federated.dense_updates import WEIGHT as TENSOR_WEIGHT
from narrowcast.algorithms.federated.fedavg import Averaging
from narrowcast.algorithms.federated.fedmf import FedMF
from narrowcast.algorithms.federated.low_rank_network import COMPONENT_WEIGHT, factors_of
from narrowcast.algorithms.federated.row_updates import SUM, WEIGHT
from narrowcast.algorithms.federated.scolr import SCoLR
from narrowcast.algorithms.federated.shared_basis import draw_components
from narrowcast.algorithms.federated.sum_layout import Group, Part, SumLayout, Summable, largest_weight
from narrowcast.platform.contracts import Task
from narrowcast.platform.errors import UserError
from narrowcast.platform.models.matrix_factorisation import MatrixFactorisation
from narrowcast.platform.types import BoolArray, IntArray


def layout_of(algorithm: Any, task: Task, cohort: int) -> SumLayout:
    """How the sum of this algorithm's updates is laid out; raises `UserError` where what it needs is not a sum."""
    if codec := getattr(algorithm, "codec", ()):
        raise UserError(
            f"secure: what algorithm.codec ({codec[0].kind}) sends cannot be added up under encryption; leave out "
            "algorithm.codec and set secure.bits"
        )
    cohort = min(cohort, task.data.n_clients)
    if isinstance(algorithm, Summable) and (layout := algorithm.sum_layout(task, cohort)):
        return layout
    if isinstance(algorithm, FedMF | LowRank) and isinstance(task.model, MatrixFactorisation):
        return _rows(algorithm, task, cohort)
    if isinstance(algorithm, LowRank):
        return _components(algorithm, task, cohort)
    if isinstance(algorithm, Averaging):
        return _tensors(algorithm, task, cohort)
    raise UserError(
        f"secure: {algorithm.kind} on {task.model.kind} needs more than the weighted sum of the clients' updates; use "
        "fedavg, fedprox, fedpara, colr or scolr, or secure=none"
    )


def _rows(algorithm: FedMF | LowRank, task: Task, cohort: int) -> SumLayout:
    n_items = task.data.n_items
    assert isinstance(task.model, MatrixFactorisation), "layout_of() has seen to it"
    width = algorithm.rank if isinstance(algorithm, LowRank) else task.model.embedding_dim
    weighted, by_component = algorithm.aggregation == "weighted", algorithm.aggregation == "per_component_mean"
    columns = 1 if weighted or not by_component else width
    divisor = (1, 1) if weighted else (n_items, columns)
    shapes: dict[str, tuple[tuple[int, ...], Any]] = {
        SUM: ((n_items, width), np.float32),
        WEIGHT: (divisor, np.float64),
    }
    most = largest_weight(task, cohort) if weighted else cohort
    if not isinstance(algorithm, SCoLR):
        whole = Group((Part(SUM, None, n_items * width),), (Part(WEIGHT, None, divisor[0] * divisor[1]),))
        return SumLayout((whole,), shapes, most, cohort, weighted)
    components = [
        Group((Part(SUM, each, n_items),), (Part(WEIGHT, each, n_items),) if by_component else ())
        for each in range(width)
    ]
    shared = () if by_component else (Group((), (Part(WEIGHT, None, divisor[0]),)),)

    def groups_of_ranks(ranks: IntArray, clients: IntArray, seed: int, round_index: int) -> BoolArray:
        own = draw_components(ranks, width, clients, seed, round_index)
        return np.hstack([own.any(axis=1, keepdims=True)] * len(shared) + [own])

    return SumLayout((*shared, *components), shapes, most, cohort, weighted, width, groups_of_ranks)


def _components(algorithm: LowRank, task: Task, cohort: int) -> SumLayout:
    """Of a network: the vectors, and each component of each weight, with the examples of the clients that sent it."""
    model = task.model.init_server(task.data, task.seed)
    factors = factors_of(algorithm, model)
    vectors = {name: values for name, values in model.items() if name not in factors}
    shapes: dict[str, tuple[tuple[int, ...], Any]] = {TENSOR_WEIGHT: ((), np.float64)}
    shapes |= {TENSOR + name: (values.shape, np.float32) for name, values in vectors.items()}
    shared = Group(
        tuple(Part(TENSOR + name, None, values.size) for name, values in vectors.items()),
        (Part(TENSOR_WEIGHT, None, 1),),
    )
    components = []
    for name, factor in factors.items():
        shapes[TENSOR + name] = ((factor.long, factor.rank), np.float32)
        divided = algorithm.aggregation != "weighted"
        if divided:
            shapes[COMPONENT_WEIGHT + name] = ((factor.rank,), np.float64)
        components += [
            Group((Part(TENSOR + name, each, factor.long),), (Part(COMPONENT_WEIGHT + name, each, 1),) * divided)
            for each in range(factor.rank)
        ]
    most = largest_weight(task, cohort)
    if not isinstance(algorithm, SCoLR):
        groups = (shared, *components)
        whole = Group(
            tuple(part for group in groups for part in group.values),
            tuple(part for group in groups for part in group.counts),
        )
        return SumLayout((whole,), shapes, most, cohort, one_weight=True)

    def groups_of_ranks(ranks: IntArray, clients: IntArray, seed: int, round_index: int) -> BoolArray:
        own = [draw_components(ranks, each.rank, clients, seed, round_index, name) for name, each in factors.items()]
        return np.hstack([(ranks > 0)[:, None], *own])

    return SumLayout((shared, *components), shapes, most, cohort, True, algorithm.rank, groups_of_ranks)


def _tensors(algorithm: Averaging, task: Task, cohort: int) -> SumLayout:
    tensors = {name: np.asarray(values) for name, values in algorithm.init(task).items()}
    shapes: dict[str, tuple[tuple[int, ...], Any]] = {
        TENSOR + name: (values.shape, values.dtype) for name, values in tensors.items()
    }
    values = tuple(Part(TENSOR + name, None, values.size) for name, values in tensors.items())
    shapes[TENSOR_WEIGHT] = ((), np.float64)
    most = largest_weight(task, cohort) if algorithm.weights == "examples" else cohort
    return SumLayout((Group(values, (Part(TENSOR_WEIGHT, None, 1),)),), shapes, most, cohort, one_weight=True)
