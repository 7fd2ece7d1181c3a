"""Local training of neural networks, of any torch module: SGD, Adam and AdamW, and what they have in common."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import replace
from typing import Literal

import numpy as np
import torch
from pydantic import Field

from narrowcast.algorithms.local_training.batches import BatchSize
from narrowcast.algorithms.local_training.calls import (
    module_of,
    network_of,
    padded_batch,
    program_key,
    rounds_alike,
    train_calls,
)
from narrowcast.algorithms.local_training.gradients import (
    Device,
    batched_forward,
    callable_of,
    chain_gradient,
    trains_faster_at_once,
)
from narrowcast.algorithms.local_training.network import of_each_client
from narrowcast.algorithms.local_training.rules import AdamSteps, GradientDescent, Optimizer, RateSchedule
from narrowcast.platform.config.files import Section
from narrowcast.platform.contracts import LocalCall, Task, Training
from narrowcast.platform.data.samples import Samples, each_input, rows_of_inputs
from narrowcast.platform.errors import UserError, described
from narrowcast.platform.models.module_call import call_module
from narrowcast.platform.models.modules import trained_of
from narrowcast.platform.models.neural_network import NeuralNetwork, as_inputs
from narrowcast.platform.seeds import isolated
from narrowcast.platform.traits import TrainingTraits
from narrowcast.platform.types import Arrays, Chunk, FloatArray, IntArray, LocalTerms, LocalUpdates


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
    def local_optimizer(self) -> Optimizer:
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

        Calls whose tensors have the same shapes are trained as one program, unless rounding would differ from that of
        each alone; client-by-client training gains nothing from it.
        """
        if self.mode(calls[0].task) == "per_client":
            return [call.task.training.train(call.server, call.chunk, call.task, call.terms) for call in calls]
        programs: dict[tuple[object, ...], list[int]] = {}
        for index, call in enumerate(calls):
            programs.setdefault(program_key(call) if rounds_alike(call) else (index,), []).append(index)
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
        gains = chain_gradient(module, network_of(task).loss_on(task.data)) is not None
        gains = gains or trains_faster_at_once(module)
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
    pair = task.data.train.take(np.arange(2) % len(task.data.train))
    features = as_inputs(pair.features, network.torch_dtype)
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
