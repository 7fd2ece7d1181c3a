"""FedNova, FedDyn, q-FFL and AFL: identities and slow references in float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from scipy.optimize import minimize

from digits import relative_error, run
from narrowcast.algorithms.client.uploads import COUNT_BITS
from narrowcast.algorithms.federated.fairness import AFL, QFFL, on_simplex
from narrowcast.algorithms.federated.fedavg import FedAvg
from narrowcast.algorithms.federated.feddyn import FedDyn
from narrowcast.algorithms.federated.fednova import FedNova
from narrowcast.algorithms.federated.fedprox import FedProx
from narrowcast.algorithms.federated.server_optimizer import Momentum
from narrowcast.laws.small_tasks import PLAN, task_of
from narrowcast.laws.small_tasks import run as rehearse
from narrowcast.platform.contracts import Algorithm, Task
from narrowcast.platform.errors import UserError
from narrowcast.platform.models.networks import MLP
from narrowcast.platform.types import Chunk, LocalTerms
from quadratics import Quadratics, quadratics

UNEQUAL = [1, 4, 10, 2, 7, 5]
COUNTS = [5, 1, 2, 9, 3, 4]


def trained(task: Task, algorithm: Algorithm, n_rounds: int = 1) -> np.ndarray:
    return np.asarray(run(algorithm, task, n_rounds=n_rounds, chunk_size=4).server["x"])


def local_changes(task: Task, x: np.ndarray, terms: LocalTerms | None = None) -> np.ndarray:
    """Return each client's y_u - x, [U, d]."""
    chunk = Chunk(1, 0, np.arange(6), {})
    return np.asarray(task.training.train({"x": x}, chunk, task, terms or LocalTerms()).changes["x"])


# FedProx


def test_a_fixed_number_of_stragglers_is_drawn_and_dropped() -> None:
    task, _ = quadratics(steps=5, examples=COUNTS)
    chunk = Chunk(3, 0, np.arange(6), {})
    kept = FedProx(mu=0, partial_share=0.5, partial_draw="number")
    slow = kept.stragglers(chunk, task)
    assert slow.sum() == 3
    assert (kept.stragglers(Chunk(4, 0, np.arange(6), {}), task) != slow).any()
    dropping = kept.model_copy(update={"drop_partial": True})
    server, weights = {"x": np.zeros(3)}, np.where(slow, 0, COUNTS)
    updates = task.training.train(server, chunk, task, LocalTerms())
    changes = np.asarray(updates.changes["x"])
    partial = dropping.send(server, chunk, task, [updates]).partial
    moved = dropping.step(server, server, partial, task, 3)["x"]
    assert np.abs(moved - weights @ changes / weights.sum()).max() <= 1e-6
    assert dropping.sum_layout(task, 6) is None, "a masked sum cannot leave out clients"


# FedNova


@pytest.mark.parametrize("momentum", [0.0, 0.7])
@pytest.mark.parametrize("mu", [0.0, 0.3])
def test_fednova_with_equal_steps_is_fedprox(momentum: float, mu: float) -> None:
    task, _ = quadratics(steps=5, examples=COUNTS, momentum=momentum)
    assert np.abs(trained(task, FedNova(mu=mu), 4) - trained(task, FedProx(mu=mu), 4)).max() <= 1e-12


