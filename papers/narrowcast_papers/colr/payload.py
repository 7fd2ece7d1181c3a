"""Figure 5 of Nguyen et al., WWW 2024 (arXiv:2401.03748): SCoLR, CoLR and FedMF on MovieLens-1M by size of the payload.

The paper says that SCoLR matches CoLR at the same uplink, and prints no number beside those of Table 4. Here payloads
are those that the runs counted. SCoLR's clients upload (r_g + 1) / 2 components on average and download r_g, so that it
is compared with CoLR at the same uplink and at the same total of both directions: seed by seed, with CoLR interpolated
in the logarithm of the payload between its ranks, of which FedMF with d = 64 is the largest.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import numpy as np

from narrowcast.platform.tracking.figures import BLACK, BLUE, ORANGE, VERMILLION, new_figure
from narrowcast.platform.types import FloatArray
from narrowcast.runs.significance import compare_paired
from narrowcast.studies.spec import Results
from narrowcast.studies.verdicts import PaperVerdict, PublishedMean, corrected, describe, judge_family, mean_and_spread
from narrowcast_papers.colr.accuracy import COLR, FEDMF, TABLE_4, Point, values_of

Direction = Literal["uplink", "total"]
POINTS = (*TABLE_4, *COLR, *FEDMF)
_COLOURS = {"SCoLR": VERMILLION, "CoLR": BLUE, "FedMF": ORANGE}
_KIBIBYTE = 8 * 1024
_AT_ROUND = 60  # clients


def payload_kib(point: Point, direction: Direction, results: Results) -> float:
    """Return what a client of a round uploads, or uploads and downloads, in KiB: the mean over rounds and seeds."""
    sent = [
        (result["uplink_bits"] + (result["downlink_bits"] if direction == "total" else 0)) / result["rounds"]
        for result in results[point.run.label]
    ]
    return float(np.mean(sent)) / _AT_ROUND / _KIBIBYTE


def judge_payloads(results: Results) -> list[PaperVerdict]:
    """Compare SCoLR with CoLR at equal uplink, and at equal total, by paired equivalence tests, with Holm's method.

    The last two rows are the mean differences over the sizes, which each size alone may have too much noise to settle.
    """
    differences, tests = [], []
    for direction in ("uplink", "total"):
        for point in TABLE_4:
            ours = np.array(values_of(point, "hr@10", results))
            rival = _interpolate(direction, payload_kib(point, direction, results), results)
            differences.append((point, direction, ours - rival))
            tests.append(compare_paired(ours, rival))
    means = [
        PublishedMean(
            f"HR@10, SCoLR minus CoLR at the same {direction}, mean over {len(TABLE_4)} sizes",
            0.0,
            tuple(map(float, np.mean([ahead for _, each, ahead in differences if each == direction], axis=0))),
        )
        for direction in ("uplink", "total")
    ]
    sizes = [
        PaperVerdict(
            f"HR@10, {point.name} minus CoLR at the same {direction}",
            f"{_published_difference(point):+.2f}" if direction == "uplink" else "",
            mean_and_spread(ahead.tolist()),
            describe(test, p_level, p_zero, len(ahead)),
            by_seed=tuple(ahead.tolist()),
        )
        for (point, direction, ahead), (test, p_level, p_zero) in zip(differences, corrected(tests), strict=True)
    ]
    return [*sizes, *judge_family(means)]


def plot_payloads(results: Results, path: Path) -> None:
    """Plot HR@10 against uplink and total: lines with error bars of a standard deviation are ours, rings the paper."""
    figure, panels = new_figure("Figure 5: SCoLR, CoLR and FedMF on ml-1m by payload", panels=2)
    base = float(np.mean(values_of(FEDMF[0], "hr@10", results)))
    directions: tuple[Direction, Direction] = ("uplink", "total")
    for axes, direction in zip(panels, directions, strict=True):
        for series, colour in _COLOURS.items():
            mine = [point for point in POINTS if point.series == series]
            payloads = [payload_kib(point, direction, results) for point in mine]
            ours = [values_of(point, "hr@10", results) for point in mine]
            spread = [float(np.std(values, ddof=min(1, len(values) - 1))) for values in ours]
            axes.errorbar(
                payloads, [np.mean(values) for values in ours], spread,
                color=colour, marker=".", capsize=3, linewidth=1.5, label=series,
            )  # fmt: skip
            axes.plot(payloads, [point.hr for point in mine], "o", color=colour, fillstyle="none", markersize=8)
        axes.axhline(base, color=BLACK, linestyle="--", linewidth=1)
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter("{x:g}")
        axes.set(
            xlabel=f"{'upload' if direction == 'uplink' else 'upload and download'} of a client per round (KiB)",
            ylabel="test HR@10 (%)",
        )
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(
        handles, labels, title="lines: ours, mean and standard deviation; rings: paper; dashed: FedMF-64",
        loc="outside lower center", ncols=3, fontsize=9, title_fontsize=9, frameon=False,
    )  # fmt: skip
    figure.savefig(path, dpi=150)


def _interpolate(direction: Direction, payload: float, results: Results) -> FloatArray:
    """Return CoLR's HR@10 for each seed at a payload in KiB."""
    knots = (*sorted(COLR, key=lambda point: point.size), FEDMF[0])
    payloads = np.log([payload_kib(point, direction, results) for point in knots])
    values = np.array([values_of(point, "hr@10", results) for point in knots])
    return np.array([np.interp(np.log(payload), payloads, seed) for seed in values.T])


def _published_difference(point: Point) -> float:
    """Return the paper's HR@10 of SCoLR less CoLR's at the mean of the uniform ranks 1 to r_g."""
    knots = (*sorted(COLR, key=lambda knot: knot.size), FEDMF[0])
    sizes, values = [knot.size for knot in knots], [knot.hr for knot in knots]
    return point.hr - float(np.interp(np.log((point.size + 1) / 2), np.log(sizes), values))
