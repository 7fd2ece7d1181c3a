"""The targets of `narrowcast reproduce`: the runs of each table or figure, its verdicts and its plots."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from narrowcast.algorithms.secure.optional_imports import library
from narrowcast.reproduce import (
    colr_bound,
    colr_components,
    colr_payload,
    colr_pinterest,
    colr_times,
    lecture_bound,
    lecture_fixed_point,
    sdp_saddle,
    wireless,
    wireless_figures,
)
from narrowcast.reproduce.colr_accuracy import COLR as COLR_POINTS
from narrowcast.reproduce.colr_accuracy import (
    FEDMF,
    FIGURE_3,
    FIGURE_4,
    SVD,
    TABLE_4,
    TOP_K,
    Point,
    judge_order,
    judge_points,
    plot_points,
)
from narrowcast.reproduce.run_spec import Results, RunSpec
from narrowcast.reproduce.verdict import PaperVerdict
from narrowcast.runs.significance import MARGIN

COLR = "Nguyen et al., WWW 2024 (arXiv:2401.03748)"
LECTURE = "X. Chang's Lecture 11, Federated Optimization"
BURER_MONTEIRO = "Burer and Monteiro, Mathematical Programming 103, 2005"
WIRELESS = "N. Mehrotra's report, Federated Learning at the Wireless Edge"


Finished = tuple[list[PaperVerdict], list[Path]]


@dataclass(frozen=True)
class Target:
    """A table or figure. `finish` takes the results and a path, and returns the verdicts and the PNG files drawn.

    `takes`: time for three seeds on 2 cores. `alone`: its runs are timed, so they run one at a time. `notes`:
    assumptions of the verdicts.
    """

    source: str
    what: str
    takes: str
    finish: Callable[[Results, Path], Finished]
    runs: tuple[RunSpec, ...] = ()
    alone: bool = False
    notes: tuple[str, ...] = ()


def _table_1(results: Results, path: Path) -> Finished:
    del results
    rows = wireless.compute_table1()
    wireless.plot_table1(rows, png := path.with_suffix(".png"))
    return [*wireless.judge_table1(rows), *wireless.judge_section31()], [png]


def _figures_2_to_4(results: Results, path: Path) -> Finished:
    del results
    curves = wireless_figures.compute_figures()
    return wireless_figures.judge_figures(curves), wireless_figures.plot_figures(curves, path.parent)


def _table_4(results: Results, path: Path) -> Finished:
    title = "Table 4: SCoLR on ml-1m, uniform ranks up to r_g"
    plot_points(TABLE_4, results, title, png := path.with_suffix(".png"))
    return judge_points(TABLE_4, results), [png]


def _figure_3(results: Results, path: Path) -> Finished:
    title = "Figure 3: CoLR and FedMF on ml-1m at the same payload"
    plot_points(FIGURE_3, results, title, png := path.with_suffix(".png"))
    same_payload = tuple(point for point in FEDMF if point.size < 64)
    return [*judge_points(FIGURE_3, results), judge_order(COLR_POINTS, same_payload, results)], [png]


def _figure_4(results: Results, path: Path) -> Finished:
    plot_points(FIGURE_4, results, "Figure 4: CoLR, SVD and Top-K on ml-1m", png := path.with_suffix(".png"))
    orders = [
        judge_order(COLR_POINTS, tuple(point for point in rivals if (point.size > 2) == wide), results)
        for rivals in (SVD, TOP_K)
        for wide in (True, False)
    ]
    return [*judge_points(FIGURE_4, results), *orders], [png]


def _figure_5(results: Results, path: Path) -> Finished:
    colr_payload.plot_payloads(results, png := path.with_suffix(".png"))
    return colr_payload.judge_payloads(results), [png]


def _figure_6(results: Results, path: Path) -> Finished:
    colr_pinterest.plot_convergence(results, png := path.with_suffix(".png"))
    return colr_pinterest.judge_convergence(results), [png]


def _bound(results: Results, path: Path) -> Finished:
    del results
    errors = {rank: colr_bound.measure_error(rank) for rank in colr_bound.RANKS}
    convergence = {rank: colr_bound.measure_convergence(rank, "orthonormal") for rank in colr_bound.RANKS}
    colr_bound.plot_bound(errors, convergence, png := path.with_suffix(".png"))
    return colr_bound.judge_bound(errors, convergence), [png]


def _least_squares(results: Results, path: Path) -> Finished:
    del results
    data = f"{lecture_fixed_point.STRONG}, heterogeneity: "
    strong = {each: lecture_fixed_point.measure_case(f"{data}{each:g}") for each in lecture_fixed_point.SPREADS}
    convex = {
        name: lecture_fixed_point.measure_case(each, lecture_fixed_point.SHORT)
        for name, each in lecture_fixed_point.CONVEX.items()
    }
    scaffold = lecture_fixed_point.measure_scaffold(f"{data}{lecture_fixed_point.SPREADS[0]:g}")
    lecture_fixed_point.plot_limits(strong, scaffold, png := path.with_suffix(".png"))
    return lecture_fixed_point.judge_limits(strong, convex, scaffold), [png]


def _theorem_1(results: Results, path: Path) -> Finished:
    del results
    descents = {
        spread: [lecture_bound.measure_descent(spread, steps) for steps in lecture_bound.STEPS]
        for spread in lecture_bound.SPREADS
    }
    sampled = lecture_bound.measure_sampled()
    lecture_bound.plot_descents(descents, sampled, png := path.with_suffix(".png"))
    return lecture_bound.judge_descents(descents, sampled), [png]


def _table_2(results: Results, path: Path) -> Finished:
    colr_times.plot_times(results, png := path.with_suffix(".png"))
    return colr_times.judge_times(results), [png]


def _table_3(results: Results, path: Path) -> Finished:
    del results
    for name in ("cryptography", "tenseal", "phe", "gmpy2"):
        library(name, "colr-table3")
    from narrowcast.reproduce import colr_encryption

    costs = colr_encryption.measure_costs()
    colr_encryption.plot_costs(costs, png := path.with_suffix(".png"))
    return colr_encryption.judge_costs(costs), [png]


def _saddles(results: Results, path: Path) -> Finished:
    del results
    runs = sdp_saddle.run_saddles()
    sdp_saddle.plot_saddles(runs, png := path.with_suffix(".png"))
    return sdp_saddle.judge_saddles(runs), [png]


def _figure_2(results: Results, path: Path) -> Finished:
    colr_components.plot_components(results, png := path.with_suffix(".png"))
    return colr_components.judge_components(results), [png]


def _runs(points: tuple[Point, ...]) -> tuple[RunSpec, ...]:
    return tuple(point.run for point in points)


_LEVEL = (
    f"Level: two one-sided t tests over the seeds put our mean within {MARGIN:g} points of the published number, which "
    "is taken as exact. Off: a t test puts it elsewhere. p values are corrected over the cells by Holm's method; the "
    "intervals, of 95 %, are not.",
)
_READ_OFF = "The paper's numbers were read from plots to within 0.3 points, which neither test includes."

TARGETS: Mapping[str, Target] = {
    "wireless-table1": Target(WIRELESS, "Table 1 and section 3.1: levels on two links", "seconds, no runs", _table_1),
    "wireless-figures": Target(WIRELESS, "Figures 2 to 4: quantised links", "10 s, no runs", _figures_2_to_4),
    "colr-table2": Target(
        COLR,
        "Table 2: minutes of communication and computation",
        "18 timings a seed, 5 min",
        _table_2,
        colr_times.timed_runs(),
        alone=True,
    ),
    "colr-table3": Target(COLR, "Table 3: seconds and bytes of encryption", "1 min, no runs", _table_3),
    "colr-table4": Target(
        COLR,
        "Table 4: SCoLR at r_g = 64 to 2, leaky negatives",
        "6 runs a seed, 4 min",
        _table_4,
        _runs(TABLE_4),
        notes=_LEVEL,
    ),
    "colr-fig2": Target(
        COLR,
        "Figure 2: effective rank by round, leaky negatives",
        "1 run a seed, 1 min",
        _figure_2,
        (colr_components.RUN,),
    ),
    "colr-fig3": Target(
        COLR,
        "Figure 3: CoLR and FedMF, leaky negatives",
        "13 runs a seed, 8 min",
        _figure_3,
        _runs(FIGURE_3),
        notes=(*_LEVEL, _READ_OFF),
    ),
    "colr-fig4": Target(
        COLR,
        "Figure 4: CoLR, SVD, Top-K, leaky negatives",
        "18 runs a seed, 25 min",
        _figure_4,
        _runs(FIGURE_4),
        notes=(*_LEVEL, _READ_OFF),
    ),
    "colr-fig5": Target(
        COLR,
        "Figure 5: SCoLR, CoLR and FedMF by payload, leaky negatives",
        "19 runs a seed, 12 min",
        _figure_5,
        _runs(colr_payload.POINTS),
        notes=(
            "Paired by seed; CoLR is interpolated between its ranks. Level: two one-sided t tests put the difference "
            f"within {MARGIN:g} points. p values are corrected over the rows by Holm's method.",
        ),
    ),
    "colr-fig6": Target(
        COLR,
        "Figure 6: convergence on pinterest, leaky negatives",
        "4 runs a seed, not measured",
        _figure_6,
        tuple(colr_pinterest.RUNS.values()),
        notes=(*_LEVEL, "HR@10 of SVD and Top-K was read from a plot."),
    ),
    "colr-bound": Target(COLR, "Theorem D.3: error of a low-rank round beside its bound", "10 s, no runs", _bound),
    "lecture-least-squares": Target(
        LECTURE,
        "Example 1: where rounds of E local steps end, and the bias",
        "1 min, no runs",
        _least_squares,
        notes=(
            "Ten clients (20, 3) have linear regressions of their own; the server averages their models after E full "
            "gradient steps each. Paper: the distance of equation 6 from the solution x_LS of all data; ours: that of "
            "the last model. Gamma = f* - mean f_k* is the lecture's measure of heterogeneity. Spread: standard "
            "deviation of the clients' true solutions. Where everything together is only convex, the limit is compared "
            "with the solution nearest to the first model.",
        ),
    ),
    "lecture-bound": Target(
        LECTURE,
        "Theorem 1: the error at decaying step sizes beside its bound",
        "1 min, no runs",
        _theorem_1,
        notes=(
            "Paper: the bound on f(x^T) - f* after the last round; ours: the error. Shares of B: gradient noise, "
            "heterogeneity Gamma, and the drift of local steps, (E - 1)^2 G^2. The theorem asks for clients that are "
            "strongly convex: for those that are only convex alpha is 0, and it says nothing.",
        ),
    ),
    "sdp-saddle": Target(
        BURER_MONTEIRO,
        "MAXCUT relaxations from a saddle point, with and without a perturbation",
        "30 s, no runs",
        _saddles,
        notes=(
            "Ten random graphs of 60 vertices and 200 edges, 25 iterations of the solver burer_monteiro from vectors "
            "of which all columns but the first are zero. Optimal: the proved gap is at most 1e-6. The paper has no "
            "numbers of such starts; the control is the plain method without zero columns. by_seed in the CSV file: "
            "the last gap, then the least eigenvalue of the slack, then the share of the optimum.",
        ),
    ),
}
