"""GIST: sub-networks of a graph network. One is plain training, disjoint ones merge exactly, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from narrowcast.algorithms.codecs.messages import DensePayload
from narrowcast.algorithms.federated.fedavg import FedAvg
from narrowcast.algorithms.federated.fedma import FedMA
from narrowcast.algorithms.federated.submodel import Submodel
from narrowcast.algorithms.federated.unit_slices import UnitSlices
from narrowcast.algorithms.local_training.graph import GraphTraining
from narrowcast.laws.small_tasks import Shuffled
from narrowcast.platform.contracts import Recipients, Task
from narrowcast.platform.data.synthetic import BlockModel
from narrowcast.platform.errors import UserError
from narrowcast.platform.models.graph import GCN
from narrowcast.platform.models.hidden_units import Units
from narrowcast.platform.rounds.fleet import LogNormalFleet
from narrowcast.platform.rounds.plan import Plan
from narrowcast.platform.seeds import PrivateSeed
from narrowcast.platform.types import Arrays, Chunk, LocalTerms
from running import play, sha256

FEATURES, HIDDEN = 12, (8, 4)
PARTITION: dict[str, Any] = {"slices": "disjoint", "weights": "equal"}


def task_of(clients: int, hidden: tuple[int, ...] = HIDDEN, **training: Any) -> Task:
    data = BlockModel(clients=clients, nodes=80, blocks=4, degree=5, features=FEATURES, separation=1, seed=0).load()
    model = GCN(hidden=hidden, layer_norm="graph")
    profiles = LogNormalFleet().profiles(data.examples, 0)
    return Task(data, profiles, model, GraphTraining(**training), 0, PrivateSeed.derived(0))


def plan(clients: int, rounds: int = 4) -> Plan:
    return Plan(rounds=rounds, clients_per_round=clients, chunk_size=1, evaluate_every=1, checkpoint_every=1)


def units_of(algorithm: Submodel, task: Task, model: Arrays, round_index: int = 1) -> list[Units]:
    hidden = task.model.hidden_units(task.data)
    slices = UnitSlices(algorithm.slices, algorithm.widths, hidden, algorithm.sliced_layers)
    return slices.of_clients(np.arange(task.data.n_clients), lambda who: 0 * who, model, task.seed, round_index)


def test_one_network_is_plain_training() -> None:
    task = task_of(1, epochs=3)
    models = [
        sha256(algorithm, play(plan(1), algorithm, task))
        for algorithm in (Submodel(widths=(1.0,), **PARTITION), FedAvg())
    ]
    assert models[0] == models[1]


@pytest.mark.parametrize("slices", ["disjoint", "stratified"])
@pytest.mark.parametrize("layers", [None, (0,), (1,), (0, 1)])
def test_the_slices_are_a_partition(slices: Any, layers: Any) -> None:
    task = task_of(4)
    algorithm = Submodel(widths=(0.25,), slices=slices, sliced_layers=layers)
    units = units_of(algorithm, task, task.initial_parameters())
    for layer, total in enumerate((FEATURES, *HIDDEN)):
        owners = 1 if layers is None or layer in layers else 4
        found = np.sort(np.concatenate([each[layer] for each in units]))
        assert found.tolist() == np.repeat(np.arange(total), owners).tolist()


def test_stratified_networks_have_one_unit_of_every_rank() -> None:
    task = task_of(4)
    algorithm = Submodel(widths=(0.25,), slices="stratified")
    model = {name: np.array(values) for name, values in task.initial_parameters().items()}
    model["layers.0.bias"] = 10.0 * np.arange(8, dtype=np.float32)[::-1]
    rounds = [[each[1] for each in units_of(algorithm, task, model, index)] for index in range(1, 6)]
    for networks in rounds:
        assert [sorted(units < 4) for units in networks] == [[False, True]] * 4
    assert any(not np.array_equal(rounds[0][0], each[0]) for each in rounds[1:])


def merged(algorithm: Submodel, task: Task) -> tuple[Arrays, Arrays, list[Units], list[Arrays]]:
    """The model before and after a round, each network's units, and what it has trained to."""
    server = algorithm.init(task)
    broadcast = algorithm.broadcast(server, task, 1).arrays
    hidden, results, trained = task.model.hidden_units(task.data), [], []
    units = units_of(algorithm, task, server)
    for client in range(task.data.n_clients):
        chunk = Chunk(1, client, np.array([client]), {})
        results.append(algorithm.train(broadcast, chunk, task).partial)
        own = hidden.take(server, units[client])
        narrow = replace(task, model=task.model.narrowed([len(each) for each in units[client]]))
        changes = task.training.train(own, chunk, narrow, LocalTerms(columns=units[client][0])).changes
        trained.append({name: own[name] + changes[name][0] for name in own})
    return server, algorithm.step(server, broadcast, algorithm.fold(results), task, 1), units, trained


