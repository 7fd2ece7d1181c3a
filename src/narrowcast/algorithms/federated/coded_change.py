"""A round's change on its way down: coded at the server, which moves its model by what clients decode.

With `error_feedback` first, the server remembers what the codec left out of earlier changes, and adds it to the next.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from narrowcast.algorithms.codecs.chain import Codec
from narrowcast.algorithms.codecs.coded_tensors import CodedTensors
from narrowcast.algorithms.codecs.message_header import FLOAT32, dtype_of
from narrowcast.algorithms.codecs.stage import Shapes, Stage, Tensors
from narrowcast.algorithms.uploads.prefixed_arrays import PrefixedArrays
from narrowcast.platform.seeds import stream_keys
from narrowcast.platform.types import Arrays, Dtype

_MEMORY = PrefixedArrays("downlink/memory/")
_SENT, _KEY = "sent", "downlink_key"


@dataclass(frozen=True)
class CodedChange:
    """The codec of the server's changes, or none: changes as they are."""

    stages: tuple[Stage, ...]

    def init(self, shapes: Shapes, dtype: Dtype = FLOAT32) -> Arrays:
        """Return what the server keeps: the last message, none, and the codec's memory."""
        if not self.stages:
            return {}
        return {_SENT: np.empty(0, dtype=np.uint8), **_MEMORY.add(Codec(self.stages, dtype).init_state(shapes))}

    def broadcast(self, seed: int, round_index: int = 0) -> Arrays:
        """Return the key of a round, as an entry of its broadcast; `seed` is the run's, or the round's own."""
        if not self.stages:
            return {}
        return {_KEY: stream_keys(seed, "downlink codec", round_index, np.zeros(1, dtype=np.int64))}

    def message(self, server: Arrays, seed: int | None = None, dtype: Dtype = FLOAT32) -> CodedTensors | None:
        """Return the message of the last round's change, None without a codec; `seed` is sent with it."""
        return None if not self.stages else CodedTensors(0, 0, np.asarray(server[_SENT]).tobytes(), seed, dtype)

    def send(self, change: Tensors, server: Arrays, broadcast: Arrays) -> tuple[Tensors, Arrays]:
        """Return the change as clients decode it, and what the next server state keeps.

        A change that is not finite is returned as it is, for the round to refuse.
        """
        if not self.stages:
            return change, {}
        if not all(np.isfinite(values).all() for values in change.values()):
            return change, self.idle(server)
        codec, key = Codec(self.stages, dtype_of(change)), int(broadcast[_KEY][0])
        update, memory = codec.encode_with_state(change, key, _MEMORY.of(server))
        received = codec.decode(update.data, {name: values.shape for name, values in change.items()}, key)
        return received, {_SENT: np.frombuffer(update.data, dtype=np.uint8), **_MEMORY.add(memory)}

    def idle(self, server: Arrays) -> Arrays:
        """Return what the next server state keeps if nothing is sent: an empty message, and the memory as it is."""
        if not self.stages:
            return {}
        return {_SENT: np.empty(0, dtype=np.uint8), **_MEMORY.add(_MEMORY.of(server))}

    def without(self, arrays: Arrays) -> Arrays:
        """Return the arrays of a server state or a broadcast that are not of this coding."""
        return {name: values for name, values in _MEMORY.without(arrays).items() if name not in (_SENT, _KEY)}
