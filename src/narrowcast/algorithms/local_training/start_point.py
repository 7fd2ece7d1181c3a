"""The parameters of each client of a chunk before training, and the samples that they are measured on."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from narrowcast.algorithms.local_training.chain_gradients import Tensors
from narrowcast.algorithms.local_training.forward_draws import ForwardDraws
from narrowcast.algorithms.local_training.minibatch_schedule import BatchSchedule
from narrowcast.algorithms.local_training.network import Loader
from narrowcast.platform.models.losses import Loss
from narrowcast.platform.types import Rebuild


@dataclass(frozen=True)
class StartPoint:
    """The values from which clients train, and all samples of each client, as a schedule of one epoch.

    Each tensor of `values` and `frozen` is [1, ...] if all clients have the same, else [C, ...]; all client axes are in
    the order of `schedule`. `rebuild` computes the module's parameters from both. `batched`: all clients at once.
    `draws` are those of the passes.
    """

    module: nn.Module
    loss: Loss
    values: Tensors
    loader: Loader
    schedule: BatchSchedule
    rebuild: Rebuild | None
    frozen: Tensors
    batched: bool
    draws: ForwardDraws
