"""Learning-rate schedules: the rate of each round and step, in every way of training, against plain loops."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from digits import digits, make_task, relative_error, run
from narrowcast.algorithms.client.uploads import CONTROL
from narrowcast.algorithms.federated.fairness import QFFL
from narrowcast.algorithms.federated.fedavg import FedAvg
from narrowcast.algorithms.federated.fedmf import FedMF
from narrowcast.algorithms.federated.fednova import FedNova
from narrowcast.algorithms.federated.scaffold import Scaffold
from narrowcast.algorithms.local_training.batches import draw_schedule
from narrowcast.algorithms.local_training.rules import Constant, Cosine, InverseTime, StepDecay, Warmup
from narrowcast.platform.contracts import LocalCall, Task
from narrowcast.platform.errors import UserError
from narrowcast.platform.models.model import ITEM_FACTORS
from narrowcast.platform.models.networks import Softmax
from narrowcast.platform.rounds.loop import rounds
from narrowcast.platform.rounds.plan import Plan
from narrowcast.platform.rounds.state import Run
from narrowcast.platform.types import Arrays, Chunk, LocalTerms
from per_client import make_task as make_factorisation
from per_client import synthetic
from running import local

COUNTS = [21, 8, 40, 3, 17, 8, 0, 30]
CHUNK = Chunk(3, 0, np.arange(len(COUNTS)), {})
SCHEDULES = {
    "step": StepDecay(every=2, decay=0.25),
    "cosine": Cosine(rounds=4, final_share=0.1),
    "inverse_time": InverseTime(alpha=0.5, gamma=9),
    "warmup over rounds": Warmup(rounds=3, initial_share=0.25, schedule=Cosine(rounds=4)),
    "warmup over steps": Warmup(steps=23, schedule=InverseTime(alpha=0.5, gamma=9)),
}


def test_factors_are_those_of_the_formulas() -> None:
    assert [SCHEDULES["step"].factor(index, 0) for index in range(1, 7)] == [1, 1, 0.25, 0.25, 0.0625, 0.0625]
    cosine = [SCHEDULES["cosine"].factor(index, 0) for index in range(1, 8)]
    optimiser = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    other, rates = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, T_max=4, eta_min=0.1), []
    for _ in range(5):
        rates.append(other.get_last_lr()[0])
        optimiser.step()
        other.step()
    assert cosine == pytest.approx([*rates, 0.1, 0.1])
    assert [SCHEDULES["inverse_time"].factor(1, step) for step in (0, 1, 90)] == [0.4, 4 / 11, 0.04]
    assert Constant().factor(7, 9) == 1


@pytest.mark.parametrize("inner", [None, StepDecay(every=2, decay=0.5)])
def test_warmup_is_a_linear_rate_and_another_schedule_of_torch(inner: StepDecay | None) -> None:
    optimiser = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    linear = torch.optim.lr_scheduler.LinearLR(optimiser, start_factor=0.2, total_iters=5)
    steps = torch.optim.lr_scheduler.StepLR(optimiser, step_size=2, gamma=0.5 if inner else 1.0)
    by_round, by_step = (
        Warmup(rounds=5, initial_share=0.2, schedule=inner),
        Warmup(steps=5, initial_share=0.2, schedule=inner),
    )
    for index in range(9):
        wanted = optimiser.param_groups[0]["lr"]
        assert by_round.factor(index + 1, 17 * index) == pytest.approx(wanted)
        assert by_step.factor(index + 1, index) == pytest.approx(wanted)
        optimiser.step()
        linear.step()
        steps.step()
    assert (by_round.by_step, by_step.by_step) == (False, True)
    assert Warmup(rounds=5, schedule=InverseTime(alpha=1, gamma=1)).by_step
    assert Warmup(rounds=3, initial_share=0.3).factor(4, 0) == 1.0


@pytest.mark.parametrize("fields", [{}, {"rounds": 2, "steps": 3}])
def test_warmup_needs_one_length(fields: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="warmup rises over rounds or over steps; give one of the two"):
        Warmup.model_validate(fields)


def rates_of_round(schedule: Any, round_index: int, n_steps: int) -> list[float]:
    """The rates of a round by the schedule's definition; the largest client has 40 samples: 5 steps, 2 epochs."""
    return [0.1 * schedule.factor(round_index, (round_index - 1) * 10 + step) for step in range(n_steps)]


