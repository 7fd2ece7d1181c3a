"""Draws in forward passes: keyed by round, client and step, whatever the chunk, the host and what ran before."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional

import drawing_modules
from drawing_modules import MODULES, Drawing
from narrowcast.algorithms.federated.fedavg import FedAvg
from narrowcast.algorithms.local_training.batches import draw_schedule
from narrowcast.algorithms.local_training.sgd import SGD
from narrowcast.laws.small_tasks import (
    PLAN,
    Shuffled,
    digest,
    digest_of_updates,
    local_call,
    run,
    sha256,
    task_of,
    trained,
)
from narrowcast.platform.contracts import LocalCall, Task
from narrowcast.platform.errors import UserError
from narrowcast.platform.rounds.loop import lockstep
from narrowcast.platform.rounds.state import Run
from narrowcast.platform.seeds import stream_keys, uniform_bits
from narrowcast.platform.types import Arrays, Chunk, LocalTerms
from norm_modules import Normed

TRAINING = SGD(batch_size=4, epochs=2, learning_rate=0.05)


def drawing(which: str, training: SGD = TRAINING) -> Task:
    task = task_of(Drawing(which=which), training=training)
    task.model.check(task.data)
    task.training.check(task)
    return task


def changes(task: Task, clients: list[int], round_index: int = 1, terms: LocalTerms | None = None) -> Arrays:
    call = local_call(task, task.initial_parameters(), clients)
    chunk = replace(call.chunk, round_index=round_index)
    return trained(replace(call, chunk=chunk, terms=terms or LocalTerms())).changes


def disturb(seed: int) -> None:
    torch.manual_seed(seed)
    np.random.seed(seed)
    random.seed(seed)


@pytest.mark.parametrize("which", MODULES)
def test_a_client_learns_the_same_in_any_company_and_after_anything(which: str) -> None:
    task = drawing(which)
    disturb(1)
    whole = changes(task, [0, 2, 3, 6])
    disturb(2)
    for place, client in reversed(list(enumerate([0, 2, 3, 6]))):
        alone = changes(task, [client])
        assert all(np.array_equal(alone[name][0], values[place]) for name, values in whole.items())


@pytest.mark.parametrize("which", MODULES)
def test_the_generators_go_on_as_if_nothing_had_been_drawn(which: str) -> None:
    task = drawing(which)
    disturb(3)
    wanted = torch.rand(3).tolist(), np.random.random(3).tolist(), [random.random() for _ in range(3)]
    disturb(3)
    changes(task, [0, 2])
    task.model.evaluate(task.initial_parameters(), {}, task.data, "test")
    assert (torch.rand(3).tolist(), np.random.random(3).tolist(), [random.random() for _ in range(3)]) == wanted


def test_a_plain_loop_with_the_same_keys_gives_the_same_parameters() -> None:
    task, client, round_index = drawing("dropout"), 3, 5
    got = changes(task, [client, 6], round_index)

    start = task.initial_parameters()
    model = drawing_modules.Dropout()
    model.load_state_dict({name: torch.from_numpy(values.copy()) for name, values in start.items()})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    own = task.data.order[task.data.indptr[client] : task.data.indptr[client + 1]]
    keys = task.private_seed.stream_keys("shuffle", round_index, np.array([client]))
    schedule = draw_schedule(np.array([len(own)]), np.array([2]), 4, keys)
    key = stream_keys(task.private_seed.value, "forward", round_index, np.array([client]))
    for step in range(len(schedule.active)):
        rows = own[schedule.samples[step][schedule.valid[step]]]
        features = torch.from_numpy(task.data.train.features[rows]).float() / 255
        torch.manual_seed(int(uniform_bits(key, np.array([step]))[0]))
        hidden = model.first(features.flatten(1)).relu()
        outputs = model.last(functional.dropout(hidden, 0.5))
        optimizer.zero_grad()
        functional.cross_entropy(outputs, torch.from_numpy(task.data.train.labels[rows])).backward()
        optimizer.step()
    for name, parameter in model.named_parameters():
        np.testing.assert_allclose(got[name][0], parameter.detach().numpy() - start[name], rtol=2e-4, atol=2e-6)
    without = changes(drawing("kept"), [client, 6], round_index)
    assert not np.allclose(got["first.weight"][0], without["first.weight"][0], rtol=0.05)


def test_draws_differ_by_client_step_and_round() -> None:
    task = drawing("watched")
    seen: dict[tuple[int, int], list[bytes]] = {}
    for round_index in (1, 2):
        for client in (2, 3):
            drawing_modules.SEEN.clear()
            changes(task, [client], round_index)
            seen[round_index, client] = list(drawing_modules.SEEN)
    draws = [draw for each in seen.values() for draw in each]
    steps = {client: 2 * -(-int(task.data.examples[client]) // 4) for client in (2, 3)}
    assert {key: len(each) for key, each in seen.items()} == {key: steps[key[1]] for key in seen}
    assert len(set(draws)) == len(draws)


class TwoGradients:
    """Steps along the mean of two gradients of each batch, as sharpness-aware methods take two."""

    parts = 1

    def init(self, values: Any, own: Any) -> Any:
        del values, own
        return {}

    def step(self, values: Any, slots: Any, gradient: Any, own: Any, rate: float, step: int) -> None:
        del slots, own, step
        first, second = gradient(values, 0), gradient(values, 0)
        for name, each in values.items():
            each.sub_((first[name] + second[name]) / 2, alpha=rate)


def test_several_gradients_of_a_step_draw_one_after_the_other() -> None:
    task, terms = drawing("watched"), LocalTerms(rule=TwoGradients())
    drawing_modules.SEEN.clear()
    whole = changes(task, [2, 3], terms=terms)
    assert len(set(drawing_modules.SEEN)) == len(drawing_modules.SEEN) > 4
    disturb(9)
    alone = changes(task, [3], terms=terms)
    assert all(np.array_equal(alone[name][0], values[1]) for name, values in whole.items())


@pytest.mark.parametrize("asked", [{"start_loss": True}, {"start_gradient": True}])
def test_what_is_measured_before_training_is_drawn_apart_from_it(asked: dict[str, bool]) -> None:
    task = drawing("watched")
    plain = changes(task, [2, 3])
    call = replace(local_call(task, task.initial_parameters(), [2, 3]), terms=LocalTerms(**asked))
    drawing_modules.SEEN.clear()
    updates = trained(call)
    assert len(set(drawing_modules.SEEN)) == len(drawing_modules.SEEN)
    assert digest(updates.changes) == digest(plain)
    disturb(4)
    again = trained(replace(call, chunk=Chunk(1, 0, np.array([3]), {})))
    if updates.start_loss is not None and again.start_loss is not None:
        assert again.start_loss[0] == updates.start_loss[1]
    for name, values in updates.start_gradient.items():
        assert np.array_equal(again.start_gradient[name][0], values[1])


@pytest.mark.slow
def test_runs_do_not_depend_on_chunks_processes_or_resumes() -> None:
    task, algorithm = drawing("dropout"), FedAvg()
    disturb(5)
    straight = run(PLAN, algorithm, task)
    wanted = sha256(algorithm, straight)
    for size in (1, 6):
        sized = run(PLAN.model_copy(update={"chunk_size": size}), algorithm, task)
        assert np.isclose(sized[-1].record.loss, straight[-1].record.loss, rtol=1e-5)
    disturb(6)
    assert sha256(algorithm, run(PLAN, algorithm, task, executor=Shuffled(algorithm, task))) == wanted
    assert sha256(algorithm, run(PLAN, algorithm, task, state=straight[1].state)) == wanted
    pair = [replace(task, seed=seed) for seed in (0, 1)]
    runs = [Run(PLAN.model_copy(update={"seed": each.seed}), algorithm, each) for each in pair]
    together = list(lockstep(runs))
    for place, each in enumerate(runs):
        outcome: Any = together[-1][place]
        assert sha256(algorithm, [outcome]) == sha256(algorithm, run(each.plan, algorithm, each.task))


def test_calls_together_are_those_alone() -> None:
    task = drawing("dropout")
    calls: list[LocalCall] = [local_call(task, task.initial_parameters(), who) for who in ([0, 3], [4, 8])]
    for call, updates in zip(calls, task.training.train_together(calls), strict=True):
        assert digest_of_updates(updates) == digest_of_updates(trained(call))


def test_evaluations_draw_the_same_each_time_for_each_client() -> None:
    task = drawing("always")
    server, everybody = task.initial_parameters(), np.arange(task.data.n_clients)
    disturb(7)
    first = task.model.evaluate(server, {}, task.data, "test")
    disturb(8)
    assert task.model.evaluate(server, {}, task.data, "test") == first
    shared = {name: values[np.newaxis] for name, values in server.items()}
    whole = task.model.measure_clients(shared, {}, task.data, "train", everybody)
    part = task.model.measure_clients(shared, {}, task.data, "train", everybody[4:6])
    assert all(np.array_equal(part[name], values[4:6]) for name, values in whole.items())
    assert len(set(drawing("kept").model.evaluate(server, {}, task.data, "test").values()) & set(first.values())) < 2


def test_what_no_key_can_decide_is_refused() -> None:
    with pytest.raises(UserError, match=r"two forward passes from one state .* have different outputs"):
        drawing("own")
    with pytest.raises(UserError, match="draw from torch, which a trial forward pass did not"):
        changes(drawing("sometimes"), [3])
    with pytest.raises(UserError, match=r"cannot be batched \(its forward pass draws from torch, .*use per_client"):
        drawing("dropout", TRAINING.model_copy(update={"execution": "batched"}))


def test_a_trial_finds_buffers_of_new_tensors() -> None:
    task = task_of(Normed(which="running_mean"), training=TRAINING)
    assert task.model.trial(task.data).statistics == ("2.seen", "2.times")


def test_modules_that_draw_nothing_are_batched_as_before() -> None:
    task = drawing("kept", TRAINING.model_copy(update={"execution": "batched"}))
    assert task.training.mode(task) == "batched"
    assert task.model.trial(task.data).draws == ()
