"""Clients of one call, or of the calls of several runs, trained as one program of a network's local steps.

A call whose terms name phases is trained phase by phase, each from where the last ended.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import repeat
from math import prod
from typing import Any, TypeVar

import numpy as np
import psutil
import torch
from numpy.typing import NDArray
from torch.nn import Module

from narrowcast.algorithms.local_training.batches import BatchSchedule, draw_schedule, epochs_of
from narrowcast.algorithms.local_training.consistency import UnlabelledBatches
from narrowcast.algorithms.local_training.forward_draws import ForwardDraws, keyed_draws_only
from narrowcast.algorithms.local_training.gradients import ARRAY_TYPES, Device, Tensors, to_array, to_tensor
from narrowcast.algorithms.local_training.network import Loader, Program, mean_gradients, mean_losses, train
from narrowcast.algorithms.local_training.rules import BY_ROUND_ADVICE, Rate, only_gradient_descent
from narrowcast.algorithms.local_training.steps import Steps
from narrowcast.platform.contracts import LocalCall, Task
from narrowcast.platform.data.samples import Labelled, Samples, joined, signature
from narrowcast.platform.errors import UserError
from narrowcast.platform.models.forward_pass import OWN_LAYERS, packed
from narrowcast.platform.models.modules import holding
from narrowcast.platform.models.neural_network import NeuralNetwork, skeleton
from narrowcast.platform.types import Arrays, FloatArray, IntArray, LocalTerms, LocalUpdates, Phase

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
        (terms.rule, terms.trained, terms.phases, terms.pulls is None, terms.radii is None),
        (terms.consistency, task.data.labels_at_clients, terms.tails is None, terms.tail_weight),
        *(
            tuple((name, values.shape[skip:]) for name, values in part.items())
            for part, skip in zip(parts, rows, strict=True)
        ),
    )


def rounds_alike(call: LocalCall) -> bool:
    """Return whether the products of a client round the same at any place of a batch.

    So do those of matrices that begin at multiples of 16 bytes, whatever their place, but for frozen ones that all
    clients are multiplied with at once.
    """
    task, rows = call.task, padded_batch(call.task)
    if any(tensor.ndim > 1 and not tensor.requires_grad for tensor in module_of(task).parameters()):
        return False
    arrays = (*call.server.values(), *call.terms.frozen.values())
    shapes = {*(values.shape for values in arrays), *(tuple(tensor.shape) for tensor in module_of(task).parameters())}
    sizes = {size for shape in shapes if len(shape) > 1 for size in (prod(shape), *(rows * side for side in shape))}
    return all(size * network_of(task).torch_dtype.itemsize % 16 == 0 for size in sizes)


def train_calls(calls: Sequence[LocalCall]) -> list[LocalUpdates]:
    """Train the clients of all calls as one program; the calls may differ in data, seed and learning rate."""
    with keyed_draws_only(calls[0]):
        return _in_phases(calls) if calls[0].terms.phases else _train_calls(calls)


def _in_phases(calls: Sequence[LocalCall]) -> list[LocalUpdates]:
    """Train each phase from where the one before ended; what is left of a client's epochs trains all that trains."""
    terms, training = calls[0].terms, calls[0].task.training
    schedule = training.learning_rate_schedule
    if terms.rule is not None or (schedule is not None and schedule.by_step):
        unfit = "local step of its own" if schedule is None else f"training.learning_rate_schedule = {schedule.kind}"
        raise UserError(f"{unfit}: this algorithm trains in phases, which take plain steps; {BY_ROUND_ADVICE}")
    if terms.consistency is not None:
        raise UserError("LocalTerms.consistency: training in phases takes samples with labels alone; leave out one")
    left = [epochs_of(call.chunk, call.terms, training.epochs) for call in calls]
    rest = Phase(trained_names(calls[0]), max(int(epochs.max(initial=0)) for epochs in left))
    ended: list[LocalUpdates] = []
    done = 0
    for index, phase in enumerate((*terms.phases, rest)):
        taken = [np.minimum(epochs, phase.epochs) for epochs in left]
        begun = [
            _continued(call, phase, epochs, before)
            for call, epochs, before in zip(calls, taken, ended or repeat(None), strict=False)
        ]
        updates = _train_calls(begun, phase=index, first_epoch=done)
        ended = [_added(*pair) for pair in zip(ended, updates, strict=True)] if ended else updates
        left = [epochs - now for epochs, now in zip(left, taken, strict=True)]
        done += phase.epochs
    return ended


