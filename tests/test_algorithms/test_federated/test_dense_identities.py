"""What must hold between the algorithms that send whole tensors, on networks and on matrix factorisation."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import per_client
from digits import digits, make_task, plain_client, relative_error, run, train
from narrowcast.algorithms.codecs.messages import DensePayload
from narrowcast.algorithms.federated.aggregator import CoordinateMedian
from narrowcast.algorithms.federated.fedavg import FedAvg
from narrowcast.algorithms.federated.fedmf import FedMF
from narrowcast.algorithms.federated.fedprox import FedProx
from narrowcast.algorithms.federated.low_rank import CoLR, SCoLR
from narrowcast.algorithms.federated.rank_policy import BandwidthRank
from narrowcast.algorithms.federated.scaffold import Scaffold
from narrowcast.platform.contracts import Algorithm, Task
from narrowcast.platform.errors import UserError
from narrowcast.platform.models.model import ITEM_FACTORS, USER_FACTORS
from narrowcast.platform.models.networks import CNN, MLP
from narrowcast.platform.types import Chunk, LocalTerms, PayloadError
from quadratics import quadratics

MEDIAN = FedAvg(aggregator=CoordinateMedian())
COUNTS = [21, 8, 40, 3, 17, 8, 12, 30]
EVERYTHING = BandwidthRank(upload_seconds=1e9)


def changes(algorithm: Algorithm, task: Task) -> dict[str, np.ndarray]:
    before, after = algorithm.init(task), run(algorithm, task).server
    return {name: after[name] - before[name] for name in algorithm.final(after)}


def test_fedavg_is_the_weighted_mean_of_the_clients_models() -> None:
    task = make_task(digits(COUNTS), epochs=2)
    server = task.model.init_server(task.data, 0)
    models = [plain_client(task, server, client) for client in range(len(COUNTS))]
    wanted = {name: np.average([model[name] for model in models], axis=0, weights=COUNTS) for name in server}
    assert relative_error(run(FedAvg(), task).server, wanted) <= 1e-6


def test_fedavg_with_one_epoch_of_full_batches_is_fedsgd() -> None:
    federated = make_task(digits(COUNTS), batch_size=1000)
    pooled = make_task(digits([sum(COUNTS)]), batch_size=1000)
    assert relative_error(changes(FedAvg(), federated), changes(FedAvg(), pooled)) <= 1e-5


@pytest.mark.parametrize("epochs", [1, 3])
def test_fedprox_without_its_term_is_fedavg(epochs: int) -> None:
    task = make_task(digits(COUNTS), epochs=epochs)
    assert relative_error(run(FedProx(mu=0), task, n_rounds=2).server, run(FedAvg(), task, n_rounds=2).server) == 0


def test_fedprox_holds_clients_near_the_server() -> None:
    task = make_task(digits(COUNTS), epochs=5)
    norms = [
        sum(float(np.square(values).sum()) for values in changes(FedProx(mu=mu), task).values()) for mu in (0, 1, 5)
    ]
    assert norms[0] > norms[1] > norms[2]


def test_scaffold_in_its_first_round_is_fedavg_with_equal_weights() -> None:
    # All control variates are zero until the first round has been played.
    task = make_task(digits(COUNTS))
    assert relative_error(changes(Scaffold(), task), changes(FedAvg(weights="equal"), task)) <= 1e-6


def test_the_servers_control_variate_is_the_mean_of_the_clients() -> None:
    task = make_task(digits(COUNTS))
    state = run(Scaffold(), task, n_rounds=5, clients=3)
    for name, values in state.server.items():
        if name.startswith("control/"):
            total = np.zeros_like(values)
            for kept in state.clients[name]:
                total += kept
            assert np.allclose(values, total / len(COUNTS), atol=1e-6)


def test_the_median_is_numpys_over_all_delivered_updates() -> None:
    task = make_task(digits(COUNTS))
    server = task.model.init_server(task.data, 0)
    models = [plain_client(task, server, client) for client in range(len(COUNTS))]
    wanted = {name: np.median([model[name] for model in models], axis=0) for name in server}
    assert relative_error(run(MEDIAN, task).server, wanted) <= 1e-5


@pytest.mark.parametrize(
    ("model", "images"), [(MLP(hidden=(16,)), False), (CNN(channels=(4, 8), hidden=16), True)], ids=["mlp", "cnn"]
)
@pytest.mark.parametrize(
    "training", [{}, {"momentum": 0.9}, {"weight_decay": 0.05}], ids=["plain", "momentum", "decay"]
)
@pytest.mark.parametrize("aggregation", ["per_item_mean", "weighted"])
def test_full_rank_scolr_is_fedavg(model: Any, images: bool, training: dict[str, float], aggregation: str) -> None:
    task = make_task(digits(COUNTS, images=images), model, epochs=2, **training)
    full = SCoLR(rank=1000, rank_policy=EVERYTHING, aggregation=aggregation)
    assert relative_error(changes(full, task), changes(FedAvg(), task)) <= 1e-5


@pytest.mark.parametrize("basis", ["orthonormal", "gaussian"])
def test_scolr_at_the_highest_rank_is_colr(basis: str) -> None:
    task = make_task(digits(COUNTS))
    colr, scolr = (
        run(algorithm, task, n_rounds=3)
        for algorithm in (CoLR(rank=4, basis=basis), SCoLR(rank=4, basis=basis, rank_policy=EVERYTHING))
    )
    assert relative_error(scolr.server, colr.server) <= 1e-6
    assert colr.uplink_bits == scolr.uplink_bits


def test_low_rank_changes_have_that_rank() -> None:
    task = make_task(digits(COUNTS))
    for name, change in changes(CoLR(rank=3), task).items():
        if change.ndim > 1:
            assert np.linalg.matrix_rank(change, tol=1e-5) == 3, name


def test_an_update_of_low_rank_weighs_what_it_packs() -> None:
    task = make_task(digits(COUNTS))
    algorithm = SCoLR(rank=6)
    (result,) = train(algorithm, task)
    shapes = [values.shape for values in task.model.init_server(task.data, 0).values()]
    for rank, bits in zip(result.ledger.rank, result.ledger.uplink_bits, strict=True):
        values = sum(max(shape) * min(rank, *shape) if len(shape) > 1 else shape[0] for shape in shapes)
        assert bits == 8 * len(DensePayload(np.zeros(values, dtype=np.float32)).to_bytes())


@pytest.mark.parametrize("seed", [None, 3])
def test_a_dense_payload_packs_and_unpacks(seed: int | None) -> None:
    tensors = {"b": np.arange(6, dtype=np.float32).reshape(2, 3), "a": np.array([np.pi], dtype=np.float32)}
    payload = DensePayload.of(tensors, examples=9, seed=seed)
    packed = payload.to_bytes()
    assert payload.wire_bits() == 8 * len(packed)
    again = DensePayload.from_bytes(packed)
    assert (again.examples, again.seed) == (9, seed)
    for name, values in again.tensors({name: values.shape for name, values in tensors.items()}).items():
        assert np.array_equal(values, tensors[name])
    for cut in range(len(packed)):
        with pytest.raises(PayloadError):
            DensePayload.from_bytes(packed[:cut])
    with pytest.raises(PayloadError, match="values"):
        again.tensors({"a": (1,)})


def factorisation_task(**training: Any) -> Task:
    return per_client.make_task(per_client.synthetic([3, 20, 1, 11, 8, 30]), **training)


def test_fedavg_on_matrix_factorisation_is_fedmf_weighted_by_examples() -> None:
    task = factorisation_task(epochs=2)
    fedavg, fedmf = run(FedAvg(), task, n_rounds=3), run(FedMF(aggregation="weighted"), task, n_rounds=3)
    assert (
        relative_error({ITEM_FACTORS: fedavg.server[ITEM_FACTORS]}, {ITEM_FACTORS: fedmf.server[ITEM_FACTORS]}) <= 1e-6
    )
    assert relative_error(fedavg.clients, fedmf.clients) <= 1e-6


@pytest.mark.parametrize("algorithm", [FedAvg(), FedProx(mu=0.1, partial_share=0.5), Scaffold(), MEDIAN])
def test_dense_algorithms_train_matrix_factorisation(algorithm: Algorithm) -> None:
    task = factorisation_task()
    state = run(algorithm, task, n_rounds=4, clients=4, chunk_size=2)
    assert all(np.isfinite(values).all() for values in (*state.server.values(), *state.clients.values()))
    assert (
        state.clients[USER_FACTORS] != task.model.init_clients(task.data, 0)[USER_FACTORS][state.participants]
    ).any()


def test_the_drift_of_untouched_rows_is_that_of_every_step() -> None:
    task = factorisation_task()
    server = task.model.init_server(task.data, 0)
    chunk = Chunk(1, 0, np.arange(6), task.model.init_clients(task.data, 0))
    ones = np.ones((6, *server[ITEM_FACTORS].shape), dtype=np.float32)
    plain, moved = (
        task.training.train(server, chunk, task, LocalTerms(correction=correction))
        for correction in (None, {ITEM_FACTORS: ones})
    )
    untouched = ~plain.changes[ITEM_FACTORS].any(axis=2)
    for client in range(6):
        drift = moved.changes[ITEM_FACTORS][client][untouched[client]]
        assert np.allclose(drift, -task.training.learning_rate * plain.steps[client], rtol=1e-6)


@pytest.mark.slow
def test_scaffold_reaches_the_minimiser_of_quadratics_where_fedavg_is_biased() -> None:
    task, minimiser = quadratics()
    errors = {
        algorithm.kind: np.abs(run(algorithm, task, n_rounds=400, chunk_size=4).server["x"] - minimiser).max()
        for algorithm in (FedAvg(), Scaffold())
    }
    assert errors["scaffold"] <= 1e-8
    assert errors["fedavg"] >= 0.05


@pytest.mark.slow
def test_scaffold_reaches_it_with_half_of_the_clients_in_a_round() -> None:
    task, minimiser = quadratics()
    state = run(Scaffold(), task, n_rounds=3000, clients=3, chunk_size=2)
    assert np.abs(state.server["x"] - minimiser).max() <= 1e-8


def test_option_1_needs_a_training_that_computes_the_gradient() -> None:
    task = per_client.make_task(per_client.synthetic([20, 3]))
    with pytest.raises(UserError, match=r"factorisation_sgd does not compute the gradient .*; use control = update"):
        Scaffold(control="gradient").check(task)
