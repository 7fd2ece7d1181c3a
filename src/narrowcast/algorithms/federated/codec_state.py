"""What codecs keep on the clients from round to round, beside the model's own state: error memories, warm factors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from narrowcast.algorithms.codecs.chain import Codec
from narrowcast.platform.types import Arrays

CODEC = "codec/"
"""What a codec keeps on a client stands under this name in its state."""


def init_codec_state(codec: Codec, n_clients: int, shapes: Mapping[str, Sequence[int]]) -> Arrays:
    """What a codec keeps on every client before round 1, zeros that take no memory, [U, ...].

    `shapes` are those of the tensors that a client sends.
    """
    return {
        CODEC + name: np.broadcast_to(np.zeros((), values.dtype), (n_clients, *values.shape))
        for name, values in codec.init_state(shapes).items()
    }


def codec_state(state: Arrays) -> Arrays:
    """The codec's part of some clients' state, under the codec's own names."""
    return {name.removeprefix(CODEC): values for name, values in state.items() if name.startswith(CODEC)}


def as_client_state(state: Arrays) -> Arrays:
    """The codec's part of the clients' state again."""
    return {CODEC + name: values for name, values in state.items()}
