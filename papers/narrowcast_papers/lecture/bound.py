"""Theorem 1 of the lecture, a bound on FedAvg's error at decaying step sizes, beside runs of federated least squares.

Reference: X. Chang, Lecture 11, Federated Optimization, Theorem 1, after Li et al., On the Convergence of FedAvg on
Non-IID Data, ICLR 2020 (arXiv:1907.02189), Theorem 1. With kappa = beta / alpha, gamma = max(8 kappa, E) and the step
sizes s_t = 2 / (alpha (gamma + t)), after T local steps of every client

    E f(x^T) - f* <= kappa / (gamma + T - 1) (2 B / alpha + alpha gamma / 2 |x^0 - x*|^2),
    B = sum p_k^2 sigma_k^2 + 6 beta Gamma + 8 (E - 1)^2 G^2.

All constants are those of the problem at hand: alpha and beta from the eigenvalues of H_k, Gamma = f* - sum p_k f_k*,
and sigma_k^2 and G^2 the largest that any model of the run saw. Letters: `problem`.

Differs from the lecture: 1. assumption 4 has E |g|^2 <= G while B has G^2; as in Li et al., G^2 bounds E |g|^2. 2. runs
of the platform take full gradients, so that sigma_k = 0. Runs with one sample a step, drawn with replacement as in
Algorithm 1, take the steps of a plain loop in float64, which is also what the platform's runs are checked against.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from narrowcast.platform.tracking.figures import BLACK, BLUE, ORANGE, VERMILLION, new_figure
from narrowcast.platform.types import FloatArray
from narrowcast.studies.tables import RecordedTable
from narrowcast.studies.verdicts import PaperVerdict
from narrowcast_papers.lecture.fixed_point import STRONG
from narrowcast_papers.lecture.problem import PRECISION, LeastSquaresProblem, configured, initial_vector, run_platform

STEPS = (1, 5, 20)
"""E."""
SPREADS = (0.0, 1.0)
LOCAL_STEPS = 4000
"""T of the last round."""
REPETITIONS = 20
"""Of the loop with one sample a step, whose mean is compared with the bound."""
_SAMPLED_STEPS = 5
_DRAWN = 1e-12
_COLOURS = dict(zip(STEPS, (BLACK, BLUE, VERMILLION), strict=True))


@dataclass(frozen=True)
class Descent:
    """f(x^T) - f* after T local steps and its bound, [n] each, and the summands of B: noise, heterogeneity, drift.

    `constant`: f - f* where rounds of the same E end at the constant step size 1 / beta. `apart`: how far the last x of
    the platform is from that of the plain loop, over |x_LS|; 0 if there was no such run.
    """

    local_steps: int
    steps: FloatArray
    measured: FloatArray
    bound: FloatArray
    summands: tuple[float, float, float]
    constant: float
    apart: float = 0.0


@dataclass(frozen=True)
class Loop:
    """A plain loop of Algorithm 1: x before round 1 and after each, and the largest E |g|^2 and sigma_k^2 [K] met."""

    models: FloatArray
    squared_gradient: float
    variances: FloatArray


def schedule_of(problem: LeastSquaresProblem, local_steps: int) -> tuple[float, float]:
    """Return alpha and gamma of the theorem's step sizes."""
    alpha = problem.strong_convexity
    return alpha, max(8 * problem.smoothness / alpha, local_steps)


def bound(
    problem: LeastSquaresProblem, local_steps: int, first: FloatArray, loop: Loop, after: FloatArray
) -> tuple[FloatArray, tuple[float, float, float]]:
    """Return the bound after each number of steps, equation 7, and the summands of B."""
    (alpha, gamma), beta, k = schedule_of(problem, local_steps), problem.smoothness, problem.n_clients
    noise = float(loop.variances.sum()) / k**2
    summands = noise, 6 * beta * problem.heterogeneity, 8 * (local_steps - 1) ** 2 * loop.squared_gradient
    start = alpha * gamma / 2 * float(np.sum((first - problem.solution) ** 2))
    return beta / alpha / (gamma + after - 1) * (2 * sum(summands) / alpha + start), summands