def test_fednova_with_unequal_steps_is_equation_11() -> None:
    task, _ = quadratics(UNEQUAL, COUNTS)
    x, shares, steps = np.zeros(3), np.array(COUNTS) / sum(COUNTS), np.array(UNEQUAL)
    for _ in range(3):
        changes = local_changes(task, x)
        normalised = sum(share * change / tau for share, change, tau in zip(shares, changes, steps, strict=True))
        x = x + (shares * steps).sum() * normalised
    assert np.abs(trained(task, FedNova(), 3) - x).max() <= 1e-12


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("mu", [0.0, 0.5])
def test_the_norms_are_the_papers_closed_forms(momentum: float, mu: float) -> None:
    task, _ = quadratics(UNEQUAL, momentum=momentum)
    steps, rate = np.array(UNEQUAL), task.training.learning_rate
    norms = FedNova(mu=mu)._norms(task, steps, rate)
    if momentum and mu:  # no closed form there: the change that gradients of 1 make
        flat = Quadratics(np.zeros((6, 1)), np.zeros((6, 1)), np.ones(6), steps, rate, momentum)
        ones = LocalTerms(proximal=mu, correction={"x": np.ones((6, 1))})
        flat_task = Task(flat, task.profiles, flat, flat, 0, task.private_seed)
        wanted = -local_changes(flat_task, np.zeros(1), ones)[:, 0] / rate
    elif momentum:
        wanted = (steps - momentum * (1 - momentum**steps) / (1 - momentum)) / (1 - momentum)
    else:
        wanted = (1 - (1 - rate * mu) ** steps) / (rate * mu) if mu else steps
    assert np.abs(norms - wanted).max() <= 1e-12


@pytest.mark.slow
def test_fednova_has_less_bias_than_fedavg_if_steps_are_unequal() -> None:
    task, minimiser = quadratics(UNEQUAL, learning_rate=0.02)
    fedavg, fednova = (np.abs(trained(task, each, 500) - minimiser).max() for each in (FedAvg(), FedNova()))
    assert fednova < fedavg / 5


def test_fednova_refuses_clipping() -> None:
    task = task_of(MLP(hidden=(16,)))
    clipped = task.training.model_copy(update={"clip_norm": 1.0})
    with pytest.raises(UserError, match=r"leave out training\.clip_norm"):
        FedNova().check(Task(task.data, task.profiles, task.model, clipped, 0, task.private_seed))


# FedDyn


def test_feddyn_is_algorithm_1() -> None:
    task, _ = quadratics(steps=6)
    alpha, x, h, g = 0.3, np.zeros(3), np.zeros(3), np.zeros((6, 3))
    for _ in range(4):
        changes = local_changes(task, x, LocalTerms(proximal=alpha, correction={"x": -g}))
        g = g - alpha * changes
        h = h - alpha / 6 * changes.sum(axis=0)
        x = (x + changes).mean(axis=0) - h / alpha
    assert np.abs(trained(task, FedDyn(alpha=alpha), 4) - x).max() <= 1e-12


@pytest.mark.slow
def test_feddyn_reaches_the_minimiser_of_quadratics_where_fedavg_is_biased() -> None:
    task, minimiser = quadratics()
    assert np.abs(trained(task, FedDyn(alpha=0.5), 400) - minimiser).max() <= 1e-10
    assert np.abs(trained(task, FedAvg(), 400) - minimiser).max() >= 0.05


def test_feddyn_with_a_vanishing_alpha_takes_the_local_steps_of_fedavg() -> None:
    # Then x moves by the mean change and by -h / alpha, the mean change once more if all clients take part.
    task, _ = quadratics()
    assert np.abs(trained(task, FedDyn(alpha=1e-14)) - 2 * trained(task, FedAvg())).max() <= 1e-12


def test_h_is_the_mean_of_the_clients_gradients() -> None:
    task, _ = quadratics()
    state = run(FedDyn(alpha=0.5), task, n_rounds=7, clients=3, chunk_size=2)
    total = state.clients["control/x"].sum(axis=0)
    assert np.abs(state.server["optimizer/h/x"] - total / 6).max() <= 1e-12


# q-FFL


@pytest.mark.parametrize("weights", ["equal", "examples"])
def test_q_of_0_is_fedavg(weights: Any) -> None:
    task, _ = quadratics(UNEQUAL, COUNTS)
    assert (trained(task, QFFL(q=0, weights=weights), 5) == trained(task, FedAvg(weights=weights), 5)).all()


def test_q_fedavg_is_algorithm_2() -> None:
    task, _ = quadratics(UNEQUAL)
    q, x, bound = 2.0, np.zeros(3), 1 / task.training.learning_rate
    for _ in range(3):
        loss, gradient = task.model.losses(x) + 1e-10, -bound * local_changes(task, x)
        deltas = (loss**q)[:, None] * gradient
        h = q * loss ** (q - 1) * np.square(gradient).sum(axis=1) + bound * loss**q
        x = x - deltas.sum(axis=0) / h.sum()
    assert relative_error({"x": trained(task, QFFL(q=q), 3)}, {"x": x}) <= 1e-12


