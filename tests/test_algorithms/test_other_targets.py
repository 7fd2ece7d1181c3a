"""Algorithms on numbers and tokens keep the laws that they keep on classes; training is the same in every mode."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from narrowcast.algorithms.federated.fedavg import FedAvg
from narrowcast.algorithms.federated.low_rank import SCoLR
from narrowcast.algorithms.local_training.gradients import batched_forward, chain_gradient
from narrowcast.algorithms.local_training.sgd import SGD
from narrowcast.laws import algorithm_cases, algorithm_laws
from narrowcast.laws.small_tasks import N_CLIENTS, numbers, sequences
from narrowcast.platform.contracts import Task
from narrowcast.platform.models.measures import CrossEntropy, Huber
from narrowcast.platform.models.networks import MLP, CharLSTM
from narrowcast.platform.rounds.fleet import LogNormalFleet
from narrowcast.platform.seeds import PrivateSeed
from narrowcast.platform.types import Chunk, LocalTerms

COUNTS = np.random.default_rng(1).integers(1, 18, N_CLIENTS)
MODELS = {"numbers": MLP(hidden=(16,), loss=Huber()), "tokens": CharLSTM(embedding_dim=3, hidden=6, layers=1)}
ALGORITHMS = {
    "quantised": FedAvg(codec=["error_feedback", {"kind": "quantise", "levels": 5}, "entropy"]),  # type: ignore[arg-type]
    "low_rank": SCoLR(rank=2),
}


def task_on(targets: str, **training: Any) -> Task:
    data = numbers(COUNTS) if targets == "numbers" else sequences(COUNTS)
    sgd = SGD(batch_size=4, epochs=2, **training)
    return Task(data, LogNormalFleet().profiles(data.examples, 0), MODELS[targets], sgd, 0, PrivateSeed.derived(0))


@dataclass(frozen=True)
class OnOtherTargets(algorithm_cases.AlgorithmCase):
    """An algorithm on numbers or tokens."""

    targets: str = "numbers"

    @cached_property
    def task(self) -> Task:
        return task_on(self.targets)


LAWS = (
    algorithm_laws.results_do_not_depend_on_the_placement_or_order_of_chunks,
    algorithm_laws.a_resumed_run_equals_the_uninterrupted_run,
)


@pytest.mark.parametrize(
    ("targets", "name"), [("numbers", "quantised"), ("numbers", "low_rank"), ("tokens", "low_rank")]
)
def test_an_algorithm_keeps_its_laws(targets: str, name: str) -> None:
    case = OnOtherTargets(ALGORITHMS[name], MODELS[targets], targets=targets)
    case.algorithm.check(case.task)
    for law in LAWS:
        law(case)


def test_batched_numbers_are_those_of_client_after_client() -> None:
    batched, each = (task_on("numbers", execution=mode) for mode in ("batched", "per_client"))
    server, clients = batched.model.init_server(batched.data, 0), np.arange(N_CLIENTS)
    updates = [task.training.train(server, Chunk(1, 0, clients, {}), task, LocalTerms()) for task in (batched, each)]
    for name, values in updates[0].changes.items():
        np.testing.assert_allclose(values, updates[1].changes[name], atol=1e-6)
    np.testing.assert_allclose(updates[0].loss, updates[1].loss, atol=1e-6)


@pytest.mark.parametrize("loss", [Huber(), CrossEntropy()], ids=lambda loss: loss.kind)
def test_the_closed_form_of_a_chain_is_the_gradient_of_the_loss(loss: Any) -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))
    parameters = {name: torch.randn(2, *values.shape) for name, values in module.named_parameters()}
    features, weights = torch.randn(2, 6, 5), torch.rand(2, 6)
    labels = torch.randint(0, 3, (2, 6)) if loss.kind == "cross_entropy" else torch.randn(2, 6, 3)
    gradient = chain_gradient(module, loss)
    assert gradient is not None
    found, losses = gradient(parameters, features, labels, weights)
    leaves = {name: values.clone().requires_grad_() for name, values in parameters.items()}
    outputs = batched_forward(module)(leaves, features)
    wanted = torch.stack([loss.per_sample(*each) for each in zip(outputs, labels, strict=True)])
    torch.testing.assert_close(losses, wanted.detach())
    for name, values in zip(leaves, torch.autograd.grad((wanted * weights).sum(), list(leaves.values())), strict=True):
        torch.testing.assert_close(found[name], values)
