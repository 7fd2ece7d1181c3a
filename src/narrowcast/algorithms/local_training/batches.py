"""Negatives, shuffles and batches on which a chunk of matrix-factorisation clients trains in one round.

All clients of the chunk are drawn at once, from streams keyed by client, so that the batches of a client do not depend
on the other clients of its chunk.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

import numpy as np

from narrowcast.algorithms.local_training.minibatch_schedule import draw_schedule
from narrowcast.platform.data.interactions import Interactions
from narrowcast.platform.seeds import Words, stream_keys, uniform_below
from narrowcast.platform.types import BoolArray, IntArray

if TYPE_CHECKING:
    from narrowcast.algorithms.local_training.factorisation_sgd import FactorisationSGD
    from narrowcast.platform.contracts import Task

SECOND_TRY = 2**32
"""Counter at which a client's stream of second draws begins."""


@dataclass(frozen=True)
class ChunkBatches:
    """The batches of a chunk, step by step, as indices into the rows that its clients touch.

    Shapes:
        order, active, valid, sizes, steps, first_of_last_epoch: as in `BatchSchedule`.
        row_items: [R] item of each work row; the rows of client c are `row_starts[c]:row_starts[c + 1]`.
        rows: [B, batch_size] work row of each sample; R (one past the last) is padding.
        labels: [B, batch_size]; samples: [C] samples of one epoch.
    """

    order: IntArray
    row_items: IntArray
    row_starts: IntArray
    active: IntArray
    rows: IntArray
    labels: BoolArray
    valid: BoolArray
    sizes: IntArray
    steps: IntArray
    first_of_last_epoch: IntArray
    samples: IntArray


def known_items(data: Interactions, clients: IntArray, leaky: bool) -> BoolArray:
    """Return the items that each client never draws as a negative, [C, N].

    With `leaky` these include the held-out items, the items they are ranked against, and items on which no user trains.
    """
    known = np.zeros((len(clients), data.n_items), dtype=bool)
    places = np.repeat(np.arange(len(clients)), data.examples[clients])
    known[places, training_items(data, clients)] = True
    if leaky:
        everyone = np.arange(len(clients))
        known[everyone[:, None], data.negatives[clients]] = True
        known[everyone, data.test[clients]] = True
        has_validation = data.validation[clients] >= 0
        known[everyone[has_validation], data.validation[clients][has_validation]] = True
        known |= ~data.trained_items
    return known


def sample_counts(data: Interactions, clients: IntArray, training: FactorisationSGD, known: BoolArray) -> IntArray:
    """Return the number of samples per epoch of each client, [C].

    A client that knows all items [C, N] draws no negatives.
    """
    return data.examples[clients] * np.where(known.all(axis=1), 1, 1 + training.negatives)


def training_items(data: Interactions, clients: IntArray) -> IntArray:
    """Return the training items of the clients, concatenated, [sum of examples]."""
    slices = [data.items[data.indptr[client] : data.indptr[client + 1]] for client in clients]
    return np.concatenate(slices) if slices else np.empty(0, dtype=np.int64)


def negative_keys(task: Task[Interactions, FactorisationSGD], clients: IntArray, round_index: int) -> Words:
    """Return the keys of the streams of negatives, [C]: private ones, unless the receiver regenerates negatives."""
    if task.training.shared_negatives:
        return stream_keys(task.seed, "negatives", round_index, clients)
    return task.private_seed.stream_keys("negatives", round_index, clients)


