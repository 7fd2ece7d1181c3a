"""Averages of adapters: their products, errors and bits are those of dense matrices and of counts by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from digits import digits, make_task, relative_error, run, train
from narrowcast.algorithms.codecs.messages import dense_wire_bits
from narrowcast.algorithms.federated.fedavg import FedAvg
from narrowcast.algorithms.federated.lora import LoRA, product_norm
from narrowcast.laws import algorithm_cases, algorithm_laws
from narrowcast.laws.small_tasks import PLAN
from narrowcast.platform.contracts import Task
from narrowcast.platform.errors import UserError
from narrowcast.platform.models.adapters import Adapters
from narrowcast.platform.models.networks import MLP
from narrowcast.platform.rounds.evaluation import model_sha256
from narrowcast.platform.rounds.state import Run
from narrowcast.platform.types import Arrays, Chunk

COUNTS = [40, 33, 20]
SHARES = np.array(COUNTS) / sum(COUNTS)
LAYERS = {"1.": (64, 16), "3.": (16, 10)}


def task_of(rank: int = 3, counts: list[int] = COUNTS, **fields: Any) -> Task:
    model = Adapters(base=MLP(hidden=(16,)), rank=rank, also_trained=fields.pop("also_trained", ()), **fields)
    return make_task(digits(counts), model, epochs=2, learning_rate=0.5)


def begun(task: Task) -> Arrays:
    """The factors after a round, of which none is zero."""
    return run(FedAvg(), task, clients=len(task.data.examples)).server


def products(values: Arrays) -> dict[str, np.ndarray]:
    return {layer: np.asarray(values[layer + "lora_B"], float) @ values[layer + "lora_A"] for layer in LAYERS}


def clients_products(task: Task, server: Arrays, changes: list[Arrays]) -> dict[str, np.ndarray]:
    """The mean of the clients' dense products."""
    mean: dict[str, Any] = dict.fromkeys(LAYERS, 0.0)
    for share, change in zip(SHARES, changes, strict=True):
        own = {name: values + change.get(name, 0) for name, values in server.items()}
        mean = {layer: mean[layer] + share * product for layer, product in products(own).items()}
    return mean


def after_one_round(
    algorithm: LoRA, rank: int = 3, round_index: int = 2
) -> tuple[Arrays, Arrays, dict[str, np.ndarray], Any]:
    """The server before and after a round, the mean product, and the round's metrics."""
    task = task_of(rank)
    algorithm.check(task)
    started = begun(task)
    server = {
        **algorithm.init(task),
        **{name: values for name, values in started.items() if name in algorithm.init(task)},
    }
    broadcast = algorithm.broadcast(server, task, round_index).arrays
    whole = algorithm.final(server)
    changes, results = [], []
    for client in range(3):
        (call,) = algorithm.local_calls(broadcast, chunk_of(client, round_index), task)
        learnt = task.training.train(call.server, call.chunk, call.task, call.terms)
        changes.append({name: values[0] for name, values in learnt.changes.items()})
        results.append(algorithm.train(broadcast, chunk_of(client, round_index), task))
    total = algorithm.fold([result.partial for result in results])
    after = algorithm.step(server, broadcast, total, task, round_index)
    metrics = algorithm.step_metrics(server, after, total, task)
    return whole, algorithm.final(after), clients_products(task, whole, changes), metrics


def chunk_of(client: int, round_index: int) -> Any:
    return Chunk(round_index, client, np.array([client]), {})


def distance(got: dict[str, np.ndarray], wanted: dict[str, np.ndarray]) -> float:
    return max(float(np.linalg.norm(got[layer] - wanted[layer]) / np.linalg.norm(wanted[layer])) for layer in LAYERS)


@pytest.mark.parametrize(
    ("fields", "round_index"),
    [({"share": "b"}, 2), ({"share": "alternate"}, 2), ({"share": "alternate"}, 3)],
    ids=str,
)
def test_the_mean_of_one_factor_is_that_of_the_products(fields: dict[str, Any], round_index: int) -> None:
    before, after, mean, metrics = after_one_round(LoRA(**fields), round_index=round_index)
    assert distance(products(after), mean) < 1e-6
    assert metrics == {}
    trained = "lora_A" if fields["share"] == "alternate" and round_index == 2 else "lora_B"
    moved = {name for name in before if not np.array_equal(after[name], before[name])}
    assert moved == {layer + trained for layer in LAYERS}


