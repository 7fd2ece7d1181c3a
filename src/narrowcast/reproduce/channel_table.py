"""The table and the plot of the channel ablation, from the results of its cells."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from narrowcast.platform.tracking.metric_labels import metric_label
from narrowcast.platform.tracking.run_plots import BLUE, ORANGE, VERMILLION, new_figure
from narrowcast.platform.types import FloatArray
from narrowcast.reproduce.against_reference import paired_differences
from narrowcast.reproduce.channel_ablation import PERFECT, Ablation, Cell
from narrowcast.reproduce.verdict import PaperVerdict, mean_and_spread

CellResults = Mapping[Cell, Sequence[Mapping[str, Any]]]
"""The results of the seeds of each cell, in the order of the seeds."""
_COLOURS = {"adapted": BLUE, "fixed": ORANGE, "rows": VERMILLION}
_OFFSETS = {"adapted": 0.2, "fixed": 0.0, "rows": -0.2}


@dataclass(frozen=True)
class ChannelTable:
    """The results of an ablation.

    Cells of one scenario, with one upload time, take the same time. Comparisons are paired by seed, and corrected over
    all of them by Holm's method.
    """

    ablation: Ablation
    results: CellResults

    def judge(self) -> list[PaperVerdict]:
        """Return a row for each cell, then one for each comparison."""
        rows = [
            PaperVerdict(
                describe_cell(cell),
                "",
                mean_and_spread(self._accuracy(cell).tolist()),
                f"for 1/{self._compression(cell):.0f}",
                by_seed=tuple(self._accuracy(cell)),
            )
            for cell in self._cells
        ]
        differences = paired_differences(list(self._pairs()))
        return rows + [
            replace(each, difference="", verdict=each.verdict.replace("off by", "differs by")) for each in differences
        ]

    def plot(self, path: Path) -> None:
        """Plot the accuracy of each cell, a line for each band, and the accuracy against the bits of the same cells."""
        title = f"Adaptation to the channel: {self.ablation.name.removeprefix('channel-')}"
        figure, (left, right) = new_figure(title, panels=2)
        places = {name: -place for place, name in enumerate(dict.fromkeys(map(_describe_band, self._cells)))}
        figure.set_size_inches(13, 1.5 + 0.28 * len(places))
        for cell in self._cells:
            values, colour = self._accuracy(cell), _COLOURS[cell.codec]
            spread = np.std(values, ddof=min(1, len(values) - 1))
            place = places[_describe_band(cell)] + _OFFSETS[cell.codec]
            left.errorbar(np.mean(values), place, xerr=spread, fmt="o", color=colour, markersize=4, capsize=2)
            right.plot(1 / self._compression(cell), np.mean(values), "o", color=colour, markersize=4)
        left.set_yticks(list(places.values()), list(places), fontsize=8)
        label = f"{metric_label(f'test.{self.ablation.metric}')} (%)"
        left.set(xlabel=label)
        right.set(xlabel="uplink, of full updates in float32", ylabel=label)
        right.set_xscale("log", base=2)
        right.xaxis.set_major_formatter(lambda value, _: f"1/{1 / value:.0f}")
        for codec in dict.fromkeys(cell.codec for cell in self._cells):
            right.plot([], [], "o", color=_COLOURS[codec], label=codec)
        right.legend(fontsize=8, frameon=False)
        figure.savefig(path, dpi=150)

    @property
    def _cells(self) -> list[Cell]:
        return [cell for cell in self.ablation.cells if self.results.get(cell)]

    def _accuracy(self, cell: Cell) -> FloatArray:
        metric = f"test.{self.ablation.metric}"
        return np.array([100 * result["final"][metric] for result in self.results[cell]])

    def _compression(self, cell: Cell) -> float:
        """Return the bits of full updates in float32 over those of the cell, mean over its seeds."""
        bits = np.mean([result["uplink_bits"] / result["rounds"] for result in self.results[cell]])
        return float(self.ablation.full_bits * cell.scenario.share_of_clients / bits)

    def _pairs(self) -> Iterator[tuple[str, FloatArray, FloatArray]]:
        for cell in self._cells:
            where = _describe_band(cell)
            fixed, rows = replace(cell, codec="fixed"), replace(cell, codec="rows")
            if cell.codec == "adapted":
                yield from self._pair(f"adapted less fixed: {where}", cell, fixed)
                yield from self._pair(f"rows less adapted: {where}", rows, cell)
                yield from self._pair(f"rows less fixed: {where}", rows, fixed)
                if cell.allocation != "max_min":
                    fair = replace(cell, allocation="max_min")
                    yield from self._pair(f"{cell.allocation} less max_min: {describe_cell(fair)}", cell, fair)
            if cell.knowledge is not PERFECT and cell.codec != "fixed":
                known = replace(cell, knowledge=PERFECT)
                yield from self._pair(f"{cell.knowledge.name} less perfect: {describe_cell(known)}", cell, known)
        yield from self._equal_bits()

    def _pair(self, what: str, cell: Cell, other: Cell) -> Iterator[tuple[str, FloatArray, FloatArray]]:
        if cell in self._cells and other in self._cells:
            ours, theirs = self._accuracy(cell), self._accuracy(other)
            seeds = min(len(ours), len(theirs))
            yield what, ours[:seeds], theirs[:seeds]

    def _equal_bits(self) -> Iterator[tuple[str, FloatArray, FloatArray]]:
        """Compare at the bits of each fixed cell, with the adapted codec interpolated between its upload times."""
        for fixed in self._cells:
            if fixed.codec != "fixed" or fixed.knowledge is not PERFECT:
                continue
            same = [
                replace(fixed, codec="adapted", seconds=each)
                for each in sorted({cell.seconds for cell in self._cells if cell.scenario == fixed.scenario})
            ]
            same = [cell for cell in same if cell in self._cells]
            shares = [-np.log(self._compression(cell)) for cell in same]
            at = -np.log(self._compression(fixed))
            if len(same) > 1 and shares[0] <= at <= shares[-1]:
                seeds = min(len(self._accuracy(cell)) for cell in (fixed, *same))
                by_seed = np.array([self._accuracy(cell)[:seeds] for cell in same]).T
                adapted = np.array([np.interp(at, shares, each) for each in by_seed])
                yield f"adapted less fixed, equal bits: {describe_cell(fixed)}", adapted, self._accuracy(fixed)[:seeds]


def describe_cell(cell: Cell) -> str:
    """Return the cell's name in tables."""
    return f"{_describe_band(cell)}, {cell.codec}"


def _describe_band(cell: Cell) -> str:
    """Return the cell's name without its codec."""
    knowledge = cell.knowledge.name.replace("error-", "error ").replace("-db", " dB").replace("-", " ")
    return f"{cell.scenario.name}, {1000 * cell.seconds:g} ms, {knowledge}, {cell.allocation}"
