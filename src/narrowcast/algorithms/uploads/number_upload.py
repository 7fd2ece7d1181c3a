"""One float32 that a client sends with its tensors, such as its loss or its number of local steps."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from narrowcast.algorithms.uploads.client_loop import Uploads
from narrowcast.algorithms.uploads.tensor_uploads import TensorCoding, Tensors, send_tensors
from narrowcast.platform.contracts import Task
from narrowcast.platform.types import Chunk, IntArray, LocalUpdates

NUMBER_BITS = 32


def with_number(bits: IntArray) -> IntArray:
    """Return the sizes of uploads with the number, [C]; clients that send nothing send no number either."""
    return np.where(bits > 0, bits + NUMBER_BITS, 0)


def send_with_number(chunk: Chunk, task: Task, updates: LocalUpdates, coding: TensorCoding) -> tuple[Tensors, Uploads]:
    """Send each client's changes, as `send_tensors` does, and its number, which is part of the size."""
    received, uploads = send_tensors(chunk.with_room_for(NUMBER_BITS), task, updates, coding)
    return received, replace(uploads, bits=with_number(uploads.bits))
