"""Error feedback: the compression error of the rest of the chain is stored and added to the next update.

Reference: Seide et al., Interspeech 2014; Karimireddy et al., ICML 2019 (arXiv:1901.09847).
"""

from __future__ import annotations

from typing import ClassVar, Literal

import numpy as np

from narrowcast.algorithms.codecs.chain import Codec
from narrowcast.algorithms.codecs.stage import Shapes, Tensors, ValueStage, check_values
from narrowcast.algorithms.codecs.wire import Reader
from narrowcast.platform.types import Arrays, IntArray

MEMORY = "memory/"
"""Prefix of names in a client's state: the error memory of every tensor, in that tensor's shape, zero at first."""


class ErrorFeedback(ValueStage):
    """Send x + e for an update x and store e = (x + e) - decoded(x + e).

    If an update is some rows of a matrix, a client's memory covers all rows: `memory_of_rows` selects those of the
    round and `with_memory_of_rows` writes them back; the others wait until they are touched again. Sent updates count
    as received, since a client does not learn that an upload was lost.
    """

    of_whole: ClassVar[bool] = True
    kind: Literal["error_feedback"] = "error_feedback"

    @property
    def remembers(self) -> bool:
        """True: the error of former updates."""
        return True

    def write(self, tensors: Tensors, key: int, state: Arrays, rest: Codec) -> tuple[bytes, Arrays]:
        """Return the bytes of the update plus its memory."""
        owed = {name: values + state.get(MEMORY + name, np.float32(0)) for name, values in tensors.items()}
        check_values(owed)
        data, after = rest.write(owed, key, state)
        received = rest.read(Reader(data), {name: values.shape for name, values in owed.items()}, key)
        memory = {MEMORY + name: values - received[name] for name, values in owed.items()}
        return data, {**after, **memory}

    def read(self, reader: Reader, shapes: Shapes, key: int, rest: Codec) -> Tensors:
        """Return the tensors that the rest of the chain decodes."""
        return rest.read(reader, shapes, key)

    def max_bytes(self, shapes: Shapes, rest: Codec) -> int:
        """Return the most bytes of the rest."""
        return rest.max_bytes(shapes)

    def init_state(self, shapes: Shapes, rest: Codec) -> Arrays:
        """Return zero memory for every tensor."""
        memory = {MEMORY + name: np.zeros(shape, dtype=rest.dtype) for name, shape in shapes.items()}
        return {**rest.init_state(shapes), **memory}


def memory_of_rows(state: Arrays, rows: IntArray) -> Arrays:
    """Return a client's state with the memory of these rows only, [m, ...] for each [N, ...]."""
    return {name: values[rows] if name.startswith(MEMORY) else values for name, values in state.items()}


def with_memory_of_rows(state: Arrays, rows: IntArray, part: Arrays) -> Arrays:
    """Return the whole state with `part` in the rows of the memory and in place of everything else.

    The memory is copied.
    """
    whole = {**state, **part}
    for name in part:
        if name.startswith(MEMORY):
            whole[name] = np.array(state[name])
            whole[name][rows] = part[name]
    return whole
