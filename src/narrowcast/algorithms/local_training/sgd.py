"""How neural clients train: SGD on the mean cross-entropy, for any torch module."""

from __future__ import annotations

from typing import Literal

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor, nn

from narrowcast.algorithms.local_training.batched_module import batched_forward, gains_from_batching
from narrowcast.algorithms.local_training.network import Rebuild, Steps, Tensors, train_network
from narrowcast.algorithms.local_training.schedule import draw_schedule
from narrowcast.platform.contracts import Task
from narrowcast.platform.data.samples import Samples
from narrowcast.platform.errors import UserError
from narrowcast.platform.models.classifier import Classifier, as_input, skeleton
from narrowcast.platform.seeds import stream_keys
from narrowcast.platform.types import Arrays, Chunk, IntArray, LocalTerms, LocalUpdates


class SGD(BaseModel):
    """Shuffled epochs of mini-batches, with momentum, weight decay and gradient clipping.

    `execution: auto` trains a chunk as one batched program where that is known to win, for chains of linear layers, and
    client after client otherwise (convolutions, recurrent layers, modules of your own).
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

    def check(self, task: Task) -> None:
        """Only classifiers train like this, and not every module can be batched."""
        if not isinstance(task.model, Classifier):
            raise UserError(
                f'training.kind = "{self.kind}" trains classifiers, not {task.model.kind}; use "factorisation_sgd"'
            )
        module = _module(task)
        if self.mode(task) == "batched":
            start = {name: torch.zeros(2, *values.shape) for name, values in module.named_parameters()}
            features = as_input(task.data.train.features[:2]).unsqueeze(1)
            try:
                batched_forward(module)(start, features)
            except (RuntimeError, ValueError) as error:
                reason = str(error).splitlines()[0]
                raise UserError(
                    f'training.execution = "{self.execution}": {task.model.kind} cannot be batched ({reason}); '
                    "use per_client"
                ) from error

    def train(
        self,
        server: Arrays,
        chunk: Chunk,
        task: Task,
        terms: LocalTerms,
        rebuild: Rebuild | None = None,
        gains: Arrays | None = None,
    ) -> LocalUpdates:
        """Train the chunk's clients.

        `rebuild` makes the module's parameters where others than these are trained; `gains` [C, ...] multiply the
        gradients of the tensors that they name.
        """
        data: Samples = task.data
        counts = data.examples[chunk.clients]
        epochs = np.full(len(counts), self.epochs) if terms.epochs is None else terms.epochs
        keys = stream_keys(task.seed, "shuffle", chunk.round_index, chunk.clients)
        schedule = draw_schedule(counts, epochs, self.batch_size, keys)
        order = schedule.order
        steps = Steps(
            learning_rate=self.learning_rate,
            momentum=self.momentum,
            weight_decay=self.weight_decay,
            clip_norm=self.clip_norm,
            proximal=terms.proximal,
            correction={name: _tensor(values[order]) for name, values in (terms.correction or {}).items()},
            gains={name: _tensor(values[order]) for name, values in (gains or {}).items()},
            rebuild=rebuild,
        )
        module = _module(task)
        start: Tensors = {name: _tensor(np.asarray(values)) for name, values in server.items()}
        changes, loss = train_network(
            module,
            start,
            data.train,
            _own(data, chunk.clients[order]),
            schedule,
            steps,
            batched=self.mode(task) == "batched",
        )
        place = np.empty(len(order), dtype=np.int64)
        place[order] = np.arange(len(order))
        return LocalUpdates(
            changes={name: values.numpy()[place] for name, values in changes.items()},
            state={},
            loss=loss[place],
            examples=counts * epochs,
            steps=schedule.steps[place],
        )

    def mode(self, task: Task) -> Literal["batched", "per_client"]:
        """How `auto` comes out for this model."""
        if self.execution != "auto":
            return self.execution
        return "batched" if gains_from_batching(_module(task)) else "per_client"


def _module(task: Task) -> nn.Module:
    assert isinstance(task.model, Classifier), "check() has seen to it"
    return skeleton(task.model, task.data)


def _own(data: Samples, clients: IntArray) -> IntArray:
    slices = [data.order[data.indptr[client] : data.indptr[client + 1]] for client in clients]
    return np.concatenate(slices) if slices else np.empty(0, dtype=np.int64)


def _tensor(values: np.ndarray) -> Tensor:
    return torch.from_numpy(values.copy() if not values.flags.writeable else values)
