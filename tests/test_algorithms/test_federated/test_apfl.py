"""APFL: without a model of their own clients are FedAvg's, with nothing else they train alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from digits import digits, make_task, relative_error, run
from narrowcast.algorithms.federated.apfl import APFL, AdaptiveStep, MixedStep
from narrowcast.algorithms.federated.fedavg import FedAvg
from narrowcast.algorithms.local_training.batches import draw_schedule
from narrowcast.experiment import load_experiment
from narrowcast.platform.contracts import Task
from narrowcast.platform.errors import UserError
from narrowcast.platform.models.networks import MLP
from narrowcast.platform.rounds.loop import rounds
from narrowcast.platform.rounds.state import Run, RunState
from narrowcast.platform.types import Arrays, Chunk, LocalTerms
from running import local

COUNTS = [21, 8, 40, 3, 17, 8, 0, 30]
EVERYONE = np.arange(len(COUNTS))


def task_of(**training: Any) -> Task:
    return make_task(digits(COUNTS), MLP(hidden=(16,)), **training)


def used(algorithm: APFL, task: Task, state: RunState) -> Arrays:
    """What each client uses, from the state of those that took part: all of them."""
    broadcast = algorithm.broadcast(state.server, task, state.round_index + 1).arrays
    return algorithm.personal(broadcast, Chunk(state.round_index, 0, EVERYONE, state.clients), task)


def test_without_a_share_of_its_own_it_is_fedavg() -> None:
    task, algorithm = task_of(momentum=0.0), APFL(alpha=0)
    alone, wanted = run(algorithm, task, n_rounds=3), run(FedAvg(), task, n_rounds=3)
    assert all(np.array_equal(alone.server[name], values) for name, values in wanted.server.items())
    assert (alone.uplink_bits, alone.downlink_bits) == (wanted.uplink_bits, wanted.downlink_bits)
    for name, values in used(algorithm, task, alone).items():
        assert np.array_equal(values, np.broadcast_to(wanted.server[name], values.shape))


def test_the_global_model_is_fedavgs_whatever_the_share() -> None:
    task = task_of(epochs=2)
    wanted = run(FedAvg(), task, n_rounds=2).server
    for alpha in (0.3, 1.0):
        assert relative_error(run(APFL(alpha=alpha), task, n_rounds=2).server, wanted) < 1e-5


def test_with_nothing_but_its_own_model_a_client_trains_alone() -> None:
    task, algorithm = task_of(epochs=2), APFL(alpha=1)
    start = task.initial_parameters()
    own = {name: np.stack([values] * len(COUNTS)) for name, values in start.items()}
    for round_index in (1, 2):
        chunk = Chunk(round_index, 0, EVERYONE, {})
        changes = task.training.train(start, chunk, task, LocalTerms(start=own)).changes
        own = {name: values + changes[name] for name, values in own.items()}
    assert relative_error(used(algorithm, task, run(algorithm, task, n_rounds=2)), own) < 2e-5


@pytest.mark.parametrize(("after", "wanted"), [(False, -1.025), (True, -0.9875)])
def test_both_gradients_are_taken_before_a_step_by_hand(after: bool, wanted: float) -> None:
    """One step at rate .5 and alpha .5 from y = 0, v = -1, where the gradient at w is w + .6.

    At the mixture -.5 it is .1. After y = -.3 the mixture is -.65, where it is -.05.
    """
    y, v = {"w": torch.tensor([0.0])}, {"w": torch.tensor([-1.0])}
    MixedStep(0.5, after).step(y, v, lambda at, _: {"w": at["w"] + 0.6}, {}, 0.5, 0)
    assert (y["w"].item(), v["w"].item()) == pytest.approx((-0.3, wanted), abs=1e-7)


@pytest.mark.parametrize("own_gradient", ["before", "after"])
def test_a_round_is_that_of_a_loop_over_clients(own_gradient: Any) -> None:
    task, alpha, rate = task_of(epochs=2), 0.3, 0.1
    algorithm = APFL(alpha=alpha, own_gradient=own_gradient)
    start, module = task.initial_parameters(), task.model.module(task.data)
    state = run(algorithm, task)
    mixed = used(algorithm, task, state)

    def gradient(at: dict[str, torch.Tensor], batch: Any) -> dict[str, torch.Tensor]:
        at = {name: each.clone().requires_grad_() for name, each in at.items()}
        scores = torch.func.functional_call(module, at, (torch.from_numpy(batch.features),))
        loss = nn.functional.cross_entropy(scores, torch.from_numpy(batch.labels))
        return dict(zip(at, torch.autograd.grad(loss, list(at.values())), strict=True))

    for client in np.flatnonzero(COUNTS).tolist():
        one = np.array([client])
        keys = task.private_seed.stream_keys("shuffle", 1, one)
        schedule = draw_schedule(task.data.examples[one], np.array([2]), task.training.batch_size, keys)
        own = task.data.order[task.data.indptr[client] : task.data.indptr[client + 1]]
        y = {name: torch.from_numpy(values.copy()) for name, values in start.items()}
        v = {name: each.clone() for name, each in y.items()}
        for batch, size in zip(schedule.samples, schedule.sizes, strict=True):
            picked = task.data.train.take(own[batch[:size]])
            step, before = gradient(y, picked), y
            y = {name: each - rate * step[name] for name, each in y.items()}
            shared = y if own_gradient == "after" else before
            step = gradient({name: alpha * v[name] + (1 - alpha) * shared[name] for name in y}, picked)
            v = {name: each - rate * alpha * step[name] for name, each in v.items()}
        wanted = {name: alpha * v[name].numpy() + (1 - alpha) * state.server[name] for name in v}
        assert relative_error({name: values[client] for name, values in mixed.items()}, wanted) < 2e-5


def test_clients_are_measured_with_their_mixtures() -> None:
    settings = ["rounds=5", "evaluate_every=5", "evaluate_clients=test", "clients_per_round=50"]
    partition = "data.partition={kind: shards, classes_per_client: 2}"
    losses = {}
    for alpha in (0, 0.9):
        each = load_experiment("fedavg-digits", [*settings, partition, f"algorithm={{kind: apfl, alpha: {alpha}}}"])
        task = each.task(each.data.load())
        *_, last = rounds(Run(each, each.algorithm, task), local(each.algorithm, task))
        losses[alpha] = last.metrics["test.loss.mean"]
    assert losses[0.9] < losses[0], "clients of two classes each do better with a model of their own"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (("training.momentum=0.9",), "training.momentum = 0.9: the steps of apfl have no momentum; set 0"),
        (("algorithm.alpha=1.5",), "algorithm.alpha"),
    ],
)
def test_what_makes_no_sense_is_refused_in_one_line(settings: tuple[str, ...], message: str) -> None:
    with pytest.raises(UserError) as error:
        each = load_experiment("fedavg-digits", ["algorithm=apfl", *settings])
        each.task(each.data.load())
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_matrix_factorisation_is_refused() -> None:
    each = load_experiment("scolr-ml100k", ["algorithm=apfl"])
    with pytest.raises(UserError, match="apfl trains networks, not matrix_factorisation"):
        each.task(each.data.load())


ALPHA = "mixture/alpha"


@pytest.mark.parametrize(
    ("best", "w", "v", "wanted"),
    [(0.25, 0.0, 1.0, 0.25), (2.0, 3.0, 1.5, 2 / 3), (4.0, 0.0, 1.0, 1.0), (-1.0, 0.0, 1.0, 0.0)],
)
def test_alpha_descends_to_the_best_mixture_of_two_numbers(best: float, w: float, v: float, wanted: float) -> None:
    """With (x - b)^2 / 2 the best mixture of w and v has alpha = (b - w) / (v - w), between 0 and 1."""
    y, slots = {"w": torch.tensor([[w]])}, {"w": torch.tensor([[v]]), ALPHA: torch.tensor([0.5])}
    step = AdaptiveStep(0.5, alpha_rate=0.2)
    for _ in range(400):
        step.step(y, slots, lambda at, _: {"w": at["w"] - best}, {}, 0.0, 0)
    assert slots[ALPHA].item() == pytest.approx(wanted, abs=1e-6)
    assert (y["w"].item(), slots["w"].item()) == (w, v)


@pytest.mark.parametrize(("after", "v", "alpha"), [(False, -1.025, 0.51), (True, -0.9875, 0.4965)])
def test_an_adaptive_step_by_hand(after: bool, v: float, alpha: float) -> None:
    """The step of `MixedStep` above, and alpha - 0.1 (v - y) g: (-1)(.1) at y = 0, (-.7)(-.05) after y = -.3."""
    y, slots = {"w": torch.tensor([0.0])}, {"w": torch.tensor([-1.0]), ALPHA: torch.tensor([0.5])}
    step = AdaptiveStep(0.5, after, alpha_rate=0.1)
    step.step(y, slots, lambda at, _: {"w": at["w"] + 0.6}, {}, 0.5, 0)
    assert (y["w"].item(), slots["w"].item(), slots[ALPHA].item()) == pytest.approx((-0.3, v, alpha), abs=1e-6)
    step.step(y, slots, lambda at, _: {"w": at["w"] + 0.6}, {}, 0.5, 1)
    assert slots[ALPHA].item() == pytest.approx(alpha, abs=1e-6), "alpha moves in the first step of a round alone"


def test_a_rate_of_next_to_nothing_is_the_fixed_mixture() -> None:
    task = task_of(epochs=2)
    fixed, adaptive = APFL(alpha=0.3), APFL(alpha=0.3, alpha_rate=1e-12)
    states = {algorithm: run(algorithm, task, n_rounds=2) for algorithm in (fixed, adaptive)}
    first, second = (used(algorithm, task, state) for algorithm, state in states.items())
    assert relative_error(second, first) < 1e-6
    assert relative_error(states[adaptive].server, states[fixed].server) < 1e-6


def test_alpha_grows_where_clients_differ_and_falls_where_they_agree() -> None:
    settings = ["rounds=30", "clients_per_round=20", "algorithm={kind: apfl, alpha: 0.5, alpha_rate: 2}"]
    ends = {}
    for shift in ("null", "{kind: permuted_labels, groups: 10}"):
        experiment = load_experiment("fedavg-digits", [*settings, f"data.shift={shift}"])
        task = experiment.task(experiment.data.load())
        *_, last = rounds(Run(experiment, experiment.algorithm, task), local(experiment.algorithm, task))
        ends[shift] = last.record.metrics["alpha"]
    assert ends["{kind: permuted_labels, groups: 10}"] > 0.6, ends
    assert ends["null"] < 0.4, ends
