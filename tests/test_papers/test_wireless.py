"""Table 1, section 3.1 and Figures 2 to 4 of the wireless report."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import matplotlib.image
import numpy as np
import pytest

from narrowcast_papers.wireless.figures import (
    LINKS,
    DescentCurve,
    compute_figures,
    judge_figures,
    plot_figures,
)
from narrowcast_papers.wireless.table import (
    BOTH_LINKS,
    FIRST_LINK,
    REPORT,
    Allocated,
    compute_table1,
    judge_section31,
    judge_table1,
    plot_table1,
)


@pytest.fixture(scope="module")
def table1() -> list[Allocated]:
    return compute_table1()


@pytest.fixture(scope="module")
def curves() -> list[DescentCurve]:
    return compute_figures()


def test_every_feasible_row_of_table_1_is_exact(table1: list[Allocated]) -> None:
    assert len(table1) == 10
    for row in table1:
        if row.link == "downlink" and row.second_link == 6:
            assert row.exact is None
            assert row.paper is None
            assert row.infeasible.startswith("users {1} need at least 642.665 bits and their links carry 600 ")
        else:
            assert row.exact == pytest.approx(row.paper, abs=1e-9)
            assert row.whole == row.paper
            assert row.infeasible == ""
    thresholds = {(row.link, round(row.threshold, 2)) for row in table1}
    assert thresholds == {("uplink", 5.37), ("downlink", 6.43)}


@pytest.mark.parametrize("link", ["uplink", "downlink"])
def test_table_1_is_the_best_of_all_whole_levels(table1: list[Allocated], link: str) -> None:
    """Eq. (9) is minimised over all pairs of levels on the boundary of eq. (8), since it falls in both levels."""
    for row in (row for row in table1 if row.link == link):
        least = int(np.ceil(2**row.threshold))
        firsts = np.arange(least, 2**FIRST_LINK + 1)
        seconds = np.minimum(2**BOTH_LINKS // firsts, 2**row.second_link)
        feasible = seconds >= least
        assert feasible.any() == (row.whole is not None)
        if row.whole is not None:
            totals = [
                sum(
                    REPORT.neighbourhood(*((w, 0.0) if link == "uplink" else (0.0, w)))
                    for w in (float(REPORT.variance(k)) for k in pair)
                )
                for pair in zip(firsts[feasible], seconds[feasible], strict=True)
            ]
            best = int(np.argmin(totals))
            pair = (firsts[feasible][best], seconds[feasible][best])
            assert np.log2(pair) == pytest.approx(row.whole)


def test_what_is_made_of_table_1(table1: list[Allocated]) -> None:
    verdicts = judge_table1(table1)
    assert len(verdicts) == 12
    assert [row.verdict for row in verdicts].count("agrees") == 11
    (infeasible,) = [row for row in verdicts if row.verdict != "agrees"]
    assert infeasible.what == "downlink, links (2^9, 2^6, 2^14)"
    assert infeasible.ours == "infeasible: user 2 needs 2^6.43 levels, its link has 2^6"
    moved = [*table1[:2], Allocated("uplink", 7, 5.37, (7, 7), (7.1, 6.9), (7.0, 7.0), "")]
    assert judge_table1(moved)[-1].verdict == "differs"


def test_the_example_of_section_3_1() -> None:
    verdicts = {row.what: row for row in judge_section31()}
    assert verdicts["uplink only, steps / kappa"].ours == "5.214"
    assert verdicts["uplink only, neighbourhood / ||x*||^2"].ours == "0.2857"
    down = verdicts["downlink only, neighbourhood / ||x*||^2"]
    assert down.ours == "(19 - 2/kappa)/73 = 0.2534"
    assert down.verdict.startswith("differs")
    assert float(down.ours.split()[-1]) == pytest.approx((19 - 2 / 4) / 73, abs=1e-4)
    assert verdicts["w within the downlink's condition"].ours == "no: 1/292 against 1/296"
    assert judge_section31(2.0)[-1].ours == "yes: 1/146 against 1/144"


@pytest.mark.slow
def test_the_figures_show_what_the_report_says_of_them(curves: list[DescentCurve]) -> None:
    assert len(curves) == sum(len(links) for links in LINKS.values())
    floor = {(curve.figure, curve.uplink, curve.downlink): curve.floor for curve in curves}
    # figure 2: eight bits are log10(2^8) = 2.41 decades, on either link; the uplink ends above the downlink
    for link in product((2,), (8, None), (8, None)):
        if link[1:].count(None) == 1:
            finer = tuple(16 if bits == 8 else bits for bits in link)
            finer = (2, *finer[1:])
            assert np.log10(floor[link] / floor[finer]) == pytest.approx(np.log10(2**8), abs=0.1)
    assert floor[2, 8, None] > 1.05 * floor[2, None, 8]
    assert floor[2, 16, None] > 1.05 * floor[2, None, 16]
    assert floor[2, None, None] < 1e-8
    # figure 3: under-use; figure 4: over-use
    assert floor[3, 8, 8] < floor[3, 8, 4] < floor[3, 4, 8] < floor[3, 4, 4]
    assert floor[4, 8, 8] < floor[4, 8, 16] < floor[4, 16, 8] < floor[4, 16, 16]
    assert floor[3, 4, 4] > floor[4, 16, 16]
    assert all(row.verdict != "differs" for row in judge_figures(curves))


def test_error_free_descent_is_linear_at_its_rate(curves: list[DescentCurve]) -> None:
    (exact,) = [curve for curve in curves if curve.name == "uplink full, downlink full"]
    steps = exact.distance[1:300] / exact.distance[:299]
    assert steps.max() <= 1 - 1 / 16 + 1e-9
    assert steps[-1] == pytest.approx(1 - 1 / 16, rel=1e-3)


@pytest.mark.slow
def test_a_seed_is_a_problem_and_its_noise(curves: list[DescentCurve]) -> None:
    again, other = compute_figures(), compute_figures(seed=1)
    assert all(np.array_equal(one.distance, two.distance) for one, two in zip(curves, again, strict=True))
    assert not any(np.array_equal(one.distance, two.distance) for one, two in zip(curves, other, strict=True))
    assert all(row.verdict != "differs" for row in judge_figures(other))


@pytest.mark.slow
def test_the_plots_are_drawn(table1: list[Allocated], curves: list[DescentCurve], tmp_path: Path) -> None:
    plot_table1(table1, tmp_path / "table1.png")
    paths = [tmp_path / "table1.png", *plot_figures(curves, tmp_path)]
    assert [path.name for path in paths[1:]] == [f"wireless_figure{figure}.png" for figure in (2, 3, 4)]
    for path in paths:
        image = matplotlib.image.imread(path)
        assert image[..., :3].std() > 0.02, "a blank image"
