"""The samples of matrix factorisation: items, negatives and shuffles, for tensor programs and for compiled loops.

All clients of a chunk are drawn at once, from streams keyed by client, so that the batches of a client do not depend on
the other clients of its chunk. `draw_batches` is for a tensor program; `draw_samples`, a compiled loop over the same
streams of `narrowcast.platform.seeds`, gives the same samples and shuffles without the tables that one needs.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from narrowcast.algorithms.local_training.batches import draw_schedule
from narrowcast.algorithms.local_training.factorisation_settings import FactorisationSettings
from narrowcast.platform.compiled import compiled, over_clients, read_only
from narrowcast.platform.data.interactions import Interactions
from narrowcast.platform.seeds import Words, stream_keys, uniform_below
from narrowcast.platform.types import BoolArray, IntArray

if TYPE_CHECKING:
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
    owner = np.repeat(np.arange(len(clients)), data.examples[clients])
    known[owner, training_items(data, clients)] = True
    if leaky:
        everyone = np.arange(len(clients))
        known[everyone[:, None], data.negatives[clients]] = True
        known[everyone, data.test[clients]] = True
        has_validation = data.validation[clients] >= 0
        known[everyone[has_validation], data.validation[clients][has_validation]] = True
        known |= ~data.trained_items
    return known


def sample_counts(data: Interactions, clients: IntArray, training: FactorisationSettings, known: BoolArray) -> IntArray:
    """Return the number of samples per epoch of each client, [C].

    A client that knows all items [C, N] draws no negatives.
    """
    return data.examples[clients] * np.where(known.all(axis=1), 1, 1 + training.negatives)


def training_items(data: Interactions, clients: IntArray) -> IntArray:
    """Return the training items of the clients, concatenated, [sum of examples]."""
    slices = [data.items[data.indptr[client] : data.indptr[client + 1]] for client in clients]
    return np.concatenate(slices) if slices else np.empty(0, dtype=np.int64)


def negative_keys(task: Task[Interactions, FactorisationSettings], clients: IntArray, round_index: int) -> Words:
    """Return the keys of the streams of negatives, [C]: private ones, unless the receiver regenerates negatives."""
    if task.training.shared_negatives:
        return stream_keys(task.seed, "negatives", round_index, clients)
    return task.private_seed.stream_keys("negatives", round_index, clients)


def draw_batches(
    task: Task[Interactions, FactorisationSettings],
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
    owners = np.repeat(np.arange(n_clients), drawn)
    keys = negative_keys(task, clients, round_index)[owners]
    counters = np.arange(len(owners)) - np.repeat(np.cumsum(drawn) - drawn, drawn)
    negatives = uniform_below(keys, counters, np.full(len(owners), data.n_items))
    again = np.flatnonzero(known[owners, negatives])
    choice = uniform_below(keys[again], SECOND_TRY + counters[again], allowed_counts[owners[again]])
    allowed_starts = np.cumsum(allowed_counts) - allowed_counts
    negatives[again] = np.flatnonzero(~known)[allowed_starts[owners[again]] + choice] % data.n_items

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
    def of(cls, task: Task[Interactions, FactorisationSettings], client: int, round_index: int) -> Self:
        """Return the public knowledge of this client's negatives in a round."""
        key = stream_keys(task.seed, "negatives", round_index, np.array([client]))
        return cls(task.data.n_items, task.training.negatives, key)

    def likely_rows(self, positives: int) -> BoolArray:
        """Return the items that a client with so many positives touches unless it may not draw them, [N]."""
        drawn, likely = positives * self.negatives, np.zeros(self.n_items, dtype=bool)
        likely[uniform_below(self.key, np.arange(drawn), np.full(drawn, self.n_items))] = True
        return likely


Places = NDArray[np.uint32]

# SplitMix64, as in `narrowcast.platform.seeds`.
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)
_SECOND_TRY = np.uint64(SECOND_TRY)
_11, _27, _30, _31 = np.uint64(11), np.uint64(27), np.uint64(30), np.uint64(31)


class ChunkSamples(NamedTuple):
    """The samples of a chunk's clients before they are shuffled into batches.

    `order`, `row_items`, `row_starts` and `samples` are those of `ChunkBatches`; the client axis follows `order`.

    Shapes:
        positives: [C] training items among a client's samples; they come first.
        sample_starts: [C] index in `sample_rows` at which a client's samples begin.
        sample_rows: the row of each sample, counted from the first row of its client.
        shuffle_keys: [C] keys of the streams that shuffle the epochs.
    """

    order: IntArray
    row_items: IntArray
    row_starts: IntArray
    samples: IntArray
    positives: IntArray
    sample_starts: IntArray
    sample_rows: Places
    shuffle_keys: Words


