"""The tables and figures of CoLR's paper: their runs, verdicts and plots."""

from __future__ import annotations

from pathlib import Path

from narrowcast.algorithms.secure.schemes import library
from narrowcast.studies.spec import Results, RunSpec
from narrowcast.studies.tables import Finished, RecordedTable
from narrowcast_papers.colr import bound, components, payload, pinterest, times
from narrowcast_papers.colr.accuracy import (
    COLR,
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


def _table_4(results: Results, path: Path) -> Finished:
    title = "Table 4: SCoLR on ml-1m, uniform ranks up to r_g"
    plot_points(TABLE_4, results, title, png := path.with_suffix(".png"))
    return judge_points(TABLE_4, results), [png]


def _figure_3(results: Results, path: Path) -> Finished:
    title = "Figure 3: CoLR and FedMF on ml-1m at the same payload"
    plot_points(FIGURE_3, results, title, png := path.with_suffix(".png"))
    same_payload = tuple(point for point in FEDMF if point.size < 64)
    return [*judge_points(FIGURE_3, results), judge_order(COLR, same_payload, results)], [png]


def _figure_4(results: Results, path: Path) -> Finished:
    plot_points(FIGURE_4, results, "Figure 4: CoLR, SVD and Top-K on ml-1m", png := path.with_suffix(".png"))
    orders = [
        judge_order(COLR, tuple(point for point in rivals if (point.size > 2) == wide), results)
        for rivals in (SVD, TOP_K)
        for wide in (True, False)
    ]
    return [*judge_points(FIGURE_4, results), *orders], [png]


def _figure_5(results: Results, path: Path) -> Finished:
    payload.plot_payloads(results, png := path.with_suffix(".png"))
    return payload.judge_payloads(results), [png]


def _figure_6(results: Results, path: Path) -> Finished:
    pinterest.plot_convergence(results, png := path.with_suffix(".png"))
    return pinterest.judge_convergence(results), [png]


def _bound(results: Results, path: Path) -> Finished:
    del results
    errors = {rank: bound.measure_error(rank) for rank in bound.RANKS}
    convergence = {rank: bound.measure_convergence(rank, "orthonormal") for rank in bound.RANKS}
    bound.plot_bound(errors, convergence, png := path.with_suffix(".png"))
    return bound.judge_bound(errors, convergence), [png]


def _table_2(results: Results, path: Path) -> Finished:
    times.plot_times(results, png := path.with_suffix(".png"))
    return times.judge_times(results), [png]


def _table_3(results: Results, path: Path) -> Finished:
    del results
    for name in ("cryptography", "tenseal", "phe", "gmpy2"):
        library(name, "colr-table3")
    from narrowcast_papers.colr import encryption

    costs = encryption.measure_costs()
    encryption.plot_costs(costs, png := path.with_suffix(".png"))
    return encryption.judge_costs(costs), [png]


def _figure_2(results: Results, path: Path) -> Finished:
    components.plot_components(results, png := path.with_suffix(".png"))
    return components.judge_components(results), [png]


def _runs(points: tuple[Point, ...]) -> tuple[RunSpec, ...]:
    return tuple(point.run for point in points)


TABLE_2_MINUTES = RecordedTable(_table_2, times.timed_runs(), alone=True)
TABLE_3_ENCRYPTION = RecordedTable(_table_3)
TABLE_4_RANKS = RecordedTable(_table_4, _runs(TABLE_4))
FIGURE_2_COMPONENTS = RecordedTable(_figure_2, (components.RUN,))
FIGURE_3_RANKS = RecordedTable(_figure_3, _runs(FIGURE_3))
FIGURE_4_CODECS = RecordedTable(_figure_4, _runs(FIGURE_4))
FIGURE_5_PAYLOADS = RecordedTable(_figure_5, _runs(payload.POINTS))
FIGURE_6_CONVERGENCE = RecordedTable(_figure_6, tuple(pinterest.RUNS.values()))
BOUND = RecordedTable(_bound)
