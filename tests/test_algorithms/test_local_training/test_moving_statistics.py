"""Batch norm and other statistics at clients: averaged, or kept with their layers, against plain loops of torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from narrowcast.algorithms.federated.fedavg import FedAvg
from narrowcast.algorithms.federated.scaffold import Scaffold
from narrowcast.algorithms.local_training.batches import draw_schedule
from narrowcast.algorithms.local_training.sgd import SGD
from narrowcast.laws.small_tasks import N_CLIENTS, Shuffled, run, samples, sha256, task_on
from narrowcast.platform.contracts import Task
from narrowcast.platform.errors import UserError
from narrowcast.platform.models.forward_pass import OWN_LAYERS
from narrowcast.platform.models.neural_network import skeleton
from narrowcast.platform.rounds.evaluation import measure_clients
from narrowcast.platform.rounds.plan import Plan
from narrowcast.platform.rounds.state import LiveState, Run
from norm_modules import Normed

ROUNDS, RATE, BATCH = 2, 0.05, 7
COUNTS = np.array([9, 9, 13, 17, 2, 3, 14, 17, 5, 6, 16])  # of which none leaves a batch of one
PLAN = Plan(rounds=ROUNDS, clients_per_round=N_CLIENTS, chunk_size=3, evaluate_every=1, checkpoint_every=1)
Values = Mapping[str, torch.Tensor]


def normed(statistics: str, which: str = "batch_norm", batch: int = BATCH) -> Task:
    training = SGD(batch_size=batch, epochs=2, learning_rate=RATE)
    model = Normed.model_validate({"which": which, "statistics": statistics})
    return task_on(samples(COUNTS), model, training=training)


def locally_trained(task: Task, module: nn.Module, client: int, round_index: int) -> None:
    """Train a module as one client does, by torch's own optimiser."""
    own = task.data.order[task.data.indptr[client] : task.data.indptr[client + 1]]
    keys = task.private_seed.stream_keys("shuffle", round_index, np.array([client]))
    schedule = draw_schedule(np.array([len(own)]), np.array([2]), task.training.batch_size, keys)
    optimizer = torch.optim.SGD(module.parameters(), lr=RATE)
    module.train()
    for step in range(len(schedule.active)):
        rows = own[schedule.samples[step][schedule.valid[step]]]
        optimizer.zero_grad()
        outputs = module(torch.from_numpy(task.data.train.features[rows]).float() / 255)
        functional.cross_entropy(outputs, torch.from_numpy(task.data.train.labels[rows])).backward()
        optimizer.step()


def mean_of(models: list[Values], weights: np.ndarray, names: set[str]) -> dict[str, torch.Tensor]:
    shares = torch.from_numpy(weights / weights.sum())
    return {
        name: sum(share * model[name].double() for share, model in zip(shares, models, strict=True)).float()
        for name in names
    }


def plain_rounds(task: Task, own: set[str]) -> tuple[dict[str, torch.Tensor], list[Values]]:
    """Return the shared tensors and each client's whole model after two rounds of federated averaging in torch."""
    module = skeleton(task.model, task.data)
    whole = {name: each.detach().clone() for name, each in module.state_dict().items()}
    shared = {name for name in whole if name not in own and not name.endswith("num_batches_tracked")}
    clients: list[dict[str, torch.Tensor]] = [{name: whole[name].clone() for name in own} for _ in range(N_CLIENTS)]
    current = {name: whole[name] for name in shared}
    for round_index in range(1, ROUNDS + 1):
        after: list[Values] = []
        for client in range(N_CLIENTS):
            one = type(task.model).model_validate(task.model.model_dump()).module(task.data)
            one.load_state_dict({**whole, **current, **clients[client]})
            locally_trained(task, one, client, round_index)
            state = {name: each.detach().clone() for name, each in one.state_dict().items()}
            clients[client] = {name: state[name] for name in own}
            after.append(state)
        current = mean_of(after, task.data.examples.astype(np.float64), shared)
    return current, [{**whole, **current, **each} for each in clients]


def last_state(task: Task) -> Any:
    Run(PLAN, FedAvg(), task).check()
    state = run(PLAN, FedAvg(), task)[-1].state
    assert state is not None
    return state


def test_averaged_batch_norm_is_that_of_a_plain_loop() -> None:
    task = normed("average")
    state = last_state(task)
    wanted, _ = plain_rounds(task, set())
    assert set(state.server) == set(wanted)
    assert {"2.running_mean", "2.running_var"} < set(wanted)
    for name, values in wanted.items():
        np.testing.assert_allclose(state.server[name], values.numpy(), rtol=2e-4, atol=2e-6)
    module = task.model.loaded(state.server, task.data)
    assert torch.equal(module[2].running_var, torch.from_numpy(state.server["2.running_var"]))
    assert (skeleton(task.model, task.data)[2].running_mean == 0).all(), "the module that all calls copy has moved"


