"""Negatives, shuffles and batches on which a chunk of matrix-factorisation clients trains in one round.

All clients of the chunk are drawn at once, from streams keyed by client, so that the batches of a client do not depend
on the other clients of its chunk.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from narrowcast.algorithms.local_training.minibatch_schedule import draw_schedule
from narrowcast.platform.data.interactions import Interactions
from narrowcast.platform.seeds import stream_keys, uniform_below
from narrowcast.platform.types import BoolArray, IntArray

if TYPE_CHECKING:
    from narrowcast.algorithms.local_training.factorisation_sgd import FactorisationSGD

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


def draw_batches(
    data: Interactions,
    clients: IntArray,
    training: FactorisationSGD,
    seed: int,
    round_index: int,
    epochs: IntArray | None = None,
) -> ChunkBatches:
    """Draw the batches of one participation of each client; a function of seed, round and client only.

    Negatives are uniform over the items that a client may draw. Each is first drawn from all items and drawn again from
    the allowed ones only if it is not allowed. The holder of the seed therefore knows almost all rows that a client
    touches.

    Shapes: clients [C]; epochs [C], by default `training.epochs` for each client.
    """
    examples = data.examples[clients]
    known = known_items(data, clients, leaky=training.train_negatives == "leaky")
    allowed_counts = data.n_items - known.sum(axis=1)
    samples = sample_counts(data, clients, training, known)
    drawn = samples - examples
    if epochs is None:
        epochs = np.full(len(clients), training.epochs)
    schedule = draw_schedule(samples, epochs, training.batch_size, stream_keys(seed, "shuffle", round_index, clients))
    order = schedule.order
    clients, examples, drawn, samples = clients[order], examples[order], drawn[order], samples[order]
    known, allowed_counts = known[order], allowed_counts[order]

    # Negatives: drawn from all items; a draw that is not allowed is replaced by one from the allowed items.
    n_clients = len(clients)
    places = np.repeat(np.arange(n_clients), drawn)
    keys = stream_keys(seed, "negatives", round_index, clients)[places]
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


def likely_rows(n_items: int, drawn: int, seed: int, round_index: int, client: int) -> BoolArray:
    """Return the items that a client touches unless it may not draw them, which the server can compute as well, [N]."""
    keys = stream_keys(seed, "negatives", round_index, np.array([client]))
    likely = np.zeros(n_items, dtype=bool)
    likely[uniform_below(keys, np.arange(drawn), np.full(drawn, n_items))] = True
    return likely
