"""The local training of one call, or of the calls of several runs as one program."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import psutil
from numpy.typing import NDArray
from torch.nn import Module

from narrowcast.algorithms.local_training.chain_gradients import Tensors
from narrowcast.algorithms.local_training.device import ARRAY_TYPES, Device, to_array, to_tensor
from narrowcast.algorithms.local_training.forward_draws import ForwardDraws, keyed_draws_only
from narrowcast.algorithms.local_training.local_optimizer import Rate, only_gradient_descent
from narrowcast.algorithms.local_training.minibatch_schedule import draw_schedule, epochs_of
from narrowcast.algorithms.local_training.network import Loader, Steps, train_network
from narrowcast.algorithms.local_training.rule_steps import train_by_rule
from narrowcast.algorithms.local_training.start_gradients import mean_gradients
from narrowcast.algorithms.local_training.start_losses import mean_losses
from narrowcast.algorithms.local_training.start_point import StartPoint
from narrowcast.platform.contracts import LocalCall, Task
from narrowcast.platform.data.features import joined, signature
from narrowcast.platform.data.samples import Labelled, Samples
from narrowcast.platform.errors import UserError
from narrowcast.platform.kinds import optional
from narrowcast.platform.models.moving_statistics import OWN_LAYERS, packed
from narrowcast.platform.models.neural_network import NeuralNetwork, skeleton
from narrowcast.platform.types import Arrays, FloatArray, IntArray, LocalTerms, LocalUpdates

if TYPE_CHECKING:
    from narrowcast.algorithms.local_training.sgd import NetworkTraining

Scalar = TypeVar("Scalar", bound=np.generic)


def program_key(call: LocalCall) -> tuple[object, ...]:
    """Return a key that is equal for two calls if they can be trained as one program.

    What `rebuild` computes is known by the object alone: equal ones are those of which Python says so.
    """
    terms, task = call.terms, call.task
    parts = (call.server, terms.gains or {}, terms.correction or {}, terms.frozen, terms.start or {}, terms.own)
    rows = (0, 1, 1, 0, 1, 1)  # leading client axes, whose length may differ
    # A rule's step has one learning rate.
    training = task.training if terms.rule else task.training.model_copy(update={"learning_rate": 1.0})
    train = task.data.train
    return (
        *(signature(train.features), signature(train.labels), task.data.n_classes),
        padded_batch(task),
        task.model,
        network_of(task).fixed_sha256(task.data),
        training,
        terms.proximal,
        terms.rebuild,
        None if terms.columns is None else tuple(terms.columns.tolist()),
        (terms.start_loss, terms.start_gradient),
        terms.rule,
        *(
            tuple((name, values.shape[skip:]) for name, values in part.items())
            for part, skip in zip(parts, rows, strict=True)
        ),
    )


def train_as_one(calls: Sequence[LocalCall]) -> list[LocalUpdates]:
    """Train the clients of all calls as one program; the calls may differ in data, seed and learning rate."""
    with keyed_draws_only(calls[0]):
        return _train_as_one(calls)


def _train_as_one(calls: Sequence[LocalCall]) -> list[LocalUpdates]:
    task = calls[0].task
    training, terms = task.training, [call.terms for call in calls]
    device: Device = training.device
    counts = _joined([call.task.data.examples[call.chunk.clients] for call in calls])
    epochs = _joined([epochs_of(call.chunk, call.terms, training.epochs) for call in calls])
    keys = _joined(
        [call.task.private_seed.stream_keys("shuffle", call.chunk.round_index, call.chunk.clients) for call in calls]
    )
    schedule = draw_schedule(counts, epochs, padded_batch(task), keys)
    order = schedule.order
    sizes = [len(call.chunk.clients) for call in calls]
    owner = np.repeat(np.arange(len(calls)), sizes)

    def of_calls(parts: Sequence[Arrays], order: IntArray = order) -> Tensors:
        """Return tensors [1, ...] for a single call, else [C, ...] in the order of the schedule."""
        if len(calls) == 1:
            return {name: to_tensor(np.asarray(values)[None], device) for name, values in parts[0].items()}
        stacked = {name: np.stack([np.asarray(part[name]) for part in parts]) for name in parts[0]}
        return {name: to_tensor(values[owner[order]], device) for name, values in stacked.items()}

    def of_clients(parts: Sequence[Arrays], order: IntArray = order) -> Tensors:
        """Return tensors [C, ...] in the order of the schedule."""
        return {name: to_tensor(np.concatenate([part[name] for part in parts])[order], device) for name in parts[0]}

    n_steps = len(schedule.active)
    rates = np.array([call.task.training.rates(call.task, call.chunk.round_index, n_steps) for call in calls])
    module = module_of(task)
    batched = training.mode(task) == "batched"
    _check_memory(task, len(order) if batched else 0)
    of_loss = network_of(task).loss_on(task.data)

    model = network_of(task)
    own, layers = _own_layers(calls)

    def starts(order: IntArray) -> Tensors:
        given = [each.start for each in terms if each.start is not None]
        begin = of_clients(given, order) if given else of_calls([call.server for call in calls], order)
        return {**begin, **of_clients(layers, order)}

    dtype = network_of(task).torch_dtype
    start_loss: FloatArray | None = None
    start_gradient: Arrays = {}
    if terms[0].start_loss or terms[0].start_gradient:
        once = np.ones_like(epochs)
        whole = schedule if (epochs == once).all() else draw_schedule(counts, once, padded_batch(task), keys)
        samples = Loader(*_samples(calls, whole.order), device, dtype)
        frozen = of_calls([each.frozen for each in terms], whole.order)
        draws = ForwardDraws.of(calls, whole.order, before_training=True)
        point = StartPoint(
            module, of_loss, starts(whole.order), samples, whole, terms[0].rebuild, frozen, batched, draws
        )
        start_loss, start_gradient = _measured(point, terms[0])
    loader = Loader(*_samples(calls, order), device, dtype)
    steps = Steps(
        learning_rates=[_rate_of(each, owner[order], loader) for each in rates.T],
        optimizer=training.local_optimizer,
        weight_decay=training.gradient_decay,
        clip_norm=training.clip_norm,
        proximal=terms[0].proximal,
        correction=of_clients([each.correction or {} for each in terms]),
        gains=of_clients([each.gains or {} for each in terms]),
        rebuild=terms[0].rebuild,
        frozen=of_calls([each.frozen for each in terms]),
        own=of_clients([each.own for each in terms]),
        draws=ForwardDraws.of(calls, order),
        statistics=model.trial(task.data).statistics,
    )
    slots: Tensors = {}
    if (rule := terms[0].rule) is None:
        changes, loss = train_network(module, of_loss, starts(order), loader, schedule, steps, batched=batched)
    else:
        _check_rule(task)
        changes, loss, slots = train_by_rule(
            module, of_loss, rule, starts(order), loader, schedule, steps, batched=batched
        )
    place = _places(order)
    stops = np.cumsum(sizes)
    scheduled = [None if training.learning_rate_schedule is None else each for each in rates]
    learnt = {name: to_array(values) for name, values in changes.items()}
    return [
        LocalUpdates(
            changes={name: values.take(part, axis=0) for name, values in learnt.items() if name not in own},
            state={OWN_LAYERS: call.chunk.state[OWN_LAYERS] + packed(learnt, own)[part]} if own else {},
            loss=loss[part],
            examples=(counts * epochs)[start:stop],
            steps=schedule.steps[part],
            start_loss=None if start_loss is None else start_loss[start:stop],
            start_gradient={name: values[start:stop] for name, values in start_gradient.items()},
            slots={name: to_array(values).take(part, axis=0) for name, values in slots.items()},
            rate_sum=None if each is None else _rate_sums(each, schedule.steps[part]),
        )
        for call, start, stop, each in zip(calls, [0, *stops[:-1]], stops, scheduled, strict=True)
        for part in [place[start:stop]]
    ]


def _own_layers(calls: Sequence[LocalCall]) -> tuple[tuple[str, ...], list[Arrays]]:
    """Return the names of what clients keep of layers with local statistics, and what those of each call have."""
    model, data = network_of(calls[0].task), calls[0].task.data
    own = tuple(model.own_layers(data))
    return own, [model.own_layers_of(call.chunk.state[OWN_LAYERS], data) if own else {} for call in calls]


def _measured(point: StartPoint, terms: LocalTerms) -> tuple[FloatArray | None, Arrays]:
    """Return the losses [C] and the gradients [C, ...] that the terms ask for, in the order of the calls' clients."""
    places = _places(point.schedule.order)
    gradients = mean_gradients(point) if terms.start_gradient else {}
    return (
        mean_losses(point)[places] if terms.start_loss else None,
        {name: to_array(each).take(places, axis=0) for name, each in gradients.items()},
    )