def draw_samples(
    task: Task[Interactions, FactorisationSettings], clients: IntArray, round_index: int, threads: int = 1
) -> ChunkSamples:
    """Draw the samples of one participation of these clients.

    They are those of `draw_batches` and do not depend on the set of clients.
    """
    data, training = task.data, task.training
    leaky = training.train_negatives == "leaky"
    positives = data.indptr[clients + 1] - data.indptr[clients]
    most = positives * (1 + training.negatives) + 1  # one extra place for writes that are discarded
    starts = np.cumsum(most) - most
    sample_rows = np.empty(int(most.sum()), dtype=np.uint32)
    row_items = np.empty(len(sample_rows), dtype=np.int64)
    samples, n_rows = np.empty_like(positives), np.empty_like(positives)
    draw = partial(
        _draw_clients,
        read_only(clients, np.int64),
        read_only(data.indptr, np.int64),
        read_only(data.items, np.int64),
        read_only(_held_out(data, clients) if leaky else np.empty((len(clients), 0)), np.int64),
        read_only(data.trained_items if leaky else np.ones(data.n_items), np.bool_),
        training.negatives,
        negative_keys(task, clients, round_index),
        starts,
        sample_rows,
        row_items,
        samples,
        n_rows,
    )
    over_clients(draw, positives, threads)
    order = np.argsort(samples // -training.step_samples(samples), kind="stable")  # clients with most batches first
    return ChunkSamples(
        order=order,
        row_items=np.concatenate([row_items[starts[client] : starts[client] + n_rows[client]] for client in order]),
        row_starts=np.concatenate([[0], np.cumsum(n_rows[order])]),
        samples=samples[order],
        positives=positives[order],
        sample_starts=starts[order],
        sample_rows=sample_rows,
        shuffle_keys=task.private_seed.stream_keys("shuffle", round_index, clients[order]),
    )


def _held_out(data: Interactions, clients: IntArray) -> IntArray:
    """Return the items on which each client is evaluated [C, 101]; the test item replaces a missing validation item."""
    test, validation = data.test[clients], data.validation[clients]
    return np.column_stack([data.negatives[clients], test, np.where(validation >= 0, validation, test)])


@compiled(inline=True)
def _mix(word: np.uint64) -> np.uint64:
    word = (word ^ (word >> _30)) * _MIX_1
    word = (word ^ (word >> _27)) * _MIX_2
    return word ^ (word >> _31)


@compiled(inline=True)
def _below(key: np.uint64, counter: np.uint64, bound: int) -> np.int64:
    """Return `seeds.uniform_below` of one word."""
    return np.int64(np.float64(_mix(key + (counter + np.uint64(1)) * _GOLDEN) >> _11) * 2.0**-53 * bound)


@compiled()
def _draw_clients(
    clients: IntArray,
    indptr: IntArray,
    items: IntArray,
    held_out: IntArray,
    anyone_trains: BoolArray,
    negatives: int,
    keys: Words,
    starts: IntArray,
    sample_rows: Places,
    row_items: IntArray,
    samples: IntArray,
    n_rows: IntArray,
    order: IntArray,
) -> None:
    """Draw the samples of the clients at these indices of the chunk and number the rows that they touch."""
    n_items = len(anyone_trains)
    allowed, touched = np.empty(n_items, dtype=np.bool_), np.empty(n_items, dtype=np.bool_)
    choices, row_of = np.empty(n_items + 1, dtype=np.uint32), np.empty(n_items, dtype=np.uint32)
    for client in order:
        positives = items[indptr[clients[client]] : indptr[clients[client] + 1]]
        sampled = sample_rows[starts[client] :]
        rows = row_items[starts[client] :]
        for item in range(n_items):
            allowed[item] = anyone_trains[item]
            touched[item] = False
        for index in range(len(positives)):
            allowed[positives[index]] = False
            touched[positives[index]] = True
            sampled[index] = positives[index]
        for item in held_out[client]:
            allowed[item] = False

        # Branch-free filter: every item is written, and the count advances if it is allowed (touched, below).
        n_allowed = 0
        for item in range(n_items):
            choices[n_allowed] = item
            n_allowed += allowed[item]
        drawn = len(positives) * negatives if n_allowed else 0
        for index in range(drawn):
            negative = _below(keys[client], np.uint64(index), n_items)
            if not allowed[negative]:
                negative = np.int64(choices[_below(keys[client], _SECOND_TRY + np.uint64(index), n_allowed)])
            sampled[len(positives) + index] = negative
            touched[negative] = True

        n_touched = 0
        for item in range(n_items):
            rows[n_touched] = item
            row_of[item] = n_touched
            n_touched += touched[item]
        samples[client] = len(positives) + drawn
        n_rows[client] = n_touched
        for index in range(len(positives) + drawn):
            sampled[index] = row_of[sampled[index]]


@compiled(inline=True)
def shuffle(key: np.uint64, epoch: int, n_samples: int, words: Words, shuffled: Words, heads: Places) -> np.uint64:
    """Sort the indices 0..n-1 by the random bits of an epoch into the low bits of `shuffled`; return their mask.

    The lowest bits of each word hold the index; words that agree in all other bits keep the order of indices. Random
    bits fall evenly into as many buckets as there are words, so that few remain to be sorted inside a bucket.

    Shapes: words, shuffled [n]; heads [2 n + 2], scratch like `words`.
    """
    place_bits = 1
    while (1 << place_bits) < n_samples:
        place_bits += 1
    n_buckets = 1 << place_bits
    mask = np.uint64(n_buckets - 1)
    shift = np.uint64(64 - place_bits)
    for index in range(n_samples):
        word = _mix(key + np.uint64(epoch * n_samples + index + 1) * _GOLDEN)
        words[index] = (word & ~mask) | np.uint64(index)
    heads[:n_buckets] = 0
    for index in range(n_samples):
        heads[words[index] >> shift] += np.uint32(1)
    head = np.uint32(0)
    for bucket in range(n_buckets):
        count = heads[bucket]
        heads[bucket] = head
        head += count
    for index in range(n_samples):
        bucket = words[index] >> shift
        shuffled[heads[bucket]] = words[index]
        heads[bucket] += np.uint32(1)
    for index in range(1, n_samples):
        word = shuffled[index]
        before = index
        while before > 0 and shuffled[before - 1] > word:
            shuffled[before] = shuffled[before - 1]
            before -= 1
        shuffled[before] = word
    return mask
