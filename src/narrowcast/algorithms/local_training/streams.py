"""Samples of each client of a chunk, drawn by a compiled loop; the same samples and shuffles as `draw_batches`.

The same streams of `narrowcast.platform.seeds` give the same negatives in the same order, without the tables that a
tensor program needs.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from narrowcast.algorithms.local_training.batches import SECOND_TRY, negative_keys
from narrowcast.algorithms.local_training.compiled import compiled, over_clients, read_only
from narrowcast.platform.data.interactions import Interactions
from narrowcast.platform.seeds import Words
from narrowcast.platform.types import BoolArray, IntArray

if TYPE_CHECKING:
    from narrowcast.algorithms.local_training.factorisation_sgd import FactorisationSGD
    from narrowcast.platform.contracts import Task

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
    task: Task[Interactions, FactorisationSGD], clients: IntArray, round_index: int, threads: int = 1
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
        row_items=np.concatenate([row_items[starts[place] : starts[place] + n_rows[place]] for place in order]),
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
    places: IntArray,
) -> None:
    """Draw the samples of the clients at these places of the chunk and number the rows that they touch."""
    n_items = len(anyone_trains)
    allowed, touched = np.empty(n_items, dtype=np.bool_), np.empty(n_items, dtype=np.bool_)
    choices, row_of = np.empty(n_items + 1, dtype=np.uint32), np.empty(n_items, dtype=np.uint32)
    for place in places:
        own = items[indptr[clients[place]] : indptr[clients[place] + 1]]
        sampled = sample_rows[starts[place] :]
        rows = row_items[starts[place] :]
        for item in range(n_items):
            allowed[item] = anyone_trains[item]
            touched[item] = False
        for index in range(len(own)):
            allowed[own[index]] = False
            touched[own[index]] = True
            sampled[index] = own[index]
        for item in held_out[place]:
            allowed[item] = False

        # Branch-free filter: every item is written, and the count advances if it is allowed (touched, below).
        n_allowed = 0
        for item in range(n_items):
            choices[n_allowed] = item
            n_allowed += allowed[item]
        drawn = len(own) * negatives if n_allowed else 0
        for index in range(drawn):
            negative = _below(keys[place], np.uint64(index), n_items)
            if not allowed[negative]:
                negative = np.int64(choices[_below(keys[place], _SECOND_TRY + np.uint64(index), n_allowed)])
            sampled[len(own) + index] = negative
            touched[negative] = True

        n_touched = 0
        for item in range(n_items):
            rows[n_touched] = item
            row_of[item] = n_touched
            n_touched += touched[item]
        samples[place] = len(own) + drawn
        n_rows[place] = n_touched
        for index in range(len(own) + drawn):
            sampled[index] = row_of[sampled[index]]


@compiled(inline=True)
def shuffle(key: np.uint64, epoch: int, n_samples: int, words: Words, shuffled: Words, heads: Places) -> np.uint64:
    """Sort the places 0..n-1 by the random bits of an epoch into the low bits of `shuffled`; return their mask.

    The lowest bits of each word hold the place; words that agree in all other bits keep the order of places. Random
    bits fall evenly into as many buckets as there are words, so that few remain to be sorted inside a bucket.

    Shapes: words, shuffled [n]; heads [2 n + 2], scratch like `words`.
    """
    place_bits = 1
    while (1 << place_bits) < n_samples:
        place_bits += 1
    n_buckets = 1 << place_bits
    mask = np.uint64(n_buckets - 1)
    shift = np.uint64(64 - place_bits)
    for place in range(n_samples):
        word = _mix(key + np.uint64(epoch * n_samples + place + 1) * _GOLDEN)
        words[place] = (word & ~mask) | np.uint64(place)
    heads[:n_buckets] = 0
    for place in range(n_samples):
        heads[words[place] >> shift] += np.uint32(1)
    head = np.uint32(0)
    for bucket in range(n_buckets):
        count = heads[bucket]
        heads[bucket] = head
        head += count
    for place in range(n_samples):
        bucket = words[place] >> shift
        shuffled[heads[bucket]] = words[place]
        heads[bucket] += np.uint32(1)
    for place in range(1, n_samples):
        word = shuffled[place]
        before = place
        while before > 0 and shuffled[before - 1] > word:
            shuffled[before] = shuffled[before - 1]
            before -= 1
        shuffled[before] = word
    return mask
