"""Frozen parameters and phases of a local training, against plain loops of torch over clients."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import pytest
import torch
from torch import nn

from digits import digits, make_task, relative_error
from narrowcast.algorithms.codecs.messages import dense_wire_bits
from narrowcast.algorithms.federated.fedavg import FedAvg, model_of
from narrowcast.algorithms.local_training.batches import draw_schedule
from narrowcast.algorithms.local_training.rules import InverseTime
from narrowcast.laws.small_tasks import run, sha256
from narrowcast.platform.contracts import LocalCall, Task
from narrowcast.platform.errors import UserError
from narrowcast.platform.models.networks import MLP
from narrowcast.platform.rounds.loop import lockstep
from narrowcast.platform.rounds.outcome import Outcome
from narrowcast.platform.rounds.plan import Plan
from narrowcast.platform.rounds.state import Run
from narrowcast.platform.types import Arrays, Chunk, LocalTerms, LocalUpdates, Phase, PrefixedArrays

COUNTS = [21, 8, 40, 3, 17, 8, 0, 30]
CLIENTS = np.array([4, 2, 1, 7])
BODY, HEAD = ("1.weight", "1.bias"), ("3.weight", "3.bias")
OWN = PrefixedArrays("own/")
KEPT = PrefixedArrays("optimizer/frozen/")


def mlp_task(**training: Any) -> Task:
    return make_task(digits(COUNTS), MLP(hidden=(16,)), epochs=3, **training)


def train(task: Task, server: Arrays, **terms: Any) -> LocalUpdates:
    updates: LocalUpdates = task.training.train(server, Chunk(1, 0, CLIENTS, {}), task, LocalTerms(**terms))
    return updates


def heads(task: Task) -> dict[str, np.ndarray]:
    """The head of each client, drawn apart."""
    drawn = [task.model.init_server(task.data, 20 + client) for client in CLIENTS]
    return {name: np.stack([model[name] for model in drawn]) for name in HEAD}


def plain(task: Task, start: Arrays, client: int, phases: list[tuple[tuple[str, ...], int]]) -> dict[str, np.ndarray]:
    """Train one client with parameters that require a gradient or not, a new optimiser for each phase."""
    data, module = task.data, task.model.module(task.data)
    module.load_state_dict({name: torch.from_numpy(np.array(values)) for name, values in start.items()})
    own, one, first = data.order[data.indptr[client] : data.indptr[client + 1]], np.array([client]), 0
    keys = task.private_seed.stream_keys("shuffle", 1, one)
    for trained, epochs in phases:
        for name, parameter in module.named_parameters():
            parameter.requires_grad_(name in trained)
        moving = [parameter for parameter in module.parameters() if parameter.requires_grad]
        optimizer = torch.optim.SGD(moving, 0.1, task.training.momentum)
        schedule = draw_schedule(np.array([len(own)]), np.array([epochs]), 8, keys, first_epoch=first)
        for batch, size in zip(schedule.samples, schedule.sizes, strict=True):
            taken = data.train.take(own[batch[:size]])
            optimizer.zero_grad()
            scores = module(torch.from_numpy(taken.features))
            nn.functional.cross_entropy(scores, torch.from_numpy(taken.labels)).backward()
            optimizer.step()
        first += epochs
    return {name: parameter.detach().numpy() - start[name] for name, parameter in module.named_parameters()}


@pytest.mark.parametrize("execution", ["batched", "per_client"])
def test_parameters_that_do_not_train_are_read_and_have_no_change(execution: str) -> None:
    task = mlp_task(execution=execution, momentum=0.5)
    server, own = task.model.init_server(task.data, 0), heads(task)
    updates = train(task, server, trained=BODY, start=own)
    assert set(updates.changes) == set(BODY)
    for place, client in enumerate(CLIENTS):
        start = {**server, **{name: values[place] for name, values in own.items()}}
        wanted = plain(task, start, client, [(BODY, 3)])
        got = {name: values[place] for name, values in updates.changes.items()}
        assert not any(wanted[name].any() for name in HEAD)
        assert relative_error(got, {name: wanted[name] for name in BODY}) <= 2e-5


@pytest.mark.parametrize("execution", ["batched", "per_client"])
def test_the_head_trains_first_and_then_the_body(execution: str) -> None:
    task = mlp_task(execution=execution, momentum=0.5)
    server, own = task.model.init_server(task.data, 0), heads(task)
    updates = train(task, server, start=own, phases=(Phase(HEAD, 2), Phase(BODY, 1)))
    assert updates.examples.tolist() == (3 * task.data.examples[CLIENTS]).tolist()
    for place, client in enumerate(CLIENTS):
        start = {**server, **{name: values[place] for name, values in own.items()}}
        wanted = plain(task, start, client, [(HEAD, 2), (BODY, 1)])
        assert relative_error({name: values[place] for name, values in updates.changes.items()}, wanted) <= 2e-5


def test_a_client_with_less_time_ends_in_an_earlier_phase_and_one_with_more_trains_all() -> None:
    task = mlp_task()
    server = task.model.init_server(task.data, 0)
    epochs = np.array([1, 2, 3, 3])
    updates = train(task, server, epochs=epochs, phases=(Phase(HEAD, 1), Phase(BODY, 1)))
    for place, client in enumerate(CLIENTS):
        wanted = plain(task, server, client, [(HEAD, 1), (BODY, 1), (HEAD + BODY, 1)][: epochs[place]])
        for name, values in wanted.items():
            assert np.allclose(updates.changes[name][place], values, rtol=0, atol=1e-6)
    assert updates.steps.tolist() == (epochs * -(-task.data.examples[CLIENTS] // 8)).tolist()


def test_phases_refuse_rates_by_step_and_names_of_nothing() -> None:
    task = mlp_task(learning_rate_schedule=InverseTime(alpha=1, gamma=1))
    server = task.model.init_server(task.data, 0)
    with pytest.raises(UserError, match=r"inverse_time.*trains in phases"):
        train(task, server, phases=(Phase(HEAD, 1),))
    with pytest.raises(UserError, match=r"LocalTerms.trained names 9.weight; parameters are 1.weight"):
        train(task, server, trained=("9.weight",))


class Probe(FedAvg):
    """Federated averaging of the last layer; the others stay as they are drawn, and nobody sends them."""

    kind: Literal["probe"] = "probe"  # type: ignore[assignment]

    def parameters(self, task: Task) -> Arrays:
        return {name: values for name, values in task.initial_parameters().items() if name in HEAD}

    def init(self, task: Task) -> Arrays:
        return {**super().init(task), **KEPT.add(task.initial_parameters())}

    def local_calls(self, broadcast: Arrays, chunk: Chunk, task: Task) -> list[LocalCall]:
        parameters = {**task.initial_parameters(), **model_of(broadcast)}
        return [LocalCall(parameters, chunk, task, LocalTerms(trained=HEAD))]

    def moved(self, server: Arrays, broadcast: Arrays, changes: Arrays) -> Arrays:
        return {**server, **super().moved(server, broadcast, changes)}

    def final(self, server: Arrays) -> Arrays:
        return {**KEPT.of(server), **model_of(server)}


@pytest.mark.parametrize("codec", [(), ("error_feedback", {"kind": "quantise", "levels": 7, "scale": "max"})])
def test_frozen_layers_stay_bit_for_bit_and_are_not_billed(codec: Any) -> None:
    task, plan = mlp_task(), Plan(rounds=3, clients_per_round=5, chunk_size=2)
    algorithm = Probe.model_validate({"codec": codec})
    outcomes = run(plan, algorithm, task)
    assert outcomes[-1].state is not None
    before, after = task.initial_parameters(), algorithm.final(outcomes[-1].state.server)
    assert all(before[name].tobytes() == after[name].tobytes() for name in BODY)
    assert all((before[name] != after[name]).any() for name in HEAD)
    whole = int(dense_wire_bits(sum(before[name].size for name in HEAD), np.dtype(np.float32)))
    for outcome in outcomes:
        sent = outcome.ledger.uplink_bits[outcome.ledger.delivered]
        assert (sent == whole).all() if not codec else (sent < whole / 4).all()
        assert (outcome.ledger.downlink_bits <= 3 * whole).all()


@pytest.mark.parametrize("hidden", [23, 16])
def test_a_run_in_lockstep_has_the_bits_that_it_has_alone_at_any_width(hidden: int) -> None:
    task, plan = make_task(digits(COUNTS), MLP(hidden=(hidden,))), Plan(rounds=2, clients_per_round=6, chunk_size=3)
    plans = [plan.model_copy(update={"seed": seed}) for seed in (0, 1)]
    *_, last = lockstep([Run(each, FedAvg(), task) for each in plans])
    for outcome, each in zip((last[0], last[1]), plans, strict=True):
        assert isinstance(outcome, Outcome)
        assert sha256(FedAvg(), [outcome]) == sha256(FedAvg(), run(each, FedAvg(), task))