@pytest.mark.parametrize("execution", ["batched", "per_client"])
@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("momentum", [0.0, 0.5])
def test_every_step_has_its_rate(name: str, execution: str, momentum: float) -> None:
    settings = {"epochs": 2, "execution": execution, "momentum": momentum}
    task = make_task(digits(COUNTS), Softmax(), learning_rate_schedule=SCHEDULES[name], **settings)
    server = task.model.init_server(task.data, 0)
    updates = task.training.train(server, CHUNK, task, LocalTerms())
    assert updates.rate_sum is not None
    for client, count in enumerate(COUNTS):
        n_steps = -(-count // 8) * 2
        assert updates.rate_sum[client] == pytest.approx(sum(rates_of_round(SCHEDULES[name], 3, n_steps)))
    # The same steps one by one: a constant rate each, on a module with torch's own optimiser.
    wanted = plain_changes(task, server, rates_of_round(SCHEDULES[name], 3, 10), client=2)
    assert relative_error({name: values[2] for name, values in updates.changes.items()}, wanted) <= 2e-5


def plain_changes(task: Task, server: Arrays, rates: list[float], client: int) -> dict[str, np.ndarray]:
    """One client's change in round 3 by torch's SGD, whose rate is set before each step."""
    module, training, data = task.model.module(task.data), task.training, task.data
    module.load_state_dict({name: torch.from_numpy(np.array(values)) for name, values in server.items()})
    optimiser = torch.optim.SGD(module.parameters(), 1.0, training.momentum)
    one = np.array([client])
    keys = task.private_seed.stream_keys("shuffle", 3, one)
    schedule = draw_schedule(data.examples[one], np.array([training.epochs]), training.batch_size, keys)
    own = data.order[data.indptr[client] : data.indptr[client + 1]]
    for rate, batch, size in zip(rates, schedule.samples, schedule.sizes, strict=True):
        picked = data.train.take(own[batch[:size]])
        outputs = module(torch.from_numpy(picked.features))
        optimiser.param_groups[0]["lr"] = rate
        optimiser.zero_grad()
        torch.nn.functional.cross_entropy(outputs, torch.from_numpy(picked.labels)).backward()
        optimiser.step()
    return {name: values.detach().numpy() - server[name] for name, values in module.named_parameters()}


@pytest.mark.parametrize("name", SCHEDULES)
def test_runs_trained_together_are_those_trained_alone(name: str) -> None:
    rates = (0.1, 0.3)
    tasks = [make_task(digits(COUNTS), learning_rate=rate, learning_rate_schedule=SCHEDULES[name]) for rate in rates]
    server = tasks[0].model.init_server(tasks[0].data, 0)
    calls = [LocalCall(server, CHUNK, task, LocalTerms()) for task in tasks]
    together = tasks[0].training.train_together(calls)
    for task, each in zip(tasks, together, strict=True):
        alone = task.training.train(server, CHUNK, task, LocalTerms())
        assert (alone.rate_sum == each.rate_sum).all()
        assert relative_error(each.changes, alone.changes) <= 1e-6


def test_a_constant_schedule_changes_no_bit() -> None:
    data = digits(COUNTS)
    plain, constant = (
        run(FedAvg(), make_task(data, learning_rate_schedule=each), n_rounds=2).server for each in (None, Constant())
    )
    assert all((plain[name] == constant[name]).all() for name in plain)


def test_scaffold_divides_by_the_rates_of_the_steps() -> None:
    """One full-batch step: c_u = c_u - c + (x - y) / lr is the gradient at x, whatever the rate of the round."""
    task = make_task(digits(COUNTS), batch_size="all", learning_rate_schedule=StepDecay(every=1, decay=0.5))
    first = run(Scaffold(), task, n_rounds=1)
    constant = make_task(digits(COUNTS), batch_size="all")
    gradient = constant.training.train(CONTROL.without(first.server), CHUNK, constant, LocalTerms())
    second = run(Scaffold(), task, n_rounds=2)
    some = np.isin(second.participants, np.flatnonzero(COUNTS))
    for name, values in gradient.changes.items():
        control, wanted = second.clients[CONTROL.name(name)][some], -values[second.participants[some]] / 0.1
        assert np.abs(control - wanted).max() <= 1e-4 * np.abs(wanted).max()


@pytest.mark.parametrize("algorithm", [Scaffold(), QFFL(q=2), FedNova(mu=0.1)], ids=lambda each: each.kind)
def test_algorithms_that_use_the_rate_have_that_of_the_round(algorithm: Any) -> None:
    """In round 3 a rate of 0.5 that halves every round is 0.125."""
    sums = []
    for settings in ({"learning_rate": 0.5, "learning_rate_schedule": StepDecay(every=1)}, {"learning_rate": 0.125}):
        task = make_task(digits(COUNTS), Softmax(), **settings)
        state = {name: np.array(values) for name, values in algorithm.init_clients(task).items()}
        broadcast = algorithm.broadcast(algorithm.init(task), task, 3).arrays
        sums.append(algorithm.train(broadcast, replace(CHUNK, state=state), task).partial)
    assert all(np.allclose(values, sums[1][name], rtol=1e-6) for name, values in sums[0].items())


def test_fednova_refuses_rates_that_change_within_a_round() -> None:
    task = make_task(digits(COUNTS), Softmax(), learning_rate_schedule=SCHEDULES["inverse_time"])
    with pytest.raises(UserError, match=r"fednova counts steps of one learning rate.*use constant, step, milestones"):
        FedNova().check(task)


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_resumed_run_continues_with_the_rates_of_its_rounds(name: str) -> None:
    task, plan = (
        make_task(digits(COUNTS), learning_rate_schedule=SCHEDULES[name]),
        Plan(rounds=4, clients_per_round=8, checkpoint_every=1),
    )
    whole = list(rounds(Run(plan, FedAvg(), task), local(FedAvg(), task)))
    resumed = list(rounds(Run(plan, FedAvg(), task), local(FedAvg(), task), whole[1].state))
    assert len(resumed) == 2
    assert whole[-1].state is not None
    assert resumed[-1].state is not None
    for key, values in whole[-1].state.server.items():
        assert (values == resumed[-1].state.server[key]).all()


@pytest.mark.parametrize("program", ["fused", "batched"])
def test_matrix_factorisation_has_the_rate_of_the_round(program: str) -> None:
    data, states = synthetic([20, 3, 11]), []
    for settings in ({"learning_rate_schedule": StepDecay(every=1, decay=0.5)}, {"learning_rate": 0.125}):
        task = make_factorisation(data, dimension=8, **{"learning_rate": 0.5, "program": program, **settings})
        server = task.model.init_server(data, 0)
        chunk = Chunk(3, 0, np.arange(3), task.model.init_clients(data, 0))
        broadcast = FedMF().broadcast(FedMF().init(task), task, 3).arrays
        result = FedMF().train(broadcast, chunk, task)
        dense = task.training.train(server, chunk, task, LocalTerms())
        states.append((*result.partial.values(), *result.state.values(), dense.changes[ITEM_FACTORS]))
    assert all((one == other).all() for one, other in zip(*states, strict=True))


def test_matrix_factorisation_refuses_rates_that_change_within_a_round() -> None:
    task = make_factorisation(synthetic([20, 3]), learning_rate_schedule=SCHEDULES["inverse_time"])
    with pytest.raises(
        UserError, match=r"inverse_time changes the rate at each local step.*use constant, step, milestones"
    ):
        task.training.check(task)
