"""One float32 that a client sends with its tensors, such as its loss or its number of local steps."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from narrowcast.algorithms.uploads.client_loop import Uploads
from narrowcast.platform.types import Chunk

NUMBER_BITS = 32


def before_number(chunk: Chunk) -> Chunk:
    """Return a chunk whose budgets leave room for the number."""
    if chunk.budget_bits is None:
        return chunk
    return replace(chunk, budget_bits=np.maximum(chunk.budget_bits - NUMBER_BITS, 0))


def with_number(uploads: Uploads) -> Uploads:
    """Return the uploads with the bits of the number; clients that send nothing send no number either."""
    return replace(uploads, bits=np.where(uploads.bits > 0, uploads.bits + NUMBER_BITS, 0))
