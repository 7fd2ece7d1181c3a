"""Server optimizers: torch's own on the pseudo-gradient, slow references, and what stays on the server."""

from __future__ import annotations

from collections.abc import Callable
from math import sqrt
from typing import Any

import numpy as np
import pytest
import torch

from narrowcast.algorithms.federated.fedavg import FedAvg
from narrowcast.algorithms.federated.fedpara import FedPara
from narrowcast.algorithms.federated.fedprox import FedProx
from narrowcast.algorithms.federated.server_optimizer import (
    SERVER_ONLY,
    Adagrad,
    Adam,
    Momentum,
    ServerOptimizer,
    Yogi,
    initial_slots,
    optimizer_step,
)
from narrowcast.algorithms.secure.aggregation import SecureAggregation
from narrowcast.algorithms.secure.schemes import Masked
from narrowcast.laws import algorithm_cases, algorithm_laws
from narrowcast.laws.algorithm_cases import AlgorithmCase
from narrowcast.laws.small_tasks import PLAN, run, sha256, task_of
from narrowcast.platform.models.networks import MLP

RATE, STEPS = 0.3, 30
OPTIMIZERS = {
    "momentum": Momentum(momentum=0.8),
    "adagrad": Adagrad(beta1=0.5, tau=0.01),
    "yogi": Yogi(beta1=0.6, beta2=0.9, tau=0.01),
    "adam": Adam(beta1=0.6, beta2=0.9, tau=0.01),
    "corrected": Adam(beta1=0.6, beta2=0.9, tau=0.01, bias_correction=True),
}
ADAPTIVE = OPTIMIZERS.keys() - {"momentum"}
CASES = {
    name: case
    for name, case in algorithm_cases.cases(
        {each: FedAvg(server_optimizer=OPTIMIZERS[each]) for each in OPTIMIZERS}
    ).items()
    if name.startswith("mlp")
}
HALF = algorithm_laws.updates_of_half_weight_move_the_server_half_as_far


def moved(optimizer: ServerOptimizer, changes: np.ndarray) -> np.ndarray:
    """Return x after each of the mean changes [steps, n], [steps, n], in float64."""
    model, path = {"x": np.linspace(-1, 1, changes.shape[1])}, []
    server = {**model, **initial_slots(optimizer, model)}
    for change in changes:
        server = dict(optimizer_step(optimizer, RATE, {"x": server["x"]}, {"x": change}, server))
        path.append(server["x"])
    return np.array(path)


def of_torch(make: Callable[[list[torch.Tensor]], torch.optim.Optimizer], changes: np.ndarray) -> np.ndarray:
    """Return the same by an optimizer of torch, for which -Delta is the gradient."""
    x, path = torch.linspace(-1, 1, changes.shape[1], dtype=torch.float64), []
    optimizer = make([x])
    for change in changes:
        x.grad = torch.from_numpy(-change)
        optimizer.step()
        path.append(x.numpy().copy())
    return np.array(path)


@pytest.fixture
def changes() -> np.ndarray:
    return np.random.default_rng(3).normal(size=(STEPS, 7))


@pytest.mark.parametrize(
    ("optimizer", "make"),
    [
        (Momentum(momentum=0.8), lambda x: torch.optim.SGD(x, RATE, momentum=0.8)),
        (Momentum(momentum=0), lambda x: torch.optim.SGD(x, RATE)),
        (OPTIMIZERS["corrected"], lambda x: torch.optim.Adam(x, RATE, betas=(0.6, 0.9), eps=0.01)),
        (
            Adagrad(tau=0.01),
            lambda x: torch.optim.Adagrad(x, RATE, initial_accumulator_value=1e-4, eps=0.01),
        ),
    ],
    ids=["momentum", "sgd", "adam", "adagrad"],
)
def test_steps_are_those_of_torch(
    optimizer: ServerOptimizer, make: Callable[[list[torch.Tensor]], torch.optim.Optimizer], changes: np.ndarray
) -> None:
    assert np.abs(moved(optimizer, changes) - of_torch(make, changes)).max() <= 1e-12


def one_by_one(kind: str, values: dict[str, float], changes: np.ndarray) -> list[float]:
    """Return x after each change of one number: Algorithm 2 of Reddi et al., line by line."""
    x, m, v, path = -1.0, 0.0, values["tau"] ** 2, []
    for delta in changes[:, 0].tolist():
        m = values["beta1"] * m + (1 - values["beta1"]) * delta
        if kind == "adagrad":
            v = v + delta**2
        elif kind == "yogi":
            v = v - (1 - values["beta2"]) * delta**2 * (1.0 if v > delta**2 else -1.0)
        else:
            v = values["beta2"] * v + (1 - values["beta2"]) * delta**2
        x += RATE * m / (sqrt(v) + values["tau"])
        path.append(x)
    return path


@pytest.mark.parametrize("kind", ["adagrad", "yogi", "adam"])
def test_steps_are_those_of_the_paper(kind: str, changes: np.ndarray) -> None:
    wanted = one_by_one(kind, OPTIMIZERS[kind].model_dump(), changes)
    assert np.abs(moved(OPTIMIZERS[kind], changes)[:, 0] - wanted).max() <= 1e-12


@pytest.mark.parametrize("law", (*algorithm_laws.UNCODED[:3], *algorithm_laws.LAWS), ids=lambda law: law.__name__)
@pytest.mark.parametrize("name", CASES)
def test_algorithms_with_a_server_optimizer_keep_the_laws(name: str, law: Callable[[AlgorithmCase], None]) -> None:
    if law is not HALF or name.removeprefix("mlp-") not in ADAPTIVE:  # whose step does not grow with the change
        law(CASES[name])


@pytest.mark.parametrize("algorithm", [FedAvg(), FedProx(mu=0.1), FedPara(gamma=0.3)], ids=lambda each: each.kind)
def test_no_momentum_is_the_plain_step(algorithm: Any) -> None:
    task, still = task_of(MLP(hidden=(16,))), algorithm.model_copy(update={"server_optimizer": Momentum(momentum=0)})
    assert sha256(algorithm, run(PLAN, algorithm, task)) == sha256(still, run(PLAN, still, task))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_slots_stay_on_the_server(name: str) -> None:
    task, plain = task_of(MLP(hidden=(16,))), FedAvg()
    algorithm = FedAvg(server_optimizer=OPTIMIZERS[name])
    ours, theirs = run(PLAN, algorithm, task), run(PLAN, plain, task)
    state = ours[-1].state
    assert state is not None
    assert SERVER_ONLY.of(state.server)
    assert algorithm.final(state.server).keys() == plain.init(task).keys()
    assert algorithm.broadcast(state.server, task, 9).arrays.keys() == plain.init(task).keys()
    for outcome, other in zip(ours, theirs, strict=True):
        assert outcome.ledger.downlink_bits.tolist() == other.ledger.downlink_bits.tolist()
        assert outcome.ledger.uplink_bits.tolist() == other.ledger.uplink_bits.tolist()


def test_slots_are_no_part_of_a_secure_sum() -> None:
    task, algorithm = task_of(MLP(hidden=(16,))), FedAvg(server_optimizer=OPTIMIZERS["adam"])
    secure = SecureAggregation(algorithm, Masked(), 8)
    secure.check(task)
    assert algorithm.sum_layout(task, 8).shapes == FedAvg().sum_layout(task, 8).shapes
    assert SERVER_ONLY.of(secure.init(task))
