"""Random low-rank basis: the columns of a matrix projected onto r directions that both sides draw from the key.

Reference: Konecny et al., arXiv:1610.05492 (random masks and sketches); the basis of Nguyen et al., WWW 2024
(arXiv:2401.03748), applied here to a finished update.
"""

from __future__ import annotations

from math import prod
from typing import Any, Literal

from numpy.typing import NDArray
from pydantic import Field

from narrowcast.algorithms.codecs.chain import Codec
from narrowcast.algorithms.codecs.factors import Rank
from narrowcast.algorithms.codecs.random_basis import BasisKind, draw_basis
from narrowcast.algorithms.codecs.stage import Shapes, Tensors, Transform
from narrowcast.algorithms.codecs.wire import Reader
from narrowcast.platform.types import Arrays, Dtype


class Basis(Transform):
    """Send M B^T [m, r] for a matrix M [m, d], with B [r, d], E[B^T B] = I, drawn for each key; vectors are sent whole.

    `scale: unbiased` decodes M B^T B, whose mean is M. `projection` decodes r / d times that, which for the orthonormal
    basis is the projection of M onto it, with less error; use it with error feedback.
    """

    kind: Literal["basis"] = "basis"
    rank: Rank = 4
    basis: BasisKind = "orthonormal"
    scale: Literal["unbiased", "projection"] = Field("unbiased", description="factor of the decoded matrix")

    def inner_shapes(self, shapes: Shapes) -> Shapes:
        """Return [m, r] for every matrix with more than r columns."""
        return {name: (shape[0], self.rank) if self._shrinks(shape) else shape for name, shape in shapes.items()}

    def write(self, tensors: Tensors, key: int, state: Arrays, rest: Codec) -> tuple[bytes, Arrays]:
        """Return the bytes of the rest of the chain; the basis adds none."""
        inner = {
            name: values.reshape(len(values), prod(values.shape[1:]))
            @ self._draw(name, values.shape, key, rest.dtype).T
            if self._shrinks(values.shape)
            else values
            for name, values in tensors.items()
        }
        return rest.write(inner, key, state)

    def read(self, reader: Reader, shapes: Shapes, key: int, rest: Codec) -> Tensors:
        """Return the components times the basis."""
        inner = rest.read(reader, self.inner_shapes(shapes), key)
        for name, shape in shapes.items():
            if self._shrinks(shape):
                scale = self.rank / prod(shape[1:]) if self.scale == "projection" else 1.0
                basis = self._draw(name, shape, key, rest.dtype) * rest.dtype.type(scale)
                inner[name] = (inner[name] @ basis).reshape(shape)
        return inner

    def _shrinks(self, shape: tuple[int, ...]) -> bool:
        return len(shape) > 1 and self.rank < prod(shape[1:])

    def _draw(self, name: str, shape: tuple[int, ...], key: int, dtype: Dtype) -> NDArray[Any]:
        return draw_basis(self.basis, self.rank, prod(shape[1:]), key, name, dtype)
