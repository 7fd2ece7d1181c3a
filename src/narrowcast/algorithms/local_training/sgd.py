"""How neural clients train: SGD on the mean cross-entropy, for any torch module."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import nn

from narrowcast.algorithms.local_training.batched_module import batched_forward, gains_from_batching
from narrowcast.algorithms.local_training.device import Device, to_array, to_tensor
from narrowcast.algorithms.local_training.minibatch_schedule import draw_schedule, epochs_of
from narrowcast.algorithms.local_training.network import Loader, Steps, Tensors, train_network
from narrowcast.platform.contracts import LocalCall, Task
from narrowcast.platform.data.samples import Samples
from narrowcast.platform.errors import UserError
from narrowcast.platform.models.classifier import Classifier, as_input, skeleton
from narrowcast.platform.seeds import stream_keys
from narrowcast.platform.types import Arrays, Chunk, IntArray, LocalTerms, LocalUpdates


class SGD(BaseModel):
    """Shuffled epochs of mini-batches, with momentum, weight decay and gradient clipping.

    `execution: auto` trains a chunk as one batched program where that is known to win, for chains of linear layers, and
    client after client otherwise (convolutions, recurrent layers, modules of your own). On a GPU it batches whatever it
    can. With `device: cuda` results are those of a CPU to rounding, and not to the last bit.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: Literal["sgd"] = "sgd"
    learning_rate: float = Field(0.1, gt=0)
    batch_size: int = Field(10, ge=1)
    epochs: int = Field(1, ge=1)
    momentum: float = Field(0.0, ge=0, lt=1)
    weight_decay: float = Field(0.0, ge=0)
    clip_norm: float | None = Field(None, gt=0, description="largest norm of a step's gradient")
    execution: Literal["auto", "batched", "per_client"] = "auto"
    device: Device = "cpu"

    def check(self, task: Task) -> None:
        """Only classifiers train like this, and not every module can be batched."""
        if not isinstance(task.model, Classifier):
            raise UserError(
                f'training.kind = "{self.kind}" trains classifiers, not {task.model.kind}; use "factorisation_sgd"'
            )
        module = _module(task)
        if self.mode(task) == "batched" and (reason := _batchable(module, task)):
            raise UserError(
                f'training.execution = "{self.execution}": {task.model.kind} cannot be batched ({reason}); '
                "use per_client"
            )

    def samples(self, task: Task, clients: IntArray) -> IntArray:
        """All of a client's examples, [C]."""
        return task.data.examples[clients]

    def train(self, server: Arrays, chunk: Chunk, task: Task, terms: LocalTerms) -> LocalUpdates:
        """Train the chunk's clients."""
        return _train_as_one([LocalCall(server, chunk, task, terms)])[0]

    def train_together(self, calls: Sequence[LocalCall]) -> list[LocalUpdates]:
        """Train the chunks of several runs that differ in their seeds and learning rates only.

        Those whose tensors have the same shapes are one program; clients that train one by one gain nothing from it.
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

    def mode(self, task: Task) -> Literal["batched", "per_client"]:
        """How `auto` comes out for this model."""
        if self.execution != "auto":
            return self.execution
        module = _module(task)
        batched = gains_from_batching(module) or (self.device == "cuda" and _batchable(module, task) is None)
        return "batched" if batched else "per_client"


def _shapes(call: LocalCall) -> tuple[object, ...]:
    """What must be the same for two calls to be one program."""
    terms, task = call.terms, call.task
    parts = (call.server, terms.gains or {}, terms.correction or {}, terms.frozen)
    rows = (0, 1, 1, 0)  # axes of clients, whose number may differ
    return (
        id(task.data),
        task.model,
        task.training.model_copy(update={"learning_rate": 1.0}),
        terms.proximal,
        *(
            tuple((name, values.shape[skip:]) for name, values in part.items())
            for part, skip in zip(parts, rows, strict=True)
        ),
    )


def _train_as_one(calls: Sequence[LocalCall]) -> list[LocalUpdates]:
    """Train the clients of all calls as one program; they may differ in seed and learning rate."""
    task = calls[0].task
    data, training, terms = task.data, task.training, [call.terms for call in calls]
    device: Device = training.device
    clients = np.concatenate([call.chunk.clients for call in calls])
    counts = data.examples[clients]
    epochs = np.concatenate([epochs_of(call.chunk, call.terms, training.epochs) for call in calls])
    keys = np.concatenate(
        [stream_keys(call.task.seed, "shuffle", call.chunk.round_index, call.chunk.clients) for call in calls]
    )
    schedule = draw_schedule(counts, epochs, training.batch_size, keys)
    order = schedule.order
    owner = np.repeat(np.arange(len(calls)), [len(call.chunk.clients) for call in calls])[order]

    def of_calls(parts: Sequence[Arrays]) -> Tensors:
        """[1, ...] where there is one call, else [C, ...] in the order of the schedule."""
        stacked = {name: np.stack([np.asarray(part[name]) for part in parts]) for name in parts[0]}
        return {
            name: to_tensor(values if len(calls) == 1 else values[owner], device) for name, values in stacked.items()
        }

    def of_clients(parts: Sequence[Arrays]) -> Tensors:
        """[C, ...] in the order of the schedule."""
        return {name: to_tensor(np.concatenate([part[name] for part in parts])[order], device) for name in parts[0]}

    rates = np.array([call.task.training.learning_rate for call in calls], dtype=np.float32)
    changes, loss = train_network(
        _module(task),
        of_calls([call.server for call in calls]),
        Loader(data.train, _own(data, clients[order]), device),
        schedule,
        Steps(
            learning_rate=training.learning_rate if (rates == rates[0]).all() else to_tensor(rates[owner], device),
            momentum=training.momentum,
            weight_decay=training.weight_decay,
            clip_norm=training.clip_norm,
            proximal=terms[0].proximal,
            correction=of_clients([each.correction or {} for each in terms]),
            gains=of_clients([each.gains or {} for each in terms]),
            rebuild=terms[0].rebuild,
            frozen=of_calls([each.frozen for each in terms]),
        ),
        batched=training.mode(task) == "batched",
    )
    place = np.empty(len(order), dtype=np.int64)
    place[order] = np.arange(len(order))
    stops = np.cumsum([len(call.chunk.clients) for call in calls])
    return [
        LocalUpdates(
            changes={name: to_array(values)[part] for name, values in changes.items()},
            state={},
            loss=loss[part],
            examples=(counts * epochs)[start:stop],
            steps=schedule.steps[part],
        )
        for start, stop in zip([0, *stops[:-1]], stops, strict=True)
        for part in [place[start:stop]]
    ]


def _module(task: Task) -> nn.Module:
    assert isinstance(task.model, Classifier), "check() has seen to it"
    return skeleton(task.model, task.data)


def _batchable(module: nn.Module, task: Task) -> str | None:
    """Why the module cannot be called with a client axis, None where it can."""
    start = {name: torch.zeros(2, *values.shape) for name, values in module.named_parameters()}
    try:
        batched_forward(module)(start, as_input(torch.from_numpy(np.array(task.data.train.features[:2]))).unsqueeze(1))
    except (RuntimeError, ValueError) as error:
        return str(error).splitlines()[0]
    return None


def _own(data: Samples, clients: IntArray) -> IntArray:
    slices = [data.order[data.indptr[client] : data.indptr[client + 1]] for client in clients]
    return np.concatenate(slices) if slices else np.empty(0, dtype=np.int64)
