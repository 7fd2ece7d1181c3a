"""Adapters with a rank for each client: means are those of clients that train smaller adapters, padded by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from digits import digits, make_task, relative_error, run
from narrowcast.algorithms.codecs.messages import dense_wire_bits
from narrowcast.algorithms.federated.fedavg import FedAvg
from narrowcast.algorithms.federated.lora import LoRA, truncated
from narrowcast.algorithms.federated.rank_policy import UniformRank
from narrowcast.algorithms.federated.server_optimizer import SERVER_ONLY
from narrowcast.laws import algorithm_cases, algorithm_laws
from narrowcast.platform.contracts import Recipients, Task
from narrowcast.platform.errors import UserError
from narrowcast.platform.models.adapters import Adapters
from narrowcast.platform.models.networks import MLP
from narrowcast.platform.types import Arrays, Chunk

COUNTS = [40, 33, 20, 25]
LAYERS = {"1.": (64, 16), "3.": (16, 10)}
LONG = sum(map(sum, LAYERS.values()))
RANK, SCALE = 4, 1.5
MOST_RANK = SERVER_ONLY.name("most adapter rank")
EVERYTHING = {"kind": "bandwidth", "upload_seconds": 1e9}


def task_of(rank: int = RANK, **fields: Any) -> Task:
    """A task whose s = alpha / rank is the same at every rank."""
    model = Adapters(base=MLP(hidden=(16,)), rank=rank, alpha=SCALE * rank, **fields)
    return make_task(digits(COUNTS), model, epochs=2, learning_rate=0.5)


def begun() -> Arrays:
    """The factors after a round, of which none is zero."""
    return run(FedAvg(), task_of(), clients=4).server


def cut(values: Arrays, rank: int) -> dict[str, np.ndarray]:
    return {name: part[:rank] if name.endswith("A") else part[:, :rank] for name, part in values.items()}


def padded(values: Arrays) -> dict[str, np.ndarray]:
    return {
        name: np.pad(
            part, [(0, RANK - len(part)), (0, 0)] if name.endswith("A") else [(0, 0), (0, RANK - part.shape[1])]
        )
        for name, part in values.items()
    }


def of_clients(server: Arrays, round_index: int) -> tuple[list[int], list[dict[str, np.ndarray]]]:
    """The ranks, and the factors of each client, which it trains by a model that has its rank."""
    ranks = UniformRank().draw(np.arange(4), RANK, 0, round_index).tolist()
    trained = []
    for client, rank in enumerate(ranks):
        own, start = task_of(rank), cut(server, rank)
        (call,) = FedAvg().local_calls(start, Chunk(round_index, 0, np.array([client]), {}), own)
        changes = own.training.train(call.server, call.chunk, call.task, call.terms).changes
        trained.append({name: np.asarray(values + changes[name][0], float) for name, values in start.items()})
    return ranks, trained


def stepped(algorithm: LoRA, server: Arrays, round_index: int) -> tuple[Arrays, Any]:
    task = task_of()
    algorithm.check(task)
    state = {**algorithm.init(task), **server}
    broadcast = algorithm.broadcast(state, task, round_index).arrays
    results = [algorithm.train(broadcast, Chunk(round_index, n, np.arange(4)[n::2], {}), task) for n in range(2)]
    total = algorithm.fold([result.partial for result in results])
    after = algorithm.step(state, broadcast, total, task, round_index)
    return algorithm.final(after), algorithm.step_metrics(state, after, total, task)


def shares(layer: str, trained: list[dict[str, np.ndarray]], *, by_norm: bool) -> np.ndarray:
    sizes = [np.linalg.norm(own[layer + "lora_B"] @ own[layer + "lora_A"]) if by_norm else 0.0 for own in trained]
    weights = np.array(sizes if by_norm else COUNTS)
    return weights / weights.sum()


def test_hetlora_pads_with_zeros_and_weighs_by_norms_and_factors_are_means_over_those_that_have_a_column() -> None:
    server = begun()
    ranks, trained = of_clients(server, 3)
    assert len(set(ranks)) > 1
    het, _ = stepped(LoRA(combine="padded", rank_policy="uniform"), server, 3)
    means, _ = stepped(LoRA(rank_policy="uniform"), server, 3)
    for layer in LAYERS:
        weights = shares(layer, trained, by_norm=True)
        examples = shares(layer, trained, by_norm=False)
        for name in (layer + "lora_A", layer + "lora_B"):
            wanted = sum(weight * padded(own)[name] for weight, own in zip(weights, trained, strict=True))
            assert np.abs(het[name] - wanted).max() < 1e-6 * np.abs(wanted).max()
            got = means[name] if name.endswith("B") else means[name].T
            for column in range(RANK):
                have = [client for client, rank in enumerate(ranks) if rank > column]
                parts = [(padded(trained[client])[name], examples[client]) for client in have]
                columns = [((part if name.endswith("B") else part.T)[:, column], weight) for part, weight in parts]
                mean = sum(values * weight for values, weight in columns) / sum(weight for _, weight in columns)
                assert np.abs(got[:, column] - mean).max() < 1e-6 * np.abs(wanted).max()


@pytest.mark.parametrize("combine", ["stack", "product"])
def test_stacks_of_other_ranks_are_exact_and_products_are_ordered_by_their_singular_values(combine: Any) -> None:
    server = begun()
    _, trained = of_clients(server, 3)
    after, metrics = stepped(LoRA(combine=combine, rank_policy="uniform"), server, 3)
    base = task_of().model.adapted_weights(task_of().data)
    for layer in LAYERS:
        examples = shares(layer, trained, by_norm=False)
        mean = sum(p * own[layer + "lora_B"] @ own[layer + "lora_A"] for p, own in zip(examples, trained, strict=True))
        if combine == "stack":
            added = after[layer + "weight"].astype(float) - base[layer + "weight"]
            assert np.abs(added - SCALE * mean).max() < 1e-6 * np.abs(after[layer + "weight"]).max()
            continue
        u, singular, v = np.linalg.svd(mean)
        for rank in (1, 3, RANK):
            part = cut({name: after[name] for name in (layer + "lora_A", layer + "lora_B")}, rank)
            nearest = (u[:, :rank] * singular[:rank]) @ v[:rank]
            assert np.abs(part[layer + "lora_B"] @ part[layer + "lora_A"] - nearest).max() < 1e-5 * singular[0]
    assert metrics["aggregation_error"] < 1e-6 if combine == "stack" else 1e-3 < metrics["aggregation_error"] < 1


def test_ranks_that_are_those_of_the_model_change_nothing_but_by_rounding() -> None:
    task = task_of()
    for fields in ({}, {"combine": "stack"}):
        models = [
            algorithm.final(run(algorithm, task, n_rounds=2, clients=4).server)
            for algorithm in (LoRA(**fields), LoRA(**fields, rank_policy=EVERYTHING))
        ]
        moving = [name for name, values in models[0].items() if values.any()]
        assert relative_error(*({name: model[name] for name in moving} for model in models)) < 1e-5
    row = np.array([[3.0, 4.0]])
    _, a = truncated(np.array([[2.0], [0.0]]), row, -row, turns=False)
    assert np.allclose(a, -row / 5)


def test_a_client_pays_for_the_columns_of_its_rank_in_both_directions() -> None:
    task, ranks = task_of(also_trained=("3.bias",)), UniformRank().draw(np.arange(4), RANK, 0, 1)
    of_rank = {rank: dense_wire_bits(rank * (64 + 16 + 16 + 10) + 10, np.dtype(np.float32)) for rank in range(RANK + 1)}
    wanted = sum(of_rank[rank] for rank in ranks.tolist())
    state = run(LoRA(combine="padded", rank_policy="uniform"), task, clients=4)
    assert (state.uplink_bits, state.downlink_bits) == (wanted, wanted)
    algorithm = LoRA(rank_policy="channel", codec=[{"kind": "quantise", "levels": 255, "scale": "max"}, "entropy"])
    broadcast = algorithm.broadcast(algorithm.init(task), task, 1).arrays
    chunk = Chunk(1, 0, np.arange(4), {}, budget_bits=np.array([of_rank[rank] for rank in (0, 1, 3, 4)]) + 7)
    ledger = algorithm.train(broadcast, chunk, task).ledger
    assert ledger.rank.tolist() == [0, 1, 3, 4]
    assert ledger.delivered.tolist() == [False, True, True, True]
    assert (ledger.uplink_bits <= chunk.budget_bits).all()
    free = algorithm.train(broadcast, replace(chunk, budget_bits=None), task).ledger
    assert free.rank.tolist() == [RANK] * 4


def tail_norm(factors: dict[str, Any], first: int, rank: int) -> Any:
    """The sum of |B_t| |A_t| of a client, by torch."""
    norms = [
        torch.linalg.norm(factors[layer + "lora_A"][first:rank])
        * torch.linalg.norm(factors[layer + "lora_B"][:, first:rank])
        for layer in LAYERS
    ]
    return sum(norms)


def test_the_last_columns_weigh_on_the_loss_by_the_product_of_their_norms() -> None:
    server, weight, task = begun(), 0.3, task_of()
    most = {MOST_RANK: np.array([4, 4, 3, 2])}
    one_step = replace(task, training=task.training.model_copy(update={"batch_size": 64, "epochs": 1}))
    chunk = Chunk(3, 0, np.arange(4), {})
    changes = {}
    for of in (0.0, weight):
        algorithm = LoRA(combine="padded", rank_policy=EVERYTHING, pruning={"kept": 0.5, "weight": of})
        (call,) = algorithm.local_calls(algorithm.broadcast(server | most, one_step, 3).arrays, chunk, one_step)
        changes[of] = one_step.training.train(call.server, chunk, one_step, call.terms).changes
    for client, (first, rank) in enumerate([(2, 4), (2, 4), (1, 3), (1, 2)]):
        leaves = {name: torch.tensor(values, dtype=torch.float64).requires_grad_() for name, values in server.items()}
        tail_norm(leaves, first, rank).backward()
        for name, leaf in leaves.items():
            assert leaf.grad is not None
            added = (changes[weight][name][client] - changes[0.0][name][client]).astype(np.float64)
            wanted = -task.training.learning_rate * weight * leaf.grad.numpy()
            assert np.abs(added - wanted).max() < 1e-5 * np.abs(wanted).max()


def test_a_client_whose_training_shrinks_its_last_columns_keeps_its_rank_without_them() -> None:
    factors, task = begun(), task_of()
    algorithm = LoRA(combine="padded", rank_policy=EVERYTHING, pruning={"kept": 0.75, "weight": 0.05})
    algorithm.check(task)
    server = {**algorithm.init(task), **factors}
    most, everyone, fallen = np.full(4, RANK), np.arange(4), 0
    assert server[MOST_RANK].tolist() == most.tolist()
    for round_index in range(1, 5):
        chunk = Chunk(round_index, 0, everyone, {})
        sent = algorithm.broadcast(server, task, round_index)
        received = algorithm.download_bits(server, sent, task, Recipients(everyone, np.zeros(4), round_index))
        assert received is not None
        assert received.tolist() == [dense_wire_bits(rank * LONG, np.dtype(np.float32)) for rank in most.tolist()]
        broadcast = sent.arrays
        (call,) = algorithm.local_calls(broadcast, chunk, task)
        changes, wanted = task.training.train(call.server, chunk, task, call.terms).changes, []
        for client, rank in enumerate(most.tolist()):
            start = padded(cut(algorithm.final(server), rank))
            moved = {name: torch.tensor(values + changes[name][client]) for name, values in start.items()}
            left = max(int(0.75 * rank), 1)
            before = tail_norm({name: torch.tensor(values) for name, values in start.items()}, left, rank)
            wanted.append(left if tail_norm(moved, left, rank) < before else rank)
        result = algorithm.train(broadcast, chunk, task)
        assert result.ledger.rank.tolist() == wanted
        bits = [dense_wire_bits(rank * LONG, np.dtype(np.float32)) for rank in wanted]
        assert result.ledger.uplink_bits.tolist() == bits
        fallen += int((most > np.array(wanted)).sum())
        most = np.array(wanted)
        server = algorithm.step(server, broadcast, result.partial, task, round_index)
        assert server[MOST_RANK].tolist() == wanted
    assert fallen > 0


@pytest.mark.parametrize("fields", [{}, {"pruning": {"kept": 0.5, "weight": 0.1}}], ids=["", "pruning"])
@pytest.mark.parametrize(
    "law",
    [
        "a_resumed_run_equals_the_uninterrupted_run",
        "a_round_in_which_nobody_delivers_leaves_the_server_as_it_is",
        "a_lost_upload_is_counted_and_not_aggregated",
        "with_a_fine_quantiser_the_result_is_close_to_float32",
    ],
)
def test_hetlora_keeps_the_laws_of_algorithms(law: str, fields: dict[str, Any]) -> None:
    case = algorithm_cases.AlgorithmCase(
        LoRA(combine="padded", rank_policy="uniform", **fields), algorithm_cases.MODELS["adapters"]
    )
    getattr(algorithm_laws, law)(case)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"share": "b"}, "share = b has an exact mean of products, without rank_policy = uniform; leave one out"),
        ({"combine": "residual"}, "combine = residual is of factors of one rank; leave out rank_policy"),
        ({"server_learning_rate": 0.5}, "rank_policy = uniform has a server step of its own; leave out aggregator"),
    ],
    ids=str,
)
def test_ranks_that_a_setting_cannot_have_are_refused(fields: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValidationError, match=reason):
        LoRA(**fields, rank_policy="uniform")
    with pytest.raises(ValidationError, match="pruning lowers the ranks of a rank_policy; set one, such as bandwidth"):
        LoRA(pruning={})
    with pytest.raises(UserError, match="send other columns; leave it out"):
        LoRA(rank_policy="uniform", codec=["error_feedback", {"kind": "top_k", "fraction": 0.1}]).check(task_of())
