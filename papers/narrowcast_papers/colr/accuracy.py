"""Table 4 and Figures 3 and 4 of Nguyen et al., WWW 2024 (arXiv:2401.03748) on MovieLens-1M: accuracy against rank.

The paper prints the numbers of Table 4. Figures 3 and 4 were read from the plots that its authors published with their
code, to within 0.3 points, by which a cell of these figures that is "off" may be misread. As in that code, negatives
avoid the held-out items and those they are ranked against (`train_negatives: leaky`), which those of the packaged
experiments do not. All values are HR@10 and NDCG@10 after round 1000, in percent.

Top-K keeps k / 64 of all values and also sends their indices, so that it costs as much as rank 2 k. The plot says only
"the same payload reduction"; its values are those of k = r / 2, one to six points below those of k = r.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from narrowcast.platform.tracking.figures import BLACK, BLUE, GREEN, METRICS, ORANGE, VERMILLION, new_figure
from narrowcast.studies.spec import Results, RunSpec
from narrowcast.studies.verdicts import PaperVerdict, PublishedMean, judge_family, judge_with_published_spread

DIMENSION = 64
LEAKY = "training.train_negatives=leaky"
"""The negatives of the released code, which the published numbers need."""
_METRICS = ("hr@10", "ndcg@10")
_SIZES = {"FedMF": "d", "SCoLR": "r_g"}
_COLOURS = {"FedMF": BLACK, "CoLR": BLUE, "SCoLR": BLUE, "SVD": VERMILLION, "Top-K": GREEN}


@dataclass(frozen=True)
class Point:
    """A published point. `size`: d of FedMF; the rank of CoLR, SCoLR and SVD; for Top-K, the rank of equal cost."""

    series: str
    size: int
    hr: float
    ndcg: float

    @property
    def run(self) -> RunSpec:
        """The run that reproduces the point."""
        size = self.size
        if self.series == "FedMF":
            return RunSpec(f"fedmf-ml1m-d-{size}", "fedmf-ml1m", (f"model.embedding_dim={size}", LEAKY))
        if self.series in ("CoLR", "SCoLR"):
            experiment = f"{self.series.lower()}-ml1m"
            return RunSpec(f"{experiment}-rank-{size}", experiment, (f"algorithm.rank={size}", LEAKY))
        own = size / 2 if self.series == "Top-K" else size
        codec, name = released_codec(self.series, own), self.series.lower().replace("-", "")
        both_ways = (f"algorithm.codec={codec}", f"algorithm.downlink_codec={codec}", LEAKY)
        return RunSpec(f"fedmf-ml1m-{name}-{own:g}", "fedmf-ml1m", both_ways)

    @property
    def name(self) -> str:
        """The label of the point in a table."""
        if self.series == "Top-K":
            return f"Top-K k = {self.size / 2:g} of 64"
        return f"{self.series} {_SIZES.get(self.series, 'r')} = {self.size}"


def released_codec(series: str, size: float, dimension: int = DIMENSION) -> str:
    """Return the codec of the released code, both ways: SVD of rank `size`, or Top-K of `size` / `dimension`."""
    if series == "SVD":
        return f"{{kind: svd, rank: {size}, parts: usv}}"
    return f"{{kind: top_k, fraction: {size / dimension}, indices: int32}}"


def _points(series: str, values: dict[int, tuple[float, float]]) -> tuple[Point, ...]:
    return tuple(Point(series, size, hr, ndcg) for size, (hr, ndcg) in values.items())


_SCOLR = {64: (63.86, 37.04), 32: (63.29, 36.34), 16: (62.06, 35.63), 8: (61.02, 34.77), 4: (59.87, 33.89)}
_FEDMF = {64: (64.8, 37.5), 32: (62.4, 35.5), 16: (58.0, 32.4), 8: (50.8, 27.9), 4: (44.2, 24.3), 2: (43.5, 23.9)}
_COLR = {32: (64.3, 37.2), 16: (63.5, 36.6), 8: (62.4, 35.8), 4: (60.7, 34.5), 2: (59.2, 33.3), 1: (57.2, 32.0)}
_SVD = {32: (64.6, 37.5), 16: (63.9, 36.9), 8: (62.8, 35.9), 4: (61.3, 34.6), 2: (57.9, 32.5), 1: (52.4, 29.0)}
_TOP_K = {32: (63.4, 36.6), 16: (61.5, 34.9), 8: (57.1, 31.8), 4: (51.1, 28.0), 2: (46.0, 24.5), 1: (44.3, 23.4)}

FEDMF = _points("FedMF", {**_FEDMF, 1: (42.5, 23.4)})
COLR = _points("CoLR", _COLR)
SVD = _points("SVD", _SVD)
TOP_K = _points("Top-K", _TOP_K)
TABLE_4 = _points("SCoLR", {**_SCOLR, 2: (57.84, 32.58)})
FIGURE_3 = (*FEDMF, *COLR)
FIGURE_4 = (*COLR, *SVD, *TOP_K)


def judge_points(points: tuple[Point, ...], results: Results) -> list[PaperVerdict]:
    """Judge HR@10 and NDCG@10 of every point, then each series as a whole, by equivalence tests against the paper.

    The cells are one family of Holm's correction, and so are the series. A series is its mean difference over the sizes
    for each seed: it shows an offset that all its cells share, for which each of them may have too much noise.
    """
    cells = [
        PublishedMean(f"{METRICS[metric][0]}, {point.name}", _paper(point, metric), values_of(point, metric, results))
        for metric in _METRICS
        for point in points
    ]
    return [*judge_family(cells), *_judge_series(points, results), judge_with_published_spread(cells)]


def _judge_series(points: tuple[Point, ...], results: Results) -> list[PaperVerdict]:
    cells = []
    for series in dict.fromkeys(point.series for point in points):
        mine = [point for point in points if point.series == series]
        for metric in _METRICS:
            off = [np.array(values_of(point, metric, results)) - _paper(point, metric) for point in mine]
            what = f"{METRICS[metric][0]}, {series}, mean difference over {len(mine)} sizes"
            cells.append(PublishedMean(what, 0.0, tuple(map(float, np.mean(off, axis=0)))))
    return judge_family(cells)


def _paper(point: Point, metric: str) -> float:
    return point.hr if metric == "hr@10" else point.ndcg


def values_of(point: Point, metric: str, results: Results) -> tuple[float, ...]:
    """Return the metric after the last round for each seed, in percent."""
    return tuple(100 * result["final"][f"test.{metric}"] for result in results[point.run.label])


def judge_order(series: tuple[Point, ...], rivals: tuple[Point, ...], results: Results) -> PaperVerdict:
    """Compare the sign of the difference in HR@10 between two series, at each size of the rivals, with the paper."""
    own = {point.size: point for point in series}
    paper = [own[rival.size].hr - rival.hr for rival in rivals]
    ours = [
        float(np.mean(values_of(own[rival.size], "hr@10", results)) - np.mean(values_of(rival, "hr@10", results)))
        for rival in rivals
    ]
    differing = [rival.size for rival, one, other in zip(rivals, paper, ours, strict=True) if one * other <= 0]
    sizes = ", ".join(f"{rival.size}" for rival in rivals)
    return PaperVerdict(
        f"HR@10, {series[0].series} minus {rivals[0].series} at {sizes}",
        f"{min(paper):+.2f} to {max(paper):+.2f}",
        f"{min(ours):+.2f} to {max(ours):+.2f}",
        f"different order at {', '.join(map(str, differing))}" if differing else "same order",
    )


def plot_points(points: tuple[Point, ...], results: Results, title: str, path: Path) -> None:
    """Plot accuracy against size: lines with error bars of one standard deviation are ours, rings the paper's."""
    figure, panels = new_figure(title, panels=2)
    base = FEDMF[0]
    for axes, metric in zip(panels, _METRICS, strict=True):
        for series in dict.fromkeys(point.series for point in points):
            mine = [point for point in points if point.series == series]
            sizes = [point.size for point in mine]
            ours = [values_of(point, metric, results) for point in mine]
            spread = [float(np.std(values, ddof=min(1, len(values) - 1))) for values in ours]
            colour, means = _COLOURS[series], [np.mean(values) for values in ours]
            axes.errorbar(sizes, means, spread, color=colour, marker=".", capsize=3, linewidth=1.5, label=series)
            papers = [_paper(point, metric) for point in mine]
            axes.plot(sizes, papers, "o", color=colour, fillstyle="none", markersize=8)
        axes.axhline(_paper(base, metric), color=ORANGE, linestyle="--", linewidth=1)
        axes.set_xscale("log", base=2)
        sizes = sorted({point.size for point in points})
        axes.set_xticks(sizes, [f"{size}" for size in sizes])
        axes.invert_xaxis()
        axes.set(xlabel="payload, in columns of 64: d, rank, or 2 k of Top-K", ylabel=f"test {METRICS[metric][0]} (%)")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(
        handles,
        [*labels],
        title="lines: ours, mean and standard deviation; rings: paper; dashed: paper's FedMF-64",
        loc="outside lower center",
        ncols=len(labels),
        fontsize=9,
        title_fontsize=9,
        frameon=False,
    )
    figure.savefig(path, dpi=150)
