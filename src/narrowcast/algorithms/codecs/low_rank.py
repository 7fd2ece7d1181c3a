"""Low-rank codecs: `svd` and `power_sgd` send a matrix as two thin factors, `basis` its components in a random basis.

Letters: a matrix M [m, d] is sent at rank r.
"""

from __future__ import annotations

from abc import abstractmethod
from math import prod
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from narrowcast.algorithms.codecs.chain import Codec, Shapes, Tensors, Transform
from narrowcast.algorithms.codecs.sparsify import nonzero_rows
from narrowcast.algorithms.codecs.wire import FLOAT32, Reader
from narrowcast.platform.seeds import generator
from narrowcast.platform.types import Arrays, Dtype, FloatArray

Rank = Annotated[int, Field(ge=1, description="columns of the factors; less where a matrix is smaller")]
LEFT, RIGHT = "/left", "/right"
"""NAME/left [m, r] and NAME/right [d, r] stand for NAME [m, d]; a column of either is one direction, with one norm."""


class Factored(Transform):
    """Base of the stages that send a matrix M [m, d] as factors L [m, r] and R [d, r] if these are smaller than it.

    Vectors are sent whole. A tensor of more dimensions is the matrix of its first dimension and all others.
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
        memory = {name: values for name, values in state.items() if name.startswith(f"{self.kind}/")}
        for name, values in tensors.items():
            rank = self.rank_for(values.shape)
            if not rank:
                inner[name] = values
                continue
            factors, learnt = self.factor(name, values.reshape(len(values), -1), rank, key, state)
            inner |= factors
            memory |= learnt
        data, after = rest.write(inner, key, state)
        return data, {**after, **memory}

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


def zero_factors(prefix: str, matrices: Shapes, rank: int) -> Arrays:
    """Return the state before the first update: zeros [d, `rank`] under `prefix` + NAME for each matrix NAME [m, d]."""
    return {prefix + name: np.zeros((int(np.prod(shape[1:])), rank), np.float32) for name, shape in matrices.items()}


def start(name: str, columns: int, rank: int, key: int, state: Arrays) -> FloatArray:
    """Return [d, r] for the first iteration: the kept columns of `name`, and normal ones from the key for the rest."""
    drawn = generator(key, name).standard_normal((columns, rank))
    if name in state:
        stored = np.asarray(state[name])[:, :rank]
        warm = np.flatnonzero(stored.any(axis=0))
        drawn[:, warm] = stored[:, warm]
    return drawn


def kept_factors(name: str, right: NDArray[np.floating], state: Arrays) -> Arrays:
    """Return the state after an update with the right factor [d, r]; empty without a state, or for an update of zeros.

    The kept columns are as many as the state has, whatever the rank of the update.
    """
    if name not in state or not right.any():
        return {}
    stored = np.array(state[name], dtype=np.float32)
    shared = min(stored.shape[1], right.shape[1])
    stored[:, :shared] = right[:, :shared]
    return {name: stored}


_VALUES = "/singular_values"
_WARM = "svd/"


class SVD(Factored):
    """Send the r largest singular values of an update with their vectors, its best approximation of rank r.

    `parts: uv` sends U S and V, r (m + d) values; `usv` sends the three separately, r (m + d + 1), as the code released
    with CoLR does.

    `warm_start` takes `iterations` of subspace iteration from the right factor V of the client's last update, which the
    client keeps, in place of the exact decomposition. A client's directions change little from one update to the next,
    so that few iterations come near it (tested: exact in the limit; one is PowerSGD's product).

    Reference: a baseline of Nguyen et al., WWW 2024 (arXiv:2401.03748), after Konecny et al., arXiv:1610.05492. With a
    warm start: Halko, Martinsson and Tropp, SIAM Review 2011 (arXiv:0909.4061), Algorithms 4.4 and 5.1.

    Differs from the paper: 1. its tables count r m values, those of U alone; here all factors are counted. 2. the
    decomposition is computed from the smaller Gram matrix in float64, several times faster for thin matrices and equal
    to float32 precision.
    """

    kind: Literal["svd"] = "svd"
    parts: Literal["uv", "usv"] = Field("uv", description="send U S and V, or U, S and V")
    warm_start: bool = Field(False, description="subspace iteration from the client's last V; otherwise exact")
    iterations: int = Field(1, ge=1, le=64, description="subspace iterations of a warm start")

    @property
    def remembers(self) -> bool:
        """Return whether the client keeps V."""
        return self.warm_start

    def factor_shapes(self, name: str, rows: int, columns: int, rank: int) -> Shapes:
        """Return U [m, r], V [d, r], and the singular values [r] with `usv`."""
        shapes = dict(super().factor_shapes(name, rows, columns, rank))
        return shapes if self.parts == "uv" else {**shapes, name + _VALUES: (rank,)}

    def factor(self, name: str, matrix: NDArray[Any], rank: int, key: int, state: Arrays) -> tuple[Tensors, Arrays]:
        """Return the factors of the truncated decomposition, exact or from the last one."""
        if self.warm_start:
            first = start(_WARM + name, matrix.shape[1], rank, key, state)
            left, values, right = iterated_svd(matrix, first, self.iterations)
        else:
            left, values, right = truncated_svd(matrix, rank)
        memory = kept_factors(_WARM + name, right.T * values, state)
        if self.parts == "uv":
            left = left * values
        factors = {name + LEFT: left, name + RIGHT: right.T, name + _VALUES: values}
        rows, columns = matrix.shape
        sent = self.factor_shapes(name, rows, columns, rank)
        return {part: factors[part].astype(matrix.dtype) for part in sent}, memory

    def init_state(self, shapes: Shapes, rest: Codec) -> Arrays:
        """Return zeros for every factored matrix if it starts warm, and the state of the rest."""
        warm = zero_factors(_WARM, self.factored(shapes), self.rank) if self.warm_start else {}
        return {**super().init_state(shapes, rest), **warm}

    def product(self, name: str, factors: Tensors) -> NDArray[Any]:
        """Return U S V^T; rows of zeros in U cost nothing."""
        if self.parts == "uv":
            return super().product(name, factors)
        left, right = factors[name + LEFT], factors[name + RIGHT].T * factors[name + _VALUES][:, None]
        used = np.flatnonzero(nonzero_rows(left))
        matrix = np.zeros((len(left), right.shape[1]), dtype=left.dtype)
        matrix[used] = left[used] @ right
        return matrix


def iterated_svd(matrix: NDArray[Any], first: FloatArray, iterations: int) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Return `truncated_svd` approximately, by subspace iteration from V [d, r], at least one."""
    dense, right = matrix.astype(np.float64), first
    for _ in range(iterations):
        left, _ = np.linalg.qr(dense @ right)
        right = dense.T @ left
    # M is close to left right^T; the decomposition of the small side orders and separates the directions
    turned, values, directions = np.linalg.svd(right.T, full_matrices=False)
    return left @ turned, values, directions


def truncated_svd(matrix: NDArray[Any], rank: int) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Return U [m, r], the r largest singular values descending, and V [r, d], of a finite matrix [m, d].

    Rows of zeros, of which a client's change has many, cost nothing: their rows of U are zero.
    """
    wide = matrix.shape[0] < matrix.shape[1]
    tall = matrix.T if wide else matrix
    nonzero = nonzero_rows(tall)
    used = slice(None) if not wide and nonzero.all() else nonzero
    dense = tall[used].astype(np.float64)
    _, vectors = np.linalg.eigh(dense.T @ dense)
    right = vectors[:, ::-1][:, :rank]
    image = dense @ right
    values = np.sqrt(np.einsum("mr,mr->r", image, image))
    left = np.zeros((len(tall), rank))
    left[used] = np.divide(image, values, out=np.zeros_like(image), where=values > 0)
    return (right, values, left.T) if wide else (left, values, right.T)


WARM = "power_sgd/"
"""Prefix of names in a client's state: the warm Q [d, r] of every matrix, zero before the first round."""


class PowerSGD(Factored):
    """Send P = M Q, orthonormalised, and Q = M^T P for a matrix M; the client keeps Q for its next update.

    The factors are those of one power iteration, started from the client's last ones.

    `warm_start` and error feedback are independent, as in the paper's code (its Tables 1 and 2): without a warm start
    Q is drawn from the client's key in every round and nothing is kept. The paper's unbiased rank r, M U^T for a random
    U, is the codec `basis`.

    Reference: Vogels et al., PowerSGD, NeurIPS 2019 (arXiv:1905.13727), Algorithm 1; with `error_feedback` before it,
    Algorithm 2.

    Differs from the paper: 1. each client has factors of its own, decoded alone; the paper averages P, then Q, over all
    workers in two rounds of communication. 2. the first Q is drawn from the client's key. 3. P is orthonormalised by
    Householder reflections instead of Gram-Schmidt.
    """

    kind: Literal["power_sgd"] = "power_sgd"
    warm_start: bool = Field(True, description="start from the client's last Q; otherwise from a random one")

    @property
    def remembers(self) -> bool:
        """Return whether the client keeps Q."""
        return self.warm_start

    def factor(self, name: str, matrix: NDArray[Any], rank: int, key: int, state: Arrays) -> tuple[Tensors, Arrays]:
        """Return the factors of one power iteration, started from warm columns of Q and random others."""
        first = start(WARM + name, matrix.shape[1], rank, key, state)
        left, _ = np.linalg.qr(matrix.astype(np.float64) @ first)
        right = matrix.T @ left
        factors = {name + LEFT: left.astype(matrix.dtype), name + RIGHT: right.astype(matrix.dtype)}
        return factors, kept_factors(WARM + name, right, state)

    def init_state(self, shapes: Shapes, rest: Codec) -> Arrays:
        """Return zeros for every factored matrix if it starts warm, and the state of the rest."""
        warm = zero_factors(WARM, self.factored(shapes), self.rank) if self.warm_start else {}
        return {**super().init_state(shapes, rest), **warm}


BasisKind = Annotated[Literal["orthonormal", "gaussian"], Field(description="distribution of the random basis")]
"""`orthonormal`: orthogonal rows of norm sqrt(d / r), the polar factor of a Gaussian matrix, as in the code released
with CoLR; `gaussian`: entries N(0, 1/r), as in the paper's theory (Nguyen et al., WWW 2024, appendix D)."""


def draw_basis(
    kind: BasisKind, rank: int, dimension: int, seed: int, name: str = "", dtype: Dtype = FLOAT32
) -> NDArray[Any]:
    """Return B [r, d] of the tensor `name`, which every party can draw from the seed; E[B^T B] = I for both kinds."""
    gaussian = generator(seed, kind + name).standard_normal((rank, dimension))
    if kind == "gaussian":
        return (gaussian / rank**0.5).astype(dtype)
    left, _, right = np.linalg.svd(gaussian, full_matrices=False)
    return np.ascontiguousarray(left @ right * (dimension / rank) ** 0.5, dtype=dtype)


class Basis(Transform):
    """Send M B^T [m, r] for a matrix M [m, d], with B [r, d], E[B^T B] = I, drawn for each key; vectors are sent whole.

    The columns of M are projected onto r directions that both sides draw from the key.

    `scale: unbiased` decodes M B^T B, whose mean is M. `projection` decodes r / d times that, which for the orthonormal
    basis is the projection of M onto it, with less error; use it with error feedback.

    Reference: Konecny et al., arXiv:1610.05492 (random masks and sketches); the basis of Nguyen et al., WWW 2024
    (arXiv:2401.03748), applied here to a finished update.
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
