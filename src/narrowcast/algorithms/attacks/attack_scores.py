"""Measures of an attack: the share of what it sought that it found, beside that of a guess."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from narrowcast.platform.types import BoolArray, FloatArray, IntArray


def expected_hits(scores: FloatArray, wanted: BoolArray) -> float:
    """Return how many of the n wanted entries are among the n of the highest scores; ties count in expectation."""
    n = int(wanted.sum())
    if not n:
        return 0.0
    least = np.partition(scores, -n)[-n]
    above, tied = scores > least, scores == least
    return float((above & wanted).sum() + (n - above.sum()) * (tied & wanted).sum() / tied.sum())


def pooled_recall(scores: FloatArray, wanted: BoolArray) -> float:
    """Return the share of all wanted entries that are found, as `expected_hits` counts; both arguments are [C, N]."""
    hits = sum(expected_hits(*each) for each in zip(scores, wanted, strict=True))
    return hits / max(int(wanted.sum()), 1)


def chance_recall(wanted: BoolArray) -> float:
    """Return the pooled recall of scores that say nothing; wanted [C, N]."""
    counts = wanted.sum(axis=1).astype(np.float64)
    return float((counts**2).sum() / max(wanted.size // len(wanted) * counts.sum(), 1))


def alignment(found: NDArray[np.floating], truth: NDArray[np.floating]) -> float:
    """Return the mean absolute cosine between the rows of two matrices [C, d]."""
    scale = np.linalg.norm(found, axis=1) * np.linalg.norm(truth, axis=1)
    return float(np.mean(np.abs((found * truth).sum(axis=1)) / np.maximum(scale, 1e-30)))


def positives_of(indptr: IntArray, items: IntArray, clients: IntArray, n_items: int) -> BoolArray:
    """Return the training items of clients, [C, N]."""
    wanted = np.zeros((len(clients), n_items), dtype=bool)
    for place, client in enumerate(clients.tolist()):
        wanted[place, items[indptr[client] : indptr[client + 1]]] = True
    return wanted
