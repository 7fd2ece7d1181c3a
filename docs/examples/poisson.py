"""A problem without clients and its solver: Poisson's equation on a square, by conjugate gradients.

Reference: Hestenes and Stiefel, Methods of Conjugate Gradients for Solving Linear Systems, 1952, section 3.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from narrowcast.extend import Arrays, FloatArray, Problem, ProblemSource, Solver, StepResult, UserError, generator


@dataclass(frozen=True)
class Grid(Problem):
    """A right-hand side on n x n points whose solution is known."""

    solution: FloatArray
    right: FloatArray
    name: str = "poisson"
    source: str = "drawn from a seed"

    @property
    def digest(self) -> str:
        """The sha256 of the right-hand side."""
        return hashlib.sha256(self.right.tobytes()).hexdigest()

    @property
    def sizes(self) -> Mapping[str, int]:
        """The number of unknowns."""
        return {"unknowns": self.right.size}

    def laplacian(self, values: FloatArray) -> FloatArray:
        """Return the five-point Laplacian with zeros outside, times -1, which is positive definite."""
        padded = np.pad(values, 1)
        around = padded[2:, 1:-1] + padded[:-2, 1:-1] + padded[1:-1, 2:] + padded[1:-1, :-2]
        return 4 * values - around

    def measure(self, answer: Arrays) -> Mapping[str, float]:
        """Return the relative error."""
        error = np.linalg.norm(answer["values"] - self.solution) / np.linalg.norm(self.solution)
        return {"relative_error": float(error)}


class Poisson(ProblemSource, BaseModel):
    """Poisson's equation on a square grid, with a random solution."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: Literal["poisson"] = "poisson"
    points: int = Field(50, ge=2, description="points along each side")
    seed: int | None = Field(None, ge=0, description="seed of the solution; null: that of the run")

    lower_is_better: ClassVar[tuple[str, ...]] = ("relative_error",)

    def load(self) -> Grid:
        """Draw the solution."""
        solution = generator(self.seed or 0, "poisson").normal(size=(self.points, self.points))
        return Grid(solution, Grid(solution, solution).laplacian(solution))


class ConjugateGradients(Solver, BaseModel):
    """Conjugate gradients for a positive definite system; its residual is relative to the right-hand side."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: Literal["conjugate_gradients"] = "conjugate_gradients"

    example: ClassVar[Poisson] = Poisson(points=8)

    def check(self, problem: object) -> None:
        """Raise `UserError` for a problem without a grid."""
        if not isinstance(problem, Grid):
            raise UserError("conjugate_gradients solves equations on a grid; use the problem poisson:Poisson")

    def init(self, problem: Grid, seed: int) -> Arrays:
        """Start from zero."""
        del seed
        return {"values": np.zeros_like(problem.right), "residual": problem.right, "direction": problem.right}

    def step(self, problem: Grid, state: Arrays) -> tuple[Arrays, StepResult]:
        """Minimise along the direction and turn it."""
        residual, direction = state["residual"], state["direction"]
        image = problem.laplacian(direction)
        length = (residual * residual).sum() / (direction * image).sum()
        values, after = state["values"] + length * direction, residual - length * image
        turn = (after * after).sum() / (residual * residual).sum()
        report = StepResult(float(np.linalg.norm(after) / np.linalg.norm(problem.right)))
        return {"values": values, "residual": after, "direction": after + turn * direction}, report

    def answer(self, state: Arrays) -> Arrays:
        """Return the values on the grid."""
        return {"values": state["values"]}
