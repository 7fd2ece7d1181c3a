"""Damped Newton steps on positions in more dimensions than the space has: the relaxation of sensor localisation."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from pydantic import Field

from narrowcast.algorithms.sdp.localisation_problem import Localisation
from narrowcast.platform.errors import UserError
from narrowcast.platform.section import Section
from narrowcast.platform.seeds import generator
from narrowcast.platform.solver_contracts import Report, name_of
from narrowcast.platform.types import Arrays, FloatArray

if TYPE_CHECKING:
    from scipy.sparse import csr_array

_LIFTED = 12
"""Dimensions beyond the space: with six, a drawn network of 50 sensors had a gap of 1e-2, with twelve of 1e-12."""
_EASED, _MOST_DAMPING = 1 / 3, 1e12
_LEAST_DROP, _EXACT = 1e-11, 1e-22
"""Of the objective, of a step that ends a stage; of sum_e d_e^4, the objective at which it ends too."""


class LiftedStress(Section):
    """Minimises sum_e (|p_i - p_j|^2 - d_e^2)^2 over positions in k >= d dimensions, then in d.

    Positions P in k dimensions are the semidefinite relaxation's Z = [[I, X'], [X, P P']] of rank at most k (Burer and
    Monteiro): where the bound of the problem meets the objective, no other Z is better. The coordinates beyond d are
    then left out, and with `refine` a second stage minimises the same stress in d dimensions from there.

    An iteration is a Newton step, damped as that of Levenberg and Marquardt while it would raise the objective. The
    residual is the norm of the gradient over (sum_e d_e^4)^(3/4).

    Source: Biswas and Ye, IPSN 2004, and the refinement of Biswas, Liang, Toh, Wang and Ye, IEEE T. Autom. Sci. Eng.
    3(4), 2006. Differs from the papers: 1. least squares of squared distances, not absolute errors; 2. factors in place
    of an interior-point method.
    """

    kind: Literal["lifted_stress"] = "lifted_stress"
    dimensions: int | None = Field(
        None, ge=2, le=1000, description="dimensions k of the relaxation; null: twelve more than the space"
    )
    refine: bool = Field(True, description="minimise in the dimensions of the space after the relaxation")

    def check(self, problem: Any) -> None:
        """Raise `UserError` for another problem than localisation, or dimensions below those of the space."""
        if not isinstance(problem, Localisation):
            raise UserError(f"lifted_stress solves sensor localisation, not {name_of(problem)}; choose another solver")
        if self.dimensions is not None and self.dimensions < problem.network.dimension:
            raise UserError(
                f"solver.dimensions is {self.dimensions}, but the sensors are in {problem.network.dimension}; raise it"
            )

    def init(self, problem: Localisation, seed: int) -> Arrays:
        """Return positions that are Gaussian around the mean of the anchors, as wide as the longest distance."""
        self.check(problem)
        network = problem.network
        size = self.dimensions or network.dimension + _LIFTED
        drawn = generator(seed, "localisation start").standard_normal((network.sensors, size))
        lifted = drawn * float(network.distances.max())
        lifted[:, : network.dimension] += network.anchors.mean(axis=0)
        return {
            "lifted": lifted,
            "positions": np.ascontiguousarray(lifted[:, : network.dimension]),
            "damping": np.array(1e-3),
            "stage": np.array(0),
        }

    def step(self, problem: Localisation, state: Arrays) -> tuple[Arrays, Report]:
        """Return the state after a step of its stage: 0 in k dimensions, 1 in those of the space."""
        dimension, refining = problem.network.dimension, int(state["stage"]) == 1
        at = state["positions" if refining else "lifted"]
        errors = problem.errors(at)
        jacobian = _jacobian(problem, at)
        gradient = jacobian.T @ errors
        moved, damping = _damped_step(problem, at, errors, jacobian, gradient, float(state["damping"]))
        before, after = float(errors @ errors), float(np.sum(problem.errors(moved) ** 2))
        scale = float(np.sum(problem.network.distances**4))
        over = before - after <= _LEAST_DROP * before or after <= _EXACT * scale
        new = {**state, "damping": np.array(damping)}
        if refining:
            new["positions"] = moved
        else:
            new |= {"lifted": moved, "positions": np.ascontiguousarray(moved[:, :dimension])}
            if over and self.refine:
                new |= {"stage": np.array(1), "damping": np.array(1e-3)}
        residual = float(np.linalg.norm(gradient)) / scale**0.75
        ended = over and (refining or not self.refine)
        return new, Report(residual, "converged" if ended else "running")

    def answer(self, state: Arrays) -> Arrays:
        """Return `positions` [n, d], and `lifted` [n, k], which the bound is computed from."""
        return {"positions": state["positions"], "lifted": state["lifted"]}


def _damped_step(
    problem: Localisation,
    at: FloatArray,
    errors: FloatArray,
    jacobian: csr_array,
    gradient: FloatArray,
    damping: float,
) -> tuple[FloatArray, float]:
    """Return the positions after the first step that lowers the objective, and the next damping; unchanged if none."""
    from scipy.sparse import csc_array, eye_array, kron
    from scipy.sparse.linalg import splu

    squares = jacobian.T @ jacobian
    scale = float(squares.diagonal().max()) or 1.0
    sensors = problem.squared.adjoint(errors)[problem.network.dimension :, problem.network.dimension :]
    hessian = csc_array(squares + 2 * kron(sensors, eye_array(at.shape[1])))
    while damping <= _MOST_DAMPING:
        damped = csc_array(hessian + damping * scale * eye_array(hessian.shape[0]))
        step = splu(damped, permc_spec="MMD_AT_PLUS_A", options={"SymmetricMode": True}).solve(gradient)
        moved = at - step.reshape(at.shape)
        if float(np.sum(problem.errors(moved) ** 2)) < float(errors @ errors):
            return moved, max(damping * _EASED, 1e-15)
        damping *= 4
    return at, damping


def _jacobian(problem: Localisation, at: FloatArray) -> csr_array:
    """Return the derivatives of the squared distances by the coordinates, [m, n k]."""
    from scipy.sparse import csr_array

    network, (sensors, size) = problem.network, at.shape
    anchors = np.zeros((len(network.anchors), size))
    anchors[:, : network.dimension] = network.anchors
    first, second = network.pairs.T
    change = 2 * (at[first] - np.concatenate([at, anchors])[second])
    every, between = np.arange(len(first)), second < sensors
    rows = np.concatenate([np.repeat(every, size), np.repeat(every[between], size)])
    places = [(node[:, None] * size + np.arange(size)).ravel() for node in (first, second[between])]
    data = np.concatenate([change.ravel(), -change[between].ravel()])
    return csr_array((data, (rows, np.concatenate(places))), shape=(len(first), sensors * size))
