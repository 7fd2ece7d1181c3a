"""What a chunk of matrix-factorisation clients trains on in one round: negatives, shuffles, batches, rows.

Everything is drawn at once for all clients of the chunk, from streams keyed by client, so that a client's batches do
not depend on who else is in its chunk.
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
"""The counter at which a client's stream of second tries begins."""


@dataclass(frozen=True)
class ChunkBatches:
    """The batches of a chunk, step by step, as indices into the rows that its clients touch.

    Shapes:
        order, active, valid, sizes, steps, first_of_last_epoch: as in `Schedule`.
        row_items: [R] item of each work row; rows of a client are contiguous, `row_starts` [C + 1] says where.
        rows: [B, batch_size] work row of each sample; R (one past the last) pads.
        labels: like rows; samples: [C] samples of one epoch.
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
        known |= ~data.trained_items
    return known


def sample_counts(data: Interactions, clients: IntArray, training: FactorisationSGD, known: BoolArray) -> IntArray:
    """The samples of one epoch of each client, [C]; who knows every item [C, N] draws no negatives."""
    return data.examples[clients] * np.where(known.all(axis=1), 1, 1 + training.negatives)


def training_items(data: Interactions, clients: IntArray) -> IntArray:
    """The training items of these clients one after the other, [sum of examples]."""
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
    """Draw the batches of one participation of these clients; the same for the same client, seed and round.

    The negatives are uniform over the items that a client may draw. Each is first drawn from all items, and only where
    that one may not be drawn from the others: so who has the seeds knows nearly all rows that a client touches.
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

    # Negatives: any item; where that one is not allowed, one of the list of those that are.
    n_clients = len(clients)
    places = np.repeat(np.arange(n_clients), drawn)
    keys = stream_keys(seed, "negatives", round_index, clients)[places]
    counters = np.arange(len(places)) - np.repeat(np.cumsum(drawn) - drawn, drawn)
    negatives = uniform_below(keys, counters, np.full(len(places), data.n_items))
    again = np.flatnonzero(known[places, negatives])
    choice = uniform_below(keys[again], SECOND_TRY + counters[again], allowed_counts[places[again]])
    allowed_starts = np.cumsum(allowed_counts) - allowed_counts
    negatives[again] = np.flatnonzero(~known)[allowed_starts[places[again]] + choice] % data.n_items

    # Samples of a client: its own items, then its negatives; rows: its distinct items, ascending.
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
    """The items that a client touches unless it may not draw them, which the server knows too, [N]."""
    keys = stream_keys(seed, "negatives", round_index, np.array([client]))
    likely = np.zeros(n_items, dtype=bool)
    likely[uniform_below(keys, np.arange(drawn), np.full(drawn, n_items))] = True
    return likely
