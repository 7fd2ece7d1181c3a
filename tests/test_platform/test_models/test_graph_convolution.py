"""A graph network against dense matrices, its steps against torch's Adam, clusters, and nodes without edges."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional

from narrowcast.algorithms.local_training.graph import GraphTraining
from narrowcast.laws.small_tasks import graph, samples
from narrowcast.platform.contracts import Task
from narrowcast.platform.data.graph import NodeGraph
from narrowcast.platform.data.synthetic import BlockModel
from narrowcast.platform.errors import UserError
from narrowcast.platform.models.graph import GCN, adjacency_among, adjacency_of
from narrowcast.platform.models.networks import MLP
from narrowcast.platform.rounds.fleet import LogNormalFleet
from narrowcast.platform.seeds import PrivateSeed
from narrowcast.platform.types import Arrays, Chunk, LocalTerms, LocalUpdates


def dense_adjacency(data: NodeGraph, self_loops: bool = True) -> np.ndarray:
    """D^-1/2 (A + I) D^-1/2, entry by entry."""
    adjacency = np.zeros((data.n_nodes, data.n_nodes))
    for node in range(data.n_nodes):
        adjacency[node, data.indices[data.indptr[node] : data.indptr[node + 1]]] = 1
    adjacency += self_loops * np.eye(data.n_nodes)
    degrees = adjacency.sum(axis=1)
    roots = np.array([degree**-0.5 if degree else 0.0 for degree in degrees])
    return roots[:, None] * adjacency * roots


def dense_scores(model: GCN, values: dict[str, Tensor], features: Tensor, adjacency: Tensor) -> Tensor:
    last = len(model.hidden)
    for layer in range(last + 1):
        features = adjacency @ (features @ values[f"layers.{layer}.weight"]) + values[f"layers.{layer}.bias"]
        if layer < last:
            features = features.clamp(min=0)
            if model.layer_norm != "none":
                axes = (0, 1) if model.layer_norm == "graph" else (1,)
                variance, mean = torch.var_mean(features, dim=axes, correction=0, keepdim=True)
                features = (features - mean) / (variance + 1e-5).sqrt()
    return features


def tensors(parameters: Arrays) -> dict[str, Tensor]:
    return {name: torch.from_numpy(values.copy()) for name, values in parameters.items()}


def task_of(model: GCN, training: GraphTraining, data: NodeGraph | None = None) -> Task:
    data = graph() if data is None else data
    return Task(data, LogNormalFleet().profiles(data.examples, 0), model, training, 0, PrivateSeed.derived(0))


def train(task: Task, server: Arrays, **terms: Any) -> LocalUpdates:
    updates: LocalUpdates = task.training.train(server, Chunk(1, 0, np.array([0]), {}), task, LocalTerms(**terms))
    return updates


@pytest.mark.parametrize("self_loops", [True, False])
@pytest.mark.parametrize("layer_norm", ["none", "graph", "node"])
@pytest.mark.parametrize("hidden", [(6,), (6, 5)])
def test_metrics_are_those_of_dense_matrices(layer_norm: Any, hidden: tuple[int, ...], self_loops: bool) -> None:
    data, model = graph(), GCN(hidden=hidden, layer_norm=layer_norm, self_loops=self_loops)
    server = model.init_server(data, 3)
    adjacency = torch.from_numpy(dense_adjacency(data, self_loops).astype(np.float32))
    scores = dense_scores(model, tensors(server), torch.from_numpy(data.features), adjacency)[data.test]
    found = model.evaluate(server, {}, data, "test")
    wanted = torch.from_numpy(data.labels[data.test])
    assert found["loss"] == pytest.approx(float(functional.cross_entropy(scores, wanted)), rel=1e-5)
    assert found["accuracy"] == pytest.approx(float((scores.argmax(1) == wanted).float().mean()))


def test_adjacency_with_isolated_nodes_is_finite() -> None:
    data = BlockModel(nodes=40, degree=1, features=3, seed=0).load()
    assert data.sizes["isolated_nodes"] > 3
    for self_loops in (True, False):
        found = adjacency_of(data, self_loops)
        np.testing.assert_allclose(found.toarray(), dense_adjacency(data, self_loops), rtol=1e-6)
        assert np.array_equal(found.toarray(), found.toarray().T)
    model = GCN(self_loops=False, layer_norm="graph")
    task = task_of(model, GraphTraining(epochs=3), data)
    assert all(np.isfinite(change).all() for change in train(task, task.initial_parameters()).changes.values())
    no_edges = BlockModel(nodes=40, degree=0, features=3, seed=0).load()
    assert np.isfinite(model.evaluate(model.init_server(no_edges, 0), {}, no_edges, "test")["loss"])


@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
def test_steps_are_those_of_torch(optimizer: Any) -> None:
    data, model = graph(), GCN(hidden=(6, 5), layer_norm="graph", dropout=0)
    training = GraphTraining(optimizer=optimizer, epochs=7, learning_rate=0.03, weight_decay=0.01)
    task = task_of(model, training)
    server = model.init_server(data, 1)
    values = {name: tensor.requires_grad_() for name, tensor in tensors(server).items()}
    kind = torch.optim.Adam if optimizer == "adam" else torch.optim.SGD
    steps = kind(values.values(), lr=0.03, weight_decay=0.01)
    adjacency = torch.from_numpy(dense_adjacency(data).astype(np.float32))
    features, wanted = torch.from_numpy(data.features), torch.from_numpy(data.labels[data.train])
    for _ in range(7):
        steps.zero_grad()
        loss = functional.cross_entropy(dense_scores(model, values, features, adjacency)[data.train], wanted)
        loss.backward()
        steps.step()
    found = train(task, server)
    for name, change in found.changes.items():
        np.testing.assert_allclose(change[0], (values[name].detach() - tensors(server)[name]).numpy(), atol=2e-5)
    assert found.loss[0] == pytest.approx(float(loss.detach()), rel=1e-4)
    assert (found.steps.tolist(), found.examples.tolist()) == ([7], [7 * len(data.train)])


def test_dropout_differs_by_client_and_round_and_is_repeated() -> None:
    task = task_of(GCN(dropout=0.5), GraphTraining())
    server = task.initial_parameters()

    def change(client: int, round_index: int) -> Any:
        chunk = Chunk(round_index, 0, np.array([client]), {})
        return task.training.train(server, chunk, task, LocalTerms()).changes["layers.1.weight"]

    assert np.array_equal(change(0, 1), change(0, 1))
    assert not np.array_equal(change(0, 1), change(1, 1))
    assert not np.array_equal(change(0, 1), change(0, 2))


def test_an_epoch_of_clusters_is_a_step_on_each_subgraph() -> None:
    """The adjacency of a step is that of the nodes of its clusters alone, normalised anew."""
    data = replace(graph(), clusters=np.arange(60) % 3)
    nodes = np.flatnonzero(data.clusters == 1)
    inside = dense_adjacency(data, self_loops=False)[np.ix_(nodes, nodes)] > 0
    with_loops = inside + np.eye(len(nodes))
    roots = with_loops.sum(axis=1) ** -0.5
    found = adjacency_among(data, nodes, True).toarray()
    np.testing.assert_allclose(found, roots[:, None] * with_loops * roots, rtol=1e-6)
    model = GCN(hidden=(6,), dropout=0)
    steps = train(task_of(model, GraphTraining(clusters_per_step=1, epochs=2), data), model.init_server(data, 0)).steps
    assert steps.tolist() == [2 * len(np.unique(data.clusters[data.train]))]
    whole, all_at_once = (
        train(task_of(model, GraphTraining(clusters_per_step=each, epochs=3), data), model.init_server(data, 0))
        for each in (None, 3)
    )
    for name, change in whole.changes.items():
        np.testing.assert_allclose(all_at_once.changes[name], change, atol=1e-5)


def test_clusters_without_training_nodes_take_no_step() -> None:
    data = graph()
    clusters = np.where(np.isin(np.arange(60), data.train), 0, 1)
    data = replace(data, clusters=clusters)
    model = GCN(hidden=(6,), dropout=0)
    updates = train(task_of(model, GraphTraining(clusters_per_step=1, epochs=2), data), model.init_server(data, 0))
    assert updates.steps.tolist() == [2]


def test_what_does_not_fit_is_refused_in_one_line() -> None:
    data, small = graph(), GraphTraining()
    for check, message in (
        (lambda: GCN().check(samples(np.array([3]))), "model.kind = gcn needs a graph, but tiny is not a graph"),
        (lambda: MLP().check(data), "model.kind = mlp needs samples with targets, but block_model has none"),
        (lambda: small.check(replace(task_of(GCN(), small), model=MLP())), "training.kind = graph trains gcn, not mlp"),
        (
            lambda: GraphTraining(clusters_per_step=2).check(task_of(GCN(), small)),
            "training.clusters_per_step = 2, but the graph has 1 clusters",
        ),
        (
            lambda: GraphTraining.model_validate(
                {"learning_rate_schedule": {"kind": "inverse_time", "alpha": 1, "gamma": 1}}
            ).check(task_of(GCN(), small)),
            "learning_rate_schedule = inverse_time changes within a round",
        ),
    ):
        with pytest.raises(UserError, match=message):
            check()