def test_means_of_both_factors_miss_the_mean_product_by_their_covariance() -> None:
    before, after, mean, metrics = after_one_round(LoRA(aggregation_error=True))
    del before
    gap = {layer: products(after)[layer] - mean[layer] for layer in LAYERS}
    task = task_of()
    server = begun(task)
    own = [run_alone(task, server, client) for client in range(3)]
    for layer in LAYERS:
        (a, b), mean_of = (np.stack([one[layer + name] for one in own]) for name in ("lora_A", "lora_B")), SHARES
        mean_a, mean_b = np.tensordot(mean_of, a, 1), np.tensordot(mean_of, b, 1)
        covariance = sum(share * (bu - mean_b) @ (au - mean_a) for share, au, bu in zip(SHARES, a, b, strict=True))
        assert np.abs(gap[layer] + covariance).max() < 1e-6 * np.abs(mean[layer]).max()
    ranks = {"1.": 3, "3.": 3}
    size = [np.sqrt(sum(np.square(parts[layer] / ranks[layer]).sum() for layer in LAYERS)) for parts in (gap, mean)]
    assert metrics["aggregation_error"] == pytest.approx(size[0] / size[1], rel=1e-4)


def run_alone(task: Task, server: Arrays, client: int) -> Arrays:
    (call,) = FedAvg().local_calls(server, chunk_of(client, 2), task)
    changes = task.training.train(call.server, call.chunk, call.task, call.terms).changes
    return {name: np.asarray(values + changes[name][0], float) for name, values in server.items()}


def test_the_mean_product_is_truncated_to_its_largest_singular_values() -> None:
    _, after, mean, metrics = after_one_round(LoRA(combine="product"))
    tails, norms = 0.0, 0.0
    for layer, product in products(after).items():
        u, singular, v = np.linalg.svd(mean[layer])
        nearest = (u[:, :3] * singular[:3]) @ v[:3]
        assert np.abs(product - nearest).max() < 1e-5 * singular[0]
        tails, norms = tails + np.square(singular[3:]).sum(), norms + np.square(singular).sum()
        assert np.allclose(after[layer + "lora_A"] @ after[layer + "lora_A"].T, np.eye(3), atol=1e-5)
    assert metrics["aggregation_error"] == pytest.approx(np.sqrt(tails / norms), rel=1e-3)
    assert metrics["aggregation_error"] > 1e-3


def test_with_a_full_rank_the_product_is_exact_and_norms_are_those_of_dense_matrices() -> None:
    _, after, mean, metrics = after_one_round(LoRA(combine="product"), rank=64)
    assert distance(products(after), mean) < 1e-5
    assert metrics["aggregation_error"] < 1e-5
    random = np.random.default_rng(0)
    left, right = random.standard_normal((5, 12)), random.standard_normal((12, 7))
    assert product_norm(left, right) == pytest.approx(np.linalg.norm(left @ right))


@pytest.mark.parametrize("weight", [0.0, 0.3])
def test_the_refined_factors_miss_the_mean_product_least(weight: float) -> None:
    _, means, mean, fedit = after_one_round(LoRA(aggregation_error=True))
    _, after, same_mean, metrics = after_one_round(LoRA(combine="refined", refinement_weight=weight))
    assert distance(same_mean, mean) < 1e-6
    for layer in LAYERS:
        a, b = (np.asarray(means[layer + name], float) for name in ("lora_A", "lora_B"))
        assert np.array_equal(after[layer + "lora_A"], means[layer + "lora_A"])
        stacked = np.vstack([a.T, np.sqrt(weight) * np.eye(3)])
        missed = np.vstack([(mean[layer] - b @ a).T, np.zeros((3, len(b)))])
        change = np.linalg.lstsq(stacked, missed)[0].T
        assert np.abs(change).max() > 1e-3 * np.abs(b).max()
        assert np.abs(after[layer + "lora_B"] - b - change).max() < 1e-5 * np.abs(b).max()
        if not weight:
            projected = mean[layer] @ np.linalg.pinv(a) @ a
            assert np.linalg.norm(products(after)[layer] - projected) < 1e-5 * np.linalg.norm(projected)
    assert 0 < metrics["aggregation_error"] < fedit["aggregation_error"]


