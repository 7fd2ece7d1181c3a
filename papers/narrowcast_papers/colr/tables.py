"""The tables and figures of CoLR's paper: their runs, verdicts and plots."""

from __future__ import annotations

from pathlib import Path

from narrowcast.algorithms.secure.schemes import library
from narrowcast.studies.spec import Results
from narrowcast.studies.tables import Finished, RecordedTable
from narrowcast.studies.verdicts import PaperVerdict
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

_Points = tuple[Point, ...]


def _of_points(title: str, points: _Points, *orders: tuple[_Points, _Points]) -> RecordedTable:
    """Return the table of points, and of the order of each pair of series of one payload."""

    def judge(results: Results) -> list[PaperVerdict]:
        return [*judge_points(points, results), *(judge_order(*pair, results) for pair in orders)]

    return RecordedTable.of(
        (point.run for point in points), judge, lambda results, path: plot_points(points, results, title, path)
    )


def _bounds() -> tuple[dict[int, bound.ErrorCurve], dict[int, bound.Convergence]]:
    convergence = {rank: bound.measure_convergence(rank, "orthonormal") for rank in bound.RANKS}
    return {rank: bound.measure_error(rank) for rank in bound.RANKS}, convergence


def _table_3(results: Results, path: Path) -> Finished:
    del results
    for name in ("cryptography", "tenseal", "phe", "gmpy2"):
        library(name, "colr-table3")
    from narrowcast_papers.colr import encryption

    costs = encryption.measure_costs()
    encryption.plot_costs(costs, png := path.with_suffix(".png"))
    return encryption.judge_costs(costs), [png]


_SAME_PAYLOAD = tuple(point for point in FEDMF if point.size < 64)
_WIDE_AND_NARROW = [
    (COLR, tuple(point for point in rivals if (point.size > 2) == wide))
    for rivals in (SVD, TOP_K)
    for wide in (True, False)
]
TABLE_2_MINUTES = RecordedTable.of(times.timed_runs(), times.judge_times, times.plot_times, alone=True)
TABLE_3_ENCRYPTION = RecordedTable(_table_3)
TABLE_4_RANKS = _of_points("Table 4: SCoLR on ml-1m, uniform ranks up to r_g", TABLE_4)
FIGURE_2_COMPONENTS = RecordedTable.of((components.RUN,), components.judge_components, components.plot_components)
FIGURE_3_RANKS = _of_points("Figure 3: CoLR and FedMF on ml-1m at the same payload", FIGURE_3, (COLR, _SAME_PAYLOAD))
FIGURE_4_CODECS = _of_points("Figure 4: CoLR, SVD and Top-K on ml-1m", FIGURE_4, *_WIDE_AND_NARROW)
FIGURE_5_PAYLOADS = RecordedTable.of(
    (point.run for point in payload.POINTS), payload.judge_payloads, payload.plot_payloads
)
FIGURE_6_CONVERGENCE = RecordedTable.of(
    pinterest.RUNS.values(), pinterest.judge_convergence, pinterest.plot_convergence
)
BOUND = RecordedTable.computed(_bounds, bound.judge_bound, bound.plot_bound)
