"""Theorem 1 and Corollary 1 against their text, simulated descent, and the errors that are allocated."""

from __future__ import annotations

import numpy as np
import pytest
from pydantic import ValidationError

from narrowcast.platform.errors import UserError
from narrowcast_papers.wireless.quantiser import (
    quantise,
    quantise_vectors,
    receive,
    receive_vectors,
)
from narrowcast_papers.wireless.theory import QuantisedDescent
from regions_by_hand import Array


def a_descent(kappa: float = 4.0, t: float = 0.25, d: int = 100, **fields: object) -> QuantisedDescent:
    return QuantisedDescent(smoothness=3 * kappa, convexity=3, step_size=t / (3 * kappa), dimension=d, **fields)


@pytest.mark.parametrize(("kappa", "t", "d"), [(4, 0.25, 100), (1, 0.1, 7), (50, 0.45, 1000)])
def test_thresholds_are_the_closed_form(kappa: float, t: float, d: int) -> None:
    descent = a_descent(kappa, t, d)
    assert descent.uplink_levels() ** 2 == pytest.approx(d * kappa * (1 + t**2) / t)
    assert descent.downlink_levels() ** 2 == pytest.approx(d * (kappa * (2 * t + 2 / t + 1) - 1) / (1 - 2 * t))
    assert descent.uplink_bits() == pytest.approx(d * np.log2(descent.uplink_levels()))
    assert descent.downlink_bits() == pytest.approx(d * np.log2(descent.downlink_levels()))
    assert descent.variance(descent.uplink_levels()) == pytest.approx(descent.uplink_limit())
    assert descent.variance(descent.downlink_levels()) == pytest.approx(descent.downlink_limit())


def test_the_report_s_thresholds() -> None:
    assert round(np.log2(a_descent().uplink_levels()), 4) == 5.3657
    assert round(np.log2(a_descent().downlink_levels()), 4) == 6.4267
    assert a_descent(t=0.5).downlink_levels() == np.inf
    assert a_descent(t=0.6).downlink_limit() < 0


@pytest.mark.parametrize(("up", "down"), [(0.0, 0.0), (2e-3, 0.0), (0.0, 1e-3), (1e-3, 2e-3)])
def test_theorem_1_as_it_is_written(up: float, down: float) -> None:
    descent = a_descent(optimum=5.0)
    L, mu, gamma = 12.0, 3.0, 0.25 / 12
    slower = 4 * up * (1 + gamma**2 * L**2) * (1 + 2 * down)
    C1 = gamma * down * (L - mu) + 2 * down * (1 + gamma**2 * L**2)
    C2 = 2 * up + 4 * up * down * (1 + gamma**2 * L**2)
    assert descent.rate(up, down) == pytest.approx(1 - mu * gamma + slower)
    assert descent.neighbourhood(up, down) == pytest.approx(2 * 5 * (C1 + C2) / (mu * gamma - slower))
    if up == 0:
        assert descent.downlink_neighbourhood(down) == pytest.approx(descent.neighbourhood(0.0, down))


def simulate(levels: list[int | None], down: int | None, steps: int, seed: int) -> tuple[Array, float]:
    """Return mean squared distances [steps + 1] of descent on least squares with a common minimiser, and ||x*||^2."""
    random = np.random.default_rng(seed)
    d, runs = 20, 60
    optimum = random.standard_normal(d)
    hessians = []
    for _ in levels:
        basis = np.linalg.qr(random.standard_normal((d, d)))[0]
        hessians.append(basis * np.linspace(1.0, 4.0, d) @ basis.T)
    x = np.zeros((runs, d))
    squares = [((x - optimum) ** 2).sum(axis=1).mean()]
    for _ in range(steps):
        y = x if down is None else quantise_vectors(x, down, random)
        local = [y - (y - optimum) @ hessian / 16 for hessian in hessians]
        sent = [z if k is None else quantise_vectors(z, k, random) for z, k in zip(local, levels, strict=True)]
        x = np.mean(sent, axis=0)
        squares.append(((x - optimum) ** 2).sum(axis=1).mean())
    return np.array(squares), float((optimum**2).sum())


