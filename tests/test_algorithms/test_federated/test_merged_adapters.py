"""FLoRA and FedEx-LoRA: weights after a round are the mean of the clients' dense ones, and bits are counts by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from digits import digits, make_task, relative_error, run
from narrowcast.algorithms.client.sums import EACH
from narrowcast.algorithms.codecs.messages import dense_wire_bits
from narrowcast.algorithms.federated.lora import LoRA
from narrowcast.experiment import Experiment
from narrowcast.laws import algorithm_cases, algorithm_laws
from narrowcast.platform.contracts import Task
from narrowcast.platform.errors import UserError
from narrowcast.platform.models.adapters import Adapters
from narrowcast.platform.models.modules import fixed_of
from narrowcast.platform.models.networks import MLP
from narrowcast.platform.models.neural_network import skeleton
from narrowcast.platform.types import Arrays, Chunk

COUNTS = [40, 33, 20]
SHARES = np.array(COUNTS) / sum(COUNTS)
LAYERS = {"1.": (64, 16), "3.": (16, 10)}
STACK, RESIDUAL, PRODUCT = LoRA(combine="stack"), LoRA(combine="residual"), LoRA(combine="product")
MERGING = pytest.mark.parametrize("algorithm", [STACK, RESIDUAL], ids=["stack", "residual"])


def task_of(counts: list[int] = COUNTS, **fields: Any) -> Task:
    execution = fields.pop("execution", "auto")
    model = Adapters(base=MLP(hidden=(16,)), rank=3, alpha=4.0, **fields)
    return make_task(digits(counts), model, epochs=2, learning_rate=0.5, execution=execution)


def weights(values: Arrays, base: Arrays) -> dict[str, np.ndarray]:
    """W + s B A of each layer, in float64."""
    rank = {layer: len(values[layer + "lora_A"]) for layer in LAYERS}
    return {
        layer: np.asarray({**base, **values}[layer + "weight"], float)
        + 4.0 / rank[layer] * np.asarray(values[layer + "lora_B"], float) @ values[layer + "lora_A"]
        for layer in LAYERS
    }


def base_of(task: Task) -> dict[str, np.ndarray]:
    return {name: tensor.numpy().copy() for name, tensor in fixed_of(skeleton(task.model, task.data)).items()}


def one_round(algorithm: LoRA, task: Task, server: Arrays, round_index: int) -> tuple[Arrays, dict[str, Any], Any]:
    """The server's state after a round, the mean of the clients' whole weights, and the metrics."""
    broadcast, base = algorithm.broadcast(server, task, round_index).arrays, base_of(task)
    whole, mean, results = algorithm.final(server), dict[str, Any].fromkeys(LAYERS, 0.0), []
    for client, share in enumerate(SHARES):
        chunk = Chunk(round_index, client, np.array([client]), {})
        results.append(algorithm.train(broadcast, chunk, task))
        sent = EACH.of(results[-1].partial)
        own = {
            name: values + sent[f"sum/{name}"][0] if f"sum/{name}" in sent else values for name, values in whole.items()
        }
        mean = {layer: mean[layer] + share * values for layer, values in weights(own, base).items()}
    total = algorithm.fold([result.partial for result in results])
    after = algorithm.step(server, broadcast, total, task, round_index)
    return after, mean, algorithm.step_metrics(server, after, total, task)


@MERGING
def test_the_weights_are_the_mean_of_the_clients_weights_and_the_frozen_ones_stay(algorithm: LoRA) -> None:
    task = task_of()
    algorithm.check(task)
    base, server = base_of(task), algorithm.init(task)
    for round_index in (1, 2):
        before = weights(algorithm.final(server), base)
        server, mean, metrics = one_round(algorithm, task, server, round_index)
        for layer, got in weights(algorithm.final(server), base).items():
            assert np.linalg.norm(got - mean[layer]) < 1e-6 * np.linalg.norm(mean[layer])
            assert np.linalg.norm(got - before[layer]) > 1e-3 * np.linalg.norm(mean[layer])
        assert metrics["aggregation_error"] < 1e-6
    assert all(np.array_equal(values, base[name]) for name, values in base_of(task).items())
    merged = task.model.merged(algorithm.final(server), task.data)
    for layer, got in weights(algorithm.final(server), base).items():
        assert np.allclose(merged[layer + "weight"], got, atol=1e-6)


def test_stacked_factors_are_drawn_anew_within_the_bound_of_the_first_ones() -> None:
    task = task_of()
    states = [run(STACK, task, n_rounds=rounds, clients=3).server for rounds in (1, 2)]
    for layer, (inputs, _) in LAYERS.items():
        first, second = (state[layer + "lora_A"] for state in states)
        assert not np.array_equal(first, second)
        assert 0.8 / np.sqrt(inputs) < np.abs(first).max() <= 1 / np.sqrt(inputs)
        assert not states[0][layer + "lora_B"].any()


def test_a_client_alone_is_fedit_with_a_residual_of_no_columns() -> None:
    task = task_of([40])
    fedit, fedex = (run(algorithm, task, n_rounds=3, clients=1) for algorithm in (LoRA(), RESIDUAL))
    base = base_of(task)
    got = RESIDUAL.final(fedex.server)
    assert relative_error({name: got[name] for name in fedit.server}, fedit.server) < 1e-6
    assert all(np.array_equal(got[layer + "weight"], base[layer + "weight"]) for layer in LAYERS)
    assert (fedex.uplink_bits, fedex.downlink_bits) == (fedit.uplink_bits, fedit.downlink_bits)
    stacked = weights(STACK.final(run(STACK, task, clients=1).server), base)
    central = weights(run(LoRA(), task, clients=1).server, base)
    for layer, wanted in central.items():
        assert np.linalg.norm(stacked[layer] - wanted) < 1e-6 * np.linalg.norm(wanted)


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-5), ("bfloat16", 0.1)])
@MERGING
def test_clients_in_turn_train_beside_the_moved_weights_as_clients_at_once_do(
    algorithm: LoRA, dtype: str, tolerance: float
) -> None:
    tasks = [task_of(execution="batched"), task_of(execution="per_client", dtype=dtype)]
    models = [algorithm.final(run(algorithm, task, n_rounds=2, clients=3).server) for task in tasks]
    assert relative_error(*(weights(model, {}) for model in models)) < tolerance
    assert {values.dtype for values in models[1].values()} == {np.dtype(np.float32)}


@pytest.mark.parametrize(
    ("algorithm", "first", "last", "everything"),
    [
        # clients' factors of layer 1 have 9 (64 + 16) values, those of layer 3 9 (16 + 10), and the weight 160
        (STACK, 0, 720 + 160, [0, 720 + 160, 1024 + 160, 1024 + 160]),
        # the residual has 6 columns; the mean factors have 3 (64 + 16 + 16 + 10) values
        (RESIDUAL, 318, 318 + 480 + 156, [318, 318 + 480 + 156, 318 + 960 + 160, 318 + 1024 + 160]),
    ],
    ids=["stack", "residual"],
)
def test_bits_are_those_of_what_a_client_lacks(algorithm: LoRA, first: int, last: int, everything: list[int]) -> None:
    bits: Callable[[int], int] = lambda size: int(dense_wire_bits(size + 10, np.dtype(np.float32)))  # noqa: E731
    task = task_of(also_trained=("3.bias",))
    states = [algorithm.init(task), *(run(algorithm, task, n_rounds=n, clients=3).server for n in (1, 2, 3))]
    for index, state in enumerate(states):
        broadcast = algorithm.broadcast(state, task, index + 1)
        assert broadcast.full.wire_bits() == bits(everything[index])
        assert broadcast.full.wire_bits() == 8 * len(broadcast.full.to_bytes())
        assert (broadcast.update is None) if not index else broadcast.update.wire_bits() == bits(last)
    whole = run(algorithm, task, n_rounds=3, clients=3)
    assert whole.uplink_bits == 3 * 3 * bits(318)
    assert whole.downlink_bits == 3 * (bits(first) + 2 * bits(last))


def test_a_round_without_uploads_adds_nothing_to_what_followers_are_sent() -> None:
    task = task_of()
    server = run(STACK, task, clients=3).server
    broadcast = STACK.broadcast(server, task, 2)
    nobody = STACK.train(broadcast.arrays, Chunk(2, 0, np.arange(3), {}, lost=np.ones(3, dtype=bool)), task)
    after = STACK.broadcast(STACK.step(server, broadcast.arrays, nobody.partial, task, 2), task, 3)
    assert after.update is not None
    assert after.update.wire_bits() == dense_wire_bits(0, np.dtype(np.float32))
    assert after.full.to_bytes() == broadcast.full.to_bytes()


LAWS = {
    "a_resumed_run_equals_the_uninterrupted_run": (STACK, RESIDUAL),
    "a_round_in_which_nobody_delivers_leaves_the_server_as_it_is": (STACK, RESIDUAL),
    "a_lost_upload_is_counted_and_not_aggregated": (PRODUCT, STACK, RESIDUAL),
    "with_a_fine_quantiser_the_result_is_close_to_float32": (PRODUCT, STACK, RESIDUAL),
}


@pytest.mark.parametrize(
    ("algorithm", "law"),
    [
        pytest.param(algorithm, law, id=f"{algorithm.combine}-{law}")
        for law, algorithms in LAWS.items()
        for algorithm in algorithms
    ],
)
def test_methods_that_read_each_clients_factors_keep_the_laws_of_algorithms(algorithm: LoRA, law: str) -> None:
    getattr(algorithm_laws, law)(algorithm_cases.AlgorithmCase(algorithm, algorithm_cases.MODELS["adapters"]))


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        (
            {"secure": {"kind": "masked"}},
            "algorithm.combine = stack needs the change of each client, which a sum hides",
        ),
        ({"schedule": {"kind": "buffered"}}, "lora as set here cannot count stale updates less"),
        (
            {
                "algorithm": {
                    "kind": "lora",
                    "combine": "stack",
                    "codec": ["error_feedback", {"kind": "top_k", "fraction": 0.1}],
                }
            },
            "combine = stack draws other factors for the next round",
        ),
    ],
    ids=["secure", "buffered", "memory"],
)
def test_what_does_not_go_with_stacked_factors_is_refused_by_one_line(fields: dict[str, Any], reason: str) -> None:
    values = {
        "name": "refused",
        "data": {"kind": "digits", "clients": 5},
        "model": {"kind": "adapters", "base": {"kind": "mlp", "hidden": [8]}},
        "algorithm": {"kind": "lora", "combine": "stack"},
        "training": {"kind": "sgd"},
        "rounds": 1,
        "clients_per_round": 3,
        **fields,
    }
    with pytest.raises(UserError, match=reason) as error:
        experiment = Experiment.model_validate(values)
        experiment.task(experiment.data_source.load())
    assert "\n" not in str(error.value)
