"""Local training of matrix factorisation: SGD of all clients of a chunk on the rows that they touch.

Clients of a round are independent, and in each client only the user factors and its private copies of the touched rows
change from step to step, so one tensor program over [active clients, batch] is exact. All copies of an item in a batch
have the same label and hence the same new row, so a plain scatter replaces the mean over duplicates.

Letters: N items, d factors, r the rank, C clients of a chunk, R the rows that they touch; q_i a row of Q, p the user
factors, B [r, d] the basis of low-rank training.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal, Self

import numpy as np
import torch
from torch import Tensor

from narrowcast.algorithms.local_training.batches import epochs_of
from narrowcast.algorithms.local_training.factorisation_kernels import (
    Factors,
    Floats,
    FusedResult,
    Subspace,
    sum_rows,
    train_low_rank_fused,
    train_rows_fused,
)
from narrowcast.algorithms.local_training.factorisation_settings import FactorisationSettings
from narrowcast.algorithms.local_training.gradients import to_array, to_tensor
from narrowcast.algorithms.local_training.negatives import (
    ChunkBatches,
    ChunkSamples,
    draw_batches,
    draw_samples,
    known_items,
    sample_counts,
)
from narrowcast.algorithms.local_training.rules import BY_ROUND_ADVICE
from narrowcast.platform.contracts import Task, Training
from narrowcast.platform.data.interactions import Interactions
from narrowcast.platform.errors import UserError
from narrowcast.platform.models.model import ITEM_FACTORS, USER_FACTORS
from narrowcast.platform.types import Arrays, BoolArray, Chunk, IntArray, LocalTerms, LocalUpdates, RowChanges


@dataclass(frozen=True)
class LocalResult:
    """Result of local training; the client axis is in the order of `ChunkBatches.order`.

    Shapes: row_changes [R, d] or [R, r]; user_factors [C, d]; loss [C], the mean over the last epoch.
    """

    row_changes: Tensor
    user_factors: Tensor
    loss: Tensor


@dataclass(frozen=True)
class _StepTensors:
    """The batches as tensors, split into steps of [active, batch]."""

    rows: list[Tensor]
    labels: list[Tensor]
    padding: list[Tensor]
    inverse_sizes: list[Tensor]


def _steps(batches: ChunkBatches, like: Tensor) -> _StepTensors:
    cuts = batches.active.tolist()
    padding = torch.from_numpy(~batches.valid).to(like.device)
    sizes = torch.from_numpy(batches.sizes).to(like)
    return _StepTensors(
        rows=list(torch.from_numpy(batches.rows).to(like.device).split(cuts)),
        labels=list(torch.from_numpy(batches.labels).to(like).split(cuts)),
        padding=list(padding.split(cuts)),
        inverse_sizes=list(sizes.unsqueeze(1).reciprocal_().split(cuts)),
    )


def train_rows(
    item_factors: Tensor,
    user_factors: Tensor,
    batches: ChunkBatches,
    training: FactorisationSGD,
    proximal: float = 0.0,
    correction: Tensor | None = None,
) -> LocalResult:
    """Train whole item rows: q_i -= lr (g p + 2 wd_q q_i) per row, p -= lr (mean g x + 2 wd p).

    With `proximal` or `correction`, every row of a client also moves by -lr (mu (q - q_0) + correction) in each step.

    Shapes: item_factors [N, d]; user_factors [C, d] in the order of `batches.order`; correction [R, d].
    """
    steps = _steps(batches, item_factors)
    before = item_factors[torch.from_numpy(batches.row_items).to(item_factors.device)]
    table = torch.cat([before, before.new_zeros(1, before.shape[1])])
    users = user_factors.clone()
    decay = 2 * training.weight_decay
    shrink = 1 - training.learning_rate * (2 * training.item_decay)
    scores = []
    drift = None
    for rows, labels, padding, inverse_sizes in zip(*_fields(steps), strict=True):
        active = len(rows)
        if proximal or correction is not None:
            stop = int(batches.row_starts[active])
            drift = proximal * (table[:stop] - before[:stop])
            if correction is not None:
                drift += correction[:stop]
        p = users[:active].clone()
        x = table.index_select(0, rows.view(-1)).view(*rows.shape, -1)
        z = torch.bmm(x, p.unsqueeze(2)).squeeze(2)
        scores.append(z)
        g = (torch.sigmoid(z) - labels).masked_fill_(padding, 0)
        mean_gradient = torch.bmm(g.unsqueeze(1), x).squeeze(1).mul_(inverse_sizes)
        users[:active].sub_(mean_gradient.add_(p, alpha=decay), alpha=training.learning_rate)
        x = torch.baddbmm(x, g.unsqueeze(2), p.unsqueeze(1), beta=shrink, alpha=-training.learning_rate)
        table.index_copy_(0, rows.view(-1), x.view(-1, x.shape[2]))
        table[-1] = 0  # the padding row is shared: a diverged client must not leave NaN in it
        if drift is not None:
            table[: len(drift)].sub_(drift, alpha=training.learning_rate)
    return LocalResult(table[:-1] - before, users, _last_epoch_loss(scores, steps, batches))


def train_low_rank(
    item_factors: Tensor,
    user_factors: Tensor,
    subspace: Subspace,
    batches: ChunkBatches,
    training: FactorisationSGD,
) -> LocalResult:
    """Train A with x_i = q_i + A_i B, q_i and B fixed: A_i -= lr s (g B p + 2 wd_q B x_i) on the client's components.

    A starts at zero, so `row_changes` [R, r] is A itself.

    Shapes: item_factors [N, d]; user_factors [C, d] in the order of `batches.order`.
    """
    steps = _steps(batches, item_factors)
    basis = to_tensor(subspace.basis, "cpu").to(item_factors)
    components = to_tensor(subspace.components.astype(np.float32), "cpu").to(item_factors)
    row_items = torch.from_numpy(batches.row_items).to(item_factors.device)
    padded_items = torch.cat([row_items, row_items.new_zeros(1)])
    basis_items = item_factors @ basis.T
    gram = basis @ basis.T
    table = basis.new_zeros(len(row_items) + 1, len(basis))
    users = user_factors.clone()
    step_scale = components * (subspace.gradient_scale * training.learning_rate)
    decay, item_decay = 2 * training.weight_decay, 2 * training.item_decay
    scores = []
    for rows, labels, padding, inverse_sizes in zip(*_fields(steps), strict=True):
        active = len(rows)
        p = users[:active].clone()
        basis_p = p @ basis.T
        flat_rows = rows.view(-1)
        flat_items = padded_items.index_select(0, flat_rows)
        q = item_factors.index_select(0, flat_items).view(*rows.shape, -1)
        a = table.index_select(0, flat_rows).view(*rows.shape, -1)
        z = torch.baddbmm(torch.bmm(q, p.unsqueeze(2)), a, basis_p.unsqueeze(2)).squeeze(2)
        scores.append(z)
        g = (torch.sigmoid(z) - labels).masked_fill_(padding, 0)
        mean_gradient = torch.bmm(g.unsqueeze(1), q).squeeze(1)
        mean_gradient.addmm_(torch.bmm(g.unsqueeze(1), a).squeeze(1), basis).mul_(inverse_sizes)
        users[:active].sub_(mean_gradient.add_(p, alpha=decay), alpha=training.learning_rate)
        basis_x = basis_items.index_select(0, flat_items).addmm_(a.view(-1, len(basis)), gram).view_as(a)
        gradient = torch.baddbmm(basis_x, g.unsqueeze(2), basis_p.unsqueeze(1), beta=item_decay)
        a = torch.addcmul(a, gradient, step_scale[:active].unsqueeze(1), value=-1)
        table.index_copy_(0, flat_rows, a.view(-1, len(basis)))
        table[-1] = 0
    return LocalResult(table[:-1], users, _last_epoch_loss(scores, steps, batches))


def _fields(steps: _StepTensors) -> tuple[list[Tensor], list[Tensor], list[Tensor], list[Tensor]]:
    return steps.rows, steps.labels, steps.padding, steps.inverse_sizes


def _last_epoch_loss(scores: list[Tensor], steps: _StepTensors, batches: ChunkBatches) -> Tensor:
    """Return the mean logistic loss of each client over its last epoch [C], each sample scored before its step."""
    n_clients = len(batches.order)
    if not scores:
        return torch.zeros(n_clients)
    z, labels, padding = torch.cat(scores), torch.cat(steps.labels), torch.cat(steps.padding)
    batch_loss = torch.nn.functional.softplus(torch.where(labels > 0, -z, z)).masked_fill_(padding, 0).sum(dim=1)
    active = torch.from_numpy(batches.active)
    step = torch.repeat_interleave(torch.arange(len(active)), active)
    owner = torch.arange(len(step)) - torch.repeat_interleave(active.cumsum(0) - active, active)
    in_last_epoch = step >= torch.from_numpy(batches.first_of_last_epoch)[owner]
    totals = torch.zeros(n_clients, dtype=z.dtype).index_add_(0, owner, batch_loss.cpu() * in_last_epoch)
    return totals / torch.from_numpy(batches.samples).clamp(min=1)


class FactorisationSGD(Training, FactorisationSettings):
    """SGD on the mean logistic loss of a client's items and of sampled negatives.

    The step is that of the code released with CoLR (Nguyen et al., WWW 2024): the user factors move by the batch mean,
    each distinct item row of the batch by its own gradient.

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

    def train(
        self, server: Arrays, chunk: Chunk, task: Task[Interactions, FactorisationSGD], terms: LocalTerms
    ) -> LocalUpdates:
        """Train whole rows; `changes` holds every row of Q [C, N, d], zero for rows that the client did not touch."""
        if terms.start_loss or terms.rule or terms.start or terms.trained or terms.phases or terms.holds_clients:
            frozen = "frozen parameters" if terms.trained or terms.phases else "local steps of its own"
            wanted = "the loss before training" if terms.start_loss else frozen
            raise UserError(
                f'training.kind = "{self.kind}" does not offer {wanted}, which the algorithm needs; '
                "use another algorithm, or a neural network"
            )
        epochs, training = epochs_of(chunk, terms, self.epochs), self.at(chunk.round_index)
        batches = draw_batches(task, chunk.clients, chunk.round_index, epochs)
        item_factors = to_tensor(np.asarray(server[ITEM_FACTORS]), self.device)
        user_factors = to_tensor(np.asarray(chunk.state[USER_FACTORS])[batches.order], self.device)
        n_clients = len(chunk.clients)
        position = np.empty(n_clients, dtype=np.int64)
        position[batches.order] = np.arange(n_clients)
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
            changes={ITEM_FACTORS: changes[position]},
            state={USER_FACTORS: to_array(result.user_factors)[position]},
            loss=to_array(result.loss).astype(np.float64)[position],
            examples=batches.samples[position] * epochs,
            steps=batches.steps[position],
            rate_sum=None if training is self else np.float64(training.learning_rate) * batches.steps[position],
        )


