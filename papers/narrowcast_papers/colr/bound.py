"""Theorem D.3 of Nguyen et al., WWW 2024 (arXiv:2401.03748), the error of a low-rank round, beside a run.

The theorem bounds the squared error of one item's mean update when each client takes one gradient step of the squared
error in the span of its own Gaussian basis B_u [d, r], with entries of variance 1 / r:

    eps_i <= (1 / |S|) max_u alpha_ui^2 ||p_u||^2 O(d / r),    alpha_ui = r_ui - p_u . q_i.

The paper has no theorem on convergence. All constants can be computed on a problem with known ratings, and are here:
E ||B B^T v - v||^2 = c ||v||^2 with c = (d + 1) / r for the Gaussian basis, which is the O(d / r), and c = d / r - 1
for the orthonormal one of the released code. For fixed user factors the loss is a quadratic in Q, with largest and
smallest curvature L and mu. The mean step B B^T g of all clients, with the step size 1 / (L (1 + c)), then has

    E f(Q_t) - f* <= (1 - mu / (L (1 + c)))^t (f(Q_0) - f*),

because the step is unbiased and E ||B B^T g||^2 = (1 + c) ||g||^2.

Differs from the paper:
    1. alpha_ui is squared, as in the first line of the proof of Proposition D.1; the paper drops the square.
    2. O(d / r) is the constant c. Proposition D.1 with Lemma D.2 would give O(d^2 / r^2).
    3. The theorem assumes a basis per client. CoLR gives all clients of a round the same one, so that errors do not
       average out: eps_i = c ||mean update||^2. Both are measured.
    4. The bound on convergence is not in the paper.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from narrowcast.platform.tracking.figures import BLACK, BLUE, GREEN, VERMILLION, new_figure
from narrowcast.platform.types import FloatArray
from narrowcast.studies.verdicts import PaperVerdict

Basis = Literal["gaussian", "orthonormal"]
RANKS = (1, 4, 8)
DIMENSION = 16
_USERS, _ITEMS, _COHORT, _OBSERVED = 200, 60, 50, 0.5
_ROUNDS, _EVERY, _DRAWS, _STEP = 200, 10, 100, 0.2
_STEPS, _REPETITIONS = 200, 20
_COLOURS = dict(zip(RANKS, (VERMILLION, BLUE, GREEN), strict=True))


@dataclass(frozen=True)
class ErrorCurve:
    """Squared error of the mean update, summed over items, in each measured round.

    `independent`, `shared`: measured with a basis per client and with one for all, means over draws. `bound`: Theorem
    D.3. `mean_update`: the squared norm of the update itself.
    """

    rounds: list[int]
    independent: FloatArray
    shared: FloatArray
    bound: FloatArray
    mean_update: FloatArray


@dataclass(frozen=True)
class Convergence:
    """f(Q_t) - f* after 0, 1, ... steps, measured as the mean over repetitions, and its bound."""

    measured: FloatArray
    bound: FloatArray


def error_factor(basis: Basis, dimension: int, rank: int) -> float:
    """Return c of E ||B B^T v - v||^2 = c ||v||^2."""
    return (dimension + 1) / rank if basis == "gaussian" else dimension / rank - 1


def draw_bases(random: np.random.Generator, n: int, rank: int, basis: Basis) -> FloatArray:
    """Return n bases [n, d, r] with E B B^T = I: Gaussian, or orthonormal columns times sqrt(d / r)."""
    gaussian = random.standard_normal((n, DIMENSION, rank))
    return gaussian / np.sqrt(rank) if basis == "gaussian" else np.linalg.qr(gaussian)[0] * np.sqrt(DIMENSION / rank)


def measure_error(rank: int, seed: int = 0) -> ErrorCurve:
    """Run Algorithm 1 with one gradient step per client, and measure the error of every tenth round."""
    random, (ratings, observed) = np.random.default_rng(seed), _problem(seed)
    p, q = (0.3 * random.standard_normal((n, DIMENSION)) for n in (_USERS, _ITEMS))
    rows = []
    for round_index in range(1, _ROUNDS + 1):
        cohort = random.permutation(_USERS)[:_COHORT]
        alpha = observed[cohort] * (ratings[cohort] - p[cohort] @ q.T)
        exact = alpha.T @ p[cohort] / _COHORT
        if round_index % _EVERY == 0:
            bases = draw_bases(random, _DRAWS, rank, "gaussian")
            shared = np.sum((exact @ bases @ bases.transpose(0, 2, 1) - exact) ** 2)
            independent = sum(_independent_error(random, alpha, p[cohort], exact, rank) for _ in range(_DRAWS))
            largest = (alpha**2 * np.sum(p[cohort] ** 2, axis=1)[:, None]).max(axis=0)
            bound = error_factor("gaussian", DIMENSION, rank) * largest.sum() / _COHORT
            rows.append((round_index, independent / _DRAWS, shared / _DRAWS, bound, np.sum(exact**2)))
        basis = draw_bases(random, 1, rank, "gaussian")[0]
        counts = np.maximum(observed[cohort].sum(axis=1), 1)[:, None]
        p[cohort] += _STEP * alpha @ q / counts
        q += _STEP / error_factor("gaussian", DIMENSION, rank) * exact @ basis @ basis.T
    rounds, *curves = (np.array(column) for column in zip(*rows, strict=True))
    return ErrorCurve(rounds.tolist(), *curves)


def measure_convergence(rank: int, basis: Basis, seed: int = 0) -> Convergence:
    """Minimise the quadratic in Q by steps of all clients in a shared basis, drawn anew for each step."""
    random, (ratings, observed) = np.random.default_rng(seed), _problem(seed)
    p = random.standard_normal((_USERS, DIMENSION))
    curvature = np.einsum("ui,ud,ue->ide", observed, p, p) / _USERS
    linear = (observed * ratings).T @ p / _USERS
    best = np.linalg.solve(curvature, linear[..., None])[..., 0]
    values = np.linalg.eigvalsh(curvature)
    largest, smallest = values.max(), values.min()
    second_moment = 1 + error_factor(basis, DIMENSION, rank)
    gaps = np.zeros((_REPETITIONS, _STEPS + 1))
    for repetition in gaps:
        off = -best  # Q_0 = 0
        for step in range(_STEPS + 1):
            gradient = np.einsum("ide,ie->id", curvature, off)
            repetition[step] = np.sum(gradient * off) / 2
            one = draw_bases(random, 1, rank, basis)[0]
            off = off - gradient @ one @ one.T / (largest * second_moment)
    bound = (1 - smallest / (largest * second_moment)) ** np.arange(_STEPS + 1) * gaps[0, 0]
    return Convergence(gaps.mean(axis=0), bound)


def judge_bound(errors: dict[int, ErrorCurve], convergence: dict[int, Convergence]) -> list[PaperVerdict]:
    """Say whether the measured errors and curves are below their bounds, and how far."""
    verdicts = []
    for rank, curve in errors.items():
        for what, measured in (("a basis per client", curve.independent), ("one basis", curve.shared)):
            ratio = measured / curve.bound
            over = int(np.sum(ratio > 1))
            verdicts.append(
                PaperVerdict(
                    f"error of a round, r = {rank}, {what}",
                    "Theorem D.3",
                    f"{ratio.min():.2g} to {ratio.max():.2g} of the bound",
                    f"above it in {over} of {len(ratio)} rounds" if over else "below it in all rounds",
                )
            )
    for rank, each in convergence.items():
        ratio, left, allowed = each.measured / each.bound, *(c[-1] / c[0] for c in (each.measured, each.bound))
        verdicts.append(
            PaperVerdict(
                f"f(Q_t) - f* of {_STEPS} steps, r = {rank}, orthonormal",
                "none",
                f"{left:.2g} is left, {allowed:.2g} by the bound",
                "below the bound at all steps" if ratio.max() <= 1 + 1e-9 else f"up to {ratio.max():.2f} of the bound",
            )
        )
    return verdicts


def plot_bound(errors: dict[int, ErrorCurve], convergence: dict[int, Convergence], path: Path) -> None:
    """Plot the errors of the rounds, and the convergence, with their bounds dashed."""
    title = f"Theorem D.3 beside a run: d = {DIMENSION}, |S| = {_COHORT}, {_USERS} users, {_ITEMS} items"
    figure, (left, right) = new_figure(title, panels=2)
    for rank, curve in errors.items():
        colour = _COLOURS[rank]
        left.plot(curve.rounds, curve.independent, color=colour, linewidth=1.5, label=f"r = {rank}")
        left.plot(curve.rounds, curve.shared, ":", color=colour, linewidth=2)
        left.plot(curve.rounds, curve.bound, "--", color=colour, linewidth=1.2)
    for rank, each in convergence.items():
        right.plot(each.measured / each.measured[0], color=_COLOURS[rank], linewidth=1.5)
        right.plot(each.bound / each.bound[0], "--", color=_COLOURS[rank], linewidth=1.2)
    left.set(xlabel="round", ylabel="squared error of the mean update", yscale="log")
    right.set(xlabel="step", ylabel="f(Q) - f*, of its first value", yscale="log")
    for style, label in (("-", "measured"), (":", "one basis for all clients"), ("--", "bound")):
        left.plot([], [], style, color=BLACK, label=label)
    handles, labels = left.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=6, fontsize=9, frameon=False)
    figure.savefig(path, dpi=150)


def _problem(seed: int) -> tuple[FloatArray, FloatArray]:
    """Return ratings of a low-rank model with noise, and 1 for those observed, else 0 [users, items]."""
    random = np.random.default_rng([seed, 1])
    true = [random.standard_normal((n, 4)) / 2 for n in (_USERS, _ITEMS)]
    ratings = true[0] @ true[1].T + 0.1 * random.standard_normal((_USERS, _ITEMS))
    return ratings, (random.random((_USERS, _ITEMS)) < _OBSERVED).astype(float)


def _independent_error(
    random: np.random.Generator, alpha: FloatArray, p: FloatArray, exact: FloatArray, rank: int
) -> float:
    bases = draw_bases(random, len(p), rank, "gaussian")
    projected = np.einsum("udr,uer,ue->ud", bases, bases, p, optimize=True)
    return float(np.sum((alpha.T @ projected / len(p) - exact) ** 2))
