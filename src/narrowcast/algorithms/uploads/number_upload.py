"""One number that a client sends with its tensors, such as its loss or its number of local steps."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from narrowcast.algorithms.codecs.message_header import dtype_of
from narrowcast.algorithms.uploads.client_loop import Uploads
from narrowcast.algorithms.uploads.tensor_uploads import TensorCoding, Tensors, send_tensors
from narrowcast.platform.contracts import Task
from narrowcast.platform.types import Arrays, Chunk, IntArray, LocalUpdates

NUMBER_BITS = 32
"""The size of a count, or of a float32."""


def bits_of_number(like: Arrays) -> int:
    """Return the size of a number that is sent in the type of these tensors."""
    return 8 * dtype_of(like).itemsize


def with_number(bits: IntArray, number_bits: int = NUMBER_BITS) -> IntArray:
    """Return the sizes of uploads with the number, [C]; clients that send nothing send no number either."""
    return np.where(bits > 0, bits + number_bits, 0)


def send_with_number(
    chunk: Chunk, task: Task, updates: LocalUpdates, coding: TensorCoding, number_bits: int = NUMBER_BITS
) -> tuple[Tensors, Uploads]:
    """Send each client's changes, as `send_tensors` does, and its number, which is part of the size."""
    received, uploads = send_tensors(chunk.with_room_for(number_bits), task, updates, coding)
    return received, replace(uploads, bits=with_number(uploads.bits, number_bits))
