"""The hyper-parameters of local training of matrix factorisation, below the programs that train by them."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field

from narrowcast.algorithms.local_training.batches import BatchSize
from narrowcast.algorithms.local_training.gradients import Device
from narrowcast.algorithms.local_training.rules import RateSchedule
from narrowcast.platform.config.files import Section
from narrowcast.platform.types import IntArray


class FactorisationSettings(Section):
    """The fields of `FactorisationSGD`, which says what they mean, and what follows from them."""

    kind: Literal["factorisation_sgd"] = "factorisation_sgd"
    learning_rate: float = Field(0.5, gt=0, description="step size of local SGD")
    learning_rate_schedule: RateSchedule | None = Field(
        None, description="factor of learning_rate by round or local step; null: constant"
    )
    batch_size: BatchSize = Field(
        256, description="samples per step; all: every sample of the client, one step per epoch"
    )
    epochs: int = Field(2, ge=1, description="local epochs per participation")
    weight_decay: float = Field(5e-4, ge=0, description="coefficient of the squared L2 norm of p and q in the loss")
    item_weight_decay: float | None = Field(
        None, ge=0, description="coefficient of the squared L2 norm of q alone, 0 for no decay of Q; null: weight_decay"
    )
    negatives: int = Field(4, ge=0, description="sampled negatives per training item")
    train_negatives: Literal["clean", "leaky"] = Field(
        "clean", description="items never drawn as negatives: training items; or also the held-out and ranked items"
    )
    shared_negatives: bool = Field(
        False, description="draw negatives that the server can regenerate: shorter row lists, which give positives away"
    )
    program: Literal["auto", "fused", "batched"] = Field(
        "auto",
        description="fused: compiled loops, client by client; batched: one tensor program per chunk, with the same "
        "steps; auto: fused on a CPU, batched on a GPU",
    )
    device: Device = Field("cpu", description="device on which clients train")

    @property
    def fused(self) -> bool:
        """Return whether clients are trained by the compiled kernels."""
        return self.program == "fused" or (self.program == "auto" and self.device == "cpu")

    @property
    def item_decay(self) -> float:
        """Return the coefficient of the squared L2 norm of q in the loss."""
        return self.weight_decay if self.item_weight_decay is None else self.item_weight_decay

    def at(self, round_index: int) -> Self:
        """Return the training with the learning rate of a round."""
        if self.learning_rate_schedule is None:
            return self
        rate = self.learning_rate * self.learning_rate_schedule.factor(round_index, 0)
        return self.model_copy(update={"learning_rate": rate, "learning_rate_schedule": None})

    def step_samples(self, samples: IntArray) -> int:
        """Return the most samples of a step, for clients with so many samples [C]."""
        return max(int(samples.max(initial=0)), 1) if self.batch_size == "all" else self.batch_size