@pytest.mark.parametrize("output_bias", ["averaged", "kept"])
def test_disjoint_networks_are_written_back_and_the_rest_is_kept(output_bias: Any) -> None:
    """Only blocks within a network move, to what it has; the output bias is averaged, or never merged."""
    task = task_of(2, epochs=3)
    algorithm = Submodel(widths=(0.5,), output_bias=output_bias, **PARTITION)
    before, after, units, trained = merged(algorithm, task)
    hidden = task.model.hidden_units(task.data)
    for name, values in before.items():
        if name == "layers.2.bias":
            continue
        wanted = np.array(values)
        for own, network in zip(units, trained, strict=True):
            wanted[hidden.index(name, own)] = network[name]
        np.testing.assert_allclose(after[name], wanted, rtol=1e-6, atol=1e-7)
        untouched = np.ones(values.shape, dtype=bool)
        for own in units:
            untouched[hidden.index(name, own)] = False
        assert np.array_equal(after[name][untouched], values[untouched])
    assert (after["layers.1.weight"] == before["layers.1.weight"]).mean() == pytest.approx(0.5)
    mean = np.mean([network["layers.2.bias"] for network in trained], axis=0)
    wanted = before["layers.2.bias"] if output_bias == "kept" else mean
    np.testing.assert_allclose(after["layers.2.bias"], wanted, rtol=1e-5, atol=1e-8)
    assert np.abs(mean).max() > 1e-4


def test_shared_layers_are_averaged() -> None:
    """With the features alone divided, output weights and hidden biases are means over the networks."""
    task = task_of(3, epochs=2)
    algorithm = Submodel(widths=(1 / 3,), sliced_layers=(0,), **PARTITION)
    _, after, units, trained = merged(algorithm, task)
    for name in ("layers.0.bias", "layers.1.weight", "layers.2.weight", "layers.2.bias"):
        np.testing.assert_allclose(after[name], np.mean([each[name] for each in trained], axis=0), rtol=1e-5, atol=1e-7)
    for own, network in zip(units, trained, strict=True):
        np.testing.assert_allclose(after["layers.0.weight"][own[0]], network["layers.0.weight"], rtol=1e-6, atol=1e-7)


def test_a_network_reads_its_own_features_alone() -> None:
    """The features of other networks may be anything."""
    task = task_of(2, epochs=2)
    algorithm = Submodel(widths=(0.5,), sliced_layers=(0,), **PARTITION)
    server = algorithm.init(task)
    mine = units_of(algorithm, task, server)[0][0]
    features = np.array(task.data.features)
    features[:, np.setdiff1d(np.arange(FEATURES), mine)] = 1e3
    changes = []
    for data in (task.data, replace(task.data, features=features)):
        here = replace(task, data=data)
        (call,) = algorithm.local_calls(
            algorithm.broadcast(server, here, 1).arrays, Chunk(1, 0, np.array([0]), {}), here
        )
        changes.append(call.task.training.train(call.server, call.chunk, call.task, call.terms).changes)
    for name, change in changes[0].items():
        np.testing.assert_allclose(changes[1][name], change, rtol=1e-4, atol=1e-6)


def test_networks_pay_for_the_bytes_of_their_slice() -> None:
    task = task_of(4)
    algorithm = Submodel(widths=(0.25,), **PARTITION)
    server = algorithm.init(task)
    sent, everyone = algorithm.broadcast(server, task, 1), np.arange(4)
    bits = algorithm.download_bits(server, sent, task, Recipients(everyone, 0 * everyone, 1))
    hidden = task.model.hidden_units(task.data)
    for client, own in enumerate(units_of(algorithm, task, server)):
        assert bits[client] == 8 * len(DensePayload.of(hidden.take(server, own)).to_bytes())
    assert algorithm.upload_bits(sent.arrays, task, everyone).tolist() == bits.tolist()
    assert bits.sum() < sent.full.wire_bits()


def test_the_work_of_a_network_is_its_share_of_the_multiplications() -> None:
    task = task_of(2, hidden=(8,))
    nodes, edges = 80, len(task.data.indices) + 80
    whole, half = (
        nodes * (features * units + units * 4) + edges * (units + 4) for features, units in ((12, 8), (6, 4))
    )
    algorithm = Submodel(widths=(0.5,), **PARTITION)
    sent = algorithm.broadcast(algorithm.init(task), task, 1).arrays
    assert algorithm.relative_work(sent, task, np.arange(2)) == pytest.approx([half / whole] * 2)


@pytest.mark.parametrize("slices", ["disjoint", "stratified"])
def test_placement_changes_no_bit(slices: Any) -> None:
    task = task_of(4, epochs=2)
    algorithm = Submodel(widths=(0.25,), slices=slices, weights="equal", output_bias="kept")
    straight = play(plan(4), algorithm, task)
    shuffled = play(plan(4), algorithm, task, executor=Shuffled(algorithm, task))
    resumed = play(plan(4), algorithm, task, state=straight[1].state)
    assert sha256(algorithm, straight) == sha256(algorithm, shuffled) == sha256(algorithm, resumed)
    assert [each.metrics for each in straight] == [each.metrics for each in shuffled]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"widths": (1 / 5,)}, "algorithm.widths = 0.2 leaves no unit of a hidden layer of 4; use at least 1/4"),
        ({"sliced_layers": (3,)}, "algorithm.sliced_layers has 3, but layers of model.kind = gcn are 0 to 2"),
        ({"scaler": True}, "algorithm.scaler = true is not defined for model.kind = gcn"),
        ({"masked_labels": True}, "algorithm.masked_labels = true is not defined for model.kind = gcn"),
    ],
)
def test_what_leaves_no_unit_or_is_not_defined_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        Submodel(**{"widths": (0.25,), **fields}).check(task_of(5))
    assert "\n" not in str(caught.value)
    Submodel(widths=(1 / 5,), sliced_layers=(0, 1)).check(task_of(5))  # a layer that is whole has units enough


def test_features_are_not_matched() -> None:
    with pytest.raises(UserError, match="the first units of model"):
        FedMA(head="equal").check(task_of(2))
