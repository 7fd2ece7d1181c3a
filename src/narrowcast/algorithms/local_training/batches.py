"""What a chunk of matrix-factorisation clients trains on in one round: negatives, shuffles, batches, rows.

Everything is drawn at once for all clients of the chunk, from streams keyed by client, so that a client's batches do
not depend on who else is in its chunk.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from narrowcast.platform.data.interactions import Interactions
from narrowcast.platform.seeds import stream_keys, uniform_below, uniform_bits
from narrowcast.platform.types import BoolArray, IntArray


class LocalTraining(BaseModel):
    """How a client trains: SGD on the mean logistic loss of its items and of sampled negatives.

    `negatives` are drawn anew for each participation and kept over its epochs. With `train_negatives: clean` a client
    avoids only the items it trains on; `leaky` also avoids its held-out items and the 99 items it is ranked against,
    and draws only from items that some user trains on, as the code released with CoLR (Nguyen et al., WWW 2024) does:
    its published numbers need it, and it tells the model where the test items are.

    Differs from the released code: 1. negatives are drawn independently, where the code draws groups of four
    without repeats inside a group.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    learning_rate: float = Field(0.5, gt=0)
    batch_size: int = Field(256, ge=1)
    epochs: int = Field(2, ge=1)
    weight_decay: float = Field(5e-4, ge=0)
    negatives: int = Field(4, ge=0, description="sampled negatives per training item")
    train_negatives: Literal["clean", "leaky"] = "clean"


@dataclass(frozen=True)
class ChunkBatches:
    """The batches of a chunk, step by step, as indices into the rows that its clients touch.

    Clients stand in descending order of batches, so that those still training at a step are the first `active[step]`.

    Shapes:
        order: [C] places in the chunk, in training order; all other client axes follow it.
        row_items: [R] item of each work row; rows of a client are contiguous, `row_starts` [C + 1] says where.
        active: [T] clients that train at each step; step t holds batches `active[:t].sum()` onwards.
        rows: [sum(active), batch_size] work row of each sample; R (one past the last) pads.
        labels, valid: like rows; `sizes` [sum(active)] samples of each batch.
        first_of_last_epoch: [C] step at which a client's last epoch begins.
        samples: [C] samples of one epoch.
    """

    order: IntArray
    row_items: IntArray
    row_starts: IntArray
    active: IntArray
    rows: IntArray
    labels: BoolArray
    valid: BoolArray
    sizes: IntArray
    first_of_last_epoch: IntArray
    samples: IntArray


def known_items(data: Interactions, clients: IntArray, leaky: bool) -> BoolArray:
    """The items that each client never draws as a negative, [C, N]."""
    known = np.zeros((len(clients), data.n_items), dtype=bool)
    places = np.repeat(np.arange(len(clients)), data.examples[clients])
    known[places, training_items(data, clients)] = True
    if leaky:
        everyone = np.arange(len(clients))
        known[everyone[:, None], data.negatives[clients]] = True
        known[everyone, data.test[clients]] = True
        has_validation = data.validation[clients] >= 0
        known[everyone[has_validation], data.validation[clients][has_validation]] = True
        known |= ~np.bincount(data.items, minlength=data.n_items).astype(bool)
    return known


def training_items(data: Interactions, clients: IntArray) -> IntArray:
    """The training items of these clients one after the other, [sum of examples]."""
    slices = [data.items[data.indptr[client] : data.indptr[client + 1]] for client in clients]
    return np.concatenate(slices) if slices else np.empty(0, dtype=np.int64)


def draw_batches(
    data: Interactions, clients: IntArray, training: LocalTraining, seed: int, round_index: int
) -> ChunkBatches:
    """Draw the batches of one participation of these clients; the same for the same client, seed and round."""
    examples = data.examples[clients]
    drawn = examples * training.negatives
    known = known_items(data, clients, leaky=training.train_negatives == "leaky")
    allowed_counts = data.n_items - known.sum(axis=1)
    drawn[allowed_counts == 0] = 0
    samples = examples + drawn
    epoch_batches = -(-samples // training.batch_size)
    order = np.argsort(-epoch_batches, kind="stable")
    clients, examples, drawn, samples = clients[order], examples[order], drawn[order], samples[order]
    known, allowed_counts, epoch_batches = known[order], allowed_counts[order], epoch_batches[order]

    # Negatives: index uniformly into the list of each client's allowed items.
    n_clients = len(clients)
    places = np.repeat(np.arange(n_clients), drawn)
    keys = stream_keys(seed, "negatives", round_index, clients)[places]
    counters = np.arange(len(places)) - np.repeat(np.cumsum(drawn) - drawn, drawn)
    choice = uniform_below(keys, counters, allowed_counts[places])
    allowed_starts = np.cumsum(allowed_counts) - allowed_counts
    negatives = np.flatnonzero(~known)[allowed_starts[places] + choice] % data.n_items

    # Samples of a client: its own items, then its negatives; rows: its distinct items, ascending.
    starts = np.cumsum(samples) - samples
    owner = np.repeat(np.arange(n_clients), samples)
    within = np.arange(len(owner)) - starts[owner]
    positive = within < examples[owner]
    sample_items = np.empty(len(owner), dtype=np.int64)
    sample_items[positive] = training_items(data, clients)
    sample_items[~positive] = negatives
    cells = owner * data.n_items + sample_items
    touched = np.zeros(n_clients * data.n_items, dtype=bool)
    touched[cells] = True
    row_of_cell = np.cumsum(touched) - 1
    touched_cells = np.flatnonzero(touched)
    row_starts = np.searchsorted(touched_cells, np.arange(n_clients + 1) * data.n_items)
    sample_rows = row_of_cell[cells]

    # Steps: epoch e of a client takes its steps e * epoch_batches onwards; the tail batch of an epoch is kept.
    total_steps = epoch_batches * training.epochs
    n_steps = int(total_steps.max(initial=0))
    active = np.searchsorted(-total_steps, -np.arange(n_steps), side="left")
    step_starts = np.cumsum(active) - active
    rows = np.full((int(active.sum()), training.batch_size), len(touched_cells), dtype=np.int64)
    labels = np.zeros(rows.shape, dtype=bool)
    valid = np.zeros(rows.shape, dtype=bool)
    shuffle_keys = stream_keys(seed, "shuffle", round_index, clients)[owner]
    for epoch in range(training.epochs):
        shuffled = _shuffle_within(owner, uniform_bits(shuffle_keys, epoch * samples[owner] + within))
        step = epoch * epoch_batches[owner] + within // training.batch_size
        flat = (step_starts[step] + owner) * training.batch_size + within % training.batch_size
        rows.ravel()[flat] = sample_rows[shuffled]
        labels.ravel()[flat] = positive[shuffled]
        valid.ravel()[flat] = True
    return ChunkBatches(
        order=order,
        row_items=touched_cells % data.n_items,
        row_starts=row_starts,
        active=active,
        rows=rows,
        labels=labels,
        valid=valid,
        sizes=valid.sum(axis=1),
        first_of_last_epoch=(training.epochs - 1) * epoch_batches,
        samples=samples,
    )


def _shuffle_within(owner: IntArray, bits: np.ndarray[tuple[int], np.dtype[np.uint64]]) -> IntArray:
    """Places sorted by random bits inside each owner; ties cannot matter, they are as likely either way."""
    owner_bits = max(1, int(owner.max(initial=0)).bit_length())
    return np.argsort((owner.astype(np.uint64) << np.uint64(64 - owner_bits)) | (bits >> np.uint64(owner_bits)))
