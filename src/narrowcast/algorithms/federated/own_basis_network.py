"""A network's change in bases of the client's own: directions of its weights, drawn such that their mean is the change.

Sixty steps of SGD change a network in few directions: of a LeNet-like one on MNIST, 28 hold nine tenths of the change.
To send the strongest alone leaves out the same ones in every round, which costs accuracy that noise does not. So a
client draws them, and sends the more of each the less likely it was (`codecs.atomo`).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from narrowcast.algorithms.channel.joint import STEPS, symbol_bits
from narrowcast.algorithms.codecs.atomo import Directions, with_vectors
from narrowcast.algorithms.codecs.budget import encode_within
from narrowcast.algorithms.codecs.chain import Codec
from narrowcast.algorithms.codecs.coded_tensors import CodedTensors
from narrowcast.algorithms.codecs.stage import Tensors, check_values
from narrowcast.platform.types import FloatArray

_NORM_BITS = 16.0  # bfloat16
_HEADER_BITS = 400.0  # models of the entropy coder, about


def encode_in_own_bases(
    codec: Codec, tensors: Tensors, counts: Sequence[int], key: int, *, most: int, budget_bits: float
) -> tuple[CodedTensors, int] | None:
    """Pack a network's change within a budget: directions drawn, and levels, that should lose least.

    A weight has `most` directions at most, and without a budget it sends all of these, at the codec's own levels.
    Returns the payload, which the codec decodes with an `atomo` of that rank before it, and the largest rank of a
    weight; None where one direction, or what is drawn, does not fit. Raises `UnsendableUpdateError` for values that are
    not finite.
    """
    tensors = {name: tensors[name] for name in sorted(tensors)}
    check_values(tensors)
    directions = Directions.of(tensors, most)
    head = CodedTensors(tuple(counts), b"")
    left, finest = budget_bits - head.wire_bits(), None
    probabilities, levels = np.ones(len(directions.strength)), codec.levels or 1
    if np.isfinite(left):
        vectors = np.array([values.size for values in tensors.values() if values.ndim < 2], dtype=np.float64)
        chosen = best_draw(directions, vectors, left)
        if chosen is None:
            return None
        probabilities, levels = chosen
        finest = _finest_levels(directions)
    ranks, factors = directions.draw(probabilities, key)
    values = with_vectors(factors, tensors)
    if np.isinf(left):
        coded = codec.encode(values, key)
    elif within := encode_within(codec.with_levels(levels), values, key, left - 8 * len(ranks), finest=finest):
        coded = within[0]
    else:
        return None
    rank = max((values.shape[1] for values in factors.values()), default=0)
    return CodedTensors(head.counts, ranks + coded.to_bytes()), rank


def best_draw(directions: Directions, vectors: FloatArray, bits: float) -> tuple[FloatArray, int] | None:
    """The probabilities [D] and the levels that should weigh so many bits with the least error.

    `vectors` are the sizes of what is sent whole. A direction of energy e, drawn with probability p, has the error
    e (1 / p - 1) of the draw and e / p (m + d) / 12 k^2 of the dithered rounding at k levels, which rounds either side
    with the steps that serve both best. None where not one direction is drawn on average.
    """
    energy, best, least = directions.strength**2, None, np.inf
    for levels in np.unique(np.rint(_finest_levels(directions) * STEPS[0] / STEPS).clip(1)):
        weight = _bits(directions.lengths, levels).sum(axis=1)
        probabilities = directions.probabilities(weight, bits - _HEADER_BITS - _bits(vectors, levels).sum())
        if probabilities.sum() < 1:
            continue
        with np.errstate(divide="ignore"):
            lost = (1 + directions.lengths.sum(axis=1) / (12 * levels**2)) / probabilities - 1
        if (error := float(energy @ lost)) < least:
            least, best = error, (probabilities, int(levels))
    return best


def _bits(lengths: FloatArray, levels: float) -> FloatArray:
    """What columns of normal values weigh at so many levels, each with its norm."""
    steps = np.log(np.maximum(lengths, 1.0)) / 2 - np.log(levels)
    return lengths * np.interp(steps, np.log(STEPS), symbol_bits()) + _NORM_BITS


def _finest_levels(directions: Directions) -> int:
    """Levels beyond which the rounding is no longer seen: with the finest of `STEPS` for the longest column."""
    return round(float(directions.lengths.max(initial=1.0)) ** 0.5 / STEPS[0])
