"""The slow reference: what the code released with CoLR does, one client and one batch at a time, by autograd.

And what these tests share: a small synthetic data set, a task around it, and relative errors.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from narrowcast.algorithms.local_training.batches import ChunkBatches
from narrowcast.algorithms.local_training.factorisation_sgd import FactorisationSGD
from narrowcast.platform.contracts import Task
from narrowcast.platform.data.interactions import NO_ITEM, Interactions
from narrowcast.platform.models.matrix_factorisation import MatrixFactorisation
from narrowcast.platform.simulation.fleet import Tiers
from narrowcast.platform.types import Profiles

Array = NDArray[Any]
Batch = tuple[Array, Array]
"""Items and labels of one step."""


@dataclass(frozen=True)
class LowRankPart:
    """What CoLR and SCoLR freeze or mask: B [r, d], and the components [C, r] that each client trains."""

    basis: Array
    components: Array


@dataclass(frozen=True)
class Trained:
    """Shapes: user_factors [C, d]; changes [C, N, d or r]; touched [C, N]; loss [C]. C in the order of the chunk."""

    user_factors: Array
    changes: Array
    touched: Array
    loss: Array

    def per_item_mean(self, delivered: Array | None = None) -> Array:
        """The server's average: each row over the clients that trained it, [N, d or r]."""
        kept = np.ones(len(self.loss), dtype=bool) if delivered is None else delivered
        return self.changes[kept].sum(axis=0) / np.maximum(self.touched[kept].sum(axis=0), 1)[:, None]


def client_batches(batches: ChunkBatches) -> list[list[Batch]]:
    """The batches of each client, step by step; clients in the order of the chunk."""
    unpacked: list[list[Batch]] = [[] for _ in batches.order]
    first = 0
    for active in batches.active:
        for place in range(active):
            valid = batches.valid[first + place]
            items = batches.row_items[batches.rows[first + place][valid]]
            unpacked[batches.order[place]].append((items, batches.labels[first + place][valid]))
        first += active
    return unpacked


def train_one(
    item_factors: Tensor, p: Tensor, steps: list[Batch], training: FactorisationSGD, basis: Tensor | None, mask: Tensor
) -> tuple[Tensor, Tensor, float]:
    """Train one client; returns its item change [N, d] or A [N, r], its user factors [d] and its last epoch's loss."""
    n_items = len(item_factors)
    user = nn.Embedding(1, len(p), scale_grad_by_freq=True, _weight=p[None].clone())
    start = item_factors.clone() if basis is None else item_factors.new_zeros(n_items, len(basis))
    table = nn.Embedding(*start.shape, scale_grad_by_freq=True, _weight=start.clone())
    if basis is not None:
        scale = (basis.shape[0] / basis.shape[1]) ** 0.5
        table.weight.register_hook(lambda gradient: gradient * scale * mask)
    optimizer = torch.optim.SGD([user.weight, table.weight], lr=training.learning_rate)
    last_epoch = len(steps) - len(steps) // training.epochs
    losses, samples = 0.0, 0
    for step, (items, labels) in enumerate(steps):
        index, target = torch.from_numpy(items), torch.from_numpy(labels).to(p)
        optimizer.param_groups[0]["lr"] = training.learning_rate * len(items)
        optimizer.zero_grad()
        x = table(index) if basis is None else item_factors[index] + table(index) @ basis
        u = user(torch.zeros_like(index))
        data_loss = nn.functional.binary_cross_entropy_with_logits((x * u).sum(dim=1), target)
        (data_loss + training.weight_decay * (x.square().sum() + u.square().sum()) / len(items)).backward()
        optimizer.step()
        if step >= last_epoch:
            losses += float(data_loss.detach()) * len(items)
            samples += len(items)
    return table.weight.detach() - start, user.weight.detach()[0], losses / max(samples, 1)


def train_cohort(
    item_factors: Array,
    user_factors: Array,
    batches: ChunkBatches,
    training: FactorisationSGD,
    low_rank: LowRankPart | None = None,
    dtype: torch.dtype = torch.float64,
) -> Trained:
    """Train all clients one after the other; `user_factors` [C, d] and `low_rank` in the order of the chunk."""
    q = torch.from_numpy(np.array(item_factors)).to(dtype)
    basis = None if low_rank is None else torch.from_numpy(np.array(low_rank.basis)).to(dtype)
    changes, users, losses = [], [], []
    touched = np.zeros((len(batches.order), len(q)), dtype=bool)
    for place, steps in enumerate(client_batches(batches)):
        p = torch.from_numpy(np.array(user_factors[place])).to(dtype)
        mask = torch.ones(1) if low_rank is None else torch.from_numpy(np.array(low_rank.components[place])).to(dtype)
        change, user, loss = train_one(q, p, steps, training, basis, mask)
        changes.append(change.numpy())
        users.append(user.numpy())
        losses.append(loss)
        for items, _ in steps:
            touched[place, items] = True
    return Trained(np.stack(users), np.stack(changes), touched, np.array(losses))


def relative_error(got: Array, wanted: Array) -> float:
    """Norm of the difference over the norm of what is wanted; both in float64."""
    wanted = np.asarray(wanted, dtype=np.float64)
    return float(np.linalg.norm(np.asarray(got, dtype=np.float64) - wanted) / max(np.linalg.norm(wanted), 1e-300))


def synthetic(examples: list[int], n_items: int = 150, n_negatives: int = 20, seed: int = 0) -> Interactions:
    """Random interactions: user u trains on `examples[u]` items; its held-out items are others wherever there are any.

    The last item is trained on by nobody, unless a user trains on all.
    """
    random = np.random.default_rng(seed)
    items, validation, test, negatives = [], [], [], []
    for count in examples:
        order = np.append(random.permutation(n_items - 1), n_items - 1)
        items.append(np.sort(order[:count]))
        validation.append(order[count] if count < n_items - 1 else NO_ITEM)
        test.append(order[min(count + 1, n_items - 1)])
        negatives.append(random.choice(order[min(count + 2, n_items - n_negatives) :], n_negatives, replace=False))
    return Interactions(
        name="synthetic",
        source="random",
        n_items=n_items,
        indptr=np.concatenate([[0], np.cumsum(examples)]),
        items=np.concatenate(items),
        validation=np.array(validation),
        test=np.array(test),
        negatives=np.array(negatives),
    )


def make_task(
    data: Interactions, *, dimension: int = 8, seed: int = 0, uplink: Array | None = None, **training: Any
) -> Task:
    """A task on the default fleet, or with these uplinks in bits per second [U]."""
    profiles = Tiers().profiles(data.examples, seed)
    if uplink is not None:
        profiles = Profiles(
            profiles.client, profiles.examples, uplink, profiles.downlink_bits_per_second, profiles.compute_speed
        )
    model = MatrixFactorisation(embedding_dim=dimension)
    return Task(data, profiles, model, FactorisationSGD(**{"batch_size": 16, **training}), seed)
