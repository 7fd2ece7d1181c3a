"""The results of the parts of a chunk that were trained apart, joined in the order of the chunk's clients."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from narrowcast.algorithms.uploads.client_loop import Uploads
from narrowcast.platform.types import IntArray, LocalUpdates


def joined_updates(places: Sequence[IntArray], parts: Sequence[LocalUpdates]) -> LocalUpdates:
    """Return what all models have in common: loss, examples and steps; `places` are those of each part in the chunk."""
    order = np.argsort(np.concatenate(places))

    def joined(name: str) -> np.ndarray:
        return np.concatenate([getattr(part, name) for part in parts])[order]

    return LocalUpdates({}, {}, joined("loss"), joined("examples"), joined("steps"))


def joined_uploads(places: Sequence[IntArray], parts: Sequence[Uploads]) -> Uploads:
    """Return the uploads of all parts, of codecs without state; `places` are those of each part in the chunk."""
    order = np.argsort(np.concatenate(places))

    def joined(name: str) -> np.ndarray:
        return np.concatenate([getattr(part, name) for part in parts])[order]

    return Uploads(joined("bits"), joined("delivered"), joined("finite"), {})