def draw_batches(
    task: Task[Interactions, FactorisationSGD],
    clients: IntArray,
    round_index: int,
    epochs: IntArray | None = None,
) -> ChunkBatches:
    """Draw the batches of one participation of each client; a function of the seeds, round and client only.

    Negatives are uniform over the items that a client may draw. Each is first drawn from all items and drawn again from
    the allowed ones only if it is not allowed. The holder of their seed therefore knows almost all rows that a client
    touches.

    Shapes: clients [C]; epochs [C], by default `training.epochs` for each client.
    """
    data, training = task.data, task.training
    examples = data.examples[clients]
    known = known_items(data, clients, leaky=training.train_negatives == "leaky")
    allowed_counts = data.n_items - known.sum(axis=1)
    samples = sample_counts(data, clients, training, known)
    drawn = samples - examples
    if epochs is None:
        epochs = np.full(len(clients), training.epochs)
    shuffle_keys = task.private_seed.stream_keys("shuffle", round_index, clients)
    # Rounding depends on the size to which batches are padded, so that it is the same for all chunks.
    padded_batch = training.step_samples(data.examples * (1 + training.negatives))
    schedule = draw_schedule(samples, epochs, padded_batch, shuffle_keys)
    order = schedule.order
    clients, examples, drawn, samples = clients[order], examples[order], drawn[order], samples[order]
    known, allowed_counts = known[order], allowed_counts[order]

    # Negatives: drawn from all items; a draw that is not allowed is replaced by one from the allowed items.
    n_clients = len(clients)
    places = np.repeat(np.arange(n_clients), drawn)
    keys = negative_keys(task, clients, round_index)[places]
    counters = np.arange(len(places)) - np.repeat(np.cumsum(drawn) - drawn, drawn)
    negatives = uniform_below(keys, counters, np.full(len(places), data.n_items))
    again = np.flatnonzero(known[places, negatives])
    choice = uniform_below(keys[again], SECOND_TRY + counters[again], allowed_counts[places[again]])
    allowed_starts = np.cumsum(allowed_counts) - allowed_counts
    negatives[again] = np.flatnonzero(~known)[allowed_starts[places[again]] + choice] % data.n_items

    # The samples of a client are its own items, then its negatives; its rows are its distinct items, ascending.
    starts = np.cumsum(samples) - samples
    owner = np.repeat(np.arange(n_clients), samples)
    positive = np.arange(len(owner)) - starts[owner] < examples[owner]
    sample_items = np.empty(len(owner), dtype=np.int64)
    sample_items[positive] = training_items(data, clients)
    sample_items[~positive] = negatives
    cells = owner * data.n_items + sample_items
    touched = np.zeros(n_clients * data.n_items, dtype=bool)
    touched[cells] = True
    row_of_cell = np.cumsum(touched) - 1
    touched_cells = np.flatnonzero(touched)
    row_starts = np.searchsorted(touched_cells, np.arange(n_clients + 1) * data.n_items)
    return ChunkBatches(
        order=order,
        row_items=touched_cells % data.n_items,
        row_starts=row_starts,
        active=schedule.active,
        rows=np.append(row_of_cell[cells], len(touched_cells))[schedule.samples],
        labels=np.append(positive, False)[schedule.samples],
        valid=schedule.valid,
        sizes=schedule.sizes,
        steps=schedule.steps,
        first_of_last_epoch=schedule.first_of_last_epoch,
        samples=samples,
    )


@dataclass(frozen=True)
class SharedNegatives:
    """The knowledge that a receiver has of the negatives that one client draws from the public stream in one round.

    `negatives` are drawn for each positive of `n_items` items; `key` is that of the client's stream.
    """

    n_items: int
    negatives: int
    key: Words

    @classmethod
    def of(cls, task: Task[Interactions, FactorisationSGD], client: int, round_index: int) -> Self:
        """Return the public knowledge of this client's negatives in a round."""
        key = stream_keys(task.seed, "negatives", round_index, np.array([client]))
        return cls(task.data.n_items, task.training.negatives, key)

    def likely_rows(self, positives: int) -> BoolArray:
        """Return the items that a client with so many positives touches unless it may not draw them, [N]."""
        drawn, likely = positives * self.negatives, np.zeros(self.n_items, dtype=bool)
        likely[uniform_below(self.key, np.arange(drawn), np.full(drawn, self.n_items))] = True
        return likely
