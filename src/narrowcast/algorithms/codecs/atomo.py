"""ATOMO: directions of every matrix, sampled and scaled such that their mean is the update.

Reference: Wang et al., ATOMO: Communication-efficient Learning via Atomic Sparsification, NeurIPS 2018
(arXiv:1806.04090), Algorithms 1 and 2 with singular vectors as atoms.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np
from pydantic import Field

from narrowcast.algorithms.codecs.chain import Codec, Shapes, Tensors, ValueStage
from narrowcast.algorithms.codecs.low_rank import LEFT, RIGHT, Rank, as_matrix, truncated_svd
from narrowcast.algorithms.codecs.wire import FLOAT32, Reader, dtype_of, varint
from narrowcast.platform.seeds import generator
from narrowcast.platform.types import Arrays, BoolArray, Dtype, FloatArray

_ROUNDING = 2.0**-20
"""Directions below this share of the strongest are float32 rounding errors."""


@dataclass(frozen=True)
class Directions:
    """The directions of an update's matrices, matrix by matrix, the strongest of each first.

    Shapes: factors, name -> U S [m, r] and V [d, r]; strength [D], the singular values; lengths [D, 2], m and d.
    """

    factors: dict[str, tuple[FloatArray, FloatArray]]
    strength: FloatArray
    lengths: FloatArray
    dtype: Dtype = FLOAT32
    """The type in which factors are sent."""

    @classmethod
    def of(cls, tensors: Tensors, most: int) -> Directions:
        """Return the `most` strongest directions of each matrix; vectors have none."""
        factors, strengths, lengths = {}, [np.empty(0)], [np.empty((0, 2))]
        for name, tensor in tensors.items():
            if tensor.ndim > 1:
                shape = as_matrix(tensor.shape)
                left, strength, right = truncated_svd(tensor.reshape(shape), min(most, *shape))
                real = strength > _ROUNDING * strength[:1]
                left, strength, right = left[:, real], strength[real], right[real]
                # the signs are arbitrary, and would decide how values are rounded: the largest is to be positive
                sign = np.where(right.max(axis=1, initial=0) < -right.min(axis=1, initial=0), -1.0, 1.0)
                factors[name] = left * (strength * sign), right.T * sign
                strengths.append(strength)
                lengths.append(np.full((len(strength), 2), shape, dtype=np.float64))
        return cls(factors, np.concatenate(strengths), np.concatenate(lengths), dtype_of(tensors))

    def probabilities(self, weight: FloatArray, total: float) -> FloatArray:
        """Return the sampling probabilities p [D] of least variance with sum p weight = `total`, at most 1 each.

        The variance sum (1 / p - 1) strength^2 is least for p in proportion to strength / sqrt(weight), up to 1; weight
        [D].
        """
        merit = self.strength / np.sqrt(weight)
        certain = np.zeros(len(merit), dtype=bool)
        while True:
            left, shared = total - weight[certain].sum(), merit[~certain] @ weight[~certain]
            p = np.where(certain, 1.0, merit * (max(left, 0.0) / shared if shared > 0 else 0.0))
            if (p <= 1).all():
                return p
            certain |= p > 1

    def draw(self, probabilities: FloatArray, key: int) -> tuple[bytes, Tensors]:
        """Return the number of directions drawn of each matrix, packed, and their factors.

        Left factors are divided by p.

        Sampling is systematic: the total size differs from its mean by about one direction.
        """
        ends = np.cumsum(probabilities) + generator(key, "atomo").random()
        drawn = np.diff(np.floor(ends), prepend=np.floor(ends[:1] - probabilities[:1])) > 0
        counts, inner, first = b"", Tensors(), 0
        for name, (left, right) in self.factors.items():
            span = slice(first, first := first + left.shape[1])
            taken: BoolArray = drawn[span]
            counts += varint(int(taken.sum()))
            inner[name + LEFT] = (left[:, taken] / probabilities[span][taken]).astype(self.dtype)
            inner[name + RIGHT] = right[:, taken].astype(self.dtype)
        return counts, inner


def with_vectors(factors: Tensors, tensors: Tensors) -> Tensors:
    """Return the factors and the tensors that have none, in the order of their names."""
    whole = {name: values for name, values in tensors.items() if values.ndim < 2}
    return dict(sorted({**factors, **whole}.items()))


class Atomo(ValueStage):
    """Sample directions that have `fraction` of the matrices' values on average; vectors are sent whole.

    A direction sampled with probability p is scaled by 1 / p, which is unbiased, whereas the SVD always drops the same
    directions.

    Differs from the paper: 1. the directions of all matrices share one budget, in which each counts by its number of
    values. 2. sampling is systematic instead of independent, so that the size of an update hardly varies. 3. `rank`
    bounds the directions of a matrix; those beyond it are lost.
    """

    of_whole: ClassVar[bool] = True

    kind: Literal["atomo"] = "atomo"
    rank: Rank = 64
    fraction: float = Field(
        0.05,
        gt=0,
        le=2,
        description="expected number of values of the factors, over those of the matrix; 2 sends them all",
    )

    def write(self, tensors: Tensors, key: int, state: Arrays, rest: Codec) -> tuple[bytes, Arrays]:
        """Return the number of directions of each matrix, then the factors and the vectors."""
        directions = Directions.of(tensors, self.rank)
        total = self.fraction * sum(tensors[name].size for name in directions.factors)
        counts, inner = directions.draw(directions.probabilities(directions.lengths.sum(axis=1), total), key)
        data, after = rest.write(with_vectors(inner, tensors), key, state)
        return counts + data, after

    def read(self, reader: Reader, shapes: Shapes, key: int, rest: Codec) -> Tensors:
        """Return the products of the factors, and the vectors."""
        ranks = {
            name: reader.varint(min(self.rank, *as_matrix(shape))) for name, shape in shapes.items() if len(shape) > 1
        }
        inner = rest.read(reader, _inner_shapes(shapes, ranks), key)
        return {
            name: (inner[name + LEFT] @ inner[name + RIGHT].T).reshape(shape) if name in ranks else inner[name]
            for name, shape in shapes.items()
        }

    def max_bytes(self, shapes: Shapes, rest: Codec) -> int:
        """Return the bytes of all directions."""
        ranks = {name: min(self.rank, *as_matrix(shape)) for name, shape in shapes.items() if len(shape) > 1}
        return sum(len(varint(rank)) for rank in ranks.values()) + rest.max_bytes(_inner_shapes(shapes, ranks))


def _inner_shapes(shapes: Shapes, ranks: dict[str, int]) -> Shapes:
    inner: dict[str, tuple[int, ...]] = {}
    for name, rank in ranks.items():
        rows, columns = as_matrix(shapes[name])
        inner |= {name + LEFT: (rows, rank), name + RIGHT: (columns, rank)}
    whole = {name: shape for name, shape in shapes.items() if name not in ranks}
    return dict(sorted({**inner, **whole}.items()))
