"""MAXCUT on graphs from files, and on random and toroidal graphs."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar, Literal, Self

from pydantic import Field, model_validator

from narrowcast.algorithms.sdp.certificate import Proof
from narrowcast.algorithms.sdp.max_cut_problem import LOWER_IS_BETTER, MaxCut
from narrowcast.algorithms.sdp.weighted_graph import random_graph, read_graph, torus
from narrowcast.platform.data.fetch import find
from narrowcast.platform.data.own_files import located
from narrowcast.platform.errors import UserError
from narrowcast.platform.section import Section

_GSET = "gset"
"""Folder and name of the collection, of which `narrowcast data fetch gset` brings five graphs."""


class _Relaxation(Section):
    """Fields of every MAXCUT problem."""

    lower_is_better: ClassVar[tuple[str, ...]] = LOWER_IS_BETTER

    roundings: int = Field(100, ge=0, description="random hyperplanes at every measurement; 0: none")
    proof: Proof = Field(
        "lanczos",
        description="proof of the bound: least Ritz value less its error, or a sparse factorisation, which is nearer",
    )
    seed: int | None = Field(None, ge=0, description="seed of drawn graphs and hyperplanes; null: that of the run")


class MaxCutFile(_Relaxation):
    """MAXCUT on a graph of the collection Gset, or on a file of one's own in its format.

    The file has a line `n m`, then a line `i j weight` for each edge; vertices are numbered from 1. All weights are 1
    if no line has one.
    """

    kind: Literal["max_cut"] = "max_cut"
    path: Path = Field(description="file of the graph, such as gset/G1")

    def load(self) -> MaxCut:
        """Return the problem; raise `UserError` if the file is no graph."""
        try:
            path = located(self.path, "path", "problem")
        except UserError:
            if self.path.parent.name != _GSET:
                raise
            path = find(_GSET, (self.path.name, f"{self.path.name}.txt"))
            path = next(each for each in (path / self.path.name, path / f"{self.path.name}.txt") if each.exists())
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
