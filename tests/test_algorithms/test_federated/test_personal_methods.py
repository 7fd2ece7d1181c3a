"""Personal methods and their controls: fixed points on quadratics, slow loops over clients on digits, identities."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from torch import nn

import narrowcast as nc
from digits import digits, make_task, plain_client, relative_error, run
from narrowcast.algorithms.federated.apfl import APFL
from narrowcast.algorithms.federated.ditto import Ditto
from narrowcast.algorithms.federated.fedavg import FedAvg
from narrowcast.algorithms.federated.fine_tune import FineTune
from narrowcast.algorithms.federated.local import Local
from narrowcast.algorithms.federated.partial import Partial
from narrowcast.algorithms.federated.per_fedavg import PerFedAvg
from narrowcast.algorithms.federated.pfedme import PFedMe
from narrowcast.algorithms.local_training.batches import draw_schedule
from narrowcast.platform.config.files import Section
from narrowcast.platform.contracts import Task, Training
from narrowcast.platform.data.samples import Labelled, Samples
from narrowcast.platform.errors import UserError
from narrowcast.platform.models.networks import MLP
from narrowcast.platform.models.neural_network import NeuralNetwork
from narrowcast.platform.rounds.evaluation import model_sha256
from narrowcast.platform.rounds.state import RunState
from narrowcast.platform.types import Arrays, Chunk, IntArray, LocalTerms, LocalUpdates

COUNTS = [21, 8, 40, 3, 17, 8, 0, 30]
EVERYONE = np.arange(len(COUNTS))
Values = dict[str, torch.Tensor]


def used(algorithm: Any, task: Task, state: RunState) -> Arrays:
    """What each client uses, from the state of those that took part: all of them."""
    broadcast = algorithm.broadcast(state.server, task, state.round_index + 1).arrays
    return algorithm.personal(
        broadcast, Chunk(state.round_index, 0, np.arange(task.data.n_clients), state.clients), task
    )


def of_client(arrays: Arrays, client: int) -> Arrays:
    return {name: values[client] for name, values in arrays.items()}


# Quadratics a/2 (x - b)^2, as least squares of one number by one weight


class OneWeight(NeuralNetwork):
    kind: Literal["one_weight"] = "one_weight"
    dtype: Literal["float64"] = "float64"

    def module(self, data: Samples) -> nn.Module:
        return nn.Linear(1, 1, bias=False)


A, B = np.array([0.5, 1.2, 2.0]), np.array([-1.0, 0.7, 2.0])
RATE, PULL, STEP = 0.4, 2.0, 0.3


def least_squares(n_steps: int = 1) -> Task:
    """Clients of one sample (s, s b) whose loss (s x - s b)^2 has the curvature a = 2 s^2."""
    scale = np.sqrt(A / 2)[:, np.newaxis]
    samples, none = Labelled(scale, scale * B[:, np.newaxis]), Labelled(scale[:0], scale[:0])
    data = Samples("one", "computed", 0, samples, none, none, np.arange(3), np.arange(4))
    return make_task(data, OneWeight(), batch_size="all", learning_rate=RATE, epochs=n_steps)


def weighted(weights: np.ndarray) -> float:
    return float((weights * B).sum() / weights.sum())


ENVELOPE = PULL * A / (A + PULL)
AROUND = {"pull": PULL, "personal_rate": STEP, "inner_steps": 20}
FIXED_POINTS = {
    "pfedme, one step, is the optimum of the Moreau envelopes": (PFedMe(**AROUND), 1, ENVELOPE),
    "pfedme, five steps, drifts": (PFedMe(**AROUND), 5, 1 - (1 - RATE * ENVELOPE) ** 5),
    "per_fedavg, first order": (PerFedAvg(alpha=STEP, batches="same"), 1, A * (1 - STEP * A)),
    "per_fedavg, difference of gradients": (
        PerFedAvg(alpha=STEP, batches="same", hessian="difference", delta=0.5),
        1,
        A * (1 - STEP * A) ** 2,
    ),
    "per_fedavg, exact": (PerFedAvg(alpha=STEP, batches="same", hessian="exact"), 1, A * (1 - STEP * A) ** 2),
    "per_fedavg without adaptation": (PerFedAvg(alpha=0, batches="same"), 1, A),
    "ditto": (Ditto(pull=PULL), 1, A),
}


@pytest.mark.slow
@pytest.mark.parametrize(("algorithm", "n_steps", "weights"), FIXED_POINTS.values(), ids=FIXED_POINTS)
def test_the_global_model_goes_to_its_fixed_point(algorithm: Any, n_steps: int, weights: np.ndarray) -> None:
    state = run(algorithm, least_squares(n_steps), n_rounds=150 // n_steps, clients=3)
    assert state.server["weight"].item() == pytest.approx(weighted(weights), abs=1e-10)


@pytest.mark.slow
def test_own_models_go_to_their_fixed_points() -> None:
    task = least_squares()
    for algorithm in (PFedMe(**AROUND), Ditto(pull=PULL)):
        state = run(algorithm, task, n_rounds=90, clients=3)
        wanted = (A * B + PULL * state.server["weight"].item()) / (A + PULL)
        assert used(algorithm, task, state)["weight"].ravel() == pytest.approx(wanted, abs=1e-10)


def test_a_client_that_adapts_takes_steps_of_alpha() -> None:
    task, algorithm = least_squares(), PerFedAvg(alpha=STEP, batches="same", steps=1)
    state = run(algorithm, task, n_rounds=2, clients=3)
    x = state.server["weight"].item()
    assert used(algorithm, task, state)["weight"].ravel() == pytest.approx(x - STEP * A * (x - B), abs=1e-12)


@pytest.mark.parametrize("n_steps", [1, 7])
def test_fine_tuning_takes_steps_of_its_own_rate(n_steps: int) -> None:
    task, algorithm = least_squares(2), FineTune(fine_tune_epochs=n_steps, fine_tune_rate=STEP)
    state = run(algorithm, task, n_rounds=3, clients=3)
    assert state.server["weight"] == run(FedAvg(), task, n_rounds=3, clients=3).server["weight"]
    tuned = B + (1 - STEP * A) ** n_steps * (state.server["weight"].item() - B)
    assert used(algorithm, task, state)["weight"].ravel() == pytest.approx(tuned, abs=1e-10)


@pytest.mark.parametrize("inner_steps", [1, 3])
def test_pfedme_takes_so_many_inner_steps(inner_steps: int) -> None:
    task, algorithm = least_squares(), PFedMe(pull=PULL, personal_rate=STEP, inner_steps=inner_steps)
    x = task.initial_parameters()["weight"].item()
    best = (A * B + PULL * x) / (A + PULL)
    theta = best + (1 - STEP * (A + PULL)) ** inner_steps * (x - best)
    state = run(algorithm, task, clients=3)
    assert used(algorithm, task, state)["weight"].ravel() == pytest.approx(theta, abs=1e-12)
    copies = x - RATE * PULL * (x - theta)
    assert state.server["weight"].item() == pytest.approx(copies.mean(), abs=1e-12)
    of_code = algorithm.model_copy(update={"measured": "copy"})
    assert used(of_code, task, run(of_code, task, clients=3))["weight"].ravel() == pytest.approx(copies, abs=1e-12)


# Loops over clients on digits


def batches(task: Task, client: int, n_epochs: int) -> Iterator[Labelled]:
    one = np.array([client])
    keys = task.private_seed.stream_keys("shuffle", 1, one)
    schedule = draw_schedule(task.data.examples[one], np.array([n_epochs]), task.training.batch_size, keys)
    own = task.data.order[task.data.indptr[client] : task.data.indptr[client + 1]]
    for batch, size in zip(schedule.samples, schedule.sizes, strict=True):
        yield task.data.train.take(own[batch[:size]])


def gradient_of(task: Task) -> Callable[[Values, Labelled], Values]:
    module = task.model.module(task.data)

    def gradient(at: Values, samples: Labelled) -> Values:
        at = {name: each.clone().requires_grad_() for name, each in at.items()}
        if not len(samples):
            return {name: torch.zeros_like(each) for name, each in at.items()}
        features = torch.from_numpy(samples.features).to(next(iter(at.values())).dtype)
        scores = torch.func.functional_call(module, at, (features,))
        loss = nn.functional.cross_entropy(scores, torch.from_numpy(samples.labels))
        return dict(zip(at, torch.autograd.grad(loss, list(at.values())), strict=True))

    return gradient


def plus(values: Values, factor: float, direction: Values) -> Values:
    return {name: each + factor * direction[name] for name, each in values.items()}


def arrays(values: Values) -> Arrays:
    return {name: each.numpy() for name, each in values.items()}


@pytest.fixture
def task() -> Task:
    return make_task(digits(COUNTS), MLP(hidden=(16,)), epochs=2)


@pytest.fixture
def start(task: Task) -> Values:
    return {name: torch.from_numpy(values.copy()) for name, values in task.initial_parameters().items()}


def mean_of(task: Task, models: dict[int, Arrays]) -> Arrays:
    counts = np.array([COUNTS[client] for client in models])
    return {
        name: np.average(np.stack([model[name] for model in models.values()]), axis=0, weights=counts)
        for name in task.initial_parameters()
    }


TRAINED = [client for client, count in enumerate(COUNTS) if count]


def test_pfedme_is_a_loop_over_clients(task: Task, start: Values) -> None:
    algorithm, gradient = PFedMe(pull=3.0, personal_rate=0.05, inner_steps=2, decay=0.001), gradient_of(task)
    state, copies = run(algorithm, task), {}
    personal = used(algorithm, task, state)
    for client in TRAINED:
        x, theta = start, start
        for batch in batches(task, client, 2):
            for _ in range(2):
                tie = plus(plus(gradient(theta, batch), 0.001, theta), 3.0, plus(theta, -1.0, x))
                theta = plus(theta, -0.05, tie)
            x = plus(x, -0.1 * 3.0, plus(x, -1.0, theta))
        copies[client] = arrays(x)
        assert relative_error(of_client(personal, client), arrays(theta)) < 2e-5
    assert relative_error(state.server, mean_of(task, copies)) < 2e-5


@pytest.mark.parametrize("hessian", ["none", "exact", "difference"])
def test_per_fedavg_is_a_loop_over_clients(hessian: Any, task: Task, start: Values) -> None:
    algorithm, gradient = PerFedAvg(alpha=0.2, hessian=hessian, delta=0.05), gradient_of(task)
    state, copies, n_parts = run(algorithm, task), {}, 2 if hessian == "none" else 3
    for client in TRAINED:
        y = start
        for batch in batches(task, client, 2):
            place = np.arange(len(batch)) * n_parts // len(batch)
            parts = [batch.take(np.flatnonzero(place == part)) for part in range(n_parts)]
            d = gradient(plus(y, -0.2, gradient(y, parts[0])), parts[1])
            if hessian != "none":
                # In float64 a short difference is the exact product to more digits than float32 has.
                step, dtype = (0.05, torch.float32) if hessian == "difference" else (1e-5, torch.float64)
                at = {name: each.to(dtype) for name, each in y.items()}
                sides = [gradient(plus(at, sign * step, d), parts[2]) for sign in (1, -1)]
                curved = plus(d, -0.2 / (2 * step), plus(sides[0], -1.0, sides[1]))
                d = {name: each.float() for name, each in curved.items()}
            y = plus(y, -0.1, d)
        copies[client] = arrays(y)
    assert relative_error(state.server, mean_of(task, copies)) < 5e-5
    apart = replace(task, private_seed=task.private_seed.successor())
    x = {name: torch.from_numpy(np.array(values)) for name, values in state.server.items()}
    own = used(algorithm, task, state)
    for client in TRAINED:
        adapted = plus(x, -0.2, gradient(x, next(batches(apart, client, 1))))
        assert relative_error(of_client(own, client), arrays(adapted)) < 2e-5


def test_dittos_own_models_take_proximal_steps_and_its_global_one_is_fedavgs(task: Task) -> None:
    state, before = run(algorithm := Ditto(pull=0.5), task), task.initial_parameters()
    assert relative_error(state.server, run(FedAvg(), task).server) < 1e-5
    own = used(algorithm, task, state)
    for client in TRAINED:
        assert relative_error(of_client(own, client), plain_client(task, before, client, mu=0.5)) < 1e-5


def test_fedrep_trains_the_head_and_then_the_body(task: Task) -> None:
    phases = [{"trained": "head", "epochs": 1}, {"trained": ["1.*"], "epochs": 1}]
    algorithm = Partial.model_validate({"phases": phases})
    state, bodies, gradient = run(algorithm, task), {}, gradient_of(task)
    own = used(algorithm, task, state)
    for client in TRAINED:
        y = {name: torch.from_numpy(values.copy()) for name, values in task.initial_parameters().items()}
        steps = list(batches(task, client, 2))
        for index, batch in enumerate(steps):
            layer = "3." if index < len(steps) // 2 else "1."
            moved = plus(y, -0.1, gradient(y, batch))
            y = {name: moved[name] if name.startswith(layer) else each for name, each in y.items()}
        bodies[client] = arrays(y)
        heads = {name: values for name, values in of_client(own, client).items() if name.startswith("3.")}
        assert relative_error(heads, {name: y[name].numpy() for name in heads}) < 2e-5
    mean = mean_of(task, bodies)
    body = {name: values for name, values in state.server.items() if name in ("1.weight", "1.bias")}
    assert relative_error(body, {name: mean[name] for name in body}) < 2e-5


# Controls and identities


def test_alone_is_independent_training_bit_for_bit_and_costs_no_bits(task: Task) -> None:
    algorithm, start = Local(), task.initial_parameters()
    moved = {name: np.zeros((len(COUNTS), *values.shape), values.dtype) for name, values in start.items()}
    for round_index in (1, 2, 3):
        own = {name: values + start[name] for name, values in moved.items()}
        chunk = Chunk(round_index, 0, EVERYONE, {})
        changes = task.training.train(start, chunk, task, LocalTerms(start=own)).changes
        moved = {name: (own[name] + changes[name]) - start[name] for name in own}
    state = run(algorithm, task, n_rounds=3, chunk_size=8)
    for name, values in moved.items():
        assert np.array_equal(state.clients[f"personal/{name}"], values)
    assert (state.uplink_bits, state.downlink_bits) == (0, 0)
    for untied in (Ditto(pull=0), APFL(alpha=1)):
        clients = run(untied, task, n_rounds=3, chunk_size=4).clients
        assert all(np.array_equal(clients[f"personal/{name}"], values) for name, values in moved.items())


# MLflow's SQL store uses what SQLAlchemy 2.1 deprecates.
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::sqlalchemy.exc.SADeprecationWarning")
def test_a_run_alone_ends_with_metrics_of_clients_and_without_traffic(tmp_path: Path) -> None:
    settings = {"algorithm": "local", "rounds": 2, "evaluate_every": 2, "tracking.system_metrics": False}
    result = nc.run("ditto-digits", settings, output=tmp_path, progress=False)
    assert (result.total_bits, "test.accuracy" in result.final) == (0, False)
    assert 0 < result.final["test.accuracy.mean"] < 1
    assert dict(result.summary())["total traffic"] == "0 B"


def test_fine_tuning_changes_no_round_and_is_training_from_the_global_model(task: Task) -> None:
    algorithm, plain = FineTune(fine_tune_epochs=2), FedAvg()
    state, wanted = run(algorithm, task), run(plain, task)
    assert model_sha256(algorithm, state) == model_sha256(plain, wanted)
    assert (state.uplink_bits, state.downlink_bits) == (wanted.uplink_bits, wanted.downlink_bits)
    apart, tuned = replace(task, private_seed=task.private_seed.successor()), used(algorithm, task, state)
    for client in TRAINED:
        assert relative_error(of_client(tuned, client), plain_client(apart, state.server, client)) < 1e-5
    same = used(FineTune(fine_tune_epochs=0), task, state)
    assert all(np.array_equal(values[0], state.server[name]) for name, values in same.items())


@pytest.mark.parametrize("schedule", [None, {"kind": "step", "every": 1}])
def test_a_rate_of_fine_tuning_that_is_the_trainings_gives_the_same_bits(schedule: Any) -> None:
    task = make_task(digits(COUNTS), MLP(hidden=(16,)), learning_rate_schedule=schedule)
    plain, algorithm = FineTune(), FineTune(fine_tune_rate=task.training.learning_rate)
    state = run(algorithm, task, n_rounds=2)
    tuned, wanted = used(algorithm, task, state), used(plain, task, run(plain, task, n_rounds=2))
    assert all(np.array_equal(values, wanted[name]) for name, values in tuned.items())
    other = used(FineTune(fine_tune_rate=0.05), task, state)
    assert not any(np.array_equal(values, wanted[name]) for name, values in other.items())
    model = used(FineTune(fine_tune_epochs=0, fine_tune_rate=0.05), task, state)
    assert all(np.array_equal(values[0], state.server[name]) for name, values in model.items())


class Still(Training, Section):
    """A training that takes no steps, and so has no learning rate."""

    kind: Literal["still"] = "still"
    epochs: int = 1
    device: Literal["cpu"] = "cpu"

    def check(self, task: Task) -> None:
        pass

    def mode(self, task: Task) -> Literal["batched"]:
        return "batched"

    def samples(self, task: Task, clients: IntArray) -> IntArray:
        return np.zeros(len(clients), dtype=np.int64)

    def train(self, server: Arrays, chunk: Chunk, task: Task, terms: LocalTerms) -> LocalUpdates:
        raise AssertionError("nothing trains here")


def test_a_rate_of_fine_tuning_needs_a_training_with_one(task: Task) -> None:
    still = replace(task, training=Still())
    FineTune().check(still)
    words = r"algorithm.fine_tune_rate = 0.05: training.kind = still has no learning rate; leave it out"
    with pytest.raises(UserError, match=words):
        FineTune(fine_tune_rate=0.05).check(still)


def test_fedbabu_holds_the_head_as_it_was_drawn_until_it_is_measured(task: Task) -> None:
    algorithm, start = Partial(kept_trains=False), task.initial_parameters()
    state = run(algorithm, task, n_rounds=2)
    heads = used(algorithm, task, state)["3.weight"]
    assert np.array_equal(heads, np.broadcast_to(start["3.weight"], heads.shape))
    tuned = used(Partial(kept_trains=False, fine_tune_epochs=1), task, state)["3.weight"]
    assert len(np.unique(tuned[TRAINED], axis=0)) == len(TRAINED)


@pytest.mark.parametrize(("kept", "shared"), [("head", "1."), ("body", "3."), (("1.*",), "3.")])
def test_partial_pays_for_what_it_shares(kept: Any, shared: str, task: Task) -> None:
    start = task.initial_parameters()
    fewer = sum(values.size for name, values in start.items() if not name.startswith(shared))
    partly, whole = run(Partial(kept=kept), task), run(FedAvg(), task)
    senders = len(TRAINED)
    assert whole.uplink_bits - partly.uplink_bits == senders * 32 * fewer
    assert whole.downlink_bits - partly.downlink_bits == len(COUNTS) * 32 * fewer


@pytest.mark.parametrize(
    ("algorithm", "message"),
    [
        (Partial(kept=("*",)), "clients keep all of mlp; share some of it, or use local"),
        (Partial(kept=("9.*",)), "algorithm.kept = 9.* names no tensor of mlp; it has 1.weight, 1.bias, 3.weight"),
        (
            Partial.model_validate({"phases": [{"trained": "head", "epochs": 3}]}),
            "algorithm.phases have 3 epochs and training.epochs = 2; raise it to 3",
        ),
        (
            Partial.model_validate({"kept_trains": False, "phases": [{"trained": "head"}]}),
            "algorithm.phases trains 3.weight, which kept_trains = false holds fixed",
        ),
        (PFedMe(pull=30.0), "training.learning_rate = 0.1 times algorithm.pull = 30 is 3, and steps of 2 or more grow"),
    ],
)
def test_what_makes_no_sense_is_refused_in_one_line(algorithm: Any, message: str, task: Task) -> None:
    with pytest.raises(UserError) as error:
        algorithm.check(task)
    assert message in str(error.value)
    assert "\n" not in str(error.value)
