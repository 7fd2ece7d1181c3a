"""MAXCUT on graphs from files and on random and toroidal graphs: the relaxation, its bound, and cuts by rounding.

The relaxation has a unit vector for each vertex; random hyperplanes round the vectors to a cut.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import ClassVar, Literal, Self

import numpy as np
from pydantic import Field, model_validator

from narrowcast.platform.config.files import Section
from narrowcast.platform.data.download import find, located
from narrowcast.platform.errors import UserError
from narrowcast.platform.seeds import generator
from narrowcast.platform.solving import ProblemSource, Work
from narrowcast.platform.types import Arrays, FloatArray, IntArray
from narrowcast.solves.certificate import Proof, is_bounded_below, least_eigenvalue_bound, proof_work
from narrowcast.solves.semidefinite import (
    SemidefiniteProblem,
    SemidefiniteProgram,
    SymmetricConstraints,
    numerical_rank,
)
from narrowcast.solves.vector_kernels import cut_values, weighted_sums
from narrowcast.solves.weighted_graph import WeightedGraph, random_graph, read_graph, torus

TOGETHER = 64
"""Hyperplanes of one product."""


@dataclass(frozen=True, eq=False)
class Roundings:
    """The cuts of all hyperplanes [count], and the sides, 0 or 1, of the best one [n]."""

    cuts: FloatArray
    sides: IntArray


def round_by_hyperplanes(graph: WeightedGraph, vectors: FloatArray, count: int, seed: int, first: int = 0) -> Roundings:
    """Return the cuts of `count` random hyperplanes, those numbered from `first`.

    A hyperplane depends on the seed and its number alone, so that parts of a set can be computed anywhere.

    Source: Goemans and Williamson, Journal of the ACM 42(6), 1995, section 2.
    """
    cuts, best, sides = np.empty(count), -np.inf, np.zeros(graph.vertices, dtype=np.int64)
    for begin in range(0, count, TOGETHER):
        numbers = range(first + begin, first + min(begin + TOGETHER, count))
        normals = [generator(seed, "hyperplane", number).standard_normal(vectors.shape[1]) for number in numbers]
        signs = np.ascontiguousarray((vectors @ np.array(normals).T >= 0).astype(np.int8))
        values = cut_values(graph.indptr, graph.indices, graph.weights, signs)
        cuts[begin : begin + len(values)] = values
        if values.max() > best:
            best, sides = float(values.max()), signs[:, int(values.argmax())].astype(np.int64)
    return Roundings(cuts, sides)


LOWER_IS_BETTER = ("gap", "bound", "rank")
"""Metrics of `MaxCut` of which the lower value is better."""
_UNIT = 1e-12
"""Error of a norm up to which a vector is one of unit norm."""


@dataclass(frozen=True, eq=False)
class MaxCut(SemidefiniteProblem):
    """Maximise sum_edges w_ij (1 - <v_i, v_j>) / 2 over unit vectors; an answer is `vectors` [n, k].

    With scalars +1 and -1 for vectors this is the largest cut. With X = V V' it is the semidefinite program
    min <W, X> over X >= 0 with unit diagonal; values are in units of the cut.

    Source: Goemans and Williamson, Journal of the ACM 42(6), 1995.
    """

    name: str
    source: str
    graph: WeightedGraph
    roundings: int
    proof: Proof
    seed: int

    @property
    def digest(self) -> str:
        """The sha256 of the graph."""
        return self.graph.digest

    @property
    def sizes(self) -> Mapping[str, int]:
        """Vertices and edges."""
        return {"vertices": self.graph.vertices, "edges": self.graph.edges}

    @cached_property
    def program(self) -> SemidefiniteProgram:
        """The same relaxation for any solver, min <W, X> / 4, which is half of all weight less the cut."""
        from scipy.sparse import csr_array, eye_array

        graph, size = self.graph, self.graph.vertices
        cost = csr_array((graph.weights / 4, graph.indices, graph.indptr), shape=(size, size))
        every = np.arange(size)
        unit = SymmetricConstraints(size, every, every, csr_array(eye_array(size)))
        return SemidefiniteProgram(self.name, self.source, cost, unit, np.ones(size), float(size), self.proof)

    @cached_property
    def _proof_work(self) -> float:
        from scipy.sparse import csr_array

        graph, size = self.graph, self.graph.vertices
        return proof_work(csr_array((graph.weights, graph.indices, graph.indptr), shape=(size, size)), self.proof)

    def measurement_work(self, answer: Arrays) -> Work:
        """Return the work of a product with the weights, which every iteration takes, and of a measurement."""
        size, columns = answer["vectors"].shape
        product, proofs = self.graph.edges * 2 * columns, 2 if "dual" in answer else 1
        cuts = self.roundings * (2 * self.graph.edges + size * columns)
        return Work(product, proofs * self._proof_work + product + cuts + size * columns**2)

    def measure(self, answer: Arrays) -> Mapping[str, float]:
        """Return the metrics of vectors, scaled to unit norm where they are not; `dual` [n] is that of `program`.

        `relaxation`: their objective; `bound`: an upper bound on every cut and on the relaxation, from a feasible
        point of the dual, that of the vectors or the solver's; `gap`: (bound - relaxation) / (1 + |bound|). `rank`: the
        number of directions that the vectors span. With roundings `cut` and `mean_cut`: the best and the mean cut of
        random hyperplanes, and `ratio`: the best over the bound.
        """
        vectors, graph = unit_vectors(answer["vectors"]), self.graph
        sums = weighted_sums(graph.indptr, graph.indices, graph.weights, vectors)
        relaxation = self._objective(vectors, sums)
        bound = self.bound(np.asarray(np.linalg.norm(sums, axis=1)))
        if "dual" in answer:
            bound = min(bound, graph.total / 2 - self.program.bound(answer["dual"]))
        measures = {
            "relaxation": relaxation,
            "bound": bound,
            "gap": (bound - relaxation) / (1 + abs(bound)),
            "rank": numerical_rank(vectors),
        }
        if self.roundings:
            cuts = self.rounded(vectors, self.roundings).cuts
            best = float(cuts.max())
            measures |= {"cut": best, "mean_cut": float(cuts.mean()), "ratio": best / bound if bound else 1.0}
        return measures

    def relaxation(self, vectors: FloatArray) -> float:
        """Return the objective of unit vectors [n, k], in units of the cut."""
        graph = self.graph
        return self._objective(vectors, weighted_sums(graph.indptr, graph.indices, graph.weights, vectors))

    def _objective(self, vectors: FloatArray, sums: FloatArray) -> float:
        """Return the objective of unit vectors, given W V."""
        return self.graph.total / 2 - float(np.einsum("ik,ik->", vectors, sums)) / 4

    def rounded(self, vectors: FloatArray, count: int, first: int = 0) -> Roundings:
        """Return the cuts of vectors [n, k] by `count` hyperplanes of this problem's seed, from number `first` on."""
        return round_by_hyperplanes(self.graph, unit_vectors(vectors), count, self.seed, first)

    def bound(self, dual: FloatArray) -> float:
        """Return the bound that y = `dual` [n] proves.

        Every feasible X has <W, X> >= -sum y + n min(0, least eigenvalue of W + diag(y)).
        """
        least = least_eigenvalue_bound(self.graph, dual, self.proof)
        return float(self.graph.total / 2 + (dual.sum() + self.graph.vertices * max(0.0, -least)) / 4)

    def proves(self, answer: Arrays, gap: float) -> bool:
        """Return whether one sparse factorisation proves that the gap of unit vectors is at most this, in (0, 1)."""
        vectors, graph = answer["vectors"], self.graph
        sums = weighted_sums(graph.indptr, graph.indices, graph.weights, vectors)
        relaxation = self._objective(vectors, sums)
        dual = np.asarray(np.linalg.norm(sums, axis=1))
        most = (relaxation + gap) / (1 - gap if relaxation + gap > 0 else 1 + gap)
        allowed = most - graph.total / 2 - float(dual.sum()) / 4
        return allowed > 0 and is_bounded_below(graph, dual, -4 * allowed / graph.vertices)


