"""Two slips of released codes, written as algorithms: a law finds the one, and `aggregation_error` shows the other."""

from __future__ import annotations

from typing import Any, Literal

import pytest

from digits import digits, make_task, train
from narrowcast.algorithms.client.sums import EACH, TENSORS, WEIGHT
from narrowcast.algorithms.federated.fedavg import Averaging
from narrowcast.algorithms.federated.lora import LoRA
from narrowcast.algorithms.federated.merged_adapters import BASE
from narrowcast.laws import algorithm_cases, algorithm_laws
from narrowcast.laws.law import LawBrokenError
from narrowcast.platform.models.adapters import Adapters
from narrowcast.platform.models.networks import MLP
from narrowcast.platform.types import Arrays


class FirstClient(Averaging):
    """A FedIT whose running sum goes to another name in the loop, so that the first client's term is all it returns."""

    kind: Literal["first_client"] = "first_client"

    @property
    def sums_up(self) -> bool:
        return False

    def mean_change(self, server: Arrays, total: Arrays, task: Any, round_index: int) -> Arrays | None:
        each = EACH.of(total)
        share = each[WEIGHT][0] / each[WEIGHT].sum()
        return {name: (share * values[0]).astype(values.dtype) for name, values in TENSORS.of(each).items()}


class Transposed(LoRA):
    """A FedEx-LoRA that adds the residual of a layer transposed, as layers need that hold their weights so."""

    def step(self, server: Arrays, broadcast: Arrays, total: Arrays, task: Any, round_index: int) -> Arrays:
        after, before = super().step(server, broadcast, total, task, round_index), BASE.of(server)
        return {
            **after,
            **BASE.add({name: before[name] + (now - before[name]).T for name, now in BASE.of(after).items()}),
        }


def test_a_mean_of_the_first_client_alone_depends_on_which_chunk_that_is_in() -> None:
    case = algorithm_cases.AlgorithmCase(FirstClient(), algorithm_cases.MODELS["adapters"])
    with pytest.raises(LawBrokenError, match="the models differ by more than rounding"):
        algorithm_laws.chunk_sizes_change_results_by_rounding_alone(case)


def test_a_transposed_residual_misses_the_mean_product_by_more_than_no_residual() -> None:
    model = Adapters(base=MLP(hidden=(16, 16)), rank=3, targets=["3.weight"])
    task = make_task(digits([40, 33, 20]), model, epochs=3, learning_rate=0.5)
    errors = []
    for algorithm in (LoRA(combine="residual"), LoRA(aggregation_error=True), Transposed(combine="residual")):
        server = algorithm.init(task)
        broadcast, total = (
            algorithm.broadcast(server, task, 1).arrays,
            algorithm.fold([r.partial for r in train(algorithm, task)]),
        )
        after = algorithm.step(server, broadcast, total, task, 1)
        errors.append(algorithm.step_metrics(server, after, total, task)["aggregation_error"])
    exact, means, transposed = errors
    assert exact < 1e-6
    assert 1e-3 < means < transposed
