"""Clients with networks of their own: which client has which, and their parameters as rows of one array."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from narrowcast.algorithms.federated.client_widths import affordable_widths, multiplications
from narrowcast.platform.contracts import Model, Task
from narrowcast.platform.data.features import Features, by_name, rows_of_inputs
from narrowcast.platform.data.samples import Samples
from narrowcast.platform.errors import UserError
from narrowcast.platform.models.module_call import call_module
from narrowcast.platform.models.module_parts import shapes_of
from narrowcast.platform.models.neural_network import NeuralNetwork, as_inputs, skeleton
from narrowcast.platform.types import Arrays, FloatArray, IntArray

_SHARED = ("loss", "metrics", "dtype")
_SAMPLES_AT_ONCE = 1000


@dataclass(frozen=True)
class ClientNetworks:
    """The networks that clients may have, in the order of the field that lists them; all have the same outputs."""

    networks: tuple[NeuralNetwork, ...]
    data: Samples

    @classmethod
    def of(cls, models: Sequence[Model], task: Task) -> ClientNetworks:
        """Return the networks of a list, with the loss, the metrics and the type of the run's model; it if none are."""
        model: Any = task.model
        shared = {name: getattr(model, name) for name in _SHARED}
        listed: Sequence[Any] = models
        return cls(tuple(each.model_copy(update=shared).of_seed(task.seed) for each in listed) or (model,), task.data)

    def parts(self, assigned: IntArray) -> Iterator[tuple[Any, IntArray]]:
        """Yield each network that clients have and their places; `assigned` [C] has the place of each one's network."""
        for place, network in enumerate(self.networks):
            if len(places := np.flatnonzero(assigned == place)):
                yield network, places

    def affordable(self, speeds: FloatArray, model: NeuralNetwork) -> IntArray:
        """Return the place of the dearest network whose work is at most each client's speed, [C]."""
        return affordable_widths(self.work(model), speeds)

    def work(self, model: NeuralNetwork) -> FloatArray:
        """Return the operations of each network on a sample, relative to those of `model`, [networks]."""
        return _relative_work(self.networks, model, self.data)

    @property
    def row_length(self) -> int:
        """The number of parameters of the largest network."""
        return max(sum(map(prod, self._shapes(each).values())) for each in self.networks)

    def packed(self, parameters: Arrays) -> NDArray[Any]:
        """Return parameters [C, ...] as rows [C, row_length], filled up with zeros."""
        flat = [values.reshape(len(values), -1) for values in parameters.values()]
        rows = np.concatenate(flat, axis=1)
        return np.pad(rows, ((0, 0), (0, self.row_length - rows.shape[1])))

    def unpacked(self, network: NeuralNetwork, rows: NDArray[Any]) -> dict[str, NDArray[Any]]:
        """Return the parameters [C, ...] of a network that rows [C, row_length] hold."""
        shapes = self._shapes(network)
        ends = np.cumsum([prod(shape) for shape in shapes.values()])
        parts = np.split(rows, ends, axis=1)[: len(shapes)]
        return {
            name: part.reshape(len(rows), *shape) for (name, shape), part in zip(shapes.items(), parts, strict=True)
        }

    def drawn(self, network: NeuralNetwork, task: Task, clients: IntArray) -> NDArray[Any]:
        """Return the rows of networks that these clients draw themselves, [C, row_length]."""
        seeds = task.private_seed.stream_keys("initial model", 0, clients)
        models = [network.init_server(self.data, int(seed >> np.uint64(1))) for seed in seeds]
        shapes = self._shapes(network)
        return self.packed({name: np.stack([each[name] for each in models]) for name in shapes})

    def outputs(self, network: NeuralNetwork, parameters: Arrays, features: Features) -> NDArray[Any]:
        """Return the outputs of each client's network for n samples, [C, n, k]; parameters are [C, ...]."""
        n_samples = len(next(iter(by_name(features).values())))
        inputs = [
            as_inputs(rows_of_inputs(features, slice(start, start + _SAMPLES_AT_ONCE)), network.torch_dtype)
            for start in range(0, n_samples, _SAMPLES_AT_ONCE)
        ]
        n_clients, found = len(next(iter(parameters.values()))), []
        for place in range(n_clients):
            module = network.loaded({name: values[place] for name, values in parameters.items()}, self.data)
            with torch.no_grad(), network.evaluation_draws(self.data):
                found.append(torch.cat([call_module(module, part) for part in inputs]).numpy())
        return np.stack(found)

    def _shapes(self, network: NeuralNetwork) -> dict[str, tuple[int, ...]]:
        return shapes_of(skeleton(network, self.data))


def check_networks(models: Sequence[Model], task: Task, kind: str) -> None:
    """Raise `UserError` unless all models are networks that `training` trains, with the outputs of the run's model."""
    for place, model in enumerate(models):
        field = f"algorithm.models[{place}]"
        if not isinstance(model, NeuralNetwork):
            raise UserError(
                f"{field}.kind = {model.kind}: clients of {kind} average the outputs of networks; use a network with "
                f"the {task.data.n_outputs} outputs of the others, such as mlp or cnn"
            )
        for name in sorted(model.model_fields_set.intersection(_SHARED)):
            if getattr(model, name) != getattr(task.model, name):
                raise UserError(f"{field}.{name}: clients of {kind} share it; set model.{name} in its place")
    networks: Sequence[Any] = ClientNetworks.of(models, task).networks
    for place, network in enumerate(networks):
        try:
            network.check(task.data)
            task.training.check(replace(task, model=network))
        except UserError as error:
            raise UserError(f"algorithm.models[{place}]: {error}") from error


@lru_cache(maxsize=2)
def _relative_work(networks: tuple[NeuralNetwork, ...], model: NeuralNetwork, data: Samples) -> FloatArray:
    whole = max(multiplications(model, data), 1)
    return np.array([multiplications(each, data) for each in networks], dtype=np.float64) / whole