@pytest.mark.parametrize(
    ("levels", "down"),
    [([24], None), ([None], 60), ([40], 60), ([11, 11, 11, 11], None), ([40, 9, 9, 12], 60)],
)
def test_descent_is_within_its_bound_at_every_step(levels: list[int | None], down: int | None) -> None:
    squares, optimum = simulate(levels, down, 600, seed=3)
    descent = QuantisedDescent(smoothness=4, convexity=1, step_size=1 / 16, dimension=20, optimum=optimum)
    w_up = sum(float(descent.variance(k)) for k in levels if k is not None) / len(levels) ** 2
    w_down = 0.0 if down is None else float(descent.variance(down))
    rate, left = descent.rate(w_up, w_down), descent.neighbourhood(w_up, w_down)
    bound = rate ** np.arange(601) * squares[0] + left
    assert rate < 1
    assert (squares <= bound).all()
    # the term that stays is needed, and it is no more than 200 times what is there
    assert rate**600 * squares[0] < squares[-1] < left < 200 * squares[-1]


def test_users_together_may_be_coarser_than_the_report_allows_one_of_them() -> None:
    report = a_descent(d=20, constants="report")
    corrected = a_descent(d=20)
    coarse = np.full(4, float(corrected.variance(11)))
    with pytest.raises(UserError, match=r"w_up = 0.041.* is not below"):
        report.total_neighbourhood(coarse)
    assert corrected.total_neighbourhood(coarse) == pytest.approx(corrected.neighbourhood(coarse[0] / 4, 0.0))
    fine = np.full(4, float(corrected.variance(40)))
    assert report.total_neighbourhood(fine) == pytest.approx(4 * report.neighbourhood(fine[0], 0.0))


@pytest.mark.parametrize("other", [0.0, 5e-4])
def test_eq_9_is_the_error_that_is_allocated_but_for_a_constant(other: float) -> None:
    report = a_descent(constants="report", optimum=2.5)
    d = report.dimension
    bits = d * np.array([6.6, 7.0, 8.5, 12.0])
    w = report.variance(2 ** (bits / d))
    up = report.uplink_errors(4, down=other).values(bits)
    expected = np.array([report.neighbourhood(float(each), other) for each in w])
    assert np.diff(up) == pytest.approx(np.diff(expected), rel=1e-9)
    down = report.downlink_errors(4, up=other).values(bits)
    expected = np.array([report.neighbourhood(other, float(each)) for each in w])
    assert np.diff(down) == pytest.approx(np.diff(expected), rel=1e-9)
    assert report.uplink_errors(4, down=other).min_bits()[0] == pytest.approx(report.uplink_bits(other))


def test_corrected_users_are_judged_by_the_sum_of_their_variances() -> None:
    corrected = a_descent()
    random = np.random.default_rng(0)
    errors = corrected.uplink_errors(5)
    assert not errors.pole.any()
    bits = 100 * random.uniform(5, 8, (30, 5))
    ours = [errors.values(each).sum() for each in bits]
    theirs = [corrected.total_neighbourhood(corrected.variance(2 ** (each / 100))) for each in bits]
    assert np.argsort(ours).tolist() == np.argsort(theirs).tolist()
    means = [float(corrected.variance(2 ** (each / 100)).sum()) / 25 for each in bits]
    assert ours == pytest.approx(means)