def _continued(call: LocalCall, phase: Phase, epochs: IntArray, ended: LocalUpdates | None) -> LocalCall:
    """Return the call of a phase with so many epochs [C], from where the clients ended the ones before."""
    chunk, terms = call.chunk, replace(call.terms, trained=phase.trained, epochs=epochs, phases=())
    if ended is not None:
        begun = {**call.server, **(terms.start or {})}
        start = {**(terms.start or {}), **{name: begun[name] + moved for name, moved in ended.changes.items()}}
        chunk = replace(chunk, state={**chunk.state, **ended.state})
        terms = replace(terms, start=start, start_loss=False, start_gradient=False)
    return replace(call, chunk=replace(chunk, epochs=None), terms=terms)


def _added(before: LocalUpdates, after: LocalUpdates) -> LocalUpdates:
    """Return the updates of two phases as those of one training."""
    names = {**before.changes, **after.changes}
    shared = before.changes.keys() & after.changes.keys()
    return LocalUpdates(
        changes=names | {name: before.changes[name] + after.changes[name] for name in shared},
        state=after.state,
        loss=np.where(after.steps > 0, after.loss, before.loss),
        examples=before.examples + after.examples,
        steps=before.steps + after.steps,
        start_loss=before.start_loss,
        rate_sum=None if before.rate_sum is None or after.rate_sum is None else before.rate_sum + after.rate_sum,
        start_gradient=before.start_gradient,
    )


def trained_names(call: LocalCall) -> tuple[str, ...]:
    """Return the parameters that a call trains; raise `UserError` for names that it has not."""
    names = tuple({**call.server, **(call.terms.start or {})})
    if call.terms.trained is None:
        return names
    if unknown := [name for name in call.terms.trained if name not in names]:
        raise UserError(f"LocalTerms.trained names {unknown[0]}; parameters are {', '.join(names)}")
    return tuple(name for name in names if name in call.terms.trained)