def test_averaging_both_factors_is_fedavg_and_one_client_is_central_training() -> None:
    task = task_of()
    for algorithm in (LoRA(), LoRA(aggregation_error=True)):
        got, wanted = run(algorithm, task, n_rounds=2, clients=3), run(FedAvg(), task, n_rounds=2, clients=3)
        assert relative_error(algorithm.final(got.server), wanted.server) < 1e-5
    assert model_sha256(LoRA(), run(LoRA(), task, clients=3)) == model_sha256(FedAvg(), run(FedAvg(), task, clients=3))
    alone = task_of(counts=[40])
    products_of = [
        products(algorithm.final(run(algorithm, alone, clients=1).server))
        for algorithm in (LoRA(combine="product"), FedAvg())
    ]
    assert distance(*products_of) < 1e-5


@pytest.mark.parametrize(
    ("fields", "up", "down"),
    [
        ({}, ["AB"] * 3, ["AB"] * 3),
        ({"share": "b"}, ["B"] * 3, ["B"] * 3),
        ({"share": "alternate"}, ["B", "A", "B"], ["AB", "B", "A"]),
        ({"combine": "product"}, ["AB"] * 3, ["AB"] * 3),
    ],
    ids=str,
)
def test_bits_are_those_of_the_factors_that_are_sent(fields: dict[str, Any], up: list[str], down: list[str]) -> None:
    head = 10
    sizes = {"A": 3 * (64 + 16) + head, "B": 3 * (16 + 10) + head, "AB": 3 * (64 + 16 + 16 + 10) + head}
    bits = {name: dense_wire_bits(size, np.dtype(np.float32)) for name, size in sizes.items()}
    task = task_of(also_trained=("3.bias",))
    state = run(LoRA(**fields), task, n_rounds=3, clients=3)
    assert state.uplink_bits == 3 * sum(bits[sent] for sent in up)
    assert state.downlink_bits == 3 * sum(bits[sent] for sent in down)
    assert not np.array_equal(state.server["3.bias"], task.initial_parameters()["3.bias"])


def test_a_codec_of_alternating_factors_sends_what_trains() -> None:
    coded = LoRA(share="alternate", codec=[{"kind": "quantise", "levels": 255, "scale": "max"}, "entropy"])
    results = train(coded, task_of())
    plain = train(LoRA(share="alternate"), task_of())
    assert 0 < results[0].ledger.uplink_bits.sum() < 0.5 * plain[0].ledger.uplink_bits.sum()


@pytest.mark.parametrize(
    "law", ["a_resumed_run_equals_the_uninterrupted_run", "a_client_that_is_drawn_twice_counts_twice"]
)
def test_the_mean_product_keeps_the_laws_of_algorithms(law: str) -> None:
    case = algorithm_cases.AlgorithmCase(LoRA(combine="product"), algorithm_cases.MODELS["adapters"])
    getattr(algorithm_laws, law)(case)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"share": "b", "combine": "product"}, "share = b has an exact mean of products, without combine = product"),
        ({"share": "alternate", "aggregation_error": True}, "without aggregation_error = true; leave one out"),
        ({"share": "alternate", "server_optimizer": "adam"}, "share = alternate goes without server_optimizer"),
        ({"combine": "product", "aggregator": "median"}, "leave out aggregator"),
        ({"combine": "refined", "rank_policy": "uniform"}, "combine = refined is of factors of one rank"),
        ({"share": "alternate", "aggregator": "centred_clip"}, "use an aggregator without memory"),
    ],
    ids=str,
)
def test_settings_that_do_not_go_together_are_refused(fields: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValidationError, match=reason):
        LoRA(**fields)


@pytest.mark.parametrize(
    ("algorithm", "model", "reason"),
    [
        (LoRA(), MLP(), "model.kind = mlp does not have; set model.kind = adapters, with model.base.kind = mlp"),
        (LoRA(combine="product"), Adapters(factor="b"), "model.factor = b trains one factor, whose mean is exact"),
        (
            LoRA(share="alternate", codec=["error_feedback", {"kind": "top_k", "fraction": 0.1}]),
            Adapters(),
            "error_feedback, which keeps state",
        ),
    ],
    ids=["no adapters", "one factor", "memory"],
)
def test_what_has_no_two_factors_is_refused(algorithm: LoRA, model: Any, reason: str) -> None:
    with pytest.raises(UserError, match=reason):
        Run(PLAN, algorithm, make_task(digits(COUNTS), model)).check()
