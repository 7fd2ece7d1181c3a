"""Local training of neural networks: the common part of its optimisers, and SGD."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from typing import ClassVar, Literal

import numpy as np
import torch
from pydantic import Field

from narrowcast.algorithms.local_training.batched_module import batched_forward, callable_of, gains_from_batching
from narrowcast.algorithms.local_training.chain_gradients import chain_gradient
from narrowcast.algorithms.local_training.device import Device
from narrowcast.algorithms.local_training.joined_calls import (
    module_of,
    network_of,
    padded_batch,
    program_key,
    train_as_one,
)
from narrowcast.algorithms.local_training.learning_rate import RateSchedule
from narrowcast.algorithms.local_training.local_optimizer import GradientDescent, LocalOptimizer
from narrowcast.algorithms.local_training.minibatch_schedule import BatchSize
from narrowcast.algorithms.local_training.network import of_each_client
from narrowcast.platform.contracts import LocalCall, Task
from narrowcast.platform.data.features import each_input, rows_of_inputs
from narrowcast.platform.data.samples import Samples
from narrowcast.platform.errors import UserError, described
from narrowcast.platform.global_generators import isolated
from narrowcast.platform.models.module_call import call_module
from narrowcast.platform.models.module_parts import trained_of
from narrowcast.platform.models.neural_network import NeuralNetwork, as_inputs
from narrowcast.platform.section import Section
from narrowcast.platform.types import Arrays, Chunk, FloatArray, IntArray, LocalTerms, LocalUpdates


class NetworkTraining(Section):
    """Mini-batch steps over shuffled epochs on the gradient of the loss; a subclass says which steps.

    `execution: auto` trains a chunk as one batched program if that is known to be faster (chains of linear layers) and
    client by client otherwise (convolutions, recurrent layers, user modules). On a GPU it batches every module that can
    be batched. Results on `device: cuda` equal those on a CPU to rounding, not bit for bit.
    """

    computes_start_loss: ClassVar[bool] = True  # for `LocalTerms.start_loss`
    computes_start_gradient: ClassVar[bool] = True  # for `LocalTerms.start_gradient`
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
    def descends_gradients(self) -> bool:
        """True if a client moves against its gradients, or their running sum, times the learning rate."""
        return isinstance(self.local_optimizer, GradientDescent)

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
        return train_as_one([LocalCall(server, chunk, task, terms)])[0]

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
            updates.update(zip(indices, train_as_one([calls[index] for index in indices]), strict=True))
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
    trained = {name: each.detach().unsqueeze(0) for name, each in trained_of(module).items()}
    if network.all_trained:  # its parameters have no values yet
        trained = {name: torch.zeros_like(each) for name, each in trained.items()}
    some = task.data.train.take(np.arange(2) % len(task.data.train))
    features = as_inputs(some.features, network.torch_dtype)
    try:
        with torch.no_grad():
            forward, (one, two) = batched_forward(module), (of_each_client(trained, n) for n in (1, 2))
            alone = forward(two, each_input(lambda values: values.unsqueeze(1), features))
            together = forward(one, each_input(lambda values: values.unsqueeze(0), features))
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
