"""Intervals, equivalence tests, Holm's correction and the bootstrap, against plain references and worked examples."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from narrowcast.runs.significance import (
    bootstrap_over_users,
    compare_paired,
    compare_with_published,
    holm,
    mean_interval,
    paired_interval,
)

# Student (1908), table of hours of additional sleep of ten patients under two drugs, paired by patient.
DRUG_1 = [0.7, -1.6, -0.2, -1.2, -0.1, 3.4, 3.7, 0.8, 0.0, 2.0]
DRUG_2 = [1.9, 0.8, 1.1, 0.1, -0.1, 4.4, 5.5, 1.6, 4.6, 3.4]


def test_students_sleep_data_has_its_published_interval_and_p_value() -> None:
    """As printed by R's t.test(extra ~ group, paired = TRUE): t = -4.0621, p = 0.002833, -2.4598858 to -0.7001142."""
    interval, test = paired_interval(DRUG_1, DRUG_2), compare_paired(DRUG_1, DRUG_2)
    assert (interval.low, interval.high) == pytest.approx((-2.4598858, -0.7001142), abs=5e-8)
    assert test.p_zero == pytest.approx(0.002833, abs=5e-7)
    assert interval == test.interval
    assert interval.mean == pytest.approx(-1.58)
    assert interval.half_width == pytest.approx(0.8798858, abs=5e-8)


@pytest.mark.parametrize("shift", [-0.4, -0.25, 0.0, 0.1, 0.29, 0.31])
@pytest.mark.parametrize("n", [2, 5, 20])
def test_level_is_two_one_sided_t_tests(n: int, shift: float) -> None:
    ours = 60 + shift + np.random.default_rng(n).normal(0, 0.1, n)
    test = compare_with_published(ours, 60.0, margin=0.3)
    low = stats.ttest_1samp(ours, 60.0 - 0.3, alternative="greater").pvalue
    high = stats.ttest_1samp(ours, 60.0 + 0.3, alternative="less").pvalue
    assert test.p_level == pytest.approx(max(low, high), rel=1e-9)
    assert test.p_zero == pytest.approx(stats.ttest_1samp(ours, 60.0).pvalue, rel=1e-9)
    # The test of level at 5 % is the inclusion of the 90 % interval in the margin.
    inside = mean_interval(ours - 60.0, confidence=0.9)
    assert (test.p_level < 0.05) == (inside.low > -0.3 and inside.high < 0.3)


def test_level_and_different_are_two_questions() -> None:
    exact = compare_with_published([60.1, 60.11, 60.09], 60.0, margin=0.3)
    assert exact.p_level < 0.01 and exact.p_zero < 0.01, "a small difference that is certain"
    noisy = compare_with_published([59.0, 60.2, 61.0], 60.0, margin=0.3)
    assert noisy.p_level > 0.05 and noisy.p_zero > 0.05, "not settled"


def test_a_published_mean_with_a_spread_makes_both_tests_weaker() -> None:
    ours = [59.5, 59.6, 59.7, 59.4, 59.5]
    exact = compare_with_published(ours, 60.0)
    spread = compare_with_published(ours, 60.0, published_seeds=5)
    assert spread.interval.half_width == pytest.approx(exact.interval.half_width * np.sqrt(2))
    assert spread.p_zero > exact.p_zero
    assert compare_with_published(ours, 59.6, published_seeds=5).p_level > compare_with_published(ours, 59.6).p_level


@pytest.mark.parametrize("margin", [0.1, 0.3])
def test_one_seed_settles_nothing(margin: float) -> None:
    test = compare_with_published([60.0], 60.0, margin=margin)
    assert (test.p_zero, test.p_level) == (1.0, 1.0)
    assert (test.interval.mean, test.interval.low, test.interval.high) == (0.0, -np.inf, np.inf)


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [([1.0, 2.0], [1.0, 2.0]), ([2.0, 3.0], [1.0, 2.0]), ([63.1, 62.7, 0.3], [60.1, 59.7, -2.7])],
    ids=["equal", "apart", "apart to rounding"],
)
def test_values_without_spread_settle_nothing(ours: list[float], theirs: list[float]) -> None:
    for margin in (0.3, 0.0):
        test = compare_paired(ours, theirs, margin=margin)
        assert (test.p_zero, test.p_level) == (1.0, 1.0)
    assert test.interval.mean == pytest.approx(ours[0] - theirs[0])


@pytest.mark.parametrize(
    ("p_values", "corrected"),
    [
        ([], []),
        ([0.04], [0.04]),
        ([0.01, 0.04, 0.03, 0.005], [0.03, 0.06, 0.06, 0.02]),  # R: p.adjust(c(.01, .04, .03, .005), "holm")
        ([0.6, 0.5], [1.0, 1.0]),
        ([0.02, 0.02, 0.02], [0.06, 0.06, 0.06]),
    ],
)
def test_holm_corrects_worked_examples(p_values: list[float], corrected: list[float]) -> None:
    assert holm(p_values) == pytest.approx(corrected)


def test_holm_rejects_what_the_stepwise_procedure_rejects() -> None:
    random = np.random.default_rng(0)
    for _ in range(200):
        p_values = random.uniform(0, 0.1, 6).tolist()
        rejected: set[int] = set()
        for place, index in enumerate(np.argsort(p_values)):
            if p_values[index] > 0.05 / (6 - place):
                break
            rejected.add(int(index))
        assert {index for index, p in enumerate(holm(p_values)) if p <= 0.05} == rejected


def test_the_bootstrap_resamples_users_jointly() -> None:
    """The percentile interval is that of a loop over resampled users, and of SciPy, up to simulation error."""
    random = np.random.default_rng(1)
    ours, theirs = random.random((3, 400)) < 0.6, random.random((3, 400)) < 0.5
    got = bootstrap_over_users(ours, theirs)
    by_user = (ours.astype(float) - theirs).mean(axis=0)
    loop = [by_user[random.integers(0, 400, 400)].mean() for _ in range(4000)]
    spread = float(np.std(by_user, ddof=1) / np.sqrt(400))
    assert got.mean == pytest.approx(by_user.mean())
    assert (got.low, got.high) == pytest.approx(tuple(np.quantile(loop, [0.025, 0.975])), abs=0.1 * spread)
    other = stats.bootstrap((by_user,), np.mean, n_resamples=4000, method="percentile", batch=500)
    assert (got.low, got.high) == pytest.approx(tuple(other.confidence_interval), abs=0.15 * spread)
    assert got == bootstrap_over_users(ours, theirs), "the same seed draws the same resamples"


@pytest.mark.slow
def test_pairing_removes_what_users_have_in_common() -> None:
    random = np.random.default_rng(2)
    easy = random.random((1, 2000))
    ours, theirs = easy + 0.01, easy + 0.01 * random.standard_normal((1, 2000))
    assert bootstrap_over_users(ours, theirs).half_width < 0.001
    unpaired = bootstrap_over_users(ours, random.permuted(theirs, axis=1))
    assert unpaired.half_width > 0.01


@pytest.mark.parametrize("wrong", [lambda: compare_paired([1.0, 2.0], [1.0]), lambda: mean_interval([])])
def test_shapes_that_do_not_fit_are_refused(wrong: object) -> None:
    with pytest.raises(ValueError, match="shape"):
        wrong()  # type: ignore[operator]
