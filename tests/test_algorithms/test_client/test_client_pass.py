"""The client pass: what clients contribute, of which some did not deliver, and what their messages weigh."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from digits import digits, make_task, train
from narrowcast.algorithms.client.client_pass import Contribution
from narrowcast.algorithms.client.sums import TensorSum, add_up
from narrowcast.algorithms.client.uploads import Message
from narrowcast.algorithms.codecs.messages import DensePayload
from narrowcast.algorithms.federated.aggregator import CoordinateMedian
from narrowcast.algorithms.federated.fedavg import FedAvg
from narrowcast.platform.contracts import Algorithm
from narrowcast.platform.errors import UserError
from narrowcast.platform.rounds.ledger import Weighted
from narrowcast.platform.types import Chunk, LocalUpdates

COUNTS = [5, 9, 2, 7]
DELIVERED = np.array([True, False, True, True])


def contribution() -> Contribution:
    """Return that of four clients, of whom the second, with values that are not finite, did not deliver."""
    tensors = {"a": np.array([[1.0, 2], [np.nan, 3], [4, 5], [6, 7]]), "b": np.array([1.0, np.inf, 3, 4])}
    weight, own = np.array([1.0, 9, 2, 3]), np.array([0.5, 9, 0.5, 2])
    return Contribution(
        *(tensors, weight),
        weights={"b": own},
        divisor=np.array([10.0, 9, 20, 30]),
        sums={"steps": np.array([2.0, 9, 3, 4])},
        each={"loss": np.array([0.1, 0.9, 0.2, 0.3])},
    )


def test_only_what_arrived_is_summed() -> None:
    partial = contribution().partial(DELIVERED)
    assert partial["sum/a"].tolist() == [1 + 8 + 18, 2 + 10 + 21]
    assert partial["sum/b"] == 0.5 + 1.5 + 8
    assert partial["weight"] == 60
    assert partial["steps"] == 9
    assert partial["each/loss"].tolist() == [0.1, 0.2, 0.3]


def test_without_a_divisor_the_weights_are_added_up() -> None:
    assert replace(contribution(), divisor=None).partial(DELIVERED)["weight"] == 6


def test_apart_the_server_has_the_tensors_of_each() -> None:
    partial = contribution().apart().partial(DELIVERED)
    assert partial["each/sum/a"].tolist() == [[1, 2], [4, 5], [6, 7]]
    assert partial["each/weight"].tolist() == [1, 2, 3]
    assert partial.keys() == {"each/sum/a", "each/sum/b", "each/weight", "each/loss", "steps"}
    joined = add_up([partial, contribution().apart().partial(~DELIVERED)])
    assert joined["each/loss"].tolist() == [0.1, 0.2, 0.3, 0.9]
    assert joined["steps"] == 18


class StepWeighted(FedAvg):
    """Clients are weighted by their local steps, which they send."""

    def message(self, broadcast: Any, chunk: Any, task: Any, updates: Any) -> Message:
        return replace(super().message(broadcast, chunk, task, updates), numbers={"steps": updates.steps})

    def contribution(self, broadcast: Any, chunk: Any, task: Any, arrived: Any) -> Contribution:
        return replace(super().contribution(broadcast, chunk, task, arrived), weight=arrived.numbers["steps"] * 1.0)


def test_a_number_weighs_32_bits_and_weights_the_change() -> None:
    task = make_task(digits(COUNTS), batch_size=2)
    (plain,), (own,) = (train(algorithm, task) for algorithm in (FedAvg(), StepWeighted()))
    assert (own.ledger.uplink_bits == plain.ledger.uplink_bits + 32).all()
    assert own.partial["weight"] == sum(-(-count // 2) for count in COUNTS) * task.training.epochs
    (given,) = train(StepWeighted(aggregator=CoordinateMedian()), task)
    assert given.partial["each/weight"].tolist() == [-(-count // 2) * task.training.epochs for count in COUNTS]


def test_a_client_whose_training_left_the_finite_numbers_keeps_its_state() -> None:
    task = make_task(digits([5, 9]))
    held = {"p": np.array([[1.0], [2.0]])}
    state = {"p": np.array([[3.0], [np.nan]])}
    ones, changes = np.ones(2, dtype=np.int64), {"w": np.ones((2, 3), dtype=np.float32)}
    updates = LocalUpdates(changes, state, np.ones(2), ones, ones)
    result = FedAvg().send({}, Chunk(1, 0, np.arange(2), held), task, [updates])
    assert result.state["p"].tolist() == [[3], [2]]
    assert result.ledger.delivered.tolist() == [True, False]
    assert (result.ledger.uplink_bits > 0).all()
    assert result.partial["weight"] == 5


class Halving(FedAvg):
    """What clients keep is half of what they learnt."""

    def contribution(self, broadcast: Any, chunk: Any, task: Any, arrived: Any) -> Contribution:
        own = super().contribution(broadcast, chunk, task, arrived)
        return replace(own, state={"p": arrived.updates.state["p"] / 2})


@pytest.mark.parametrize(("algorithm", "kept"), [(FedAvg(), [[3], [5]]), (Halving(), [[1.5], [2.5]])])
def test_a_client_whose_upload_is_lost_keeps_what_it_learnt(algorithm: FedAvg, kept: list[list[float]]) -> None:
    task, ones = make_task(digits([5, 9])), np.ones(2, dtype=np.int64)
    updates = LocalUpdates({"w": np.ones((2, 3), dtype=np.float32)}, {"p": np.array([[3.0], [5]])}, ones, ones, ones)
    chunk = Chunk(1, 0, np.arange(2), {"p": np.array([[1.0], [2.0]])}, lost=np.array([True, False]))
    result = algorithm.send({}, chunk, task, [updates])
    assert result.state["p"].tolist() == kept
    assert result.ledger.delivered.tolist() == [False, True]


def test_a_budget_of_the_size_of_an_update_lets_a_client_send() -> None:
    task, ones = make_task(digits([5, 9])), np.ones(2, dtype=np.int64)
    updates = LocalUpdates({"w": np.ones((2, 3), dtype=np.float32)}, {}, np.ones(2), ones, ones)
    size = 8 * len(DensePayload(np.ones(3, dtype=np.float32)).to_bytes())
    result = FedAvg().send({}, Chunk(1, 0, np.arange(2), {}, np.array([size, size - 1])), task, [updates])
    assert result.ledger.uplink_bits.tolist() == [size, 0]
    assert result.ledger.delivered.tolist() == [True, False]


@pytest.mark.parametrize(("dtype", "bits"), [(np.float32, 32), (np.float64, 64)])
def test_a_number_has_the_type_of_the_tensors_and_a_count_32_bits(dtype: type, bits: int) -> None:
    message = Message({"w": np.ones((2, 3), dtype=dtype)}, numbers={"loss": np.ones(2)})
    assert message.number_bits == bits
    steps = np.ones(2, dtype=np.int64)
    assert replace(message, numbers={"steps": steps}).number_bits == 32
    assert replace(message, numbers={"loss": np.ones(2), "steps": steps}).number_bits == bits + 32


def test_through_a_codec_training_that_left_the_finite_numbers_sends_nothing() -> None:
    task, ones = make_task(digits([5, 9])), np.ones(2, dtype=np.int64)
    changes = {"w": np.ones((2, 3), dtype=np.float32)}
    updates = LocalUpdates(changes, {}, np.array([1.0, np.nan]), ones, ones)
    algorithm = FedAvg.model_validate({"codec": [{"kind": "quantise", "levels": 3}]})
    result = algorithm.send({}, Chunk(1, 0, np.arange(2), {}), task, [updates])
    assert result.ledger.delivered.tolist() == [True, False]
    assert (result.ledger.uplink_bits > 0).tolist() == [True, False]
    assert result.partial["weight"] == 5


class Claiming(FedAvg):
    """All clients claim three times their steps; the server is told the steps that they claim."""

    def tamper(self, broadcast: Any, chunk: Any, task: Any, updates: Any) -> LocalUpdates:
        return replace(updates, steps=3 * updates.steps)

    def contribution(self, broadcast: Any, chunk: Any, task: Any, arrived: Any) -> Contribution:
        own = super().contribution(broadcast, chunk, task, arrived)
        return replace(own, sums={"steps": arrived.updates.steps})


def test_what_a_client_contributes_is_what_it_claims() -> None:
    task = make_task(digits(COUNTS), batch_size=2)
    (result,) = train(Claiming(), task)
    assert result.partial["steps"] == 3 * sum(-(-count // 2) for count in COUNTS) * task.training.epochs


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("local_call", "Old.local_call is now local_calls, which returns a sequence of calls"),
        ("upload", "Old.upload is now message and contribution: what clients send, and what they add to the sums"),
        ("upload_parts", "Old.upload_parts is now send"),
    ],
)
def test_methods_of_earlier_versions_are_named(name: str, words: str) -> None:
    with pytest.raises(UserError, match=words):
        type("Old", (Algorithm,), {name: lambda *_: None})


def test_numbers_are_paid_within_the_budget_and_by_those_who_send() -> None:
    counts = [5, 0, 9]
    task = make_task(digits(counts), batch_size=2)
    (plain,) = train(FedAvg(), task)
    size = int(plain.ledger.uplink_bits[0])
    algorithm = StepWeighted()
    broadcast, clients = algorithm.broadcast(algorithm.init(task), task, 1).arrays, np.arange(3)
    for more, bits in ((31, 0), (32, size + 32)):
        chunk = Chunk(1, 0, clients, {}, np.full(3, size + more))
        ledger = algorithm.train(broadcast, chunk, task).ledger
        assert ledger.uplink_bits.tolist() == [bits, 0, bits]
        assert ledger.delivered.tolist() == [bits > 0, False, bits > 0]


class Noting(FedAvg):
    """FedAvg whose metrics are what the pass tells `contribution` of each client."""

    def contribution(self, broadcast: Any, chunk: Any, task: Any, arrived: Any) -> Contribution:
        own = super().contribution(broadcast, chunk, task, arrived)
        noted = {"finite": arrived.finite, "delivered": arrived.delivered}
        ones = np.ones(len(chunk.clients))
        return replace(own, metrics={name: Weighted(values * 1.0, ones) for name, values in noted.items()})


def test_a_client_whose_upload_is_lost_stayed_finite_all_the_same() -> None:
    task, ones = make_task(digits([5, 9, 3])), np.ones(3, dtype=np.int64)
    changes = {"w": np.ones((3, 2), dtype=np.float32)}
    changes["w"][2] = np.inf
    chunk = Chunk(1, 0, np.arange(3), {}, lost=np.array([True, False, False]))
    metrics = Noting().send({}, chunk, task, [LocalUpdates(changes, {}, np.ones(3), ones, ones)]).metrics
    assert metrics["finite"].values.tolist() == [1, 1, 0]
    assert metrics["delivered"].values.tolist() == [0, 1, 0]


class Doubling(FedAvg):
    """Clients send twice what they learnt."""

    def message(self, broadcast: Any, chunk: Any, task: Any, updates: Any) -> Message:
        return Message({name: 2 * values for name, values in updates.changes.items()})


@pytest.mark.filterwarnings("ignore:overflow encountered")
def test_a_message_that_is_not_finite_does_not_count_though_the_training_is() -> None:
    task, ones = make_task(digits([5, 9])), np.ones(2, dtype=np.int64)
    changes = {"w": np.array([[1, 1], [1, 2e38]], dtype=np.float32)}
    result = Doubling().send(
        {}, Chunk(1, 0, np.arange(2), {}), task, [LocalUpdates(changes, {}, np.ones(2), ones, ones)]
    )
    assert result.ledger.delivered.tolist() == [True, False]
    assert result.partial["sum/w"].tolist() == [5 * 2, 5 * 2]


class Lying(FedAvg):
    """All clients claim a loss of 0, and factors of their own that they have not learnt."""

    def tamper(self, broadcast: Any, chunk: Any, task: Any, updates: Any) -> LocalUpdates:
        return replace(updates, loss=0 * updates.loss, state={"p": 0 * updates.state["p"]})


def test_losses_and_models_of_an_attackers_own_stay_true() -> None:
    task, ones = make_task(digits([5, 9])), np.ones(2, dtype=np.int64)
    learnt, losses = np.array([[3.0], [5]]), np.array([0.25, 0.5])
    updates = LocalUpdates({"w": np.ones((2, 3), dtype=np.float32)}, {"p": learnt}, losses, ones, ones)
    result = Lying().send({}, Chunk(1, 0, np.arange(2), {"p": np.zeros((2, 1))}), task, [updates])
    assert result.ledger.loss.tolist() == [0.25, 0.5]
    assert result.state["p"].tolist() == [[3], [5]]


def test_columns_are_divided_by_the_weights_of_those_who_sent_them() -> None:
    sums = {"a": np.array([[6.0, 0, 5], [3, 0, -1]]), "b": np.array([8.0, 2])}
    total = TensorSum(sums, np.array(4.0), {"a": np.array([3.0, 0, 1])})
    assert total.mean("a").tolist() == [[2, 0, 5], [1, 0, -1]]
    assert total.mean("b").tolist() == [2, 0.5]


def test_partial_sums_are_added_in_the_order_of_the_chunks() -> None:
    values = np.array([1.0, 1e8, -1e8, 3.0], dtype=np.float32)
    total = add_up([{"a": value} for value in values])["a"]
    assert total == ((values[0] + values[1]) + values[2]) + values[3] != values[0] + values[1] + (values[3] + values[2])
