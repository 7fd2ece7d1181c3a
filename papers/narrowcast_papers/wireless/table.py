"""Table 1 and the numbers of section 3.1 of N. Mehrotra's report, Federated Learning at the Wireless Edge.

The report states neither the dimension nor the condition number of Table 1. Its two thresholds, 2^5.37 and 2^6.43,
follow from d = 100, L / mu = 4 and gamma = 1 / (4 L); no other natural choice was found that gives both. L / mu = 4
corresponds to a least-squares matrix with condition number 2, which the report mentions.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from narrowcast.algorithms.channel.allocation import least_error, out_of_reach
from narrowcast.algorithms.channel.regions import TableRegion
from narrowcast.platform.tracking.figures import BLACK, BLUE, VERMILLION, new_figure
from narrowcast.platform.types import FloatArray
from narrowcast.studies.tables import RecordedTable
from narrowcast.studies.verdicts import PaperVerdict
from narrowcast_papers.wireless.errors import Neighbourhoods, whole_levels
from narrowcast_papers.wireless.theory import QuantisedDescent

REPORT = QuantisedDescent(smoothness=4, convexity=1, step_size=1 / 16, dimension=100, constants="report")
FIRST_LINK, BOTH_LINKS = 9, 14
"""log2 of the levels that user 1 can send, and that both users together can send."""
PAPER: dict[int, tuple[tuple[int, int], tuple[int, int] | None]] = {
    6: ((8, 6), None),
    7: ((7, 7), (7, 7)),
    8: ((7, 7), (7, 7)),
    9: ((7, 7), (7, 7)),
    10: ((7, 7), (7, 7)),
}
"""Table 1: log2 of user 2's levels -> log2 of the levels given to both on the uplink, and on the downlink.