def unit_vectors(vectors: FloatArray) -> FloatArray:
    """Return vectors [n, k] scaled to unit norm, those that are already unchanged; zero becomes the first axis."""
    norms = np.linalg.norm(vectors, axis=1, keepdims=True)
    if (np.abs(norms - 1) <= _UNIT).all():
        return vectors
    first = np.eye(1, vectors.shape[1])
    return np.asarray(np.where(norms == 0, first, vectors / np.where(norms == 0, 1.0, norms)))


_GSET = "gset"
"""Folder and name of the collection, of which `narrowcast data fetch gset` brings five graphs."""


class _Relaxation(ProblemSource, Section):
    """Fields of every MAXCUT problem."""

    lower_is_better: ClassVar[tuple[str, ...]] = LOWER_IS_BETTER

    roundings: int = Field(100, ge=0, description="random hyperplanes at every measurement; 0: none")
    proof: Proof = Field(
        "lanczos",
        description="proof of the bound: least Ritz value less its error, or a sparse factorisation, which is nearer",
    )
    seed: int | None = Field(None, ge=0, description="seed of drawn graphs and hyperplanes; null: that of the run")


class MaxCutFile(_Relaxation):
    """MAXCUT on a graph of the collection Gset, or on your own file in its format.

    The file has a line `n m`, then a line `i j weight` for each edge; vertices are numbered from 1. All weights are 1
    if no line has one.
    """

    kind: Literal["max_cut"] = "max_cut"
    path: Path = Field(description="file of the graph, such as gset/G1")

    def load(self) -> MaxCut:
        """Return the problem; raise `UserError` if the file is not a graph."""
        try:
            path = located(self.path, "path", "problem")
        except UserError:
            if self.path.parent.name != _GSET:
                raise
            path = find(_GSET, (self.path.name, f"{self.path.name}.txt"))
            path = next(
                candidate for candidate in (path / self.path.name, path / f"{self.path.name}.txt") if candidate.exists()
            )
        return MaxCut(path.stem, str(path), read_graph(path), self.roundings, self.proof, self.seed or 0)


class RandomMaxCut(_Relaxation):
    """MAXCUT on a graph whose edges are drawn uniformly, with weights 1."""

    kind: Literal["random_max_cut"] = "random_max_cut"
    vertices: int = Field(800, ge=2, le=10**6, description="number of vertices")
    edges: int = Field(19_176, ge=1, le=10**8, description="number of edges")

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.edges > (most := self.vertices * (self.vertices - 1) // 2):
            raise ValueError(f"edges is {self.edges}, but {self.vertices} vertices have {most} pairs")
        return self

    def load(self) -> MaxCut:
        """Draw the graph."""
        graph = random_graph(self.vertices, self.edges, self.seed or 0)
        return MaxCut(self.kind, "drawn", graph, self.roundings, self.proof, self.seed or 0)


class TorusMaxCut(_Relaxation):
    """MAXCUT on a square grid that is closed in both directions, with weights +1 and -1 of equal probability."""

    kind: Literal["torus_max_cut"] = "torus_max_cut"
    side: int = Field(100, ge=3, le=3000, description="vertices along each side")

    def load(self) -> MaxCut:
        """Draw the weights."""
        graph = torus(self.side, self.seed or 0)
        return MaxCut(self.kind, "drawn", graph, self.roundings, self.proof, self.seed or 0)
