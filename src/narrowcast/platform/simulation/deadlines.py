"""Deadlines on the virtual clock: the clients that the server waits for, from their times alone."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from narrowcast.platform.types import BoolArray, FloatArray, IntArray


def cutoff(
    seconds: FloatArray, uploads: BoolArray, wanted: int, deadline: float | None = None
) -> tuple[BoolArray, float]:
    """Return which clients are late [C] and the second at which the server stops waiting, infinity if none is late.

    The server waits for the first `wanted` uploads, and no longer than `deadline`. Of uploads at one instant, that of
    the client with the lower place in the cohort comes first.

    Shapes: seconds [C] until each client is done; uploads [C], whether its upload then arrives.
    """
    limit = np.inf if deadline is None else deadline
    in_order = np.argsort(seconds, kind="stable")
    arrived = np.cumsum((uploads & (seconds <= limit))[in_order])
    if arrived.max(initial=0) < wanted:
        late = seconds > limit
        return late, limit if late.any() else np.inf
    last = int(np.searchsorted(arrived, wanted))
    late = np.ones(len(seconds), dtype=bool)
    late[in_order[: last + 1]] = False
    return late, float(seconds[in_order[last]])


def epochs_in_time(
    seconds_after: Callable[[IntArray], FloatArray], n_clients: int, most: int, deadline: float
) -> IntArray:
    """Return the epochs, at most `most`, after which each client's upload meets the deadline, [C].

    At least 1: a client for which one epoch is too many is late. `seconds_after` gives the clients' times after the
    given epochs [C].
    """
    epochs = np.ones(n_clients, dtype=np.int64)
    for more in range(2, most + 1):
        epochs += seconds_after(np.full(n_clients, more)) <= deadline
    return epochs
