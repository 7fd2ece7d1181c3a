"""`batch_size: all`: a client takes one step per epoch, on the gradient of the mean loss over all of its samples."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import psutil
import pytest

from digits import digits, make_task, relative_error, run
from narrowcast.algorithms.federated.fedavg import FedAvg
from narrowcast.experiment import load_experiment
from narrowcast.platform.contracts import Task
from narrowcast.platform.errors import UnresumableFailure, UserError
from narrowcast.platform.models.networks import Softmax
from narrowcast.platform.types import Arrays, Chunk, LocalTerms

COUNTS = [21, 8, 40, 3, 17, 8, 0, 30]


def federated_sgd(task: Task, server: Arrays, rate: float, n_rounds: int) -> dict[str, np.ndarray]:
    """x - rate * sum n_u / n grad F_u(x), round by round, of multinomial logistic regression in float64."""
    (weight_name, weight), (bias_name, bias) = ((name, np.array(each, np.float64)) for name, each in server.items())
    data = task.data
    for _ in range(n_rounds):
        weight_gradient, bias_gradient = np.zeros_like(weight), np.zeros_like(bias)
        for client, count in enumerate(data.examples):
            own = data.order[data.indptr[client] : data.indptr[client + 1]]
            for row in own:
                x, label = data.train.features[row].astype(np.float64), data.train.labels[row]
                scores = weight @ x + bias
                error = np.exp(scores - scores.max())
                error /= error.sum()
                error[label] -= 1
                share = count / data.examples.sum() / count
                weight_gradient += share * np.outer(error, x)
                bias_gradient += share * error
        weight, bias = weight - rate * weight_gradient, bias - rate * bias_gradient
    return {weight_name: weight, bias_name: bias}


@pytest.mark.parametrize("execution", ["batched", "per_client"])
def test_fedavg_of_one_epoch_of_full_batches_is_federated_sgd(execution: str) -> None:
    task = make_task(digits(COUNTS), Softmax(), batch_size="all", learning_rate=0.5, execution=execution)
    server = task.model.init_server(task.data, task.seed)
    state = run(FedAvg(), task, n_rounds=5)
    assert relative_error(state.server, federated_sgd(task, server, 0.5, 5)) <= 3e-6


@pytest.mark.parametrize("execution", ["batched", "per_client"])
def test_pulled_clients_and_those_within_a_radius_take_their_steps_and_the_others_plain_ones(execution: str) -> None:
    task = make_task(digits(COUNTS), Softmax(), batch_size="all", learning_rate=0.5, epochs=4, execution=execution)
    clients, pulls, radii = np.array([0, 2, 4, 7]), np.array([0.9, 0, 0, 0.4]), np.array([np.inf, 0.05, np.inf, 0.1])
    server, chunk = task.model.init_server(task.data, task.seed), Chunk(1, 0, clients, {})
    plain = task.training.train(server, chunk, task, LocalTerms()).changes
    held = task.training.train(server, chunk, task, LocalTerms(pulls=pulls, radii=radii)).changes
    for place, client in enumerate(clients):
        alone = replace(
            task.data,
            indptr=np.array([0, COUNTS[client]]),
            order=task.data.order[slice(*task.data.indptr[client : client + 2])],
        )
        start = {name: np.array(values, np.float64) for name, values in server.items()}
        y = dict(start)
        for _ in range(4):
            stepped = federated_sgd(replace(task, data=alone), y, 0.5, 1)
            moved = {name: stepped[name] - 0.5 * pulls[place] * (y[name] - start[name]) - start[name] for name in y}
            length = np.sqrt(sum((values**2).sum() for values in moved.values()))
            y = {name: start[name] + min(1, radii[place] / length) * values for name, values in moved.items()}
        wanted = {name: y[name] - start[name] for name in y}
        assert relative_error({name: values[place] for name, values in held.items()}, wanted) <= 1e-5
        same = all(np.array_equal(held[name][place], plain[name][place]) for name in held)
        assert same == (client == 4)


def test_a_full_batch_is_one_step_per_epoch() -> None:
    task = make_task(digits(COUNTS), batch_size="all", epochs=3)
    chunk = Chunk(1, 0, np.arange(len(COUNTS)), {})
    updates = task.training.train(task.model.init_server(task.data, 0), chunk, task, LocalTerms())
    assert updates.steps.tolist() == [3 * (count > 0) for count in COUNTS]
    assert updates.examples.tolist() == [3 * count for count in COUNTS]


def test_a_number_of_at_least_the_largest_client_is_the_same_bit_for_bit() -> None:
    data = digits(COUNTS)
    results = [run(FedAvg(), make_task(data, batch_size=size), n_rounds=2).server for size in ("all", 40)]
    assert all((results[0][name] == results[1][name]).all() for name in results[0])


def test_the_size_of_a_batch_is_a_number_or_all() -> None:
    assert load_experiment("fedavg-digits", ["training.batch_size=all"]).training.model_dump()["batch_size"] == "all"
    for wrong in ("0", "most"):
        with pytest.raises(UserError, match=r"training.batch_size = .*(1|all)"):
            load_experiment("fedavg-digits", [f"training.batch_size={wrong}"])


def test_full_batches_that_do_not_fit_say_what_to_lower(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = psutil.virtual_memory()
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory._replace(available=10_000))
    with pytest.raises(UnresumableFailure, match=r"lower chunk_size, training.batch_size or training.epochs, and"):
        run(FedAvg(), make_task(digits(COUNTS), batch_size="all"))