def _train_calls(calls: Sequence[LocalCall], *, phase: int = 0, first_epoch: int = 0) -> list[LocalUpdates]:
    task = calls[0].task
    training, terms, model = task.training, calls[0].terms, network_of(task)
    device: Device = training.device
    counts = _joined([call.task.data.examples[call.chunk.clients] for call in calls])
    epochs = _joined([epochs_of(call.chunk, call.terms, training.epochs) for call in calls])
    keys = _joined(
        [call.task.private_seed.stream_keys("shuffle", call.chunk.round_index, call.chunk.clients) for call in calls]
    )
    sizes = [len(call.chunk.clients) for call in calls]
    owner = np.repeat(np.arange(len(calls)), sizes)
    batched = training.mode(task) == "batched"
    _check_memory(task, len(owner) if batched else 0)
    own_layers, layers = _own_layers(calls)
    trained = {*trained_names(calls[0]), *own_layers}

    def program_of(schedule: BatchSchedule, *, before_training: bool = False) -> Program:
        order = schedule.order

        def of_calls(parts: Sequence[Arrays]) -> Tensors:
            """Return tensors [1, ...] for a single call, else [C, ...] in the order of the schedule."""
            if len(calls) == 1:
                return {name: to_tensor(np.asarray(values)[None], device) for name, values in parts[0].items()}
            stacked = {name: np.stack([np.asarray(part[name]) for part in parts]) for name in parts[0]}
            return {name: to_tensor(values[owner[order]], device) for name, values in stacked.items()}

        starts = [call.terms.start or {} for call in calls]
        shared = [{name: values for name, values in call.server.items() if name not in starts[0]} for call in calls]
        begin = {**of_calls(shared), **_of_clients(starts, order, device), **_of_clients(layers, order, device)}
        begin = {name: begin[name] for name in {**calls[0].server, **begin}}
        frozen = of_calls([call.terms.frozen for call in calls])
        held = {} if terms.rebuild else {name: tensor[0] for name, tensor in frozen.items()}
        return Program(
            module=holding(module_of(task), held),
            loss=model.loss_on(task.data),
            loader=Loader(*_samples(calls, order), device, model.torch_dtype),
            schedule=schedule,
            start={name: tensor for name, tensor in begin.items() if name in trained},
            batched=batched,
            fixed={name: tensor for name, tensor in begin.items() if name not in trained},
            rebuild=terms.rebuild,
            frozen=frozen if terms.rebuild else {},
            draws=ForwardDraws.of(calls, order, phase=phase, before_training=before_training),
            statistics=model.trial(task.data).statistics,
            unlabelled=None if before_training else _unlabelled(calls, schedule, batched=batched),
            labels=task.data.labels_at_clients,
        )

    schedule = draw_schedule(counts, epochs, padded_batch(task), keys, first_epoch=first_epoch)
    start_loss: FloatArray | None = None
    start_gradient: Arrays = {}
    if terms.start_loss or terms.start_gradient:
        once = np.ones_like(epochs)
        whole = schedule if (epochs == once).all() else draw_schedule(counts, once, padded_batch(task), keys)
        start_loss, start_gradient = _measured(program_of(whole, before_training=True), terms)
    program, order = program_of(schedule), schedule.order
    rates = np.array(
        [call.task.training.rates(call.task, call.chunk.round_index, len(schedule.active)) for call in calls]
    )
    if terms.rule is not None:
        _check_rule(task)
    steps = Steps(
        learning_rates=[_rate_of(rate, owner[order], program.loader) for rate in rates.T],
        rule=training.local_optimizer if terms.rule is None else terms.rule,
        weight_decay=training.gradient_decay,
        clip_norm=training.clip_norm,
        proximal=terms.proximal,
        correction=_of_clients([call.terms.correction or {} for call in calls], order, device),
        gains=_of_clients([call.terms.gains or {} for call in calls], order, device),
        own=_of_clients([call.terms.own for call in calls], order, device),
        pulls=_of_each([call.terms.pulls for call in calls], order, device),
        radii=_of_each([call.terms.radii for call in calls], order, device),
        tails=_of_each([call.terms.tails for call in calls], order, device),
        tail_weight=terms.tail_weight,
    )
    changes, loss, slots = train(program, steps)
    positions = _positions(order)
    stops = np.cumsum(sizes)
    scheduled = [None if training.learning_rate_schedule is None else rate for rate in rates]
    learnt = {name: to_array(values) for name, values in changes.items()}
    return [
        LocalUpdates(
            changes={name: values.take(part, axis=0) for name, values in learnt.items() if name not in own_layers},
            state={OWN_LAYERS: call.chunk.state[OWN_LAYERS] + packed(learnt, own_layers)[part]} if own_layers else {},
            loss=loss[part],
            examples=(counts * epochs)[start:stop],
            steps=schedule.steps[part],
            start_loss=None if start_loss is None else start_loss[start:stop],
            start_gradient={name: values[start:stop] for name, values in start_gradient.items()},
            slots={name: to_array(values).take(part, axis=0) for name, values in slots.items()},
            rate_sum=None if rate is None else _rate_sums(rate, schedule.steps[part]),
        )
        for call, start, stop, rate in zip(calls, [0, *stops[:-1]], stops, scheduled, strict=True)
        for part in [positions[start:stop]]
    ]


def _unlabelled(calls: Sequence[LocalCall], schedule: BatchSchedule, *, batched: bool) -> UnlabelledBatches | None:
    """Return the samples without labels that the calls' clients train on besides; None if the terms have no loss."""
    task, consistency = calls[0].task, calls[0].terms.consistency
    if consistency is None:
        return None
    size = padded_batch(task) * (consistency.ratio if task.data.labels_at_clients else 1)
    dtype = network_of(task).torch_dtype
    return UnlabelledBatches.of(calls, consistency, schedule, size, dtype, padded=batched)


def _of_clients(parts: Sequence[Arrays], order: IntArray, device: Device) -> Tensors:
    """Return tensors [C, ...] of the calls' clients, in the order of a schedule."""
    return {name: to_tensor(np.concatenate([part[name] for part in parts])[order], device) for name in parts[0]}