def _rate_of(rates: FloatArray, owner: IntArray, loader: Loader) -> Rate:
    """Return the learning rate of one step of the calls [R]: a number if they share it, else one per client, [C]."""
    rounded = rates.astype(ARRAY_TYPES[loader.dtype])
    return float(rates[0]) if (rounded == rounded[0]).all() else to_tensor(rates[owner], loader.device)


def _rate_sums(rates: FloatArray, steps: IntArray) -> FloatArray:
    """Return the sum of the learning rates of each client's steps, [C]."""
    return steps * rates[0] if len(rates) == 1 else np.concatenate([[0.0], np.cumsum(rates)])[steps]


def _places(order: IntArray) -> IntArray:
    """Return the place of each client in `order`."""
    places = np.empty(len(order), dtype=np.int64)
    places[order] = np.arange(len(order))
    return places


def network_of(task: Task[Samples, NetworkTraining]) -> NeuralNetwork:
    """Return the task's model, which `NetworkTraining.check` has found to be a network."""
    assert isinstance(task.model, NeuralNetwork), "check() has seen to it"
    return task.model


def module_of(task: Task[Samples, NetworkTraining]) -> Module:
    """Return the module that all clients train, without values."""
    return skeleton(network_of(task), task.data)


def _joined(parts: Sequence[NDArray[Scalar]]) -> NDArray[Scalar]:
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def padded_batch(task: Task[Samples, NetworkTraining]) -> int:
    """Return the size to which batches are padded; rounding depends on it, so that it is the same for all chunks."""
    most, size = max(int(task.data.examples.max(initial=0)), 1), task.training.batch_size
    return most if size == "all" else min(size, most)


