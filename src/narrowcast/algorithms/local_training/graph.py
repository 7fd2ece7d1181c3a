"""Local training on a graph: steps of Adam or of gradient descent on the whole graph, or on some of its clusters."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from pydantic import Field
from torch import Tensor
from torch.nn import functional

from narrowcast.algorithms.local_training.rules import BY_ROUND_ADVICE, RateSchedule
from narrowcast.platform.config.files import Section
from narrowcast.platform.contracts import Task, Training
from narrowcast.platform.data.graph import NodeGraph
from narrowcast.platform.errors import UserError
from narrowcast.platform.models.graph import GCN, Features, adjacency_among, adjacency_of, features_of
from narrowcast.platform.traits import TrainingTraits
from narrowcast.platform.types import Arrays, Chunk, IntArray, LocalTerms, LocalUpdates

_BETAS, _EPSILON = (0.9, 0.999), 1e-8


class GraphTraining(Training, Section):
    """Steps on the mean cross-entropy of the training nodes, over the whole graph or over some clusters at a time.

    Adam begins anew in each round, as it does at each synchronisation of the code released with GIST; `weight_decay` is
    added to the gradient. With `clusters_per_step` an epoch takes the clusters in random order, each step on the graph
    that those of its group have among themselves, normalised anew; a group without training nodes takes no step.

    Sources: Kingma and Ba, Adam, ICLR 2015; Chiang et al., Cluster-GCN, KDD 2019 (arXiv:1905.07953), Algorithm 1.
    """

    kind: Literal["graph"] = "graph"
    learning_rate: float = Field(0.01, gt=0, allow_inf_nan=False, description="step size")
    learning_rate_schedule: RateSchedule | None = Field(
        None, description="factor of learning_rate by round; null: constant"
    )
    epochs: int = Field(1, ge=1, description="local epochs per participation; one step each on the whole graph")
    optimizer: Literal["adam", "sgd"] = Field("adam", description="rule of a step; sgd has no momentum")
    weight_decay: float = Field(
        5e-4, ge=0, allow_inf_nan=False, description="coefficient of the parameters in the gradient"
    )
    clusters_per_step: int | None = Field(
        None, ge=1, description="clusters of data.clusters in a step; null: the whole graph"
    )

    @property
    def traits(self) -> TrainingTraits:
        """Only steps of `sgd` go against the gradient, times the learning rate."""
        return replace(super().traits, descends_gradients=self.optimizer == "sgd")

    @property
    def device(self) -> Literal["cpu"]:
        """The device on which clients train."""
        return "cpu"

    def check(self, task: Task) -> None:
        """Raise `UserError` unless the model is a graph network and there are clusters enough."""
        if not isinstance(task.model, GCN):
            raise UserError(f"training.kind = {self.kind} trains gcn, not {task.model.kind}; use another training")
        if self.learning_rate_schedule is not None and self.learning_rate_schedule.by_step:
            raise UserError(
                f"training.learning_rate_schedule = {self.learning_rate_schedule.kind} changes within a round, which "
                f"training.kind = {self.kind} does not; {BY_ROUND_ADVICE}"
            )
        if self.clusters_per_step is not None and self.clusters_per_step > task.data.n_clusters:
            raise UserError(
                f"training.clusters_per_step = {self.clusters_per_step}, but the graph has {task.data.n_clusters} "
                "clusters; raise data.clusters, or leave it out"
            )

    def mode(self, task: Task) -> Literal["per_client"]:
        """Return that clients train one after the other."""
        del task
        return "per_client"

    def samples(self, task: Task[NodeGraph, GraphTraining], clients: IntArray) -> IntArray:
        """Return the number of training nodes, for each client, [C]."""
        return task.data.examples[clients]

    def train(
        self, server: Arrays, chunk: Chunk, task: Task[NodeGraph, GraphTraining], terms: LocalTerms
    ) -> LocalUpdates:
        """Train the clients of the chunk; raise `UserError` for terms that graphs are not trained with."""
        other_steps = terms.rule or terms.rebuild or terms.start or terms.phases or terms.holds_clients
        if other_steps or terms.start_loss or terms.start_gradient:
            raise UserError(
                f"training.kind = {self.kind} takes plain steps, and this algorithm others; use fedavg or submodel"
            )
        factor = 1.0
        if (schedule := self.learning_rate_schedule) is not None:
            factor = schedule.factor(chunk.round_index, 0)
        epochs = np.full(len(chunk.clients), self.epochs) if terms.epochs is None else terms.epochs
        keys = task.private_seed.stream_keys("graph steps", chunk.round_index, chunk.clients).tolist()
        trained = [
            _Client(self, task, terms, index, torch.Generator().manual_seed(key >> 1)).train(
                server, int(epochs[index]), self.learning_rate * factor
            )
            for index, key in enumerate(keys)
        ]
        changes = {name: np.stack([client.changes[name] for client in trained]) for name in trained[0].changes}
        steps = np.array([client.steps for client in trained], dtype=np.int64)
        return LocalUpdates(
            changes=changes,
            state={},
            loss=np.array([client.loss for client in trained]),
            examples=epochs * len(task.data.train),
            steps=steps,
            rate_sum=None if factor == 1.0 else steps.astype(np.float64) * (self.learning_rate * factor),
        )


class _Trained(NamedTuple):
    changes: Arrays
    loss: float
    steps: int


class _Part(NamedTuple):
    """The subgraph of a step: the features of some nodes, the matrix among them, and those that are trained on."""

    features: Features
    adjacency: Any
    trained: Tensor
    labels: Tensor


@dataclass
class _Client:
    """One client's steps."""

    training: GraphTraining
    task: Task[NodeGraph, GraphTraining]
    terms: LocalTerms
    index: int
    random: torch.Generator
    moments: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def train(self, server: Arrays, epochs: int, rate: float) -> _Trained:
        """Return the change of each parameter, the mean loss of the last epoch and the steps taken."""
        start = {name: torch.from_numpy(np.array(values)) for name, values in server.items()}
        values = {name: tensor.clone() for name, tensor in start.items()}
        loss, counted, steps = 0.0, 0, 0
        for _ in range(epochs):
            loss, counted = 0.0, 0
            for part in self._parts():
                mean, gradients = self._gradients(values, part)
                steps += 1
                self._step(values, start, gradients, rate, steps)
                loss, counted = loss + mean * len(part.labels), counted + len(part.labels)
        changes = {name: (values[name] - start[name]).numpy() for name in self._names(values)}
        return _Trained(changes, loss / max(counted, 1), steps)

    def _parts(self) -> Iterator[_Part]:
        data, gcn = self.task.data, self._model
        features = features_of(data)
        if (at_once := self.training.clusters_per_step) is None:
            whole = adjacency_of(data, gcn.self_loops)
            yield _part(data, features.at(None, self.terms.columns), whole, data.train, data.train)
            return
        for clusters in torch.randperm(data.n_clusters, generator=self.random).split(at_once):
            nodes = np.flatnonzero(np.isin(data.clusters, clusters.numpy()))
            positions = np.flatnonzero(np.isin(nodes, data.train))
            if len(positions):
                among = adjacency_among(data, nodes, gcn.self_loops)
                yield _part(data, features.at(nodes, self.terms.columns), among, positions, nodes[positions])

    @property
    def _model(self) -> GCN:
        assert isinstance(self.task.model, GCN), "check() has seen to it"
        return self.task.model

    def _gradients(self, values: Mapping[str, Tensor], part: _Part) -> tuple[float, dict[str, Tensor]]:
        now = {name: values[name].detach().requires_grad_() for name in self._names(values)}
        scores = self._model.scores({**values, **now}, part.features, part.adjacency, self._drop())
        loss = functional.cross_entropy(scores[part.trained], part.labels)
        gradients = torch.autograd.grad(loss, list(now.values()))
        return float(loss.detach()), dict(zip(now, gradients, strict=True))

    def _names(self, values: Mapping[str, Tensor]) -> list[str]:
        """Return the parameters that train."""
        return [name for name in values if self.terms.trained is None or name in self.terms.trained]

    def _drop(self) -> Callable[[Tensor], Tensor] | None:
        if not (share := self._model.dropout):
            return None
        return lambda values: values * (torch.rand(values.shape, generator=self.random) >= share) / (1 - share)

    def _step(
        self, values: dict[str, Tensor], start: Mapping[str, Tensor], gradients: dict[str, Tensor], rate: float, t: int
    ) -> None:
        """Take step t, from 1, in place."""
        for name, of_loss in gradients.items():
            gradient = of_loss + self.training.weight_decay * values[name]
            if self.terms.gains:
                gradient += (self._own(self.terms.gains[name]) - 1) * of_loss
            if self.terms.proximal:
                gradient += self.terms.proximal * (values[name] - start[name])
            if self.terms.correction is not None:
                gradient += self._own(self.terms.correction[name])
            if self.training.optimizer == "sgd":
                values[name] -= rate * gradient
                continue
            first, second = self.moments.get(name, (torch.zeros_like(gradient), torch.zeros_like(gradient)))
            first = _BETAS[0] * first + (1 - _BETAS[0]) * gradient
            second = _BETAS[1] * second + (1 - _BETAS[1]) * gradient.square()
            self.moments[name] = first, second
            spread = (second / (1 - _BETAS[1] ** t)).sqrt() + _EPSILON
            values[name] -= rate / (1 - _BETAS[0] ** t) * first / spread

    def _own(self, rows: Any) -> Tensor:
        return torch.from_numpy(np.array(rows[self.index if len(rows) > 1 else 0]))


def _part(data: NodeGraph, features: Features, adjacency: Any, positions: IntArray, nodes: IntArray) -> _Part:
    return _Part(features, adjacency, torch.from_numpy(positions), torch.from_numpy(data.labels[nodes]))