def _of_each(parts: Sequence[FloatArray | IntArray | None], order: IntArray, device: Device) -> torch.Tensor | None:
    """Return a number of each of the calls' clients [C], in the order of a schedule; None if the calls have none."""
    given = [values for values in parts if values is not None]
    return to_tensor(np.concatenate(given)[order], device) if given else None


def _own_layers(calls: Sequence[LocalCall]) -> tuple[tuple[str, ...], list[Arrays]]:
    """Return the names of what clients keep of layers with local statistics, and what those of each call have."""
    model, data = network_of(calls[0].task), calls[0].task.data
    layers = tuple(model.own_layers(data))
    return layers, [model.own_layers_of(call.chunk.state[OWN_LAYERS], data) if layers else {} for call in calls]


def _measured(program: Program, terms: LocalTerms) -> tuple[FloatArray | None, Arrays]:
    """Return the losses [C] and the gradients [C, ...] that the terms ask for, in the order of the calls' clients."""
    positions = _positions(program.schedule.order)
    gradients = mean_gradients(program) if terms.start_gradient else {}
    return (
        mean_losses(program)[positions] if terms.start_loss else None,
        {name: to_array(gradient).take(positions, axis=0) for name, gradient in gradients.items()},
    )


def _rate_of(rates: FloatArray, owner: IntArray, loader: Loader) -> Rate:
    """Return the learning rate of one step of the calls [R]: a number if they share it, else one per client, [C]."""
    rounded = rates.astype(ARRAY_TYPES[loader.dtype])
    return float(rates[0]) if (rounded == rounded[0]).all() else to_tensor(rates[owner], loader.device)


def _rate_sums(rates: FloatArray, steps: IntArray) -> FloatArray:
    """Return the sum of the learning rates of each client's steps, [C]."""
    return steps * rates[0] if len(rates) == 1 else np.concatenate([[0.0], np.cumsum(rates)])[steps]


def _positions(order: IntArray) -> IntArray:
    """Return the position of each client in `order`."""
    positions = np.empty(len(order), dtype=np.int64)
    positions[order] = np.arange(len(order))
    return positions


def network_of(task: Task[Samples, Any]) -> NeuralNetwork:
    """Return the task's model, which `NetworkTraining.check` has found to be a network."""
    assert isinstance(task.model, NeuralNetwork), "check() has seen to it"
    return task.model


def module_of(task: Task[Samples, Any]) -> Module:
    """Return the module that all clients train, without values."""
    return skeleton(network_of(task), task.data)


def _joined(parts: Sequence[NDArray[Scalar]]) -> NDArray[Scalar]:
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def padded_batch(task: Task[Samples, Any]) -> int:
    """Return the size to which batches are padded; rounding depends on it, so that it is the same for all chunks."""
    most, size = max(int(task.data.examples.max(initial=0)), 1), task.training.batch_size
    return most if size == "all" else min(size, most)


def _check_rule(task: Task[Samples, Any]) -> None:
    only_gradient_descent(task, "the algorithm's own local step goes along gradients")
    if momentum := task.training.traits.momentum:
        raise UserError(f"training.momentum = {momentum:g}: the algorithm's own local step has no momentum; set 0")


def _check_memory(task: Task[Samples, Any], n_clients: int) -> None:
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
    if not data.labels_at_clients:  # one sample stands for those that no loss reads
        n_samples = sum(int(call.task.data.examples[call.chunk.clients].sum()) for call in calls)
        return data.train, np.zeros(n_samples, dtype=np.int64)
    if all(call.task.data is data for call in calls):
        return data.train, _own(data, _joined([call.chunk.clients for call in calls])[order])
    taken = [call.task.data.train.take(_own(call.task.data, call.chunk.clients)) for call in calls]
    counts = _joined([call.task.data.examples[call.chunk.clients] for call in calls])
    rows = np.split(np.arange(counts.sum()), np.cumsum(counts)[:-1])
    together = Labelled(joined([samples.features for samples in taken]), _joined([samples.labels for samples in taken]))
    return together, np.concatenate([rows[client] for client in order])


def _own(data: Samples, clients: IntArray) -> IntArray:
    """Return the rows of the clients' training samples, one client after the other."""
    return data.of_clients("train").rows(clients)[0]
