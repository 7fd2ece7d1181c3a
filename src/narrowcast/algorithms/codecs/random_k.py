"""Random sparsification: values at places that both sides draw from the key, so that no index is sent.

Reference: Konecny et al., arXiv:1610.05492, section 3 (subsampling); Wangni et al., NeurIPS 2018 (arXiv:1710.09854);
Stich et al., NeurIPS 2018 (arXiv:1809.07599), rand-k. With `eden` after it: Vargaftik et al., EDEN, ICML 2022
(arXiv:2108.08842), below one bit per value.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
from pydantic import Field

from narrowcast.algorithms.codecs.chain import Codec
from narrowcast.algorithms.codecs.flat_values import flatten, n_values, share_of, unflatten
from narrowcast.algorithms.codecs.stage import Shapes, Tensors, Transform, stream
from narrowcast.algorithms.codecs.wire import Reader
from narrowcast.platform.seeds import uniform_bits
from narrowcast.platform.types import Arrays, IntArray

DRAWN = "drawn"


class RandomK(Transform):
    """Keep ceil(fraction n) of all n values of an update, at places drawn from the key, each set equally likely.

    The rest of the chain gets `drawn` [k], in the order of their places. `scale: unbiased` multiplies them by n / k,
    whose mean is the update and whose relative squared error is n / k - 1, for any update; after it a quantiser of
    relative squared error v, unbiased, has (1 + v) n / k - 1. `kept` leaves them as they are, relative squared error
    1 - k / n, for sums of few clients or with error feedback.

    Differs from the papers: exactly ceil(fraction n) values instead of a coin for each, so that the size of an update
    is known and its error is less.
    """

    kind: Literal["random_k"] = "random_k"
    fraction: float = Field(0.1, gt=0, le=1, description="share of the values to keep; at least one is kept")
    scale: Literal["unbiased", "kept"] = Field(
        "unbiased", description="multiply the kept values by n / k, or leave them as they are"
    )

    def inner_shapes(self, shapes: Shapes) -> Shapes:
        """Return the shape of the kept values."""
        return {DRAWN: (share_of(self.fraction, n_values(shapes)),)}

    def write(self, tensors: Tensors, key: int, state: Arrays, rest: Codec) -> tuple[bytes, Arrays]:
        """Return the bytes of the rest of the chain; the places add none."""
        values = flatten(tensors)
        kept = share_of(self.fraction, len(values))
        return rest.write({DRAWN: values[_places(len(values), kept, key)]}, key, state)

    def read(self, reader: Reader, shapes: Shapes, key: int, rest: Codec) -> Tensors:
        """Return the kept values, scaled, at their places, and zeros elsewhere."""
        drawn = rest.read(reader, self.inner_shapes(shapes), key)[DRAWN]
        values = np.zeros(n_values(shapes), dtype=rest.dtype)
        scale = len(values) / len(drawn) if self.scale == "unbiased" and len(drawn) else 1.0
        values[_places(len(values), len(drawn), key)] = drawn * rest.dtype.type(scale)
        return unflatten(values, shapes)


def _places(count: int, kept: int, key: int) -> IntArray:
    """Return `kept` of 0..count-1, ascending: those with the least words of the stream, all distinct."""
    if kept == count:
        return np.arange(count)
    words = uniform_bits(stream(key, "places"), np.arange(count))
    return np.sort(np.argpartition(words, kept)[:kept])
