"""Local training of neural networks: the common part of its optimisers, and SGD.

The local training of one call, or of the calls of several runs as one program.

Local training of neural networks by Adam and by AdamW, for any torch module.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import replace
from math import prod
from typing import TYPE_CHECKING, Literal, TypeVar

import numpy as np
import psutil
import torch
from numpy.typing import NDArray
from pydantic import Field
from torch.nn import Module

from narrowcast.algorithms.local_training.batches import BatchSize, draw_schedule, epochs_of
from narrowcast.algorithms.local_training.forward_draws import ForwardDraws, keyed_draws_only
from narrowcast.algorithms.local_training.gradients import (
    ARRAY_TYPES,
    Device,
    Tensors,
    batched_forward,
    callable_of,
    chain_gradient,
    gains_from_batching,
    to_array,
    to_tensor,
)
from narrowcast.algorithms.local_training.local_optimizer import (
    AdamSteps,
    GradientDescent,
    LocalOptimizer,
    Rate,
    only_gradient_descent,
)
from narrowcast.algorithms.local_training.network import (
    Loader,
    StartPoint,
    Steps,
    mean_losses,
    of_each_client,
    train_network,
)
from narrowcast.algorithms.local_training.rules import RateSchedule, mean_gradients, train_by_rule
from narrowcast.platform.config.files import Section
from narrowcast.platform.contracts import LocalCall, Task, Training, TrainingTraits
from narrowcast.platform.data.samples import Labelled, Samples, each_input, joined, rows_of_inputs, signature
from narrowcast.platform.errors import UserError, described
from narrowcast.platform.models.forward_pass import OWN_LAYERS, packed
from narrowcast.platform.models.module_call import call_module
from narrowcast.platform.models.modules import trained_of
from narrowcast.platform.models.neural_network import NeuralNetwork, as_inputs, skeleton
from narrowcast.platform.seeds import isolated
from narrowcast.platform.types import Arrays, Chunk, FloatArray, IntArray, LocalTerms, LocalUpdates

if TYPE_CHECKING:
    pass

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


def train_calls(calls: Sequence[LocalCall]) -> list[LocalUpdates]:
    """Train the clients of all calls as one program; the calls may differ in data, seed and learning rate."""
    with keyed_draws_only(calls[0]):
        return _train_calls(calls)


def _train_calls(calls: Sequence[LocalCall]) -> list[LocalUpdates]:
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
    own_layers, layers = _own_layers(calls)

    def starts(order: IntArray) -> Tensors:
        given = [asked.start for asked in terms if asked.start is not None]
        begin = of_clients(given, order) if given else of_calls([call.server for call in calls], order)
        return {**begin, **of_clients(layers, order)}

    dtype = network_of(task).torch_dtype
    start_loss: FloatArray | None = None
    start_gradient: Arrays = {}
    if terms[0].start_loss or terms[0].start_gradient:
        once = np.ones_like(epochs)
        whole = schedule if (epochs == once).all() else draw_schedule(counts, once, padded_batch(task), keys)
        samples = Loader(*_samples(calls, whole.order), device, dtype)
        frozen = of_calls([asked.frozen for asked in terms], whole.order)
        draws = ForwardDraws.of(calls, whole.order, before_training=True)
        point = StartPoint(
            module, of_loss, starts(whole.order), samples, whole, terms[0].rebuild, frozen, batched, draws
        )
        start_loss, start_gradient = _measured(point, terms[0])
    loader = Loader(*_samples(calls, order), device, dtype)
    steps = Steps(
        learning_rates=[_rate_of(rate, owner[order], loader) for rate in rates.T],
        optimizer=training.local_optimizer,
        weight_decay=training.gradient_decay,
        clip_norm=training.clip_norm,
        proximal=terms[0].proximal,
        correction=of_clients([asked.correction or {} for asked in terms]),
        gains=of_clients([asked.gains or {} for asked in terms]),
        rebuild=terms[0].rebuild,
        frozen=of_calls([asked.frozen for asked in terms]),
        own=of_clients([asked.own for asked in terms]),
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


def _own_layers(calls: Sequence[LocalCall]) -> tuple[tuple[str, ...], list[Arrays]]:
    """Return the names of what clients keep of layers with local statistics, and what those of each call have."""
    model, data = network_of(calls[0].task), calls[0].task.data
    layers = tuple(model.own_layers(data))
    return layers, [model.own_layers_of(call.chunk.state[OWN_LAYERS], data) if layers else {} for call in calls]


def _measured(point: StartPoint, terms: LocalTerms) -> tuple[FloatArray | None, Arrays]:
    """Return the losses [C] and the gradients [C, ...] that the terms ask for, in the order of the calls' clients."""
    positions = _positions(point.schedule.order)
    gradients = mean_gradients(point) if terms.start_gradient else {}
    return (
        mean_losses(point)[positions] if terms.start_loss else None,
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
    if momentum := task.training.traits.momentum:
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
    together = Labelled(joined([samples.features for samples in taken]), _joined([samples.labels for samples in taken]))
    return together, np.concatenate([rows[client] for client in order])


def _own(data: Samples, clients: IntArray) -> IntArray:
    """Return the rows of the clients' training samples, one client after the other."""
    return data.of_clients("train").rows(clients)[0]


class NetworkTraining(Training, Section):
    """Mini-batch steps over shuffled epochs on the gradient of the loss; a subclass says which steps.

    `execution: auto` trains a chunk as one batched program if that is known to be faster (chains of linear layers) and
    client by client otherwise (convolutions, recurrent layers, user modules). On a GPU it batches every module that can
    be batched. Results on `device: cuda` equal those on a CPU to rounding, not bit for bit.
    """

    kind: str
    learning_rate: float = Field(0.1, gt=0, description="step size of local training")
    learning_rate_schedule: RateSchedule | None = Field(
        None, description="factor of learning_rate by round or local step; null: constant"
    )
    batch_size: BatchSize = Field(
        10, description="samples per step; all: every sample of the client, one step per epoch"
    )
    epochs: int = Field(1, ge=1, description="local epochs per participation")
    weight_decay: float = Field(0.0, ge=0, description="coefficient of the parameters in the gradient")
    clip_norm: float | None = Field(None, gt=0, description="largest L2 norm of a step's gradient; null: no clipping")
    execution: Literal["auto", "batched", "per_client"] = Field(
        "auto", description="train a chunk as one tensor program, client by client, or the faster of the two"
    )
    device: Device = Field("cpu", description="device on which clients train")

    @property
    def local_optimizer(self) -> LocalOptimizer:
        """The step that a client takes with a gradient."""
        raise NotImplementedError

    @property
    def gradient_decay(self) -> float:
        """The coefficient of the parameters in the gradient."""
        return self.weight_decay

    @property
    def traits(self) -> TrainingTraits:
        """Losses and gradients at the start are computed; only gradient descent descends gradients."""
        descends = isinstance(self.local_optimizer, GradientDescent)
        return replace(
            super().traits, descends_gradients=descends, computes_start_loss=True, computes_start_gradient=True
        )

    def check(self, task: Task) -> None:
        """Raise `UserError` unless the model is a neural network that can be trained in the chosen mode."""
        if not isinstance(task.model, NeuralNetwork):
            raise UserError(
                f'training.kind = "{self.kind}" trains neural networks, not {task.model.kind}; use "factorisation_sgd"'
            )
        _check_lone_samples(task)
        if self.mode(task) == "batched" and (reason := _batchable(task)):
            raise UserError(
                f'training.execution = "{self.execution}": {task.model.kind} cannot be batched ({reason}); '
                "use per_client"
            )

    def rates(self, task: Task[Samples, NetworkTraining], round_index: int, n_steps: int) -> FloatArray:
        """Return the learning rate of each local step of a round, [n_steps], or of all of them, [1]."""
        schedule = self.learning_rate_schedule
        if schedule is None:
            return np.array([self.learning_rate])
        of_largest = -(-int(task.data.examples.max(initial=1)) // padded_batch(task)) * self.epochs
        before = (round_index - 1) * of_largest
        steps = range(n_steps if schedule.by_step else 1)
        return self.learning_rate * np.array([schedule.factor(round_index, before + step) for step in steps])

    def samples(self, task: Task[Samples, NetworkTraining], clients: IntArray) -> IntArray:
        """Return the number of examples of each client, [C]."""
        return task.data.examples[clients]

    def train(
        self, server: Arrays, chunk: Chunk, task: Task[Samples, NetworkTraining], terms: LocalTerms
    ) -> LocalUpdates:
        """Train the clients of the chunk."""
        return train_calls([LocalCall(server, chunk, task, terms)])[0]

    def train_together(self, calls: Sequence[LocalCall]) -> list[LocalUpdates]:
        """Train the chunks of several runs that differ only in data, seed and learning rate.

        Calls whose tensors have the same shapes are trained as one program; client-by-client training gains nothing
        from it.
        """
        if self.mode(calls[0].task) == "per_client":
            return [call.task.training.train(call.server, call.chunk, call.task, call.terms) for call in calls]
        programs: dict[tuple[object, ...], list[int]] = {}
        for index, call in enumerate(calls):
            programs.setdefault(program_key(call), []).append(index)
        updates: dict[int, LocalUpdates] = {}
        for indices in programs.values():
            updates.update(zip(indices, train_calls([calls[index] for index in indices]), strict=True))
        return [updates[index] for index in range(len(calls))]

    def mode(self, task: Task[Samples, NetworkTraining]) -> Literal["batched", "per_client"]:
        """Return the mode that `execution: auto` selects for this model, or `execution` itself."""
        if self.execution != "auto":
            return self.execution
        trial = network_of(task).trial(task.data)
        if trial.draws or trial.statistics:
            return "per_client"
        module = module_of(task)
        gains = chain_gradient(module, network_of(task).loss_on(task.data)) is not None or gains_from_batching(module)
        return "batched" if gains or (self.device == "cuda" and _batchable(task) is None) else "per_client"


class SGD(NetworkTraining):
    """Mini-batch SGD over shuffled epochs, with momentum, weight decay and gradient clipping.

    `execution: auto` is that of all trainings of networks: a chunk as one batched program if that is known to be
    faster, client by client otherwise.
    """

    kind: Literal["sgd"] = "sgd"
    momentum: float = Field(0.0, ge=0, lt=1, description="momentum of local SGD, reset at each participation")

    @property
    def local_optimizer(self) -> GradientDescent:
        """Gradient descent."""
        return GradientDescent(self.momentum)


def _batchable(task: Task[Samples, NetworkTraining]) -> str | None:
    """Return why the module cannot be called with a client axis, or None if it can."""
    trial = network_of(task).trial(task.data)
    if trial.draws:
        return f"its forward pass draws from {' and '.join(trial.draws)}, for each client by its own key"
    if trial.statistics:
        return f"its forward pass changes {trial.statistics[0]}"
    network, module = network_of(task), callable_of(module_of(task), "cpu")
    trained = {name: tensor.detach().unsqueeze(0) for name, tensor in trained_of(module).items()}
    if network.all_trained:  # its parameters have no values yet
        trained = {name: torch.zeros_like(tensor) for name, tensor in trained.items()}
    some = task.data.train.take(np.arange(2) % len(task.data.train))
    features = as_inputs(some.features, network.torch_dtype)
    try:
        with torch.no_grad():
            forward, (batch_of_one, two) = batched_forward(module), (of_each_client(trained, n) for n in (1, 2))
            alone = forward(two, each_input(lambda values: values.unsqueeze(1), features))
            together = forward(batch_of_one, each_input(lambda values: values.unsqueeze(0), features))
    except (Exception, SystemExit) as error:
        return described(error)
    if not torch.allclose(alone[:, 0], together[0], rtol=1e-3, atol=1e-5, equal_nan=True):
        return "its outputs for a sample depend on the rest of the batch, which is padded"
    return None


def _check_lone_samples(task: Task[Samples, NetworkTraining]) -> None:
    """Raise `UserError` if a client trains on a batch of one sample, which the module refuses, as batch norm does."""
    network, size, counts = network_of(task), task.training.batch_size, task.data.examples
    lone = int((counts == 1).sum() if size == "all" else ((counts > 0) & (counts % size == 1 % size)).sum())
    if network.all_trained or not lone:
        return
    features = as_inputs(rows_of_inputs(task.data.train.features, slice(0, 1)), network.torch_dtype)
    try:
        with isolated(0), torch.no_grad():
            call_module(deepcopy(callable_of(module_of(task), "cpu")), features)
    except (Exception, SystemExit) as error:
        raise UserError(
            f"{network.named} takes no batch of one sample ({described(error)}), and with training.batch_size = {size} "
            f"the last batch of {lone} of {len(counts)} clients is one; use another batch_size, or group or layer norm"
        ) from error


class _Moments(NetworkTraining):
    learning_rate: float = Field(0.001, gt=0, description="step size of local training")
    beta1: float = Field(0.9, ge=0, lt=1, description="decay rate of the mean of gradients")
    beta2: float = Field(0.999, ge=0, lt=1, description="decay rate of the mean of squared gradients")
    eps: float = Field(1e-8, gt=0, description="added to the root of the second moment")

    @property
    def local_optimizer(self) -> AdamSteps:
        """Adam without decoupled decay."""
        return AdamSteps(self.beta1, self.beta2, self.eps)


class Adam(_Moments):
    """Mini-batch steps of Adam over shuffled epochs; `weight_decay` is part of the gradient.

    The moments begin at 0 in each participation, and stay on the client. Proximal terms, corrections of an algorithm
    and clipping act on the gradient, before the moments. Algorithms that need the steps of gradient descent refuse it.

    Reference: Kingma and Ba, Adam: A Method for Stochastic Optimization, ICLR 2015 (arXiv:1412.6980), Algorithm 1; the
    step is that of `torch.optim.Adam`.
    """

    kind: Literal["adam"] = "adam"


class AdamW(_Moments):
    """Adam with decoupled weight decay: each step multiplies what is trained by 1 - learning_rate * weight_decay.

    What is trained are the factors where an algorithm trains factors (`fedpara`, `colr`), and with `colr` they are
    those of the change. All else is as in `adam`.

    Reference: Loshchilov and Hutter, Decoupled Weight Decay Regularization, ICLR 2019 (arXiv:1711.05101), Algorithm 2;
    the step is that of `torch.optim.AdamW`.
    """

    kind: Literal["adamw"] = "adamw"
    weight_decay: float = Field(0.01, ge=0, description="decay of the parameters, times the learning rate, in a step")

    @property
    def local_optimizer(self) -> AdamSteps:
        """Adam with decoupled decay."""
        return AdamSteps(self.beta1, self.beta2, self.eps, self.weight_decay)

    @property
    def gradient_decay(self) -> float:
        """0: the decay is not part of the gradient."""
        return 0.0