def plain_loop(
    problem: LeastSquaresProblem, first: FloatArray, local_steps: int, random: np.random.Generator | None = None
) -> Loop:
    """Run Algorithm 1 from `first`: with one sample a step drawn with replacement, or with all of them."""
    alpha, gamma = schedule_of(problem, local_steps)
    (k, m, _), x, models = problem.rows.shape, first, [first]
    largest, variances = 0.0, np.zeros(k)
    for begin in range(0, LOCAL_STEPS, local_steps):
        own = np.tile(x, (k, 1))
        for t in range(begin + 1, begin + local_steps + 1):
            full = (problem.curvatures @ own[..., None])[..., 0] - problem.linear
            squares, gradients = np.sum(full**2, axis=1), full
            if random is not None:
                gradients_of_samples = (
                    2 * ((problem.rows @ own[..., None])[..., 0] - problem.targets)[..., None] * problem.rows
                )
                mean_squares = np.mean(np.sum(gradients_of_samples**2, axis=2), axis=1)
                variances = np.maximum(variances, mean_squares - squares)
                squares, gradients = mean_squares, gradients_of_samples[np.arange(k), random.integers(m, size=k)]
            largest = max(largest, float(squares.max()))
            own = own - 2 / (alpha * (gamma + t)) * gradients
        x = own.mean(axis=0)
        models.append(x)
    return Loop(np.array(models), largest, variances)


def measure_descent(spread: float, local_steps: int) -> Descent:
    """Run FedAvg with full gradients on the platform, and the plain loop beside it."""
    data = f"{STRONG}, heterogeneity: {spread:g}"
    source = configured(data)
    problem, first = LeastSquaresProblem.of(source.task(source.data_source.load()).data), initial_vector(source)
    alpha, gamma = schedule_of(problem, local_steps)
    rounds = LOCAL_STEPS // local_steps
    schedule = f"learning_rate_schedule: {{kind: inverse_time, alpha: {alpha!r}, gamma: {gamma!r}}}"
    experiment = configured(
        data,
        f"training={{kind: sgd, learning_rate: 1.0, batch_size: all, epochs: {local_steps}, {schedule}}}",
        f"rounds={rounds}",
        f"evaluate_every={rounds}",
        f"checkpoint_every={max(1, rounds // 200)}",
    )
    after, gaps = list[int](), list[float]()

    def watch(round_index: int, x: FloatArray) -> None:
        after.append(round_index * local_steps)
        gaps.append(problem.gap(x))

    last = run_platform(experiment, watch)
    loop = plain_loop(problem, first, local_steps)
    apart = float(np.linalg.norm(last - loop.models[-1]) / np.linalg.norm(problem.solution))
    return _descent(problem, local_steps, first, loop, np.array(after, float), np.array(gaps), apart)


def measure_sampled(spread: float = SPREADS[-1]) -> Descent:
    """Run the plain loop with one sample a step, `REPETITIONS` times, and return its mean."""
    source = configured(f"{STRONG}, heterogeneity: {spread:g}")
    problem, first = LeastSquaresProblem.of(source.task(source.data_source.load()).data), initial_vector(source)
    loops = [plain_loop(problem, first, _SAMPLED_STEPS, np.random.default_rng(seed)) for seed in range(REPETITIONS)]
    variances = np.max([loop.variances for loop in loops], axis=0)
    worst = Loop(loops[0].models, max(loop.squared_gradient for loop in loops), variances)
    gaps = np.mean([[problem.gap(x) for x in loop.models[1:]] for loop in loops], axis=0)
    after = _SAMPLED_STEPS * np.arange(1.0, 1 + len(gaps))
    return _descent(problem, _SAMPLED_STEPS, first, worst, after, gaps)


def _descent(
    problem: LeastSquaresProblem,
    local_steps: int,
    first: FloatArray,
    loop: Loop,
    after: FloatArray,
    gaps: FloatArray,
    apart: float = 0.0,
) -> Descent:
    bounds, summands = bound(problem, local_steps, first, loop, after)
    constant = problem.gap(problem.fixed_point(1 / problem.smoothness, local_steps))
    return Descent(local_steps, after, gaps, bounds, summands, constant, apart)