@pytest.mark.slow
def test_larger_q_makes_the_losses_more_even() -> None:
    task, _ = quadratics()
    spread = [task.model.losses(trained(task, QFFL(q=q), 200)).std() for q in (0, 1, 5)]
    assert spread[0] > spread[1] > spread[2]


# AFL


def test_the_projection_is_the_nearest_point_of_the_simplex() -> None:
    random = np.random.default_rng(4)
    for size in (1, 2, 7):
        for _ in range(20):
            values = random.normal(0, 1, size)
            nearest = minimize(
                lambda x, values=values: np.square(x - values).sum(),
                np.full(size, 1 / size),
                jac=lambda x, values=values: 2 * (x - values),
                bounds=[(0, 1)] * size,
                constraints={"type": "eq", "fun": lambda x: x.sum() - 1, "jac": lambda x: np.ones(len(x))},
                options={"ftol": 1e-14, "maxiter": 500},
            ).x
            assert np.abs(on_simplex(values) - nearest).max() <= 1e-6
    inside = np.array([0.2, 0.5, 0.3])
    assert np.abs(on_simplex(inside) - inside).max() <= 1e-15


def test_afl_is_descent_in_x_and_ascent_in_the_mixture() -> None:
    task, _ = quadratics(steps=1, examples=COUNTS)
    x, mixture = np.zeros(3), np.array(COUNTS) / sum(COUNTS)
    for _ in range(20):
        losses, changes = task.model.losses(x), local_changes(task, x)
        x, mixture = x + mixture @ changes, on_simplex(mixture + 0.02 * losses)
    assert np.abs(trained(task, AFL(mixture_learning_rate=0.02), 20) - x).max() <= 1e-12


@pytest.mark.slow
def test_afl_lowers_the_worst_loss() -> None:
    task, _ = quadratics(steps=1)
    worst = [task.model.losses(trained(task, each, 1000)).max() for each in (FedAvg(), AFL(mixture_learning_rate=3e-3))]
    x0 = np.zeros(4)
    minimax = minimize(
        lambda z: z[3], x0, method="SLSQP", options={"ftol": 1e-12, "maxiter": 1000},
        constraints={"type": "ineq", "fun": lambda z: z[3] - task.model.losses(z[:3])},
    ).fun  # fmt: skip
    assert worst[1] <= 1.01 * minimax < worst[0]


# Bits, and what does not go together


@pytest.mark.parametrize("algorithm", [FedNova(), QFFL(), AFL()], ids=lambda each: each.kind)
def test_the_number_of_a_client_is_counted_and_fits_its_budget(algorithm: Any) -> None:
    task = task_of(MLP(hidden=(16,)))
    plain, ours = rehearse(PLAN, FedAvg(), task), rehearse(PLAN, algorithm, task)
    for one, other in zip(ours, plain, strict=True):
        assert (one.ledger.uplink_bits - other.ledger.uplink_bits == COUNT_BITS).all()
        assert (one.ledger.downlink_bits == other.ledger.downlink_bits).all()
    broadcast = algorithm.broadcast(algorithm.init(task), task, 1).arrays
    said = algorithm.upload_bits(broadcast, task, ours[0].ledger.client)
    assert said.tolist() == ours[0].ledger.uplink_bits.tolist()


def test_feddyn_takes_no_server_optimizer() -> None:
    with pytest.raises(ValueError, match="server_optimizer"):
        FedDyn(server_optimizer=Momentum())  # type: ignore[arg-type]


@pytest.mark.parametrize("algorithm", [FedDyn(weights="examples"), AFL(weights="examples")], ids=lambda each: each.kind)
def test_weights_that_a_method_replaces_are_refused(algorithm: Any) -> None:
    with pytest.raises(UserError, match=f"{algorithm.kind} has weights of its own; leave weights out"):
        algorithm.check(task_of(MLP(hidden=(16,))))
