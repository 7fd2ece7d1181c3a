"""The ensemble of models that clients trained alone: a control of methods that make one model of them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from narrowcast.algorithms.codecs.messages import dense_wire_bits
from narrowcast.algorithms.codecs.wire import dtype_of
from narrowcast.algorithms.federated.fedma import FedMA
from narrowcast.platform.data.samples import Labelled, Samples
from narrowcast.platform.models.module_call import call_module
from narrowcast.platform.models.neural_network import NeuralNetwork, as_input
from narrowcast.platform.types import Arrays, Chunk
from narrowcast.studies.spec import RunSpec

_SAMPLES_AT_ONCE = 1000


def ensemble_of_clients(spec: RunSpec, seed: int, *, test: bool = True) -> dict[str, Any]:
    """Return the accuracy of the mean of all clients' class probabilities, with equal weights, as a run's result.

    The clients train as in the first round of the specification's FedMA, and send their whole models.
    """
    began, experiment = time.perf_counter(), spec.configured(seed, spec.label)
    task, algorithm = experiment.task(experiment.data_source.load()), experiment.algorithm
    assert isinstance(algorithm, FedMA), "the clients' models are those that FedMA would match"
    assert isinstance(task.model, NeuralNetwork), "FedMA matches networks"
    clients = np.arange(task.data.n_clients)
    chunk = Chunk(1, 0, clients, algorithm.init_clients(task))
    (call,) = algorithm.local_calls(algorithm.broadcast(algorithm.init(task), task, 1).arrays, chunk, task)
    changes = call.task.training.train(call.server, chunk, call.task, call.terms).changes
    assert call.terms.start is not None, "clients of FedMA start from models of their own"
    models = [{name: values[u] + changes[name][u] for name, values in call.terms.start.items()} for u in clients]
    parts = {"validation": task.data.validation} | ({"test": task.data.test} if test else {})
    final = {f"{part}.accuracy": _accuracy(models, task.model, task.data, each) for part, each in parts.items()}
    values = sum(each.size for each in models[0].values())
    return {
        "rounds": 1,
        "final": final,
        "uplink_bits": len(clients) * int(dense_wire_bits(values, dtype_of(models[0]))),
        "downlink_bits": 0,
        "wall_seconds": round(time.perf_counter() - began, 2),
    }


def _accuracy(models: Sequence[Arrays], network: NeuralNetwork, data: Samples, samples: Labelled) -> float:
    """Return the share of samples, or of positions of a text, whose label has the largest mean probability."""
    modules, right, asked = [network.loaded(each, data) for each in models], 0, 0
    for start in range(0, len(samples), _SAMPLES_AT_ONCE):
        some = samples.take(np.arange(start, min(start + _SAMPLES_AT_ONCE, len(samples))))
        with torch.no_grad():
            features = as_input(torch.from_numpy(some.features), network.torch_dtype)
            mean = torch.stack([call_module(module, features).softmax(-1) for module in modules]).mean(0)
        right += int((mean.argmax(-1).numpy() == some.labels).sum())
        asked += some.labels.size
    return right / asked
