"""Gradients of factored gradient descent: in two factors stacked into one, or in the one factor of a PSD matrix."""

from __future__ import annotations

from typing import Literal

import numpy as np

from narrowcast.algorithms.completion.completion_problem import Completion
from narrowcast.platform.errors import UserError
from narrowcast.platform.types import FloatArray

Form = Literal["rectangular", "psd"]


def check_form(problem: Completion, form: Form) -> None:
    """Raise `UserError` if the form is that of positive semidefinite matrices and the problem is another."""
    if form == "psd" and not problem.symmetric:
        raise UserError(f'{problem.name} is not symmetric; use form "rectangular", or a problem with symmetric=true')


def stacked(left: FloatArray, right: FloatArray, form: Form) -> FloatArray:
    """Return [left; right] as one factor, or their mean for a positive semidefinite matrix."""
    return (left + right) / 2 if form == "psd" else np.vstack([left, right])


def unstacked(problem: Completion, factor: FloatArray, form: Form) -> tuple[FloatArray, FloatArray]:
    """Return left and right of a stacked factor."""
    return (factor, factor) if form == "psd" else (factor[: problem.observed.rows], factor[problem.observed.rows :])


def gradient(problem: Completion, factor: FloatArray, residual: FloatArray, form: Form) -> FloatArray:
    """Return the gradient at a stacked factor with this residual D, q being the observed share.

    psd: that of ||D||^2 / (2 q) in U, -2 D U / q. rectangular: that of ||D||^2 / q + ||L'L - R'R||^2 / 4 in [L; R],
    whose minimisers are balanced.
    """
    observed = problem.observed
    left, right = unstacked(problem, factor, form)
    if form == "psd":
        return -2 / observed.fraction * observed.times(residual, right)
    unbalanced = left.T @ left - right.T @ right
    scale = 2 / observed.fraction
    return np.vstack(
        [
            left @ unbalanced - scale * observed.times(residual, right),
            -(right @ unbalanced) - scale * observed.transposed_times(residual, left),
        ]
    )
