"""Local training of neural networks: SGD on the mean of the model's loss, for any torch module."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import ClassVar, Literal, TypeVar

import numpy as np
import psutil
import torch
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor, nn

from narrowcast.algorithms.local_training.batched_module import batched_forward, gains_from_batching
from narrowcast.algorithms.local_training.chain_gradients import Tensors, chain_gradient
from narrowcast.algorithms.local_training.device import Device, to_array, to_tensor
from narrowcast.algorithms.local_training.learning_rate import RateSchedule
from narrowcast.algorithms.local_training.minibatch_schedule import BatchSize, draw_schedule, epochs_of
from narrowcast.algorithms.local_training.network import Loader, Steps, train_network
from narrowcast.algorithms.local_training.rule_steps import train_by_rule
from narrowcast.algorithms.local_training.start_losses import mean_losses
from narrowcast.platform.contracts import LocalCall, Task
from narrowcast.platform.data.samples import Labelled, Samples
from narrowcast.platform.errors import UserError
from narrowcast.platform.models.neural_network import NeuralNetwork, as_input, skeleton
from narrowcast.platform.types import Arrays, Chunk, FloatArray, IntArray, LocalTerms, LocalUpdates

Scalar = TypeVar("Scalar", bound=np.generic)


class SGD(BaseModel):
    """Mini-batch SGD over shuffled epochs, with momentum, weight decay and gradient clipping.

    `execution: auto` trains a chunk as one batched program if that is known to be faster (chains of linear layers) and
    client by client otherwise (convolutions, recurrent layers, user modules). On a GPU it batches every module that can
    be batched. Results on `device: cuda` equal those on a CPU to rounding, not bit for bit.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    computes_start_loss: ClassVar[bool] = True  # for `LocalTerms.start_loss`
    kind: Literal["sgd"] = "sgd"
    learning_rate: float = Field(0.1, gt=0, description="step size of local SGD")
    learning_rate_schedule: RateSchedule | None = Field(
        None, description="factor of learning_rate by round or local step; null: constant"
    )
    batch_size: BatchSize = Field(
        10, description="samples per step; all: every sample of the client, one step per epoch"
    )
    epochs: int = Field(1, ge=1, description="local epochs per participation")
    momentum: float = Field(0.0, ge=0, lt=1, description="momentum of local SGD, reset at each participation")
    weight_decay: float = Field(0.0, ge=0, description="coefficient of the parameters in the gradient")
    clip_norm: float | None = Field(None, gt=0, description="largest L2 norm of a step's gradient; null: no clipping")
    execution: Literal["auto", "batched", "per_client"] = Field(
        "auto", description="train a chunk as one tensor program, client by client, or the faster of the two"
    )
    device: Device = Field("cpu", description="device on which clients train")

    def check(self, task: Task) -> None:
        """Raise `UserError` unless the model is a neural network that can be trained in the chosen mode."""
        if not isinstance(task.model, NeuralNetwork):
            raise UserError(
                f'training.kind = "{self.kind}" trains neural networks, not {task.model.kind}; use "factorisation_sgd"'
            )
        module = _module(task)
        if self.mode(task) == "batched" and (reason := _batchable(module, task)):
            raise UserError(
                f'training.execution = "{self.execution}": {task.model.kind} cannot be batched ({reason}); '
                "use per_client"
            )

    def rates(self, task: Task[Samples, SGD], round_index: int, n_steps: int) -> FloatArray:
        """Return the learning rate of each local step of a round, [n_steps], or of all of them, [1]."""
        schedule = self.learning_rate_schedule
        if schedule is None:
            return np.array([self.learning_rate])
        of_largest = -(-int(task.data.examples.max(initial=1)) // _padded_batch(task)) * self.epochs
        before = (round_index - 1) * of_largest
        steps = range(n_steps if schedule.by_step else 1)
        return self.learning_rate * np.array([schedule.factor(round_index, before + step) for step in steps])

    def samples(self, task: Task[Samples, SGD], clients: IntArray) -> IntArray:
        """Return the number of examples of each client, [C]."""
        return task.data.examples[clients]

    def train(self, server: Arrays, chunk: Chunk, task: Task[Samples, SGD], terms: LocalTerms) -> LocalUpdates:
        """Train the clients of the chunk."""
        return _train_as_one([LocalCall(server, chunk, task, terms)])[0]

    def train_together(self, calls: Sequence[LocalCall]) -> list[LocalUpdates]:
        """Train the chunks of several runs that differ only in data, seed and learning rate.

        Calls whose tensors have the same shapes are trained as one program; client-by-client training gains nothing
        from it.
        """
        if self.mode(calls[0].task) == "per_client":
            return [call.task.training.train(call.server, call.chunk, call.task, call.terms) for call in calls]
        programs: dict[tuple[object, ...], list[int]] = {}
        for index, call in enumerate(calls):
            programs.setdefault(_shapes(call), []).append(index)
        updates: dict[int, LocalUpdates] = {}
        for indices in programs.values():
            updates.update(zip(indices, _train_as_one([calls[index] for index in indices]), strict=True))
        return [updates[index] for index in range(len(calls))]

    def mode(self, task: Task[Samples, SGD]) -> Literal["batched", "per_client"]:
        """Return the mode that `execution: auto` selects for this model, or `execution` itself."""
        return "batched" if self._batches(_module(task), task) else "per_client"

    def _batches(self, module: nn.Module, task: Task[Samples, SGD]) -> bool:
        if self.execution != "auto":
            return self.execution == "batched"
        if chain_gradient(module, _model(task).loss_on(task.data)) is not None:
            return True
        return gains_from_batching(module) or (self.device == "cuda" and _batchable(module, task) is None)


def _shapes(call: LocalCall) -> tuple[object, ...]:
    """Return a key that is equal for two calls if they can be trained as one program."""
    terms, task = call.terms, call.task
    parts = (call.server, terms.gains or {}, terms.correction or {}, terms.frozen, terms.start or {}, terms.own)
    rows = (0, 1, 1, 0, 1, 1)  # leading client axes, whose length may differ
    # A rule's step has one learning rate.
    training = task.training if terms.rule else task.training.model_copy(update={"learning_rate": 1.0})
    features, labels = task.data.train.features, task.data.train.labels
    return (
        *(features.shape[1:], features.dtype, labels.shape[1:], labels.dtype, task.data.n_classes),
        _padded_batch(task),
        task.model,
        training,
        terms.proximal,
        terms.start_loss,
        terms.rule,
        *(
            tuple((name, values.shape[skip:]) for name, values in part.items())
            for part, skip in zip(parts, rows, strict=True)
        ),
    )


def _train_as_one(calls: Sequence[LocalCall]) -> list[LocalUpdates]:
    """Train the clients of all calls as one program; the calls may differ in data, seed and learning rate."""
    task = calls[0].task
    training, terms = task.training, [call.terms for call in calls]
    device: Device = training.device
    counts = _joined([call.task.data.examples[call.chunk.clients] for call in calls])
    epochs = _joined([epochs_of(call.chunk, call.terms, training.epochs) for call in calls])
    keys = _joined(
        [call.task.private_seed.stream_keys("shuffle", call.chunk.round_index, call.chunk.clients) for call in calls]
    )
    schedule = draw_schedule(counts, epochs, _padded_batch(task), keys)
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
    rates = np.stack([call.task.training.rates(call.task, call.chunk.round_index, n_steps) for call in calls])
    module = _module(task)
    batched = training._batches(module, task)
    if batched and training.batch_size == "all":
        _check_memory(task, len(order))
    of_loss = _model(task).loss_on(task.data)

    def starts(order: IntArray) -> Tensors:
        own = [each.start for each in terms if each.start is not None]
        return of_clients(own, order) if own else of_calls([call.server for call in calls], order)

    start_loss = None
    if terms[0].start_loss:
        once = np.ones_like(epochs)
        whole = schedule if (epochs == once).all() else draw_schedule(counts, once, _padded_batch(task), keys)
        start_loss = mean_losses(
            module,
            of_loss,
            starts(whole.order),
            Loader(*_samples(calls, whole.order), device),
            whole,
            rebuild=terms[0].rebuild,
            frozen=of_calls([each.frozen for each in terms], whole.order),
            batched=batched,
        )[_places(whole.order)]
    loader = Loader(*_samples(calls, order), device)
    steps = Steps(
        learning_rates=[_rate_of(each, owner[order], device) for each in rates.T],
        momentum=training.momentum,
        weight_decay=training.weight_decay,
        clip_norm=training.clip_norm,
        proximal=terms[0].proximal,
        correction=of_clients([each.correction or {} for each in terms]),
        gains=of_clients([each.gains or {} for each in terms]),
        rebuild=terms[0].rebuild,
        frozen=of_calls([each.frozen for each in terms]),
        own=of_clients([each.own for each in terms]),
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
    return [
        LocalUpdates(
            changes={name: to_array(values).take(part, axis=0) for name, values in changes.items()},
            state={},
            loss=loss[part],
            examples=(counts * epochs)[start:stop],
            steps=schedule.steps[part],
            start_loss=None if start_loss is None else start_loss[start:stop],
            slots={name: to_array(values).take(part, axis=0) for name, values in slots.items()},
            rate_sum=None if each is None else _rate_sums(each, schedule.steps[part]),
        )
        for start, stop, each in zip([0, *stops[:-1]], stops, scheduled, strict=True)
        for part in [place[start:stop]]
    ]


def _rate_of(rates: FloatArray, owner: IntArray, device: Device) -> float | Tensor:
    """Return the learning rate of one step of the calls [R]: a number if they share it, else one per client, [C]."""
    rounded = rates.astype(np.float32)
    return float(rates[0]) if (rounded == rounded[0]).all() else to_tensor(rounded[owner], device)


def _rate_sums(rates: FloatArray, steps: IntArray) -> FloatArray:
    """Return the sum of the learning rates of each client's steps, [C]."""
    return steps * rates[0] if len(rates) == 1 else np.concatenate([[0.0], np.cumsum(rates)])[steps]


def _places(order: IntArray) -> IntArray:
    """Return the place of each client in `order`."""
    places = np.empty(len(order), dtype=np.int64)
    places[order] = np.arange(len(order))
    return places


def _model(task: Task[Samples, SGD]) -> NeuralNetwork:
    assert isinstance(task.model, NeuralNetwork), "check() has seen to it"
    return task.model


def _module(task: Task[Samples, SGD]) -> nn.Module:
    return skeleton(_model(task), task.data)


def _batchable(module: nn.Module, task: Task[Samples, SGD]) -> str | None:
    """Return why the module cannot be called with a client axis, or None if it can."""
    start = {name: torch.zeros(2, *values.shape) for name, values in module.named_parameters()}
    try:
        batched_forward(module)(start, as_input(torch.from_numpy(np.array(task.data.train.features[:2]))).unsqueeze(1))
    except (RuntimeError, ValueError) as error:
        return str(error).splitlines()[0]
    return None


def _joined(parts: Sequence[NDArray[Scalar]]) -> NDArray[Scalar]:
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def _padded_batch(task: Task[Samples, SGD]) -> int:
    """Return the size to which batches are padded; rounding depends on it, so that it is the same for all chunks."""
    most, size = max(int(task.data.examples.max(initial=0)), 1), task.training.batch_size
    return most if size == "all" else min(size, most)


def _check_rule(task: Task[Samples, SGD]) -> None:
    if task.training.momentum:
        raise UserError(
            f"training.momentum = {task.training.momentum:g}: the algorithm's own local step has no momentum; set 0"
        )


def _check_memory(task: Task[Samples, SGD], n_clients: int) -> None:
    """Raise `MemoryError` if one step's features do not fit: each client's are padded to those of the largest one."""
    features = 4 * n_clients * _padded_batch(task) * prod(task.data.train.features.shape[1:])
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
    joined = Labelled(_joined([each.features for each in taken]), _joined([each.labels for each in taken]))
    return joined, np.concatenate([rows[client] for client in order])


def _own(data: Samples, clients: IntArray) -> IntArray:
    slices = [data.order[data.indptr[client] : data.indptr[client + 1]] for client in clients]
    return np.concatenate(slices) if slices else np.empty(0, dtype=np.int64)
