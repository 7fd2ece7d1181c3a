"""Local SGD of matrix factorisation for all clients of a chunk at once, on the rows they touch.

Clients of a round are independent, and in each client only the user factors and its private copies of the touched rows
change from step to step, so one tensor program over [active clients, batch] is exact. All copies of an item in a batch
have the same label and hence the same new row, so a plain scatter replaces the mean over duplicates.

The step is that of the code released with CoLR (Nguyen et al., WWW 2024): logistic loss, the user factors move by the
batch mean, each distinct item row of the batch by its own gradient.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from narrowcast.algorithms.local_training.batches import ChunkBatches
from narrowcast.algorithms.local_training.device import to_tensor
from narrowcast.algorithms.local_training.subspace import Subspace

if TYPE_CHECKING:
    from narrowcast.algorithms.local_training.factorisation_sgd import FactorisationSGD


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
    place = torch.arange(len(step)) - torch.repeat_interleave(active.cumsum(0) - active, active)
    in_last_epoch = step >= torch.from_numpy(batches.first_of_last_epoch)[place]
    totals = torch.zeros(n_clients, dtype=z.dtype).index_add_(0, place, batch_loss.cpu() * in_last_epoch)
    return totals / torch.from_numpy(batches.samples).clamp(min=1)