def judge_descents(descents: Mapping[float, Sequence[Descent]], sampled: Descent) -> list[PaperVerdict]:
    """Say whether the error is below its bound after every measured round, how far, and what the bound is made of."""
    verdicts = [
        _verdict(f"spread {spread:g}, E = {descent.local_steps}, full gradients", descent)
        for spread, several in descents.items()
        for descent in several
    ]
    what = f"spread {SPREADS[-1]:g}, E = {_SAMPLED_STEPS}, one sample a step, mean of {REPETITIONS}"
    verdicts.append(_verdict(what, sampled))
    apart = max(descent.apart for several in descents.values() for descent in several)
    verdicts.append(
        PaperVerdict(
            "platform beside a plain float64 loop",
            "",
            f"{apart:.1g}",
            f"the same models, to {PRECISION:g}" if apart <= PRECISION else "differ",
        )
    )
    return verdicts


def _verdict(what: str, descent: Descent) -> PaperVerdict:
    ratio = descent.bound / descent.measured
    over = int(np.sum(ratio < 1))
    holds = f"above the error in all {len(ratio)} rounds measured" if not over else f"below the error in {over} rounds"
    parts = ", ".join(
        f"{name} {part / max(sum(descent.summands), 1e-300):.0%}"
        for name, part in zip(("noise", "heterogeneity", "local steps"), descent.summands, strict=True)
    )
    late = descent.steps >= LOCAL_STEPS / 10
    falls = -np.polyfit(np.log(descent.steps[late]), np.log(descent.measured[late]), 1)[0]
    return PaperVerdict(
        what,
        f"{descent.bound[-1]:.2g}",
        f"{descent.measured[-1]:.2g}",
        f"{holds}, {ratio.min():.2g} to {ratio.max():.2g} times; B: {parts}; the error falls as T^-{falls:.1f}",
    )


def plot_descents(descents: Mapping[float, Sequence[Descent]], sampled: Descent, path: Path) -> None:
    """Plot error and bound against the local steps, a panel for each spread of the clients' solutions."""
    title = "Theorem 1 beside runs: step sizes 2 / (alpha (gamma + t)), federated least squares"
    figure, panels = new_figure(title, panels=2)
    for axes, (spread, several) in zip(panels, descents.items(), strict=True):
        for descent in several:
            colour = _COLOURS[descent.local_steps]
            axes.plot(descent.steps, descent.measured, color=colour, linewidth=1.5, label=f"E = {descent.local_steps}")
            axes.plot(descent.steps, descent.bound, "--", color=colour, linewidth=1.2)
            if descent.constant > 1e-15:
                axes.axhline(descent.constant, color=colour, linestyle=":", linewidth=1)
        if spread == SPREADS[-1]:
            label = f"E = {_SAMPLED_STEPS}, one sample a step"
            axes.plot(sampled.steps, sampled.measured, color=ORANGE, linewidth=1.5, label=label)
            axes.plot(sampled.steps, sampled.bound, "--", color=ORANGE, linewidth=1.2)
        axes.set(xlabel="local steps of every client, T", ylabel="f(x) - f*", xscale="log", yscale="log")
        axes.set_ylim(bottom=_DRAWN)
        axes.set_title(f"clients' solutions spread by {spread:g}", fontsize=9)
    for style, label in (("-", "measured"), ("--", "bound"), (":", "where a constant step size ends")):
        panels[1].plot([], [], style, color="0.5", label=label)
    handles, labels = panels[1].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, fontsize=8, frameon=False)
    figure.savefig(path, dpi=150)


def _measured() -> tuple[Mapping[float, Sequence[Descent]], Descent]:
    return {spread: [measure_descent(spread, steps) for steps in STEPS] for spread in SPREADS}, measure_sampled()


THEOREM_1 = RecordedTable.computed(_measured, judge_descents, plot_descents)