The downlink has one entry fewer than the uplink; its empty cell is taken to be that of the first row.
"""


@dataclass(frozen=True)
class Allocated:
    """One cell of Table 1, in log2 of levels; `exact` and `whole` are None if no allocation is feasible."""

    link: Literal["uplink", "downlink"]
    second_link: int
    threshold: float
    paper: tuple[int, int] | None
    exact: tuple[float, float] | None
    whole: tuple[float, float] | None
    infeasible: str


def compute_table1() -> list[Allocated]:
    """Return the ten cells of Table 1, by exact allocation and in whole levels."""
    rows = []
    for second_link, (uplink, downlink) in PAPER.items():
        up, down = REPORT.uplink_errors(2), REPORT.downlink_errors(2)
        rows.append(_cell("uplink", second_link, np.log2(REPORT.uplink_levels()), up, uplink))
        rows.append(_cell("downlink", second_link, np.log2(REPORT.downlink_levels()), down, downlink))
    return rows


def _cell(
    link: Literal["uplink", "downlink"],
    second_link: int,
    threshold: float,
    errors: Neighbourhoods,
    paper: tuple[int, int] | None,
) -> Allocated:
    d = REPORT.dimension
    region = TableRegion.of({(0,): d * FIRST_LINK, (1,): d * second_link, (0, 1): d * BOTH_LINKS})
    lower = np.full(2, d * threshold)
    if infeasible := out_of_reach(region, 1.0, lower):
        return Allocated(link, second_link, threshold, paper, None, None, infeasible)
    exact = least_error(errors, region, 1.0, lower) / d
    whole = np.log2(whole_levels(errors, region, 1.0, lower))
    return Allocated(link, second_link, threshold, paper, _pair(exact), _pair(whole), "")


def _pair(values: FloatArray) -> tuple[float, float]:
    return float(values[0]), float(values[1])


def judge_table1(rows: list[Allocated]) -> list[PaperVerdict]:
    """Compare Table 1 with the report."""
    verdicts = [
        PaperVerdict(
            "least uplink levels", "2^5.37", f"2^{rows[0].threshold:.2f}", _same(round(rows[0].threshold, 2) == 5.37)
        ),
        PaperVerdict(
            "least downlink levels", "2^6.43", f"2^{rows[1].threshold:.2f}", _same(round(rows[1].threshold, 2) == 6.43)
        ),
    ]
    for row in rows:
        what = f"{row.link}, links (2^{FIRST_LINK}, 2^{row.second_link}, 2^{BOTH_LINKS})"
        paper = "no entry" if row.paper is None else f"(2^{row.paper[0]}, 2^{row.paper[1]})"
        if row.exact is None or row.whole is None:
            verdict = "agrees: infeasible" if row.paper is None else "the report gives an infeasible allocation"
            reason = f"infeasible: user 2 needs 2^{row.threshold:.2f} levels, its link has 2^{row.second_link}"
            verdicts.append(PaperVerdict(what, paper, reason, verdict))
            continue
        ours = f"(2^{row.exact[0]:.4g}, 2^{row.exact[1]:.4g})"
        agrees = row.paper is not None and np.allclose([*row.exact, *row.whole], 2 * row.paper, rtol=0, atol=1e-9)
        verdicts.append(PaperVerdict(what, paper, ours, _same(bool(agrees))))
    return verdicts


def judge_section31(condition: float = 4.0) -> list[PaperVerdict]:
    """Compare the example of section 3.1, w = 1 / (73 kappa) and gamma = 1 / (4 L), by Theorem 1 and Corollary 1."""
    descent = QuantisedDescent(smoothness=condition, convexity=1, step_size=1 / (4 * condition), dimension=100)
    w = 1 / (73 * condition)
    up, down = descent.neighbourhood(w, 0.0), descent.downlink_neighbourhood(w)
    steps = 1 / (1 - descent.rate(w, 0.0)) / condition
    holds = w <= descent.downlink_limit()
    return [
        PaperVerdict("uplink only, steps / kappa", "5.2", f"{steps:.3f}", _same(round(steps, 1) == 5.2)),
        PaperVerdict("downlink only, steps / kappa", "4", f"{1 / descent.contraction / condition:g}", "agrees"),
        PaperVerdict(
            "uplink only, neighbourhood / ||x*||^2", "2/7 = 0.286", f"{up:.4f}", _same(abs(up - 2 / 7) < 5e-4)
        ),
        PaperVerdict(
            "downlink only, neighbourhood / ||x*||^2",
            "4/1387 = 0.00288",
            f"(19 - 2/kappa)/73 = {down:.4f}",
            f"differs: 1387 = 73 x 19, the 19 belongs in the numerator; uplink is worse by {up / down:.2f}, not by 99",
        ),
        PaperVerdict(
            "w within the downlink's condition",
            "yes",
            f"{'yes' if holds else 'no'}: 1/{1 / w:g} against 1/{1 / descent.downlink_limit():g}",
            _same(holds) + ", since kappa is " + ("at most 8/3" if holds else "above 8/3"),
        ),
    ]


def _same(agrees: bool) -> str:
    return "agrees" if agrees else "differs"


def plot_table1(rows: list[Allocated], path: Path) -> None:
    """Plot the rate regions of Table 1 with the thresholds and the allocations, as a PNG file."""
    figure, panels = new_figure("Exact allocation in the five rate regions of Table 1 (log2 of levels)", panels=2)
    for axes, link in zip(panels, ("uplink", "downlink"), strict=True):
        mine = [row for row in rows if row.link == link]
        threshold = mine[0].threshold
        for row in mine:
            second = row.second_link
            corners = [(0, second), (min(BOTH_LINKS - second, FIRST_LINK), second)]
            corners += [(FIRST_LINK, min(BOTH_LINKS - FIRST_LINK, second)), (FIRST_LINK, 0)]
            axes.plot(*zip(*corners, strict=True), color=BLUE, linewidth=1, alpha=0.5)
            axes.annotate(f"$2^{{{second}}}$", (0.15, second), va="top", fontsize=8, color=BLUE)
            if row.exact is not None:
                axes.plot(*row.exact, "o", color=VERMILLION, markersize=7, zorder=3)
        for line in (axes.axhline, axes.axvline):
            line(threshold, color=BLACK, linewidth=0.8, linestyle="--")
        label = f"Theorem 1: at least {threshold:.2f}"
        axes.annotate(label, (threshold, 0), xytext=(-3, 6), textcoords="offset points", ha="right", fontsize=8)
        for x, y in sorted({(round(row.exact[0], 6), round(row.exact[1], 6)) for row in mine if row.exact}):
            axes.annotate(f"({x:.3g}, {y:.3g})", (x, y), xytext=(6, 6), textcoords="offset points", fontsize=9)
        missing = [f"$2^{{{row.second_link}}}$" for row in mine if row.exact is None]
        axes.set_title(link + (f"; infeasible with user 2 at {', '.join(missing)}" if missing else ""), fontsize=10)
        axes.set(xlim=(0, 10.5), ylim=(0, 11), xlabel="user 1", ylabel="user 2")
        axes.set_aspect("equal")
    figure.savefig(path, dpi=150)


TABLE_1 = RecordedTable.computed(
    lambda: (compute_table1(),), lambda rows: [*judge_table1(rows), *judge_section31()], plot_table1
)
