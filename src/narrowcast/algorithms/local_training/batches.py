"""The mini-batches of a chunk: shuffled epochs of batches for every client, padded to one shape."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import numpy as np
import psutil
from pydantic import Field

from narrowcast.platform.seeds import Words, uniform_bits
from narrowcast.platform.types import BoolArray, Chunk, IntArray, LocalTerms

BatchSize = Annotated[int, Field(ge=1)] | Literal["all"]
"""The samples of a step; all: those of the client, one step per epoch."""
_SURELY_FREE = 2**30
"""Bytes for which the free memory of a machine, which takes time to ask for, is not asked."""


@dataclass(frozen=True)
class BatchSchedule:
    """The batches of a chunk, step by step.

    Clients are in descending order of steps, so that the clients still training at a step are the first `active[step]`.

    Shapes:
        order: [C] indices in the chunk, in training order; all other client axes follow it.
        active: [T] clients that train at each step; step t holds batches `active[:t].sum()` onwards.
        samples: [B, batch_size] position in the clients' concatenated samples; the total number of samples is padding.
        valid: [B, batch_size], False for padding; sizes: [B] samples of each batch.
        steps: [C] steps of each client; first_of_last_epoch: [C] step at which its last epoch begins.
    """

    order: IntArray
    active: IntArray
    samples: IntArray
    valid: BoolArray
    sizes: IntArray
    steps: IntArray
    first_of_last_epoch: IntArray


def epochs_of(chunk: Chunk, terms: LocalTerms, epochs: int) -> IntArray:
    """Return the epochs of each client [C]: those of the algorithm, else `epochs`, limited to those it has time for."""
    wanted = np.full(len(chunk.clients), epochs) if terms.epochs is None else terms.epochs
    return wanted if chunk.epochs is None else np.minimum(wanted, chunk.epochs)


def draw_schedule(
    counts: IntArray, epochs: IntArray, batch_size: int, keys: Words, *, first_epoch: int = 0
) -> BatchSchedule:
    """Cut every epoch of every client, `first_epoch` being the first, into batches in an order drawn from its key.

    The last batch of an epoch may be smaller. Shapes: counts, epochs, keys [C]. Raise `MemoryError` if the indices
    of all samples do not fit.
    """
    epoch_steps = -(-counts // batch_size)
    size = 8 * batch_size * float(epoch_steps.astype(np.float64) @ epochs)
    if size > _SURELY_FREE and size > psutil.virtual_memory().available:
        raise MemoryError(f"{size / 1e9:.0f} GB for the batches of all epochs")
    order = np.argsort(-epoch_steps * epochs, kind="stable")
    counts, epochs, keys, epoch_steps = counts[order], epochs[order], keys[order], epoch_steps[order]
    steps = epoch_steps * epochs
    active = (-steps).searchsorted(-np.arange(steps.max(initial=0)), side="left")
    step_starts = active.cumsum() - active
    n_samples = int(counts.sum())
    samples = np.full((int(active.sum()), batch_size), n_samples, dtype=np.int64)
    owner = np.arange(len(counts)).repeat(counts)
    within = np.arange(n_samples) - (counts.cumsum() - counts)[owner]
    batch, index_within_batch = np.divmod(within, batch_size)
    most = int(epochs.max(initial=0))
    fewest = int(epochs.min(initial=most))
    for epoch in range(most):
        counters = (first_epoch + epoch) * counts[owner] + within
        trained, shuffled = owner, _shuffle_within(owner, uniform_bits(keys[owner], counters))
        step, index_in_batch = epoch * epoch_steps[owner] + batch, index_within_batch
        if epoch >= fewest:
            trains = epochs[owner] > epoch
            step, index_in_batch, shuffled, trained = (
                step[trains],
                index_in_batch[trains],
                shuffled[trains],
                owner[trains],
            )
        samples.ravel()[(step_starts[step] + trained) * batch_size + index_in_batch] = shuffled
    valid = samples < n_samples
    return BatchSchedule(
        order=order,
        active=active,
        samples=samples,
        valid=valid,
        sizes=valid.sum(axis=1),
        steps=steps,
        first_of_last_epoch=steps - epoch_steps,
    )


def _shuffle_within(owner: IntArray, bits: Words) -> IntArray:
    """Return the indices sorted by random bits inside each owner; either order of a tie is equally likely."""
    owner_bits = max(1, int(owner.max(initial=0)).bit_length())
    return np.argsort((owner.astype(np.uint64) << np.uint64(64 - owner_bits)) | (bits >> np.uint64(owner_bits)))
