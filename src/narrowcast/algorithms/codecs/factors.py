"""Matrices sent as the product of two thin ones, the common part of `svd` and `power_sgd`."""

from __future__ import annotations

from abc import abstractmethod
from math import prod
from typing import Annotated, Any, ClassVar

from numpy.typing import NDArray
from pydantic import Field

from narrowcast.algorithms.codecs.chain import Codec
from narrowcast.algorithms.codecs.stage import Shapes, Tensors, Transform
from narrowcast.algorithms.codecs.wire import Reader
from narrowcast.platform.types import Arrays

Rank = Annotated[int, Field(ge=1, description="columns of the factors; less where a matrix is smaller")]
LEFT, RIGHT = "/left", "/right"
"""NAME/left [m, r] and NAME/right [d, r] stand for NAME [m, d]; a column of either is one direction, with one norm."""


class Factored(Transform):
    """Send a matrix M [m, d] as factors L [m, r] and R [d, r] if these are smaller than the matrix.

    Vectors are sent whole.

    A tensor of more dimensions is the matrix of its first dimension and all others.
    """

    of_whole: ClassVar[bool] = True
    rank: Rank = 4

    @abstractmethod
    def factor(self, name: str, matrix: NDArray[Any], rank: int, key: int, state: Arrays) -> tuple[Tensors, Arrays]:
        """Return the factors of a matrix under their names, and the client's state for the next ones."""

    def factor_shapes(self, name: str, rows: int, columns: int, rank: int) -> Shapes:
        """Return the shapes of the factors."""
        return {name + LEFT: (rows, rank), name + RIGHT: (columns, rank)}

    def product(self, name: str, factors: Tensors) -> NDArray[Any]:
        """Return the matrix that the factors stand for."""
        return factors[name + LEFT] @ factors[name + RIGHT].T

    def inner_shapes(self, shapes: Shapes) -> Shapes:
        """Return the shapes of the matrices' factors and of the tensors sent whole."""
        inner: dict[str, tuple[int, ...]] = {}
        for name, shape in shapes.items():
            rank = self.rank_for(shape)
            inner |= self.factor_shapes(name, *as_matrix(shape), rank) if rank else {name: shape}
        return inner

    def factored(self, shapes: Shapes) -> Shapes:
        """Return the shapes of the tensors that are sent as factors."""
        return {name: shape for name, shape in shapes.items() if self.rank_for(shape)}

    def rank_for(self, shape: tuple[int, ...]) -> int:
        """Return the rank at which a tensor of this shape is sent; 0 if it is sent whole."""
        rows, columns = as_matrix(shape)
        rank = min(self.rank, rows, columns)
        return rank if len(shape) > 1 and rank * (rows + columns) < rows * columns else 0

    def write(self, tensors: Tensors, key: int, state: Arrays, rest: Codec) -> tuple[bytes, Arrays]:
        """Return the bytes of all factors in the order of the tensors; this stage adds none."""
        inner: Tensors = {}
        kept = {each: values for each, values in state.items() if each.startswith(f"{self.kind}/")}
        for name, values in tensors.items():
            rank = self.rank_for(values.shape)
            if not rank:
                inner[name] = values
                continue
            factors, learnt = self.factor(name, values.reshape(len(values), -1), rank, key, state)
            inner |= factors
            kept |= learnt
        data, after = rest.write(inner, key, state)
        return data, {**after, **kept}

    def read(self, reader: Reader, shapes: Shapes, key: int, rest: Codec) -> Tensors:
        """Return the products of the factors."""
        inner = rest.read(reader, self.inner_shapes(shapes), key)
        return {
            name: self.product(name, inner).reshape(shape) if self.rank_for(shape) else inner[name]
            for name, shape in shapes.items()
        }


def as_matrix(shape: tuple[int, ...]) -> tuple[int, int]:
    """Return the rows and columns of a tensor of this shape: its first dimension, and the product of the others."""
    return (shape[0], prod(shape[1:])) if shape else (1, 1)