@dataclass(frozen=True)
class RowCohort:
    """A chunk's clients with the samples that they draw in this round, trained by the program of `training.program`.

    Arrays of clients [C] are in the order of the chunk; training results are in that of `samples.order`, and
    `positions` maps them back.
    """

    chunk: Chunk
    task: Task[Interactions, FactorisationSGD]
    samples: ChunkSamples

    @classmethod
    def draw(cls, chunk: Chunk, task: Task[Interactions, FactorisationSGD]) -> Self:
        """Draw the samples of the chunk's clients."""
        return cls(chunk, task, draw_samples(task, chunk.clients, chunk.round_index))

    @cached_property
    def positions(self) -> IntArray:
        """The position of each client in `samples.order`, [C]."""
        positions = np.empty(len(self.samples.order), dtype=np.int64)
        positions[self.samples.order] = np.arange(len(positions))
        return positions

    @cached_property
    def rows(self) -> RowChanges:
        """The rows that each client touches, without values."""
        samples, n_items = self.samples, self.task.data.n_items
        none = np.empty((0, 0), dtype=np.float32)
        return RowChanges(samples.row_items, samples.row_starts, none, n_items, samples.order)

    def updates(self, result: FusedResult, columns: BoolArray, levels: IntArray | None = None) -> LocalUpdates:
        """Return the result of training these columns [C, k], in the order of the chunk."""
        order, training = self.positions, self.task.training
        n_samples, values = self.samples.samples[order], result.row_changes
        if values is None:
            rows = replace(self.rows, columns=columns, total=result.total, touched=result.touched)
        else:
            rows = replace(self.rows, columns=columns, values=values)
        return LocalUpdates(
            changes={},
            state={USER_FACTORS: result.user_factors[order]},
            loss=result.loss[order],
            examples=n_samples * training.epochs,
            steps=-(-n_samples // training.step_samples(n_samples)) * training.epochs,
            rows={ITEM_FACTORS: rows},
            finite=result.finite[order],
            levels=levels,
        )

    def train_rows(self, item_factors: Floats, client_weights: Floats, keep_changes: bool = False) -> FusedResult:
        """Train whole rows of Q [N, d], and add up the changes times `client_weights` [C].

        A client of weight 0 trains for itself alone. `keep_changes` returns the changes of every client too.
        """
        training, weights = self._training, client_weights[self.samples.order]
        start = Factors(item_factors, self._user_factors)
        if training.fused:
            return train_rows_fused(start, self.samples, training, weights, keep_changes=keep_changes)
        items, users = (to_tensor(values, training.device) for values in start)
        batches = self._batches
        return _summed(len(item_factors), batches, train_rows(items, users, batches, training), weights)

    def train_components(
        self,
        item_factors: Floats,
        basis: Floats,
        components: BoolArray,
        client_weights: Floats,
        keep_changes: bool = False,
    ) -> FusedResult:
        """Train each client's components [C, r] of A in Q + A B, and add them up as `train_rows` does."""
        training, weights = self._training, client_weights[self.samples.order]
        start = Factors(item_factors, self._user_factors)
        subspace = Subspace(basis, components[self.samples.order])
        if training.fused:
            return train_low_rank_fused(start, subspace, self.samples, training, weights, keep_changes=keep_changes)
        items, users = (to_tensor(values, training.device) for values in start)
        batches = self._batches
        return _summed(len(item_factors), batches, train_low_rank(items, users, subspace, batches, training), weights)

    @property
    def _training(self) -> FactorisationSGD:
        return self.task.training.at(self.chunk.round_index)

    @property
    def _user_factors(self) -> Floats:
        return np.asarray(self.chunk.state[USER_FACTORS])[self.samples.order]

    @property
    def _batches(self) -> ChunkBatches:
        return draw_batches(self.task, self.chunk.clients, self.chunk.round_index)


def _summed(n_items: int, batches: ChunkBatches, result: LocalResult, client_weights: Floats) -> FusedResult:
    changes, users = to_array(result.row_changes), to_array(result.user_factors)
    client = np.repeat(np.arange(len(users)), np.diff(batches.row_starts))
    bad_rows = np.bincount(client[~np.isfinite(changes).all(axis=1)], minlength=len(users))
    finite = np.isfinite(users).all(axis=1) & (bad_rows == 0)
    delivered = finite & (client_weights != 0)
    total, touched = sum_rows(n_items, batches.row_items, batches.row_starts, changes, client_weights, delivered)
    return FusedResult(total, touched, users, to_array(result.loss).astype(np.float64), finite, changes)