def test_the_level_ratio_is_the_stationary_one_and_the_report_s_is_not() -> None:
    """Along k_1 k_2 = const the sum is stationary where both errors have the same slope in log k: equal w / D^2."""
    report, levels = a_descent(constants="report"), (60.0, 90.0)
    up = (float(report.variance(levels[0])), float(report.variance(levels[1])))

    def fall(k: float) -> float:
        """Return the slope of the error neighbourhood in log k, by a central difference."""
        low, high = (report.neighbourhood(float(report.variance(k * (1 + h))), 0.0) for h in (1e-6, -1e-6))
        return (high - low) / 2e-6

    # so the root of the falls' ratio is (k_2 / k_1) x (D_2 / D_1)
    ratio = np.sqrt(fall(levels[0]) / fall(levels[1])) * levels[0] / levels[1]
    assert a_descent().level_ratio(up) == pytest.approx(ratio, rel=1e-6)
    assert report.level_ratio(up) > 1.05 * ratio
    # at like levels, the only fixed point for like users, both are 1
    for descent in (report, a_descent()):
        assert descent.level_ratio((up[0], up[0])) == pytest.approx(1.0)


def test_a_coarse_quantiser_has_the_smaller_of_two_factors() -> None:
    k = np.array([1.0, 2.0, 2.5, 3.0, 50.0])
    assert a_descent(constants="report").variance(k) == pytest.approx(100 / (4 * k**2))
    assert a_descent().variance(k) == pytest.approx([10, 5, 4, 100 / 36, 0.01])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: a_descent().neighbourhood(0.1, 0.0), "w_up = 0.1 is not below 0.0147059"),
        (lambda: a_descent().neighbourhood(0.0, 0.1), "w_down = 0.1 is above 0.0033783"),
        (lambda: a_descent().neighbourhood(-1.0, 0.0), "cannot be negative"),
        (lambda: a_descent().neighbourhood(float("nan"), 0.0), "cannot be negative"),
        (lambda: a_descent().variance(0.0), "levels = 0.0"),
        (lambda: a_descent().downlink_errors(2, up=0.02), "leaves no contraction"),
    ],
)
def test_where_the_theorem_does_not_hold_it_says_so(call: object, message: str) -> None:
    with pytest.raises(UserError, match=message):
        call()  # type: ignore[operator]


def test_a_loss_is_no_more_convex_than_smooth() -> None:
    with pytest.raises(ValidationError, match="convexity = 2 is above smoothness = 1"):
        QuantisedDescent(smoothness=1, convexity=2, step_size=0.1, dimension=1)


def test_quantisation_is_unbiased_and_within_its_variance() -> None:
    random = np.random.default_rng(0)
    x = random.standard_normal(50) * np.arange(50)
    for levels in (2, 7, 64):
        drawn = quantise_vectors(np.tile(x, (20_000, 1)), levels, random)
        spread = drawn.std(axis=0) / np.sqrt(20_000)
        assert (np.abs(drawn.mean(axis=0) - x) <= 6 * spread + 1e-9).all()
        factor = ((drawn - x) ** 2).sum(axis=1).mean() / (x**2).sum()
        assert factor <= min(50 / (4 * levels**2), np.sqrt(50) / levels)
        on_grid = np.abs(drawn / np.linalg.norm(x) * levels)
        assert np.abs(on_grid - np.rint(on_grid)).max() < 1e-9
    assert not quantise_vectors(np.zeros((2, 3)), 4, random).any()


def test_a_channel_is_exact_up_to_its_budget_and_noisy_above() -> None:
    random = np.random.default_rng(0)
    values = np.repeat(quantise(np.linspace(0, 1, 9), 32, random), 100_000)
    assert np.array_equal(receive(values, 32, 32.0, random), values)
    arrived = receive(values, 32, 8.0, random)
    assert not np.array_equal(arrived, values)
    assert arrived.min() >= 0
    assert arrived.max() <= 1
    # in the middle: noise of 1 / (2 K), and the quantiser's own of at most 1 / (2 k)
    middle = arrived.reshape(9, -1)[4]
    assert 1 / 16 < middle.std() < np.sqrt(1 / 16**2 + 1 / 64**2) * 1.01
    x = random.standard_normal((4, 6))
    assert np.array_equal(
        np.sign(receive_vectors(x, 2**16, 2.0, random)) * np.sign(x) >= 0, np.ones((4, 6), dtype=bool)
    )
