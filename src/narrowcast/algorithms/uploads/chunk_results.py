"""The result of a chunk, put together from what its clients learnt and what they sent."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from narrowcast.algorithms.uploads.client_loop import Uploads
from narrowcast.platform.types import NO_RANK, Arrays, BoolArray, Chunk, ChunkResult, ClientLedger, LocalUpdates


def chunk_result(
    chunk: Chunk, updates: LocalUpdates, uploads: Uploads, partial: Arrays, *, state: Arrays | None = None
) -> ChunkResult:
    """Return a chunk's partial sum, its clients' new states and its ledger.

    `state` [C, ...] is what the algorithm adds to the clients' states. A client keeps what it learnt for itself even if
    its update is not sent or is lost, and its former state if its training left the finite numbers. The ledger has rank
    0 for clients that sent nothing.
    """
    learnt = {name: of_clients(uploads.finite, values, chunk.state[name]) for name, values in updates.state.items()}
    sent = uploads.bits > 0
    return ChunkResult(
        index=chunk.index,
        partial=partial,
        state={**learnt, **uploads.state, **(state or {})},
        ledger=ClientLedger(
            client=chunk.clients,
            rank=np.full(len(sent), NO_RANK) if uploads.ranks is None else np.where(sent, uploads.ranks, 0),
            uplink_bits=uploads.bits,
            examples=updates.examples,
            loss=updates.loss,
            delivered=uploads.delivered,
        ),
    )


def of_clients(chosen: BoolArray, values: NDArray[Any], others: NDArray[Any]) -> NDArray[Any]:
    """Return `values` [C, ...] for the chosen clients [C], and `others` [C, ...] for the rest."""
    return np.where(chosen.reshape(-1, *[1] * (values.ndim - 1)), values, others)
