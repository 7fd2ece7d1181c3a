"""Claims of the attackers of a chunk: their true changes as vectors, and the vectors that they send."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from narrowcast.platform.errors import UserError
from narrowcast.platform.rounds.adversary import Adversary, Seen
from narrowcast.platform.types import Chunk, FloatArray, IntArray, LocalUpdates, RowChanges


def claimed_updates(
    adversary: Adversary,
    chunk: Chunk,
    updates: LocalUpdates,
    weights: FloatArray,
    watched: Sequence[tuple[LocalUpdates, FloatArray]],
) -> LocalUpdates:
    """Return the updates of a chunk with what its attackers claim in place of what they have learnt.

    `watched` are the updates of the other chunks of the round, with the weights of their clients, as is weights [C].
    """
    attack, places = adversary.attack, np.flatnonzero(adversary.attacking(chunk.round_index, chunk.clients))
    if not len(places):
        return updates
    groups = np.split(places, len(places)) if attack.sees == "own" else [places]
    others = [_vectors(update, np.arange(len(update.loss))) for update, _ in watched]
    other_weights = [weight for _, weight in watched]
    claims = []
    for group in groups:
        own = _vectors(updates, group)
        if any(len(vector) != own.shape[1] for vectors in others for vector in vectors):
            raise UserError(
                f"{type(attack).__name__}: clients of this run train other tensors than the attackers, who cannot "
                "compare them; use an attack on own changes, such as sign_flip"
            )
        seen = Seen(
            weights[group],
            np.concatenate([np.empty((0, own.shape[1])), *others]),
            np.concatenate([np.empty(0), *other_weights]),
            adversary.draw(chunk, int(group[0])),
        )
        claim = np.asarray(attack.tamper(own, seen))
        if claim.shape != own.shape:
            raise UserError(
                f"{type(attack).__name__}.tamper returned {claim.shape}; return {own.shape}, as it was given"
            )
        claims.append(claim)
    return _with_vectors(updates, groups, claims)


def _parts(updates: LocalUpdates) -> Iterator[tuple[str, NDArray[Any] | RowChanges]]:
    """Yield the changes by name, in the order in which they make up a vector."""
    parts: dict[str, NDArray[Any] | RowChanges] = {**updates.changes, **updates.rows}
    yield from sorted(parts.items())


def _of_client(part: NDArray[Any] | RowChanges, place: int) -> NDArray[Any]:
    """Return a view of the change of the client at this place of the chunk."""
    return part.of_client(place)[1] if isinstance(part, RowChanges) else part[place]


def _vectors(updates: LocalUpdates, places: IntArray) -> FloatArray:
    """Return the changes of the clients at these places as vectors, [len(places), d]."""
    parts = [part for _, part in _parts(updates)]
    return np.stack(
        [np.concatenate([_of_client(part, place).ravel() for part in parts]).astype(np.float64) for place in places]
    )


def _with_vectors(updates: LocalUpdates, groups: Sequence[IntArray], vectors: Sequence[FloatArray]) -> LocalUpdates:
    """Return the updates with these vectors [g, d] in place of the changes of each group of clients [g]."""
    changes: dict[str, NDArray[Any]] = {}
    rows: dict[str, RowChanges] = {}
    position = [0] * len(groups)
    for name, part in _parts(updates):
        if isinstance(part, RowChanges):
            assert part.total is None, "changes that are added up are of no client"
            changed: NDArray[Any] | RowChanges = replace(part, values=part.values.copy())
        else:
            changed = part.copy()
        for index, (group, vector) in enumerate(zip(groups, vectors, strict=True)):
            for row, place in enumerate(group):
                values = _of_client(changed, place)
                last = position[index] + values.size
                values[...] = vector[row, position[index] : last].reshape(values.shape)
            position[index] = last
        if isinstance(changed, RowChanges):
            rows[name] = changed
        else:
            changes[name] = changed
    return replace(updates, changes=changes, rows=rows)
