"""FedPara: its sizes and ranks are those of the paper's formulas, and its clients train as a plain loop does."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import per_client
from digits import digits, make_task, relative_error, run, train
from narrowcast.algorithms.codecs.messages import dense_wire_bits
from narrowcast.algorithms.federated.fedavg import FedAvg
from narrowcast.algorithms.federated.fedpara import FedPara, factorise, inner_rank, n_factor_values, products_of_arrays
from narrowcast.algorithms.local_training.batches import draw_schedule
from narrowcast.platform.contracts import Task
from narrowcast.platform.errors import UserError
from narrowcast.platform.models.networks import CNN, MLP
from narrowcast.platform.types import Arrays

COUNTS = [21, 8, 40, 3, 17, 8, 0, 30]
SHAPES = [(256, 256), (64, 10), (10, 128), (128, 1568), (256, 256, 3, 3), (32, 16, 5, 5), (100, 60, 7)]
SMALLER = [shape for shape in SHAPES if np.prod(shape) < 100_000]


def normal(*shape: int, scale: float = 1.0) -> np.ndarray:
    return np.random.default_rng(0).normal(0, scale, shape).astype(np.float32)


@pytest.mark.parametrize(
    ("shape", "rank", "values"),
    [((256, 256), 16, 16384), ((256, 256, 3, 3), 16, 20992)],  # 16K of 66K and 21K of 590K
)
def test_values_of_the_papers_table_1(shape: tuple[int, ...], rank: int, values: int) -> None:
    assert inner_rank(shape, 0.0) == rank
    assert n_factor_values(shape, rank) == values


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_gamma_goes_from_the_least_full_rank_to_as_many_values(shape: tuple[int, ...]) -> None:
    """The slow reference: all ranks, one after the other."""
    full = min(shape) if len(shape) == 2 else max(shape[:2])
    lowest = next(rank for rank in range(1, 1000) if rank * rank >= full)
    highest = max(rank for rank in range(1, 1000) if n_factor_values(shape, rank) <= np.prod(shape))
    assert inner_rank(shape, 0.0) == lowest
    assert inner_rank(shape, 1.0) == highest
    assert inner_rank(shape, 0.5) == round((lowest + highest) / 2)


@pytest.mark.parametrize("shape", [(7,), (), (3, 6), (16, 1, 5, 5)], ids=str)
def test_what_factors_do_not_make_smaller_stays_whole(shape: tuple[int, ...]) -> None:
    assert inner_rank(shape, 0.1) == 0
    assert list(factorise({"w": normal(*shape)}, 0.1, 0)) == ["w"]
    assert list(factorise({"w": np.zeros((64, 64), dtype=np.float32)}, 0.1, 0)) == ["w"]


@pytest.mark.parametrize("shape", SMALLER, ids=str)
@pytest.mark.parametrize("gamma", [0.0, 0.4])
def test_the_product_has_the_shape_the_variance_and_a_full_rank(shape: tuple[int, ...], gamma: float) -> None:
    whole = {"a.weight": normal(*shape, scale=0.05), "a.bias": normal(shape[0])}
    squares = []
    for seed in range(40):
        server = factorise(whole, gamma, seed)
        product = products_of_arrays(server)
        squares.append(np.mean(np.square(product["a.weight"])))
    assert sum(values.size for values in server.values()) == shape[0] + n_factor_values(shape, inner_rank(shape, gamma))
    assert set(product) == set(whole)
    assert np.array_equal(product["a.bias"], whole["a.bias"])
    assert product["a.weight"].shape == shape
    assert np.mean(squares) == pytest.approx(np.mean(np.square(whole["a.weight"])), rel=0.25)
    for axis in range(2):
        unfolded = np.moveaxis(product["a.weight"], axis, 0).reshape(shape[axis], -1).astype(np.float64)
        assert np.linalg.matrix_rank(unfolded, tol=1e-7) == min(unfolded.shape)


def test_the_rank_of_the_product_is_the_square_of_the_inner_one() -> None:
    random = np.random.default_rng(0)
    factors = {f"w/{name}": random.normal(size=(50, 3)) for name in ("X1", "X2", "Y1", "Y2")}
    assert np.linalg.matrix_rank(products_of_arrays(factors)["w"]) == 9


def in_a_plain_loop(task: Task, server: Arrays) -> Arrays:
    """The mean of the clients' factors after round 1, by torch's own optimiser on a module called with the products."""
    module, training = task.model.module(task.data), task.training
    models = []
    for client in np.flatnonzero(task.data.examples):
        factors = {name: torch.from_numpy(np.array(values)).requires_grad_() for name, values in server.items()}
        optimiser = torch.optim.SGD(factors.values(), training.learning_rate, training.momentum)
        one = np.array([client])
        keys = task.private_seed.stream_keys("shuffle", 1, one)
        schedule = draw_schedule(task.data.examples[one], np.array([training.epochs]), training.batch_size, keys)
        own = task.data.order[task.data.indptr[client] : task.data.indptr[client + 1]]
        for batch, size in zip(schedule.samples, schedule.sizes, strict=True):
            picked = task.data.train.take(own[batch[:size]])
            weights = {name: values for name, values in factors.items() if "/" not in name}
            for name in {name.split("/")[0] for name in factors if "/" in name}:
                halves = []
                for half in "12":
                    x, y = factors[f"{name}/X{half}"], factors[f"{name}/Y{half}"]
                    core = factors.get(f"{name}/T{half}")
                    halves.append(x @ y.T if core is None else torch.tensordot(x, torch.tensordot(y, core, ([1], [1])), ([1], [1])))  # fmt: skip  # noqa: E501
                weights[name] = halves[0] * halves[1]
            scores = torch.func.functional_call(module, weights, (torch.from_numpy(picked.features),))
            optimiser.zero_grad()
            nn.functional.cross_entropy(scores, torch.from_numpy(picked.labels)).backward()
            optimiser.step()
        models.append({name: values.detach().numpy() for name, values in factors.items()})
    weights_of_clients = task.data.examples[task.data.examples > 0]
    return {name: np.average([model[name] for model in models], axis=0, weights=weights_of_clients) for name in server}


@pytest.mark.parametrize(
    ("model", "images"), [(MLP(hidden=(32,)), False), (CNN(channels=(4, 8), hidden=16), True)], ids=["mlp", "cnn"]
)
@pytest.mark.parametrize("execution", ["batched", "per_client"])
def test_clients_train_the_factors_as_a_plain_loop_does(model: Any, images: bool, execution: str) -> None:
    task = make_task(digits(COUNTS, images=images), model, epochs=2, momentum=0.5, execution=execution)
    algorithm = FedPara()
    server = algorithm.init(task)
    assert any("/T1" in name for name in server) == images
    assert relative_error(run(algorithm, task).server, in_a_plain_loop(task, server)) <= 2e-5


def test_a_client_sends_and_receives_the_factors() -> None:
    task = make_task(digits(COUNTS), MLP(hidden=(64,)))
    algorithm = FedPara(gamma=0.0)
    values = 2 * 8 * (64 + 64) + 64 + 2 * 4 * (64 + 10) + 10
    assert sum(each.size for each in algorithm.init(task).values()) == values
    (result,) = train(algorithm, task)
    assert set(result.ledger.uplink_bits) == {0, dense_wire_bits(values)}
    assert algorithm.broadcast(algorithm.init(task), task, 1).full.wire_bits() == dense_wire_bits(values)


@pytest.mark.slow
def test_fedpara_learns_digits_as_well_as_fedavg() -> None:
    task = make_task(digits([175] * 8), MLP(hidden=(64,)), learning_rate=0.2)
    accuracies, bits = {}, {}
    for algorithm in (FedAvg(), FedPara(gamma=0.1)):
        state = run(algorithm, task, n_rounds=20, chunk_size=8)
        metrics = task.model.evaluate(algorithm.final(state.server), {}, task.data, "test")
        accuracies[algorithm.kind], bits[algorithm.kind] = metrics["accuracy"], state.uplink_bits
    assert accuracies["fedavg"] >= 0.85
    assert accuracies["fedpara"] >= accuracies["fedavg"] - 0.03  # 200 test samples: one standard deviation is 0.02
    assert bits["fedpara"] < 0.75 * bits["fedavg"]


def test_matrix_factorisation_is_refused() -> None:
    with pytest.raises(UserError, match="trains networks"):
        FedPara().check(per_client.make_task(per_client.synthetic([3, 20])))
