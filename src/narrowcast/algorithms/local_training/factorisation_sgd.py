"""Local training of matrix factorisation: hyper-parameters, and dense updates for algorithms that need them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
from pydantic import Field

from narrowcast.algorithms.local_training.batches import draw_batches, known_items, sample_counts
from narrowcast.algorithms.local_training.device import Device, to_array, to_tensor
from narrowcast.algorithms.local_training.factorisation import train_rows
from narrowcast.algorithms.local_training.learning_rate import BY_ROUND_ADVICE, RateSchedule
from narrowcast.algorithms.local_training.minibatch_schedule import BatchSize, epochs_of
from narrowcast.platform.contracts import LocalCall, Task
from narrowcast.platform.data.interactions import Interactions
from narrowcast.platform.errors import UserError
from narrowcast.platform.models.matrix_factorisation import ITEM_FACTORS, USER_FACTORS
from narrowcast.platform.section import Section
from narrowcast.platform.types import Arrays, Chunk, IntArray, LocalTerms, LocalUpdates


class FactorisationSGD(Section):
    """SGD on the mean logistic loss of a client's items and of sampled negatives.

    Negatives are drawn once per participation and used in all of its epochs. With `train_negatives: clean` a client
    avoids only the items it trains on. With `leaky` it also avoids its held-out items and the 99 items they are ranked
    against, and draws only items on which some user trains, as the code released with CoLR does (Nguyen et al., WWW
    2024). The published numbers need `leaky`, and it tells the model where the test items are.

    With `shared_negatives` negatives come from the public stream. The receiver regenerates them, so that an upload
    through a codec names hardly more than the client's own items, whose number it sends: fewer bits, and the client's
    training items lie open. Without it they are private, and the list of all touched rows is sent.

    Differs from the released code: 1. negatives are drawn independently; the code draws groups of four without repeats
    inside a group.
    """

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

    def at(self, round_index: int) -> FactorisationSGD:
        """Return the training with the learning rate of a round."""
        if self.learning_rate_schedule is None:
            return self
        rate = self.learning_rate * self.learning_rate_schedule.factor(round_index, 0)
        return self.model_copy(update={"learning_rate": rate, "learning_rate_schedule": None})

    def step_samples(self, samples: IntArray) -> int:
        """Return the most samples of a step, for clients with so many samples [C]."""
        return max(int(samples.max(initial=0)), 1) if self.batch_size == "all" else self.batch_size

    def check(self, task: Task) -> None:
        """Raise `UserError` unless the model is matrix factorisation and the program runs on the device."""
        if not isinstance(task.data, Interactions):
            raise UserError(
                f'training.kind = "{self.kind}" trains matrix_factorisation only, not {task.model.kind}; use "sgd"'
            )
        if self.learning_rate_schedule is not None and self.learning_rate_schedule.by_step:
            raise UserError(
                f"training.learning_rate_schedule.kind = {self.learning_rate_schedule.kind} changes the rate at each "
                f"local step, which matrix factorisation does not; {BY_ROUND_ADVICE}"
            )
        if self.shared_negatives and not self.negatives:
            raise UserError("training.shared_negatives = true: training.negatives = 0 draws none; leave it out")
        if self.program == "fused" and self.device != "cpu":
            raise UserError('training.program = "fused" runs on a CPU; use batched, or device: cpu')

    def mode(self, task: Task[Interactions, FactorisationSGD]) -> Literal["batched", "per_client"]:
        """Return "batched": both programs train the whole chunk in one call."""
        del task
        return "batched"

    def samples(self, task: Task[Interactions, FactorisationSGD], clients: IntArray) -> IntArray:
        """Return the samples per epoch of each client, its items and the negatives drawn for them, [C]."""
        known = known_items(task.data, clients, leaky=self.train_negatives == "leaky")
        return sample_counts(task.data, clients, self, known)

    def train_together(self, calls: Sequence[LocalCall]) -> list[LocalUpdates]:
        """Train the calls in turn; each call is already one program of many clients."""
        return [call.task.training.train(call.server, call.chunk, call.task, call.terms) for call in calls]

    def train(
        self, server: Arrays, chunk: Chunk, task: Task[Interactions, FactorisationSGD], terms: LocalTerms
    ) -> LocalUpdates:
        """Train whole rows; `changes` holds every row of Q [C, N, d], zero for rows that the client did not touch."""
        if terms.start_loss or terms.rule or terms.start:
            wanted = "the loss before training" if terms.start_loss else "local steps of its own"
            raise UserError(
                f'training.kind = "{self.kind}" does not offer {wanted}, which the algorithm needs; '
                "use another algorithm, or a neural network"
            )
        epochs, training = epochs_of(chunk, terms, self.epochs), self.at(chunk.round_index)
        batches = draw_batches(task, chunk.clients, chunk.round_index, epochs)
        item_factors = to_tensor(np.asarray(server[ITEM_FACTORS]), self.device)
        user_factors = to_tensor(np.asarray(chunk.state[USER_FACTORS])[batches.order], self.device)
        n_clients = len(chunk.clients)
        place = np.empty(n_clients, dtype=np.int64)
        place[batches.order] = np.arange(n_clients)
        client_of_row = np.repeat(np.arange(n_clients), np.diff(batches.row_starts))
        changes = np.zeros((n_clients, *item_factors.shape), dtype=np.float32)
        row_correction = None
        if terms.correction is not None:
            correction = np.asarray(terms.correction[ITEM_FACTORS])[batches.order]
            # Rows that a client never trains still move by the correction, by the same amount in each step.
            changes -= (training.learning_rate * batches.steps)[:, None, None].astype(np.float32) * correction
            row_correction = to_tensor(correction[client_of_row, batches.row_items], self.device)
        result = train_rows(item_factors, user_factors, batches, training, terms.proximal, row_correction)
        changes[client_of_row, batches.row_items] = to_array(result.row_changes)
        return LocalUpdates(
            changes={ITEM_FACTORS: changes[place]},
            state={USER_FACTORS: to_array(result.user_factors)[place]},
            loss=to_array(result.loss).astype(np.float64)[place],
            examples=batches.samples[place] * epochs,
            steps=batches.steps[place],
            rate_sum=None if training is self else np.float64(training.learning_rate) * batches.steps[place],
        )