def test_batch_norm_of_clients_is_that_of_a_plain_loop_of_fedbn() -> None:
    task = normed("local")
    state = last_state(task)
    own = {"2.weight", "2.bias", "2.running_mean", "2.running_var"}
    wanted, clients = plain_rounds(task, own)
    assert set(state.server) == {"1.weight", "1.bias", "4.weight", "4.bias"} == set(wanted)
    for name, values in wanted.items():
        np.testing.assert_allclose(state.server[name], values.numpy(), rtol=2e-4, atol=2e-6)
    rows = np.asarray(state.clients[OWN_LAYERS])
    layers = task.model.own_layers_of(rows, task.data)
    assert set(layers) == own
    for name, values in layers.items():
        np.testing.assert_allclose(values, np.stack([each[name].numpy() for each in clients]), rtol=2e-4, atol=2e-5)

    live = LiveState.of(Run(PLAN.model_copy(update={"evaluate_clients": ("train",)}), FedAvg(), task), state)
    losses = measure_clients(live)["train.loss"]
    for client, values in enumerate(clients):
        module = task.model.module(task.data)
        module.load_state_dict(dict(values))
        rows = task.data.order[task.data.indptr[client] : task.data.indptr[client + 1]]
        with torch.no_grad():
            outputs = module.eval()(torch.from_numpy(task.data.train.features[rows]).float() / 255)
        loss = functional.cross_entropy(outputs, torch.from_numpy(task.data.train.labels[rows]))
        assert losses[client] == pytest.approx(float(loss), rel=1e-3)

    mean = {name: torch.stack([each[name].double() for each in clients]).mean(0).float() for name in own}
    module = task.model.module(task.data)
    module.load_state_dict({**dict(clients[0]), **mean})
    with torch.no_grad():
        outputs = module.eval()(torch.from_numpy(task.data.test.features).float() / 255)
    loss = functional.cross_entropy(outputs, torch.from_numpy(task.data.test.labels))
    got = task.model.evaluate(state.server, {OWN_LAYERS: state.clients[OWN_LAYERS]}, task.data, "test")["loss"]
    assert got == pytest.approx(float(loss), rel=1e-3)


@pytest.mark.parametrize("statistics", ["average", "local"])
@pytest.mark.parametrize("which", ["batch_norm", "running_mean", "spectral"])
def test_runs_do_not_depend_on_placement_or_resumes(statistics: str, which: str) -> None:
    task, algorithm = normed(statistics, which), FedAvg()
    plan = PLAN.model_copy(update={"rounds": 3, "clients_per_round": 6})
    Run(plan, algorithm, task).check()
    straight = run(plan, algorithm, task)
    assert np.isfinite([each.record.loss for each in straight]).all()
    assert sha256(algorithm, run(plan, algorithm, task, executor=Shuffled(algorithm, task))) == sha256(
        algorithm, straight
    )
    assert sha256(algorithm, run(plan, algorithm, task, state=straight[0].state)) == sha256(algorithm, straight)


def test_what_is_sent_is_billed() -> None:
    bits = {}
    for statistics in ("average", "local"):
        task = normed(statistics)
        bits[statistics] = int(run(PLAN, FedAvg(), task)[0].ledger.uplink_bits[0])
    # 8 means and 8 variances against 8 scales and 8 shifts, 32 bits each
    assert bits["average"] - bits["local"] == 32 * 32


def test_clients_that_have_not_taken_part_have_the_layers_as_built() -> None:
    task = normed("local")
    plan = PLAN.model_copy(update={"clients_per_round": 3, "rounds": 1})
    (outcome,) = run(plan, FedAvg(), task)
    assert outcome.state is not None
    live = LiveState.of(Run(plan, FedAvg(), task), outcome.state)
    rows = live.population.arrays[OWN_LAYERS]
    cohort = np.flatnonzero(np.asarray(rows).any(axis=1))
    assert len(cohort) == 3
    others = np.setdiff1d(np.arange(N_CLIENTS), cohort)
    layers = task.model.own_layers_of(np.asarray(rows)[others], task.data)
    assert (layers["2.running_var"] == 1).all()
    assert (layers["2.running_mean"] == 0).all()


def test_what_does_not_go_with_statistics_is_one_line() -> None:
    with pytest.raises(UserError, match=r"changes 2.running_mean.* of BatchNorm1d 2, .* set model.statistics = local"):
        Run(PLAN, FedAvg(), normed("refuse")).check()
    coded = FedAvg.model_validate({"codec": [{"kind": "quantise"}]})
    with pytest.raises(UserError, match=r"with algorithm.codec the average of variances may be negative"):
        Run(PLAN, coded, normed("average")).check()
    Run(PLAN, coded, normed("local")).check()
    with pytest.raises(UserError, match=r"algorithm.kind = scaffold has no place for what training moves"):
        Run(PLAN, Scaffold(), normed("local")).check()
    with pytest.raises(UserError, match="cannot be batched"):
        task = normed("local")
        batched = task.training.model_copy(update={"execution": "batched"})
        Run(PLAN, FedAvg(), replace(task, training=batched)).check()
    with pytest.raises(UserError, match=r"model.kind = normed takes no batch of one sample .*training.batch_size = 4"):
        Run(PLAN, FedAvg(), normed("local", batch=4)).check()