def _check_rule(task: Task[Samples, NetworkTraining]) -> None:
    only_gradient_descent(task, "the algorithm's own local step goes along gradients")
    if momentum := optional(task.training, "momentum"):
        raise UserError(f"training.momentum = {momentum:g}: the algorithm's own local step has no momentum; set 0")


def _check_memory(task: Task[Samples, NetworkTraining], n_clients: int) -> None:
    """Raise `MemoryError` if the features of whole clients do not fit: each is padded to the largest one."""
    if task.training.batch_size != "all":
        return
    values = n_clients * padded_batch(task) * sum(prod(shape) for _, shape, _ in signature(task.data.train.features))
    features = network_of(task).torch_dtype.itemsize * values
    if features > psutil.virtual_memory().available:
        raise MemoryError(f"{features / 1e9:.0f} GB for the features of one step")


def _samples(calls: Sequence[LocalCall], order: IntArray) -> tuple[Labelled, IntArray]:
    """Return the samples of the calls' clients, and the rows of each client in turn, clients in the given order."""
    data = calls[0].task.data
    if all(call.task.data is data for call in calls):
        return data.train, _own(data, _joined([call.chunk.clients for call in calls])[order])
    taken = [call.task.data.train.take(_own(call.task.data, call.chunk.clients)) for call in calls]
    counts = _joined([call.task.data.examples[call.chunk.clients] for call in calls])
    rows = np.split(np.arange(counts.sum()), np.cumsum(counts)[:-1])
    together = Labelled(joined([each.features for each in taken]), _joined([each.labels for each in taken]))
    return together, np.concatenate([rows[client] for client in order])


def _own(data: Samples, clients: IntArray) -> IntArray:
    """Return the rows of the clients' training samples, one client after the other."""
    return data.of_clients("train").rows(clients)[0]
